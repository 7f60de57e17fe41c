//! The pods of a job, node by node, and what they say.

mod pod;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ContainerStateTerminated, Event, Pod};
use kube::ResourceExt;
use kube::api::ListParams;

use super::cluster::Cluster;
use super::objects::{AGENT, PART_LABEL, selector};
use super::owner::seconds;
use crate::error::Result;
use crate::job::{Instance, JobStatus, Role};
use crate::spec::JobSpec;
use pod::{agent, failure, is_running, node_of, phase, rank, terminated, with_words};

pub(super) use pod::{container_name, has_output, runs};

/// The pods of each node of a job, the oldest first.
#[derive(Debug, Default)]
pub(super) struct NodePods {
    pods: BTreeMap<usize, Vec<Pod>>,
    warnings: Warnings,
}

/// Warnings of the engine, by the uid of the object.
#[derive(Debug, Default)]
pub(super) struct Warnings(Vec<(String, String)>);

/// How a pod's agent ended with a failure.
#[derive(Debug)]
pub(super) struct AgentEnd<'a> {
    pub(super) node: usize,
    pub(super) terminated: Option<&'a ContainerStateTerminated>,
    /// In the engine's words.
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

    /// With what the engine warns of them and of `owners`, as far as this user may see that.
    pub(super) async fn with_warnings(mut self, cluster: &Cluster, owners: &[String]) -> Self {
        let uids: Vec<_> = self
            .all()
            .filter_map(ResourceExt::uid)
            .chain(owners.iter().cloned())
            .collect();
        let api = cluster.api::<Event>();
        let parameters = ListParams::default().fields("type=Warning");
        // Without them there are fewer words.
        if let Ok(events) = cluster.try_ask(|| api.list(&parameters)).await {
            self.warnings = Warnings::of(events.items, &uids);
        }
        self
    }

    /// These pods.
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

    /// Those of one node, the oldest first.
    pub(super) fn of_node(&self, node: usize) -> &[Pod] {
        self.pods.get(&node).map_or(&[], Vec::as_slice)
    }

    /// The instance of one node of the job `job`, whose Job is one of `owners`.
    pub(super) fn instance(&self, job: &str, node: usize, owners: &[String]) -> Instance {
        let pods = self.of_node(node);
        let lives = |pod: &&Pod| pod.metadata.deletion_timestamp.is_none();
        let current = pods.iter().rev().find(lives).or(pods.last());
        let mut instance = Instance {
            name: Role::instance_name(job, node),
            role: Role::of_node(node),
            status: JobStatus::Pending,
            node: None,
            started: None,
            ended: None,
            restarts: 0,
            exit_code: None,
            reason: None,
        };
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

    /// How agents ended that did not succeed: first those that say most about why the job failed.
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

    /// Why a pod ended or is ending, as a clause.
    fn end_of(&self, pod: &Pod) -> Option<String> {
        if self.is_lost(pod) {
            return Some(self.lost(pod));
        }
        let end = agent(pod).and_then(terminated);
        (phase(pod) == Some("Failed"))
            .then(|| format!("{} ended: {}", pod.name_any(), failure(pod, end)))
    }

    /// Whether a pod seems to run, but its node does not answer.
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

    /// Why a pod does not run yet, in the engine's words.
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

#[cfg(test)]
mod tests;
