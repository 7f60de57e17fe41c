//! Jobs that Kubernetes itself knows.

use k8s_openapi::api::batch::v1::{
    Job, JobSpec as BatchJobSpec, PodFailurePolicy, PodFailurePolicyOnExitCodesRequirement,
    PodFailurePolicyOnPodConditionsPattern, PodFailurePolicyRule,
};
use k8s_openapi::api::core::v1::PodTemplateSpec;

use super::pod::template;
use super::{AGENT, NODE_LABEL, Object, agent, metadata};
use crate::engine::kubernetes::version::ServerVersion;
use crate::error::{Error, Result};
use crate::spec::JobSpec;

/// The label by which Kueue knows whose turn it is.
pub(super) const QUEUE_LABEL: &str = "kueue.x-k8s.io/queue-name";
/// Where the agent of node 0 listens.
const PORT: u16 = 29400;

/// The Job of a job; for a server that has no Indexed Jobs, one a node.
///
/// # Errors
/// When such a server would need one.
pub(super) fn jobs(spec: &JobSpec, version: ServerVersion) -> Result<(Object, Vec<Object>)> {
    if version.has_indexed_jobs() {
        return Ok((Object::of(&indexed(spec, version)?)?, Vec::new()));
    }
    if spec.options.kubernetes.queue.is_some() {
        return Err(Error::usage(format!(
            "--queue needs Indexed Jobs, which Kubernetes has from 1.22 on; this server is {version}"
        )));
    }
    let first = Object::of(&of_node(spec, 0)?)?;
    let others = (1..spec.nodes.get())
        .map(|node| Object::of(&of_node(spec, node)?))
        .collect::<Result<_>>()?;
    Ok((first, others))
}

fn indexed(spec: &JobSpec, version: ServerVersion) -> Result<Job> {
    let nodes = i32::try_from(spec.nodes.get())
        .map_err(|_| Error::usage("--nodes is more than a Job can have"))?;
    let words = agent(spec).endpoint(endpoint(spec)).words();
    let mut job = job(spec, spec.name.as_str(), template(spec, AGENT, words)?);
    if let Some(queue) = &spec.options.kubernetes.queue {
        let labels = job.metadata.labels.get_or_insert_default();
        labels.insert(QUEUE_LABEL.to_owned(), queue.clone());
    }
    if let Some(job) = &mut job.spec {
        job.completion_mode = Some("Indexed".to_owned());
        job.completions = Some(nodes);
        job.parallelism = Some(nodes);
        job.backoff_limit = Some(limit(spec).saturating_mul(nodes));
        // Kueue lets it go on when its turn has come.
        job.suspend = spec.options.kubernetes.queue.as_ref().map(|_| true);
        let has_policy = version.has_pod_failure_policy() && spec.max_restarts > 0;
        job.pod_failure_policy = has_policy.then(failure_policy);
    }
    Ok(job)
}

fn of_node(spec: &JobSpec, node: usize) -> Result<Job> {
    let words = agent(spec).node_rank(node).endpoint(endpoint(spec)).words();
    let mut template = template(spec, AGENT, words)?;
    let name = format!("{}-{node}", spec.name);
    if let Some(pod) = &mut template.spec {
        pod.hostname = Some(name.clone());
    }
    if let Some(metadata) = &mut template.metadata {
        let labels = metadata.labels.get_or_insert_default();
        labels.insert(NODE_LABEL.to_owned(), node.to_string());
    }
    Ok(job(spec, &name, template))
}

fn job(spec: &JobSpec, name: &str, mut template: PodTemplateSpec) -> Job {
    if let Some(pod) = &mut template.spec {
        pod.subdomain = Some(spec.name.to_string());
    }
    let seconds = spec.time_limit.map(|limit| limit.as_secs());
    Job {
        metadata: metadata(name, spec),
        spec: Some(BatchJobSpec {
            active_deadline_seconds: seconds.map(|limit| i64::try_from(limit).unwrap_or(i64::MAX)),
            backoff_limit: Some(limit(spec)),
            template,
            ..BatchJobSpec::default()
        }),
        ..Job::default()
    }
}

/// The pod of node 0 by the name that its Service gives it.
fn endpoint(spec: &JobSpec) -> String {
    format!("{0}-0.{0}:{PORT}", spec.name)
}

/// How many failures of one node are made good.
pub(super) fn limit(spec: &JobSpec) -> i32 {
    i32::try_from(spec.max_restarts).unwrap_or(i32::MAX)
}

/// An agent whose job goes on without it ends with one code; any other is that of a job which has failed after all its
/// restarts. A pod that was taken from its node is no failure.
fn failure_policy() -> PodFailurePolicy {
    let on_code = |action: &str, operator: &str| PodFailurePolicyRule {
        action: action.to_owned(),
        on_exit_codes: Some(PodFailurePolicyOnExitCodesRequirement {
            container_name: Some(AGENT.to_owned()),
            operator: operator.to_owned(),
            values: vec![i32::from(accelerator_env::PREEMPTED_EXIT_CODE)],
        }),
        ..PodFailurePolicyRule::default()
    };
    PodFailurePolicy {
        rules: vec![
            PodFailurePolicyRule {
                action: "Ignore".to_owned(),
                on_pod_conditions: Some(vec![PodFailurePolicyOnPodConditionsPattern {
                    status: "True".to_owned(),
                    type_: "DisruptionTarget".to_owned(),
                }]),
                ..PodFailurePolicyRule::default()
            },
            on_code("Count", "In"),
            on_code("FailJob", "NotIn"),
        ],
    }
}
