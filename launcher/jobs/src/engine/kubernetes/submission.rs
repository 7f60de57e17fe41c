//! Making all objects of a job, or none.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::ResourceExt;
use kube::api::PostParams;
use kube::core::DynamicObject;

use super::api_error::is_not_carried_out;
use super::cluster::Cluster;
use super::objects::{Object, Objects};
use super::removal;
use crate::error::{Error, Result};
use crate::spec::JobSpec;

/// Asks the server whether it would take the objects. Nothing is made.
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

/// Makes the objects of a job, the owner first. Returns what was made, a line each.
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
        // The first error counts; what is said of the removal is added to it.
        return Err(match removal::remove(cluster, spec).await {
            Ok(()) => error,
            Err(left) => Error::refused(format!("{error}; what was made may be left: {left}")),
        });
    }
    Ok(objects
        .all()
        .map(|object| format!("{} created", object.shown()))
        .collect())
}

/// Whether an object is only checked.
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
    // A second request would find what the first has made, whose answer was lost.
    let answer = cluster.ask_while(is_not_carried_out, || {
        api.create(&parameters, &object.value)
    });
    answer
        .await
        .map_err(|error| error.into_error(&object.shown(), cluster))
}

/// Servers drop fields that they do not know. Where one has dropped a part of what was asked for, the job would be another.
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
