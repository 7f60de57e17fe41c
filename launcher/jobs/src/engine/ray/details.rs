//! What is shown of a job, from what Ray says of its driver and the driver of its agents.

use super::answers::{RayJob, RayStatus};
use super::gang::{GangState, whole};
use crate::job::{Failure, Instance, JobDetails, JobRecord, JobStatus, Role};
use crate::spec::JobSpec;

/// What Ray and the driver say of a job; the driver may have said nothing yet, or no more.
pub(super) fn details(job: &JobRecord, answer: &RayJob, state: Option<GangState>) -> JobDetails {
    let spec = &job.spec;
    let told = state.as_ref().map(|state| state.status);
    let status = match (answer.status, told) {
        // Ray says that the driver runs.
        (RayStatus::Running, Some(told)) if !told.is_final() => told,
        (RayStatus::Running, Some(_)) => JobStatus::Running,
        (RayStatus::Running | RayStatus::Pending, _) => JobStatus::Pending,
        (RayStatus::Stopped, _) => JobStatus::Stopped,
        (RayStatus::Succeeded, _) => JobStatus::Succeeded,
        (RayStatus::Failed, _) => JobStatus::Failed,
    };
    // Where the driver was killed, only Ray says why.
    let killed = status == JobStatus::Failed && told != Some(JobStatus::Failed);
    let said = answer
        .message
        .as_deref()
        .and_then(|message| message.lines().next());
    let said = said.map(str::to_owned);
    let gpus = spec.all_gpus();
    JobDetails {
        name: spec.name.to_string(),
        trainer: "RAY".to_owned(),
        status,
        reason: match &state {
            Some(state) if !killed => state.reason.clone(),
            _ if killed || status == JobStatus::Pending => said.clone(),
            _ => None,
        },
        namespace: None,
        priority: None,
        submitted: Some(job.submitted),
        started: state.as_ref().and_then(|state| state.started).map(whole),
        ended: answer.end_time.map(|time| time / 1000),
        restarts: state.as_ref().map_or(0, |state| state.restarts),
        gpus_requested: gpus,
        gpus_allocated: if status.is_active() { gpus } else { 0 },
        instances: match &state {
            Some(state) => instances(state, status),
            None => (0..spec.nodes.get())
                .map(|node| unknown(spec, node, status))
                .collect(),
        },
        tensorboard: state
            .as_ref()
            .and_then(|state| state.tensorboard.clone())
            .filter(|_| status.is_active()),
        failure: match state {
            _ if killed => Some(Failure {
                instance: None,
                exit_code: None,
                reason: said.unwrap_or_else(|| "its driver failed".to_owned()),
                last_lines: last_lines(answer.message.as_deref().unwrap_or_default()),
            }),
            Some(state) if status == JobStatus::Failed => state.failure,
            _ => None,
        },
    }
}

/// The instances that the driver knows; none runs on when the job is over.
fn instances(state: &GangState, status: JobStatus) -> Vec<Instance> {
    let mut instances = state.instances();
    for instance in &mut instances {
        if status.is_final() && !instance.status.is_final() {
            instance.status = status;
        }
    }
    instances
}

/// An instance of which the driver has not said anything.
fn unknown(spec: &JobSpec, node: usize, status: JobStatus) -> Instance {
    Instance {
        name: Role::instance_name(spec.name.as_str(), node),
        role: Role::of_node(node),
        status,
        node: None,
        started: None,
        ended: None,
        restarts: 0,
        exit_code: None,
        reason: None,
    }
}

/// The last lines of Ray's message, which has those of the log.
fn last_lines(message: &str) -> Vec<String> {
    const LINES: usize = 20;
    let lines: Vec<_> = message.lines().skip(1).map(str::to_owned).collect();
    lines[lines.len().saturating_sub(LINES)..].to_vec()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::spec;
    use super::*;

    #[test]
    fn a_driver_that_has_not_begun_is_shown_by_what_ray_says() {
        let record = JobRecord {
            spec: spec(),
            id: "mnist".to_owned(),
            submitted: 1,
            last: None,
            removed: false,
        };
        let answer = |status: &str, message: &str| -> RayJob {
            serde_json::from_value(json!({"status": status, "message": message})).unwrap()
        };
        let shown = details(
            &record,
            &answer("PENDING", "It may be waiting.\nFor long."),
            None,
        );
        assert_eq!(shown.status, JobStatus::Pending);
        assert_eq!(shown.reason.as_deref(), Some("It may be waiting."));
        assert_eq!(shown.instances[1].name, "mnist-worker-0");
        let shown = details(
            &record,
            &answer("FAILED", "It failed:\nsh: python: not found"),
            None,
        );
        let failure = shown.failure.unwrap();
        assert_eq!(failure.reason, "It failed:");
        assert_eq!(failure.last_lines, ["sh: python: not found"]);
    }
}
