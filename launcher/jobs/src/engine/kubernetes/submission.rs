//! Making all objects of a job, or none, and removing them.

use std::time::Duration;

use accelerator_host::cli::{Error, Result};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Pod, Secret, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{ApiResource, DeleteParams, PostParams, Preconditions};
use kube::core::DynamicObject;
use kube::{Resource, ResourceExt};
use tokio::time::{Instant, sleep};

use super::cluster::{Cluster, is_not_carried_out};
use super::objects::{Object, Objects, pytorch_job, selector, train_job};
use crate::output::{now, warn};
use crate::spec::JobSpec;

/// Checks that the server would accept the objects. Makes nothing.
///
/// # Errors
/// When it refuses one.
pub(super) async fn check(cluster: &Cluster, objects: &Objects) -> Result<()> {
    for object in objects.all() {
        let answer = create(cluster, object, RunMode::Dry).await?;
        has_all_fields(object, &answer)?;
    }
    Ok(())
}

/// Makes the objects of a job, the owner first. Returns one line per object.
///
/// # Errors
/// When the server refuses one; then none is left.
pub(super) async fn make(
    cluster: &Cluster,
    objects: &Objects,
    spec: &JobSpec,
) -> Result<Vec<String>> {
    let made = match create(cluster, &objects.owner, RunMode::Real).await {
        Ok(owner) => owned(cluster, objects, &owner).await,
        // A server that did not answer may have made it.
        Err(error) if error.is_unreachable() => Err(error),
        Err(error) => return Err(error),
    };
    if let Err(error) = made {
        // The first error counts; an error of the removal is added to it.
        return Err(match remove(cluster, spec).await {
            Ok(()) => error,
            Err(left) => Error::refused(format!("{error}; what was made may be left: {left}")),
        });
    }
    Ok(objects
        .all()
        .map(|object| format!("{} created", object.shown()))
        .collect())
}

/// The choice between checking an object and making it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunMode {
    Dry,
    Real,
}

async fn owned(cluster: &Cluster, objects: &Objects, owner: &DynamicObject) -> Result<()> {
    let resource = &objects.owner.resource;
    let reference = OwnerReference {
        api_version: resource.api_version.clone(),
        kind: resource.kind.clone(),
        name: owner.name_any(),
        uid: owner.uid().unwrap_or_default(),
        ..OwnerReference::default()
    };
    for object in &objects.owned {
        let mut object = object.clone();
        object.value.metadata.owner_references = Some(vec![reference.clone()]);
        create(cluster, &object, RunMode::Real).await?;
    }
    Ok(())
}

async fn create(cluster: &Cluster, object: &Object, mode: RunMode) -> Result<DynamicObject> {
    let api = cluster.dynamic(&object.resource);
    let parameters = PostParams {
        dry_run: mode == RunMode::Dry,
        ..PostParams::default()
    };
    // A second request would find the object of the first one, if only its answer was lost.
    let answer = cluster.ask_while(is_not_carried_out, || {
        api.create(&parameters, &object.value)
    });
    answer
        .await
        .map_err(|error| error.into_error(&object.shown(), cluster))
}

/// Refuses an answer that lacks fields. Servers drop fields that they do not know, and the job would be another one.
fn has_all_fields(object: &Object, answer: &DynamicObject) -> Result<()> {
    let fields = |value: &DynamicObject| {
        let spec = value.data.get("spec").and_then(|spec| spec.as_object());
        spec.map(|spec| spec.keys().cloned().collect::<Vec<_>>())
            .unwrap_or_default()
    };
    let kept = fields(answer);
    match fields(&object.value)
        .into_iter()
        .find(|field| !kept.contains(field))
    {
        None => Ok(()),
        Some(field) => Err(Error::refused(format!(
            "this cluster's {} has no field spec.{field}: its version is too old; use --kind job",
            object.resource.kind
        ))),
    }
}

/// The interval at which the remaining objects are listed.
const POLL: Duration = Duration::from_millis(500);
/// The time that pods may take to end: more than their grace period.
const LIMIT: Duration = Duration::from_secs(120);
/// Seconds after the end of its grace period at which a pod is given up if its node does not report its end.
const GIVEN_UP_SECONDS: u64 = 5;

/// Removes a job's objects, and waits until none is left. An object that does not exist is not an error.
///
/// # Errors
/// When the server refuses it, or something is still there after two minutes; the message names it.
pub(super) async fn remove(cluster: &Cluster, spec: &JobSpec) -> Result<()> {
    let selector = selector(spec);
    // Owners first: a Job that still exists would make its pods again.
    let resources = [
        pytorch_job(),
        train_job(),
        ApiResource::erase::<Job>(&()),
        ApiResource::erase::<Deployment>(&()),
        ApiResource::erase::<Service>(&()),
        ApiResource::erase::<Secret>(&()),
    ];
    let mut there = Vec::new();
    for resource in resources {
        let objects = find(cluster, &resource, &selector).await?;
        for object in &objects {
            delete(cluster, &resource, object, DeleteParams::foreground()).await?;
        }
        if !objects.is_empty() {
            there.push(resource);
        }
    }
    there.push(ApiResource::erase::<Pod>(&()));
    let deadline = Instant::now() + LIMIT;
    loop {
        let mut left = Vec::new();
        for resource in &there {
            let objects = find(cluster, resource, &selector).await?;
            if resource.kind == "Pod" {
                give_up(cluster, resource, &objects).await?;
            }
            let shown =
                |object: &DynamicObject| format!("{}/{}", resource.plural, object.name_any());
            left.extend(objects.iter().map(shown));
        }
        if left.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(Error::refused(format!(
                "job {} is still there after {} s: {}; `kubectl describe -n {}` says what holds them",
                spec.name,
                LIMIT.as_secs(),
                left.join(", "),
                cluster.namespace
            )));
        }
        sleep(POLL).await;
    }
}

