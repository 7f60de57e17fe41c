//! The objects that a job is made of. Nothing here asks a server.

mod job;
mod kubeflow;
mod pod;
mod tensorboard;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Secret, Service, ServiceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::{ApiResource, DynamicObject};
use kube::{Resource, ResourceExt};
use serde::Serialize;

use super::version::ServerVersion;
use crate::error::{Error, Result};
use crate::image::LAUNCHER_PATH;
use crate::spec::{AgentCommand, JobSpec, ObjectKind};

pub(super) use kubeflow::{pytorch_job, train_job};
pub(super) use tensorboard::{NAME_SUFFIX as TENSORBOARD_SUFFIX, PORT as TENSORBOARD_PORT};

/// The label of every object of a job, with the job's name.
pub(super) const JOB_LABEL: &str = "accel-jobs/job";
/// The label that distinguishes the objects of a job from those of another job with its name.
const NONCE_LABEL: &str = "accel-jobs/nonce";
/// The label that tells pods of the job from others of its pods.
pub(super) const PART_LABEL: &str = "accel-jobs/part";
/// The part that trains.
pub(super) const AGENT: &str = "agent";
/// The label of a pod whose node's number is known when it is made.
pub(super) const NODE_LABEL: &str = "accel-jobs/node";
/// The variables that a clone of a private repository needs. No pod's specification has their values.
const GIT_CREDENTIALS: [&str; 2] = ["GIT_SYNC_USERNAME", "GIT_SYNC_PASSWORD"];

/// An object as it is sent, and where.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Object {
    pub(super) resource: ApiResource,
    pub(super) value: DynamicObject,
}

/// All objects of a job.
#[derive(Clone, Debug)]
pub(super) struct Objects {
    /// The one whose deletion takes the others with it.
    pub(super) owner: Object,
    /// In the order in which they are made.
    pub(super) owned: Vec<Object>,
}

impl Objects {
    /// Those of `spec` for a server of that version. `token` is what the agents of the job prove to one another.
    ///
    /// # Errors
    /// When such a job cannot run there; the message names the option.
    pub(super) fn of(spec: &JobSpec, version: ServerVersion, token: &str) -> Result<Self> {
        check(spec)?;
        let (owner, mut owned) = match spec.options.kubernetes.kind {
            ObjectKind::Job => {
                let (first, others) = job::jobs(spec, version)?;
                let mut owned = vec![service(spec)?];
                owned.extend(others);
                (first, owned)
            }
            ObjectKind::PyTorchJob => (kubeflow::of_pytorch(spec)?, Vec::new()),
            ObjectKind::TrainJob => (kubeflow::of_trainer(spec)?, Vec::new()),
        };
        owned.insert(0, secret(token_secret(spec), spec, [("token", token)])?);
        if needs_git_secret(spec) {
            let values =
                GIT_CREDENTIALS.map(|name| (name, spec.env.get(name).map_or("", String::as_str)));
            owned.insert(1, secret(git_secret(spec), spec, values)?);
        }
        if spec.tensorboard {
            owned.extend(tensorboard::objects(spec)?);
        }
        Ok(Self { owner, owned })
    }

    /// As YAML, a document an object.
    ///
    /// # Errors
    /// When they cannot be written.
    pub(super) fn yaml(&self) -> Result<String> {
        let values: Vec<_> = self.all().map(|object| &object.value).collect();
        // A long word stays on its line, where people look for it.
        let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
        serde_saphyr::to_string_multiple_with_options(&values, options)
            .map_err(|error| Error::system("cannot write YAML").with_source(error))
    }

    /// In the order in which they are made.
    pub(super) fn all(&self) -> impl Iterator<Item = &Object> {
        std::iter::once(&self.owner).chain(&self.owned)
    }
}

impl Object {
    fn of<K>(value: &K) -> Result<Self>
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

    /// As `kubectl` names it: `job.batch/NAME`.
    pub(super) fn shown(&self) -> String {
        let (kind, group) = (self.resource.kind.to_lowercase(), &self.resource.group);
        let name = self.value.name_any();
        match group.is_empty() {
            true => format!("{kind}/{name}"),
            false => format!("{kind}.{group}/{name}"),
        }
    }
}

/// Selects the objects of exactly this job.
pub(super) fn selector(spec: &JobSpec) -> String {
    format!("{JOB_LABEL}={},{NONCE_LABEL}={}", spec.name, spec.nonce)
}

/// The labels of every object of a job.
fn labels(spec: &JobSpec) -> BTreeMap<String, String> {
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
fn literal(word: impl AsRef<str>) -> String {
    word.as_ref().replace('$', "$$")
}

/// Returns the command of a container that gets these words unchanged.
fn command<S: AsRef<str>>(words: impl IntoIterator<Item = S>) -> Vec<String> {
    words.into_iter().map(literal).collect()
}

/// The agent of every pod. In an image of ours it is where we put it, which the base's PATH may lack.
fn agent(spec: &JobSpec) -> AgentCommand<'_> {
    match spec.options.kubernetes.base_image {
        Some(_) => spec.agent().launcher(LAUNCHER_PATH),
        None => spec.agent(),
    }
}

/// The name of an object of a job, and its labels.
fn metadata(name: impl Into<String>, spec: &JobSpec) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.into()),
        labels: Some(labels(spec)),
        ..ObjectMeta::default()
    }
}

/// The Service by which pods find that of node 0. It has no address of its own.
fn service(spec: &JobSpec) -> Result<Object> {
    let mut selector = labels(spec);
    selector.insert(PART_LABEL.to_owned(), AGENT.to_owned());
    Object::of(&Service {
        metadata: metadata(spec.name.as_str(), spec),
        spec: Some(ServiceSpec {
            cluster_ip: Some("None".to_owned()),
            // Agents wait for one another, so none is ready before it is found.
            publish_not_ready_addresses: Some(true),
            selector: Some(selector),
            ..ServiceSpec::default()
        }),
        ..Service::default()
    })
}

fn secret<const N: usize>(
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

fn token_secret(spec: &JobSpec) -> String {
    format!("{}-token", spec.name)
}

fn git_secret(spec: &JobSpec) -> String {
    format!("{}-git", spec.name)
}

fn needs_git_secret(spec: &JobSpec) -> bool {
    let has = |name: &&str| spec.env.contains_key(*name);
    spec.options.kubernetes.sync_source.is_some() && GIT_CREDENTIALS.iter().any(has)
}

/// What no kind of object can do.
fn check(spec: &JobSpec) -> Result<()> {
    let options = &spec.options.kubernetes;
    if options.image.is_none() {
        return Err(Error::usage(
            "Kubernetes runs images: give one that holds accel-launch and the program by --image, or have one made by --base-image and --push",
        ));
    }
    if spec.tensorboard && !options.is_in_data(&spec.logdir) {
        return Err(Error::usage(format!(
            "TensorBoard runs in a pod of its own and sees --logdir {} only on a volume: mount one there by --data PVC:PATH",
            spec.logdir.display()
        )));
    }
    if options.kind == ObjectKind::TrainJob {
        let given = [
            ("--sync-mode", options.sync_mode.is_some()),
            ("--working-dir", spec.working_dir.is_some()),
            ("--priority", spec.priority.is_some()),
        ];
        if let Some((option, _)) = given.iter().find(|(_, given)| *given) {
            return Err(Error::usage(format!(
                "a TrainJob has no place for {option}: its runtime decides that; use --kind job, or a runtime that has it"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests;
