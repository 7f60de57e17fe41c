//! The state of a job: that of the objects that run it, and of its pods.

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Resource;
use kube::api::ApiResource;
use kube::core::DynamicObject;
use serde::Deserialize;

use super::cluster::{Cluster, seconds};
use super::objects::{TENSORBOARD_PORT, TENSORBOARD_SUFFIX, pytorch_job, selector, train_job};
use super::pods::NodePods;
use crate::error::{Error, Result};
use crate::job::{Failure, Instance, JobDetails, JobRecord, JobStatus, LAST_LINES, Role};
use crate::output::{now, tail_of};
use crate::spec::{JobSpec, ObjectKind};

/// Asks the cluster for the state of a job.
///
/// # Errors
/// When it has forgotten the job, or does not answer.
pub(super) async fn details(cluster: &Cluster, job: &JobRecord) -> Result<JobDetails> {
    let spec = &job.spec;
    let owners = Owners::find(cluster, spec).await?;
    let mut pods = NodePods::find(cluster, spec).await?;
    if owners.state == OwnerState::Active {
        pods = pods.with_warnings(cluster, &owners.uids).await;
    }
    let mut details = of(spec, job.submitted, &cluster.namespace, &owners, &pods);
    // Pods that were replaced are removed in time.
    let before = job.last.as_ref().map_or(0, |last| last.restarts);
    details.restarts = details.restarts.max(before);
    Ok(details)
}

fn of(
    spec: &JobSpec,
    submitted: u64,
    namespace: &str,
    owners: &Owners,
    pods: &NodePods,
) -> JobDetails {
    let name = spec.name.as_str();
    let instances: Vec<_> = (0..spec.nodes.get())
        .map(|node| pods.instance(name, node, &owners.uids))
        .collect();
    let status = status(&owners.state, &instances);
    let held = instances
        .iter()
        .filter(|instance| instance.status == JobStatus::Running)
        .count();
    let queue = spec.options.kubernetes.queue.as_deref();
    let reason = match (&owners.state, status) {
        (OwnerState::Suspended, _) => Some(match queue {
            Some(queue) => format!("waits in queue {queue}"),
            None => "suspended".to_owned(),
        }),
        (OwnerState::Failed(reason), _) => Some(reason.clone()),
        (_, JobStatus::Pending | JobStatus::Restarting) => instances
            .iter()
            .find_map(|instance| instance.reason.clone()),
        _ => None,
    };
    JobDetails {
        name: name.to_owned(),
        trainer: match spec.options.kubernetes.kind {
            ObjectKind::Job => "JOB",
            ObjectKind::PyTorchJob => "PYTORCHJOB",
            ObjectKind::TrainJob => "TRAINJOB",
        }
        .to_owned(),
        status,
        reason,
        namespace: Some(namespace.to_owned()),
        priority: spec.priority.clone(),
        submitted: Some(submitted),
        started: owners.started,
        ended: owners.ended,
        restarts: instances
            .iter()
            .map(|instance| instance.restarts)
            .max()
            .unwrap_or(0),
        gpus_requested: spec.all_gpus(),
        gpus_allocated: held * spec.resources.gpus,
        failure: (status == JobStatus::Failed)
            .then(|| failure(name, pods))
            .flatten(),
        tensorboard: spec.tensorboard.then(|| port_forward(name, namespace)),
        instances,
    }
}

fn status(state: &OwnerState, instances: &[Instance]) -> JobStatus {
    let all = |statuses: &[JobStatus]| {
        instances
            .iter()
            .all(|instance| statuses.contains(&instance.status))
    };
    match state {
        OwnerState::Failed(_) => JobStatus::Failed,
        OwnerState::Complete => JobStatus::Succeeded,
        OwnerState::Suspended => JobStatus::Pending,
        OwnerState::Active if all(&[JobStatus::Running, JobStatus::Succeeded]) => {
            JobStatus::Running
        }
        OwnerState::Active if instances.iter().any(|instance| instance.restarts > 0) => {
            JobStatus::Restarting
        }
        OwnerState::Active
            if instances.iter().any(|instance| {
                matches!(instance.status, JobStatus::Restarting | JobStatus::Failed)
            }) =>
        {
            JobStatus::Restarting
        }
        OwnerState::Active => JobStatus::Pending,
    }
}

