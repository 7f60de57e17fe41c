//! The objects that run a job: Jobs, and the PyTorchJob and TrainJob of Kubeflow.

use k8s_openapi::api::batch::v1::{
    Job, JobSpec as BatchJobSpec, PodFailurePolicy, PodFailurePolicyOnExitCodesRequirement,
    PodFailurePolicyOnPodConditionsPattern, PodFailurePolicyRule,
};
use k8s_openapi::api::core::v1::PodTemplateSpec;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::object::{AGENT, NODE_LABEL, Object, PART_LABEL, agent, command, labels, metadata};
use super::pod;
use super::pod::template;
use crate::engine::kubernetes::cluster::ServerVersion;
use crate::error::{Error, Result};
use crate::spec::JobSpec;

/// The label of Kueue with the name of the queue.
const QUEUE_LABEL: &str = "kueue.x-k8s.io/queue-name";
/// The port of the agent of node 0.
const PORT: u16 = 29400;

/// Makes the Job of a job; for a server without Indexed Jobs, one per node.
///
/// # Errors
/// When the job needs an Indexed Job, and the server has none.
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
        // Kueue resumes it when its turn has come.
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

/// Returns the address of node 0: the name that its Service gives to its pod.
fn endpoint(spec: &JobSpec) -> String {
    format!("{0}-0.{0}:{PORT}", spec.name)
}

/// Returns the number of failures of one node after which the job fails.
fn limit(spec: &JobSpec) -> i32 {
    i32::try_from(spec.max_restarts).unwrap_or(i32::MAX)
}

/// Counts an agent whose job continues without it as a failure of its pod, and fails the job for any other exit code: the
/// job failed after all its restarts. The disruption of a pod is not a failure.
fn failure_policy() -> PodFailurePolicy {
    let on_code = |action: &str, operator: &str| PodFailurePolicyRule {
        action: action.to_owned(),
        on_exit_codes: Some(PodFailurePolicyOnExitCodesRequirement {
            container_name: Some(AGENT.to_owned()),
            operator: operator.to_owned(),
            values: vec![i32::from(accelerator_host::PREEMPTED_EXIT_CODE)],
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

/// The port that the training operator opens at the pod of node 0.
const MASTER_PORT: u16 = 23456;
/// The runtime of the Kubeflow Trainer that sets torchrun's variables, and the name of its container and Job.
const RUNTIME: &str = "torch-distributed";
const NODE: &str = "node";

/// The resource of PyTorchJobs.
pub(in super::super) fn pytorch_job() -> ApiResource {
    let kind = GroupVersionKind::gvk("kubeflow.org", "v1", "PyTorchJob");
    ApiResource::from_gvk_with_plural(&kind, "pytorchjobs")
}

/// The resource of TrainJobs.
pub(in super::super) fn train_job() -> ApiResource {
    let kind = GroupVersionKind::gvk("trainer.kubeflow.org", "v1alpha1", "TrainJob");
    ApiResource::from_gvk_with_plural(&kind, "trainjobs")
}

/// Makes a PyTorchJob: node 0 is its Master, the others are its Workers. Its operator gives agents their ranks.
pub(super) fn of_pytorch(spec: &JobSpec) -> Result<Object> {
    let endpoint = format!("{}-master-0:{MASTER_PORT}", spec.name);
    let words = agent(spec).endpoint(endpoint).words();
    let mut template = template(spec, "pytorch", words)?;
    if let Some(pod) = &mut template.spec {
        // The restart policy of the replica counts.
        pod.restart_policy = None;
    }
    let template = written(&template)?;
    let restart_policy = if spec.max_restarts > 0 {
        "OnFailure"
    } else {
        "Never"
    };
    let replica = |count: usize| json!({"replicas": count, "restartPolicy": restart_policy, "template": template});
    let mut replicas = json!({"Master": replica(1)});
    if spec.nodes.get() > 1 {
        replicas["Worker"] = replica(spec.nodes.get() - 1);
    }
    let nodes = i32::try_from(spec.nodes.get()).unwrap_or(i32::MAX);
    let mut policy =
        json!({"cleanPodPolicy": "None", "backoffLimit": limit(spec).saturating_mul(nodes)});
    if let Some(limit) = spec.time_limit {
        policy["activeDeadlineSeconds"] = json!(limit.as_secs());
    }
    if spec.options.kubernetes.queue.is_some() {
        policy["suspend"] = json!(true);
    }
    let content = json!({"runPolicy": policy, "pytorchReplicaSpecs": replicas});
    Ok(object(spec, pytorch_job(), content))
}

/// Makes a TrainJob. Fields of pods that its runtime lacks are a patch of the runtime.
pub(super) fn of_trainer(spec: &JobSpec) -> Result<Object> {
    let words = agent(spec).words();
    let options = &spec.options.kubernetes;
    let mut trainer = json!({
        "image": options.image,
        "command": command(words),
        "numNodes": spec.nodes.get(),
        "resourcesPerNode": written(&pod::resources(spec))?,
        "env": written(&pod::environment(spec))?,
    });
    if let Ok(ranks) = spec.nproc_per_node.parse::<u32>() {
        trainer["numProcPerNode"] = json!(ranks);
    }
    let mut pod_spec = Map::new();
    let mut set = |key: &str, value: Value| pod_spec.insert(key.to_owned(), value);
    set("affinity", written(&pod::anti_affinity(spec))?);
    set("volumes", written(&pod::volumes(spec))?);
    set(
        "containers",
        json!([{"name": NODE, "volumeMounts": written(&pod::mounts(spec))?}]),
    );
    if let Some(labels) = pod::node_selector(spec) {
        set("nodeSelector", written(&labels)?);
    }
    if let Some(tolerations) = pod::lost_node_tolerations(spec) {
        set("tolerations", written(&tolerations)?);
    }
    if let Some(secrets) = pod::pull_secrets(spec) {
        set("imagePullSecrets", written(&secrets)?);
    }
    if let Some(account) = &options.service_account {
        set("serviceAccountName", json!(account));
    }
    let mut pod_labels = labels(spec);
    pod_labels.insert(PART_LABEL.to_owned(), AGENT.to_owned());
    let template = json!({"metadata": {"labels": pod_labels}, "spec": pod_spec});
    let jobs = json!([{"name": NODE, "template": {"spec": {"template": template}}}]);
    let mut content = json!({
        "runtimeRef": {"name": RUNTIME},
        "trainer": trainer,
        "runtimePatches": [{
            "manager": "accel-jobs",
            "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
        }],
    });
    if let Some(limit) = spec.time_limit {
        content["activeDeadlineSeconds"] = json!(limit.as_secs());
    }
    if options.queue.is_some() {
        content["suspend"] = json!(true);
    }
    Ok(object(spec, train_job(), content))
}

fn object(spec: &JobSpec, resource: ApiResource, content: Value) -> Object {
    let mut value =
        DynamicObject::new(spec.name.as_str(), &resource).data(json!({"spec": content}));
    value.metadata = metadata(spec.name.as_str(), spec);
    if let Some(queue) = &spec.options.kubernetes.queue {
        let labels = value.metadata.labels.get_or_insert_default();
        labels.insert(QUEUE_LABEL.to_owned(), queue.clone());
    }
    Object { resource, value }
}

fn written(value: &impl Serialize) -> Result<Value> {
    serde_json::to_value(value)
        .map_err(|error| Error::system("cannot write an object").with_source(error))
}
