//! One object of a job: its name, its labels, and its content.

use std::collections::BTreeMap;

use accelerator_host::cli::{Error, Result};
use k8s_openapi::api::core::v1::{Secret, Service, ServiceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::{ApiResource, DynamicObject};
use kube::{Resource, ResourceExt};
use serde::Serialize;

use crate::image::LAUNCHER_PATH;
use crate::spec::{AgentCommand, JobSpec};

/// The label of every object of a job, with the job's name.
pub(crate) const JOB_LABEL: &str = "accel-jobs/job";
/// The label that distinguishes the objects of a job from those of another job with its name.
const NONCE_LABEL: &str = "accel-jobs/nonce";
/// The label that distinguishes the pods of agents from other pods of the job.
pub(crate) const PART_LABEL: &str = "accel-jobs/part";
/// The part that trains.
pub(crate) const AGENT: &str = "agent";
/// The label of a pod whose node's number is known when it is made.
pub(crate) const NODE_LABEL: &str = "accel-jobs/node";
/// The variables that a clone of a private repository needs. No pod's specification has their values.
pub(super) const GIT_CREDENTIALS: [&str; 2] = ["GIT_SYNC_USERNAME", "GIT_SYNC_PASSWORD"];

/// An object as it is sent, and its resource.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Object {
    pub(crate) resource: ApiResource,
    pub(crate) value: DynamicObject,
}

impl Object {
    pub(super) fn of<K>(value: &K) -> Result<Self>
    where
        K: Resource<DynamicType = ()> + Serialize,
    {
        let written = serde_json::to_value(value).and_then(serde_json::from_value);
        Ok(Self {
            resource: ApiResource::erase::<K>(&()),
            value: written
                .map_err(|error| Error::system("cannot write an object").with_source(error))?,
        })
    }

    /// Returns the name that `kubectl` shows: `job.batch/NAME`.
    pub(crate) fn shown(&self) -> String {
        let (kind, group) = (self.resource.kind.to_lowercase(), &self.resource.group);
        let name = self.value.name_any();
        match group.is_empty() {
            true => format!("{kind}/{name}"),
            false => format!("{kind}.{group}/{name}"),
        }
    }
}

/// Returns the selector of the objects of exactly this job.
pub(crate) fn selector(spec: &JobSpec) -> String {
    format!("{JOB_LABEL}={},{NONCE_LABEL}={}", spec.name, spec.nonce)
}

/// Returns the labels of every object of a job.
pub(super) fn labels(spec: &JobSpec) -> BTreeMap<String, String> {
    [
        (JOB_LABEL, spec.name.as_str()),
        (NONCE_LABEL, spec.nonce.as_str()),
        ("app.kubernetes.io/managed-by", "accel-jobs"),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .into()
}

/// Escapes a word that a container must get unchanged. Kubernetes replaces `$(NAME)` in commands and in values of
/// variables, and turns `$$` into `$`.
pub(super) fn literal(word: impl AsRef<str>) -> String {
    word.as_ref().replace('$', "$$")
}

/// Returns the command of a container that gets these words unchanged.
pub(super) fn command<S: AsRef<str>>(words: impl IntoIterator<Item = S>) -> Vec<String> {
    words.into_iter().map(literal).collect()
}

/// Returns the agent of every pod. In a built image it has a fixed path, since the PATH of the base may lack it.
pub(super) fn agent(spec: &JobSpec) -> AgentCommand<'_> {
    match spec.options.kubernetes.base_image {
        Some(_) => spec.agent().launcher(LAUNCHER_PATH),
        None => spec.agent(),
    }
}

/// Returns the name and the labels of an object of a job.
pub(super) fn metadata(name: impl Into<String>, spec: &JobSpec) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.into()),
        labels: Some(labels(spec)),
        ..ObjectMeta::default()
    }
}

/// Makes the headless Service by which pods find the pod of node 0.
pub(super) fn service(spec: &JobSpec) -> Result<Object> {
    let mut selector = labels(spec);
    selector.insert(PART_LABEL.to_owned(), AGENT.to_owned());
    Object::of(&Service {
        metadata: metadata(spec.name.as_str(), spec),
        spec: Some(ServiceSpec {
            cluster_ip: Some("None".to_owned()),
            // Agents wait for each other, so none is ready before it is found.
            publish_not_ready_addresses: Some(true),
            selector: Some(selector),
            ..ServiceSpec::default()
        }),
        ..Service::default()
    })
}

pub(super) fn secret<const N: usize>(
    name: String,
    spec: &JobSpec,
    values: [(&str, &str); N],
) -> Result<Object> {
    let owned = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
    Object::of(&Secret {
        metadata: metadata(name, spec),
        string_data: Some(values.map(owned).into()),
        ..Secret::default()
    })
}

pub(super) fn token_secret(spec: &JobSpec) -> String {
    format!("{}-token", spec.name)
}

pub(super) fn git_secret(spec: &JobSpec) -> String {
    format!("{}-git", spec.name)
}

pub(super) fn needs_git_secret(spec: &JobSpec) -> bool {
    let has = |name: &&str| spec.env.contains_key(*name);
    spec.options.kubernetes.sync_source.is_some() && GIT_CREDENTIALS.iter().any(has)
}
