//! What one pod of a job says.

use k8s_openapi::api::core::v1::{ContainerState, ContainerStateTerminated, ContainerStatus, Pod};
use kube::ResourceExt;

use crate::engine::kubernetes::objects::NODE_LABEL;

pub(super) const INDEX: &str = "batch.kubernetes.io/job-completion-index";
pub(super) const REPLICA_TYPE: &str = "training.kubeflow.org/replica-type";
pub(super) const REPLICA_INDEX: &str = "training.kubeflow.org/replica-index";

/// Whether the container of a pod's agent runs.
pub(in super::super) fn runs(pod: &Pod) -> bool {
    agent(pod).is_some_and(is_running)
}

/// Whether a pod has begun to write output.
pub(in super::super) fn has_output(pod: &Pod) -> bool {
    agent(pod).is_some_and(|container| is_running(container) || terminated(container).is_some())
}

/// Which container of a pod is the agent: those of operators have other names.
pub(in super::super) fn container_name(pod: &Pod) -> Option<String> {
    let container = pod.spec.as_ref()?.containers.first()?;
    Some(container.name.clone())
}

pub(super) fn node_of(pod: &Pod) -> Option<usize> {
    let (labels, annotations) = (pod.labels(), pod.annotations());
    if let Some(node) = labels.get(NODE_LABEL) {
        return node.parse().ok();
    }
    if let Some(index) = annotations.get(INDEX).or(labels.get(INDEX)) {
        return index.parse().ok();
    }
    match labels.get(REPLICA_TYPE)?.to_lowercase().as_str() {
        "master" => Some(0),
        _ => Some(labels.get(REPLICA_INDEX)?.parse::<usize>().ok()? + 1),
    }
}

pub(super) fn phase(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.phase.as_deref()
}

pub(super) fn agent(pod: &Pod) -> Option<&ContainerStatus> {
    let name = container_name(pod)?;
    let statuses = pod.status.as_ref()?.container_statuses.as_deref()?;
    statuses.iter().find(|status| status.name == name)
}

pub(super) fn is_running(container: &ContainerStatus) -> bool {
    container
        .state
        .as_ref()
        .is_some_and(|state| state.running.is_some())
}

/// The last end of a container.
pub(super) fn terminated(container: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    let end = |state: &'_ Option<ContainerState>| {
        state
            .as_ref()
            .is_some_and(|state| state.terminated.is_some())
    };
    match end(&container.state) {
        true => container.state.as_ref()?.terminated.as_ref(),
        false => container.last_state.as_ref()?.terminated.as_ref(),
    }
}

/// Why a pod failed, in the engine's words.
pub(super) fn failure(pod: &Pod, end: Option<&ContainerStateTerminated>) -> String {
    let status = pod.status.as_ref();
    if let Some(reason) = status.and_then(|status| status.reason.as_deref()) {
        return with_words(reason, status.and_then(|status| status.message.as_deref()));
    }
    let init = status
        .and_then(|status| status.init_container_statuses.as_deref())
        .unwrap_or_default();
    let synced = init
        .iter()
        .filter_map(terminated)
        .find(|end| end.exit_code != 0);
    match (end, synced) {
        (Some(end), _) if is_oom(end) => "killed for want of memory (OOMKilled)".to_owned(),
        (Some(end), _) if end.exit_code == i32::from(accelerator_env::PREEMPTED_EXIT_CODE) => {
            format!(
                "exit code {}: another node of the job was lost",
                end.exit_code
            )
        }
        (Some(end), _) => format!("exit code {}", end.exit_code),
        (None, Some(end)) => format!(
            "its code was not brought, exit code {}: {}",
            end.exit_code,
            end.message.as_deref().unwrap_or_default().trim()
        ),
        (None, None) => "failed".to_owned(),
    }
}

fn is_oom(end: &ContainerStateTerminated) -> bool {
    end.reason.as_deref() == Some("OOMKilled")
}

/// How little an end says about why a job failed.
pub(super) fn rank(pod: &Pod, end: Option<&ContainerStateTerminated>) -> u8 {
    let evicted = pod
        .status
        .as_ref()
        .is_some_and(|status| status.reason.is_some());
    match end {
        Some(end) if is_oom(end) => 0,
        _ if evicted => 1,
        Some(end) if end.exit_code != i32::from(accelerator_env::PREEMPTED_EXIT_CODE) => 2,
        Some(_) => 4,
        None => 3,
    }
}

pub(super) fn with_words(reason: &str, message: Option<&str>) -> String {
    match message.map(str::trim).filter(|message| !message.is_empty()) {
        Some(message) => format!("{reason}: {message}"),
        None => reason.to_owned(),
    }
}
