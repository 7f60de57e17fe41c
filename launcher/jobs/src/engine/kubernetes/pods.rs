//! The pods of a job, node by node, and their states.

use std::collections::BTreeMap;

use accelerator_host::cli::Result;
use k8s_openapi::api::core::v1::{
    ContainerState, ContainerStateTerminated, ContainerStatus, Event, Pod,
};
use kube::ResourceExt;
use kube::api::ListParams;

use super::cluster::{Cluster, seconds};
use super::objects::{AGENT, NODE_LABEL, PART_LABEL, selector};
use crate::job::{Instance, JobStatus};
use crate::spec::JobSpec;

/// The pods of each node of a job, the oldest first.
#[derive(Debug, Default)]
pub(super) struct NodePods {
    pods: BTreeMap<usize, Vec<Pod>>,
    warnings: Warnings,
}

/// Warnings of the engine, by the uid of the object.
#[derive(Debug, Default)]
pub(super) struct Warnings(Vec<(String, String)>);

/// The failure of a pod's agent.
#[derive(Debug)]
pub(super) struct AgentEnd<'a> {
    pub(super) node: usize,
    pub(super) terminated: Option<&'a ContainerStateTerminated>,
    /// The reason, in the engine's words.
    pub(super) reason: String,
}

impl NodePods {
    /// Asks the cluster.
    ///
    /// # Errors
    /// When it refuses it or does not answer.
    pub(super) async fn find(cluster: &Cluster, spec: &JobSpec) -> Result<Self> {
        let selector = format!("{},{PART_LABEL}={AGENT}", selector(spec));
        let pods = cluster
            .labelled("pods", &cluster.api::<Pod>(), &selector)
            .await?;
        Ok(Self::of(pods, Warnings::default()))
    }

    /// Adds the engine's warnings about them and `owners`, as far as this user may see them.
    pub(super) async fn with_warnings(mut self, cluster: &Cluster, owners: &[String]) -> Self {
        let uids: Vec<_> = self
            .all()
            .filter_map(ResourceExt::uid)
            .chain(owners.iter().cloned())
            .collect();
        let api = cluster.api::<Event>();
        let parameters = ListParams::default().fields("type=Warning");
        // Without them, the reasons are shorter.
        if let Ok(events) = cluster.try_ask(|| api.list(&parameters)).await {
            self.warnings = Warnings::of(events.items, &uids);
        }
        self
    }

    /// Sorts these pods by node and age.
    pub(super) fn of(found: Vec<Pod>, warnings: Warnings) -> Self {
        let mut pods: BTreeMap<usize, Vec<Pod>> = BTreeMap::new();
        for pod in found {
            if let Some(node) = node_of(&pod) {
                pods.entry(node).or_default().push(pod);
            }
        }
        for pods in pods.values_mut() {
            pods.sort_by_key(|pod| (pod.creation_timestamp(), pod.name_any()));
        }
        Self { pods, warnings }
    }

    /// Returns the pods of one node, the oldest first.
    pub(super) fn of_node(&self, node: usize) -> &[Pod] {
        self.pods.get(&node).map_or(&[], Vec::as_slice)
    }

