//! A job as `accel-jobs get` shows it.

use super::cluster::Cluster;
use super::objects::{TENSORBOARD_PORT, TENSORBOARD_SUFFIX};
use super::owner::{OwnerState, Owners};
use super::pods::NodePods;
use crate::error::Result;
use crate::job::{Failure, Instance, JobDetails, JobRecord, JobStatus, LAST_LINES, Role};
use crate::spec::{JobSpec, ObjectKind};

/// Asks the cluster.
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
    // Pods that others took the place of are removed in time.
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
    let lines: Vec<_> = message.lines().map(str::to_owned).collect();
    let skipped = lines.len().saturating_sub(LAST_LINES);
    Some(Failure {
        instance: Some(Role::instance_name(job, first.node)),
        exit_code: first.terminated.map(|end| end.exit_code),
        reason: first.reason.clone(),
        last_lines: lines.into_iter().skip(skipped).collect(),
    })
}

/// A cluster's own way to a Service differs; this one is the same everywhere.
fn port_forward(job: &str, namespace: &str) -> String {
    format!(
        "http://localhost:9090 while this runs:\n\
         kubectl port-forward -n {namespace} svc/{job}{TENSORBOARD_SUFFIX} 9090:{TENSORBOARD_PORT}"
    )
}