fn failure(job: &str, pods: &NodePods) -> Option<Failure> {
    let ends = pods.ends();
    let first = ends.first()?;
    let message = first
        .terminated
        .and_then(|end| end.message.as_deref())
        .unwrap_or_default();
    Some(Failure {
        instance: Some(Role::instance_name(job, first.node)),
        exit_code: first.terminated.map(|end| end.exit_code),
        reason: first.reason.clone(),
        last_lines: tail_of(message, LAST_LINES)
            .lines()
            .map(str::to_owned)
            .collect(),
    })
}

/// Returns the command that reaches TensorBoard on every cluster.
fn port_forward(job: &str, namespace: &str) -> String {
    format!(
        "http://localhost:9090 while this runs:\n\
         kubectl port-forward -n {namespace} svc/{job}{TENSORBOARD_SUFFIX} 9090:{TENSORBOARD_PORT}"
    )
}

/// The combined state of the objects of one job.
#[derive(Clone, Debug, PartialEq, Eq)]
enum OwnerState {
    /// Waits to be admitted.
    Suspended,
    /// Its pods run, or will.
    Active,
    /// Every pod succeeded.
    Complete,
    /// The cluster gave it up, for this reason.
    Failed(String),
}

/// The objects of one job.
#[derive(Clone, Debug)]
struct Owners {
    state: OwnerState,
    /// Seconds since 1970.
    started: Option<u64>,
    ended: Option<u64>,
    /// The ids by which the cluster distinguishes them from all other objects.
    uids: Vec<String>,
}

/// Seconds that the other Jobs of a job have to end when one has failed.
const SETTLING_SECONDS: u64 = 10;

/// The fields that the three kinds share.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct OwnerStatus {
    conditions: Vec<OwnerCondition>,
    start_time: Option<Time>,
    completion_time: Option<Time>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct OwnerCondition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    reason: String,
    message: String,
    last_transition_time: Option<Time>,
}

/// Returns the resource of the objects that run a job of that kind.
pub(super) fn owner_resource(kind: ObjectKind) -> ApiResource {
    match kind {
        ObjectKind::Job => ApiResource::erase::<Job>(&()),
        ObjectKind::PyTorchJob => pytorch_job(),
        ObjectKind::TrainJob => train_job(),
    }
}

impl Owners {
    /// Asks the cluster.
    ///
    /// # Errors
    /// When there are none, or it does not answer.
    async fn find(cluster: &Cluster, spec: &JobSpec) -> Result<Self> {
        let resource = owner_resource(spec.options.kubernetes.kind);
        let api = cluster.dynamic(&resource);
        let found = cluster
            .labelled(&resource.plural, &api, &selector(spec))
            .await?;
        Self::of(&found, now()).ok_or_else(|| {
            Error::not_found(format!(
                "Kubernetes at {} has no {} {} that was submitted from here in namespace {}: it was removed there",
                cluster.url, resource.kind, spec.name, cluster.namespace
            ))
        })
    }