    /// Returns the instance of one node of the job `job`, whose Job is one of `owners`.
    pub(super) fn instance(&self, job: &str, node: usize, owners: &[String]) -> Instance {
        let pods = self.of_node(node);
        let lives = |pod: &&Pod| pod.metadata.deletion_timestamp.is_none();
        let current = pods.iter().rev().find(lives).or(pods.last());
        let mut instance = Instance::new(job, node, JobStatus::Pending);
        let Some(pod) = current else {
            let warning = owners
                .iter()
                .find_map(|owner| self.warnings.of_object(owner));
            instance.reason = warning.map(str::to_owned);
            return instance;
        };
        let status = pod.status.as_ref();
        let container = agent(pod);
        let end = container.and_then(terminated);
        instance.node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        instance.started = status
            .and_then(|status| status.start_time.as_ref())
            .map(seconds);
        instance.ended = end.and_then(|end| end.finished_at.as_ref()).map(seconds);
        instance.exit_code = end.map(|end| end.exit_code);
        let again = container.map_or(0, |container| container.restart_count);
        let others = pods.len() - 1;
        instance.restarts = u32::try_from(others)
            .unwrap_or(u32::MAX)
            .saturating_add(again.unsigned_abs());
        let restarts = others > 0 || again > 0;
        (instance.status, instance.reason) = match status.and_then(|status| status.phase.as_deref())
        {
            Some("Succeeded") => (JobStatus::Succeeded, None),
            Some("Failed") => (JobStatus::Failed, Some(failure(pod, end))),
            Some("Running") if self.is_lost(pod) => (JobStatus::Restarting, Some(self.lost(pod))),
            Some("Running") if container.is_some_and(is_running) => {
                let before = pods
                    .iter()
                    .rev()
                    .filter(|other| other.name_any() != pod.name_any());
                let before = before.filter_map(|pod| self.end_of(pod)).next();
                (
                    JobStatus::Running,
                    before.map(|reason| format!("started again, since {reason}")),
                )
            }
            _ => {
                let waits = match restarts {
                    true => JobStatus::Restarting,
                    false => JobStatus::Pending,
                };
                (waits, self.wait_reason(pod))
            }
        };
        instance
    }

    /// Returns the failures of agents: first those that explain best why the job failed.
    pub(super) fn ends(&self) -> Vec<AgentEnd<'_>> {
        let mut ends = Vec::new();
        for (node, pods) in &self.pods {
            for pod in pods {
                let end = agent(pod)
                    .and_then(terminated)
                    .filter(|end| end.exit_code != 0);
                if end.is_some() || phase(pod) == Some("Failed") {
                    ends.push((
                        rank(pod, end),
                        AgentEnd {
                            node: *node,
                            terminated: end,
                            reason: failure(pod, end),
                        },
                    ));
                }
            }
        }
        ends.sort_by_key(|(rank, end)| (*rank, end.node));
        ends.into_iter().map(|(_, end)| end).collect()
    }

    fn all(&self) -> impl Iterator<Item = &Pod> {
        self.pods.values().flatten()
    }

    /// Returns why a pod ended or is ending, as a clause.
    fn end_of(&self, pod: &Pod) -> Option<String> {
        if self.is_lost(pod) {
            return Some(self.lost(pod));
        }
        let end = agent(pod).and_then(terminated);
        (phase(pod) == Some("Failed"))
            .then(|| format!("{} ended: {}", pod.name_any(), failure(pod, end)))
    }

    /// Returns `true` if a pod seems to run, but its node does not answer.
    fn is_lost(&self, pod: &Pod) -> bool {
        let status = pod.status.as_ref();
        let is_not_ready = status
            .and_then(|status| status.conditions.as_deref())
            .unwrap_or_default()
            .iter()
            .any(|condition| condition.type_ == "Ready" && condition.status != "True");
        let says_so = status.and_then(|status| status.reason.as_deref()) == Some("NodeLost")
            || self
                .warnings
                .of_pod(pod)
                .is_some_and(|text| text.contains("NodeNotReady"))
            || pod.metadata.deletion_timestamp.is_some();
        phase(pod) == Some("Running")
            && is_not_ready
            && says_so
            && agent(pod).is_some_and(is_running)
    }

    fn lost(&self, pod: &Pod) -> String {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
        format!(
            "node {} of pod {} does not answer (NodeLost)",
            node.unwrap_or("?"),
            pod.name_any()
        )
    }

    /// Returns why a pod does not run yet, in the engine's words.
    fn wait_reason(&self, pod: &Pod) -> Option<String> {
        let status = pod.status.as_ref()?;
        let conditions = status.conditions.as_deref().unwrap_or_default();
        let unscheduled = conditions
            .iter()
            .find(|condition| condition.type_ == "PodScheduled" && condition.status == "False");
        if let Some(condition) = unscheduled {
            return Some(with_words(
                condition.reason.as_deref().unwrap_or("Unschedulable"),
                condition.message.as_deref(),
            ));
        }
        let init = status
            .init_container_statuses
            .as_deref()
            .unwrap_or_default();
        let containers = status.container_statuses.as_deref().unwrap_or_default();
        for container in init.iter().chain(containers) {
            let state = container.state.as_ref();
            let waiting = state.and_then(|state| state.waiting.as_ref());
            let reason = waiting.and_then(|waiting| waiting.reason.as_deref());
            match (reason, waiting) {
                (Some("PodInitializing" | "ContainerCreating"), _) | (None, _) => {}
                (Some(reason), waiting) => {
                    let message = waiting.and_then(|waiting| waiting.message.as_deref());
                    return Some(format!(
                        "{} ({})",
                        with_words(reason, message),
                        container.image
                    ));
                }
            }
        }
        let warning = self.warnings.of_pod(pod);
        warning
            .filter(|text| text.starts_with("Failed"))
            .map(str::to_owned)
    }
}

