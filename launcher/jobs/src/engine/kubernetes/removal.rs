//! Removing all that has a job's label.

use std::time::Duration;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Pod, Secret, Service};
use kube::api::{ApiResource, DeleteParams};
use kube::core::DynamicObject;
use kube::{Resource, ResourceExt};
use tokio::time::{Instant, sleep};

use super::cluster::Cluster;
use super::objects::{JOB_LABEL, pytorch_job, train_job};
use crate::error::{Error, Result};
use crate::output::{now, warn};

/// How often it is looked whether anything is left.
const POLL: Duration = Duration::from_millis(500);
/// How long pods may take to end: their grace period, and some more.
const LIMIT: Duration = Duration::from_secs(120);
/// How long after the end of its grace period a pod is given up, whose node does not say that it has ended.
const GIVEN_UP_SECONDS: u64 = 5;

/// Removes a job's objects, and waits until none is left. What is not there is no error.
///
/// # Errors
/// When the server refuses it, or something is still there after two minutes; the message names it.
pub(super) async fn remove(cluster: &Cluster, job: &str) -> Result<()> {
    let selector = format!("{JOB_LABEL}={job}");
    // Owners first: a Job that is still there would make its pods anew.
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
            delete(cluster, &resource, object, &DeleteParams::foreground()).await?;
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
                "job {job} is still there after {} s: {}; `kubectl describe -n {}` says what holds them",
                LIMIT.as_secs(),
                left.join(", "),
                cluster.namespace
            )));
        }
        sleep(POLL).await;
    }
}

/// Those with the label. What a cluster does not know, or lets nobody see, is not there.
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

async fn delete(
    cluster: &Cluster,
    resource: &ApiResource,
    object: &DynamicObject,
    parameters: &DeleteParams,
) -> Result<()> {
    let (api, name) = (cluster.dynamic(resource), object.name_any());
    match cluster.try_ask(|| api.delete(&name, parameters)).await {
        Ok(_) => Ok(()),
        Err(error) if error.code() == Some(404) => Ok(()),
        Err(error) => Err(error.into_error(&format!("{}/{name}", resource.plural), cluster)),
    }
}

/// A pod on a node that is lost stays for ever, since nobody says that it has ended.
async fn give_up(cluster: &Cluster, resource: &ApiResource, pods: &[DynamicObject]) -> Result<()> {
    for pod in pods {
        // The time by which it has to be gone.
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
            &DeleteParams::default().grace_period(0),
        )
        .await?;
    }
    Ok(())
}