/// Lists the objects with the label. A kind that the cluster does not know, or does not let this user see, has none.
async fn find(
    cluster: &Cluster,
    resource: &ApiResource,
    selector: &str,
) -> Result<Vec<DynamicObject>> {
    let api = cluster.dynamic(resource);
    let parameters = kube::api::ListParams::default().labels(selector);
    match cluster.try_ask(|| api.list(&parameters)).await {
        Ok(list) => Ok(list.items),
        Err(error) if error.code() == Some(404) => Ok(Vec::new()),
        // Only these need rights that a user of other kinds may not have.
        Err(error) if error.code() == Some(403) && is_optional(resource) => Ok(Vec::new()),
        Err(error) => Err(error.into_error(&resource.plural, cluster)),
    }
}

fn is_optional(resource: &ApiResource) -> bool {
    let kinds = ["PyTorchJob", "TrainJob", "Deployment"];
    kinds.contains(&resource.kind.as_str())
}

/// Deletes exactly this object. If it is gone, this succeeds, even if another object has its name by now.
async fn delete(
    cluster: &Cluster,
    resource: &ApiResource,
    object: &DynamicObject,
    parameters: DeleteParams,
) -> Result<()> {
    let (api, name) = (cluster.dynamic(resource), object.name_any());
    let parameters = parameters.preconditions(Preconditions {
        uid: object.uid(),
        resource_version: None,
    });
    match cluster.try_ask(|| api.delete(&name, &parameters)).await {
        Ok(_) => Ok(()),
        Err(error) if matches!(error.code(), Some(404 | 409)) => Ok(()),
        Err(error) => Err(error.into_error(&format!("{}/{name}", resource.plural), cluster)),
    }
}

/// Deletes pods whose node is lost: nobody else reports their end.
async fn give_up(cluster: &Cluster, resource: &ApiResource, pods: &[DynamicObject]) -> Result<()> {
    for pod in pods {
        // The time by which the pod has to be gone.
        let Some(time) = pod.meta().deletion_timestamp.as_ref() else {
            continue;
        };
        let due = u64::try_from(time.0.as_second()).unwrap_or(0);
        if now() < due + GIVEN_UP_SECONDS {
            continue;
        }
        let name = pod.name_any();
        warn(&format!(
            "pod {name} is removed although its node does not say that it has ended"
        ));
        delete(
            cluster,
            resource,
            pod,
            DeleteParams::default().grace_period(0),
        )
        .await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::{Arc, Mutex};

    use http::{Method, Request, Response};
    use kube::Client;
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;
    use crate::engine::kubernetes::objects::tests::spec;

    /// A request that a server got.
    struct Asked {
        method: Method,
        path: String,
        query: String,
        body: String,
    }

    /// Returns the requests to a server that has one Job until it is deleted.
    async fn requests() -> Vec<Asked> {
        let asked = Arc::new(Mutex::new(Vec::<Asked>::new()));
        let asks = Arc::clone(&asked);
        let service = tower::service_fn(move |request: Request<Body>| {
            let asks = Arc::clone(&asks);
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap();
                let body = String::from_utf8(body.to_vec()).unwrap();
                let mut asks = asks.lock().unwrap();
                let is_deleted = asks.iter().any(|asked| asked.method == Method::DELETE);
                let is_job = parts.uri.path().ends_with("/jobs") && !is_deleted;
                let metadata = json!({"name": "mnist", "uid": "u-1"});
                let items = is_job.then(|| json!([{"metadata": metadata}]));
                let answer = match &parts.method {
                    &Method::DELETE => json!({"kind": "Status", "status": "Success"}),
                    _ => {
                        json!({"kind": "List", "metadata": {}, "items": items.unwrap_or(json!([]))})
                    }
                };
                asks.push(Asked {
                    method: parts.method,
                    path: parts.uri.path().to_owned(),
                    query: parts.uri.query().unwrap_or_default().to_owned(),
                    body,
                });
                let answer = Response::builder().body(Body::from(answer.to_string().into_bytes()));
                Ok::<_, Infallible>(answer.unwrap())
            }
        });
        let cluster = Cluster {
            client: Client::new(service, "team"),
            namespace: "team".to_owned(),
            url: "https://cluster".to_owned(),
        };
        remove(&cluster, &spec()).await.unwrap();
        std::mem::take(&mut *asked.lock().unwrap())
    }

    #[tokio::test]
    async fn only_the_very_objects_of_the_job_are_removed() {
        let mut deleted = Vec::new();
        for asked in requests().await {
            if asked.method == Method::DELETE {
                let body: Value = serde_json::from_str(&asked.body).unwrap();
                deleted.push((asked.path, body["preconditions"]["uid"].clone()));
            } else {
                let nonce = "accel-jobs%2Fjob%3Dmnist%2Caccel-jobs%2Fnonce%3D89abcdef";
                assert!(asked.query.contains(nonce), "{}", asked.query);
            }
        }
        let path = "/apis/batch/v1/namespaces/team/jobs/mnist".to_owned();
        assert_eq!(deleted, [(path, json!("u-1"))]);
    }
}