impl Warnings {
    /// Returns the warnings about the objects with these uids. An earlier object with the same name had another uid.
    pub(super) fn of(events: Vec<Event>, uids: &[String]) -> Self {
        let warning = |event: Event| {
            let uid = event.involved_object.uid.filter(|uid| uids.contains(uid))?;
            Some((
                uid,
                with_words(&event.reason.unwrap_or_default(), event.message.as_deref()),
            ))
        };
        Self(events.into_iter().filter_map(warning).collect())
    }

    fn of_object(&self, uid: &str) -> Option<&str> {
        let found = self.0.iter().rev().find(|(of, _)| of == uid);
        found.map(|(_, text)| text.as_str())
    }

    fn of_pod(&self, pod: &Pod) -> Option<&str> {
        self.of_object(pod.metadata.uid.as_deref()?)
    }
}

const INDEX: &str = "batch.kubernetes.io/job-completion-index";
const REPLICA_TYPE: &str = "training.kubeflow.org/replica-type";
const REPLICA_INDEX: &str = "training.kubeflow.org/replica-index";

/// Returns `true` if the container of a pod's agent runs.
pub(super) fn runs(pod: &Pod) -> bool {
    agent(pod).is_some_and(is_running)
}

/// Returns `true` if a pod has begun to write output.
pub(super) fn has_output(pod: &Pod) -> bool {
    agent(pod).is_some_and(|container| is_running(container) || terminated(container).is_some())
}

/// Returns the name of the agent's container, which differs between operators.
pub(super) fn container_name(pod: &Pod) -> Option<String> {
    let container = pod.spec.as_ref()?.containers.first()?;
    Some(container.name.clone())
}