    /// Sums up these objects at that time; `None` if there are none.
    fn of(objects: &[DynamicObject], now: u64) -> Option<Self> {
        let read = |object: &DynamicObject| {
            let status = object.data.get("status").cloned().unwrap_or_default();
            serde_json::from_value::<OwnerStatus>(status).unwrap_or_default()
        };
        let statuses: Vec<_> = objects.iter().map(read).collect();
        let first = statuses.first()?;
        let end = statuses.iter().filter_map(OwnerStatus::end).max();
        // The others end with it, and may explain more.
        let is_settled = statuses.iter().all(OwnerStatus::is_over)
            || end.is_none_or(|end| now >= end + SETTLING_SECONDS);
        let failed = statuses
            .iter()
            .find_map(|status| status.condition("Failed"))
            .filter(|_| is_settled);
        let state = if let Some(condition) = failed {
            OwnerState::Failed(condition.text())
        } else if statuses.iter().all(OwnerStatus::is_complete) {
            OwnerState::Complete
        } else if first.condition("Suspended").is_some() || is_suspended(&objects[0]) {
            OwnerState::Suspended
        } else {
            OwnerState::Active
        };
        Some(Self {
            ended: match state {
                OwnerState::Failed(_) | OwnerState::Complete => end,
                OwnerState::Suspended | OwnerState::Active => None,
            },
            state,
            started: statuses
                .iter()
                .filter_map(|status| status.start_time.as_ref().map(seconds))
                .min(),
            uids: objects
                .iter()
                .filter_map(|object| object.meta().uid.clone())
                .collect(),
        })
    }
}

impl OwnerStatus {
    fn condition(&self, kind: &str) -> Option<&OwnerCondition> {
        let holds =
            |condition: &&OwnerCondition| condition.kind == kind && condition.status == "True";
        self.conditions.iter().find(holds)
    }

    fn is_complete(&self) -> bool {
        let complete = ["Complete", "Succeeded"];
        complete.iter().any(|kind| self.condition(kind).is_some())
    }

    fn is_over(&self) -> bool {
        self.is_complete() || self.condition("Failed").is_some()
    }

    fn end(&self) -> Option<u64> {
        let last = ["Failed", "Complete", "Succeeded"]
            .iter()
            .find_map(|kind| self.condition(kind));
        let time = self
            .completion_time
            .as_ref()
            .or(last?.last_transition_time.as_ref());
        time.map(seconds)
    }
}

impl OwnerCondition {
    fn text(&self) -> String {
        match (self.message.is_empty(), self.reason.is_empty()) {
            (false, false) => format!("{} ({})", self.message, self.reason),
            (true, _) => self.reason.clone(),
            (false, true) => self.message.clone(),
        }
    }
}

/// Returns `true` if the object is suspended, even if the server has not reported that yet.
fn is_suspended(object: &DynamicObject) -> bool {
    let places = ["/spec/suspend", "/spec/runPolicy/suspend"];
    places
        .iter()
        .any(|place| object.data.pointer(place).and_then(|value| value.as_bool()) == Some(true))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn state(statuses: &[serde_json::Value]) -> OwnerState {
        let object = |status: &serde_json::Value| {
            DynamicObject::new("m", &pytorch_job()).data(json!({"status": status}))
        };
        Owners::of(&statuses.iter().map(object).collect::<Vec<_>>(), 100)
            .unwrap()
            .state
    }

    #[test]
    fn jobs_of_nodes_are_taken_together() {
        let done = json!({"conditions": [{"type": "Complete", "status": "True"}]});
        let failed = json!({"conditions": [
        {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "Job was active longer"}]});
        assert_eq!(state(&[done.clone(), json!(null)]), OwnerState::Active);
        assert_eq!(state(&[done.clone(), done.clone()]), OwnerState::Complete);
        assert_eq!(
            state(&[done, failed]),
            OwnerState::Failed("Job was active longer (DeadlineExceeded)".to_owned())
        );
        assert!(Owners::of(&[], 0).is_none());
    }

    #[test]
    fn conditions_of_kubeflow_are_read() {
        let of = |kind: &str| {
            json!({"conditions": [
        {"type": "Created", "status": "True"}, {"type": kind, "status": "True"}]})
        };
        assert_eq!(state(&[of("Succeeded")]), OwnerState::Complete);
        assert_eq!(state(&[of("Suspended")]), OwnerState::Suspended);
        assert_eq!(state(&[of("Running")]), OwnerState::Active);
    }
}