fn node_of(pod: &Pod) -> Option<usize> {
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

fn phase(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.phase.as_deref()
}

fn agent(pod: &Pod) -> Option<&ContainerStatus> {
    let name = container_name(pod)?;
    let statuses = pod.status.as_ref()?.container_statuses.as_deref()?;
    statuses.iter().find(|status| status.name == name)
}

fn is_running(container: &ContainerStatus) -> bool {
    container
        .state
        .as_ref()
        .is_some_and(|state| state.running.is_some())
}

/// Returns the last end of a container.
fn terminated(container: &ContainerStatus) -> Option<&ContainerStateTerminated> {
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

/// Returns why a pod failed, in the engine's words.
fn failure(pod: &Pod, end: Option<&ContainerStateTerminated>) -> String {
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
        (Some(end), _) if end.exit_code == i32::from(accelerator_host::PREEMPTED_EXIT_CODE) => {
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

/// Ranks the end of a pod: the lower, the more it explains why the job failed.
fn rank(pod: &Pod, end: Option<&ContainerStateTerminated>) -> u8 {
    let evicted = pod
        .status
        .as_ref()
        .is_some_and(|status| status.reason.is_some());
    match end {
        Some(end) if is_oom(end) => 0,
        _ if evicted => 1,
        Some(end) if end.exit_code != i32::from(accelerator_host::PREEMPTED_EXIT_CODE) => 2,
        Some(_) => 4,
        None => 3,
    }
}

fn with_words(reason: &str, message: Option<&str>) -> String {
    match message.map(str::trim).filter(|message| !message.is_empty()) {
        Some(message) => format!("{reason}: {message}"),
        None => reason.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::engine::kubernetes::objects::NODE_LABEL;

    fn pod(name: &str, node: usize, status: Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": name, "labels": {NODE_LABEL: node.to_string()},
                "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"nodeName": "node1", "containers": [{"name": "agent"}]},
            "status": status,
        }))
        .unwrap()
    }

    fn container(state: Value) -> Value {
        json!([{"name": "agent", "image": "r/m:1", "imageID": "", "ready": false, "restartCount": 0, "state": state}])
    }

    fn instance(pods: Vec<Pod>) -> Instance {
        NodePods::of(pods, Warnings::default()).instance("m", 1, &[])
    }

    #[test]
    fn why_a_pod_waits_is_shown() {
        let unschedulable = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."}]);
        let pulling =
            json!({"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}});
        for (status, reason) in [
            (
                json!({"phase": "Pending", "conditions": unschedulable}),
                "Unschedulable: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
            ),
            (
                json!({"phase": "Pending", "containerStatuses": container(pulling)}),
                "ImagePullBackOff: Back-off pulling image (r/m:1)",
            ),
        ] {
            let instance = instance(vec![pod("a", 1, status)]);
            assert_eq!(instance.status, JobStatus::Pending);
            assert_eq!(instance.reason.unwrap(), reason);
        }
    }

    #[test]
    fn the_pod_before_says_why_there_is_another() {
        let runs = json!({"running": {}});
        let mut lost = pod(
            "a",
            1,
            json!({"phase": "Running", "containerStatuses": container(runs.clone()),
        "conditions": [{"type": "Ready", "status": "False"}]}),
        );
        lost.metadata.deletion_timestamp = lost.metadata.creation_timestamp.clone();
        let alone = instance(vec![lost.clone()]);
        assert_eq!(alone.status, JobStatus::Restarting);
        assert!(
            alone
                .reason
                .unwrap()
                .contains("node node1 of pod a does not answer")
        );
        let new = pod(
            "b",
            1,
            json!({"phase": "Running", "containerStatuses": container(runs)}),
        );
        let again = instance(vec![lost, new]);
        assert_eq!((again.status, again.restarts), (JobStatus::Running, 1));
        assert!(
            again
                .reason
                .unwrap()
                .starts_with("started again, since node node1")
        );
    }

    #[test]
    fn want_of_memory_says_most() {
        let end = |code: i32, reason: &str| {
            let state = json!({"terminated": {"exitCode": code, "reason": reason, "message": "last words"}});
            json!({"phase": "Failed", "containerStatuses": container(state)})
        };
        let pods = vec![
            pod("a", 0, end(137, "Error")),
            pod("b", 1, end(75, "Error")),
            pod("c", 2, end(137, "OOMKilled")),
        ];
        let pods = NodePods::of(pods, Warnings::default());
        let ends = pods.ends();
        assert_eq!(
            ends.iter().map(|end| end.node).collect::<Vec<_>>(),
            [2, 0, 1]
        );
        assert!(ends[0].reason.contains("OOMKilled"));
        assert_eq!(
            ends[0].terminated.unwrap().message.as_deref(),
            Some("last words")
        );
    }

    #[test]
    fn pods_of_every_kind_know_their_node() {
        let with = |metadata: Value| -> Option<usize> {
            node_of(&serde_json::from_value(json!({"metadata": metadata})).unwrap())
        };
        assert_eq!(with(json!({"annotations": {INDEX: "3"}})), Some(3));
        assert_eq!(
            with(json!({"labels": {REPLICA_TYPE: "master", REPLICA_INDEX: "0"}})),
            Some(0)
        );
        assert_eq!(
            with(json!({"labels": {REPLICA_TYPE: "worker", REPLICA_INDEX: "1"}})),
            Some(2)
        );
        assert_eq!(with(json!({})), None);
    }
}
