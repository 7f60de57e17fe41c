//! The objects of Kubeflow's operators: a PyTorchJob, a TrainJob.

use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::job::limit;
use super::{AGENT, Object, PART_LABEL, agent, command, labels, metadata, pod};
use crate::error::{Error, Result};
use crate::spec::JobSpec;

/// The port that the training operator opens at the pod of node 0.
const PORT: u16 = 23456;
/// The runtime of the Kubeflow Trainer that sets torchrun's variables, and the name of its container and Job.
const RUNTIME: &str = "torch-distributed";
const NODE: &str = "node";

/// Where PyTorchJobs are.
pub(in super::super) fn pytorch_job() -> ApiResource {
    let kind = GroupVersionKind::gvk("kubeflow.org", "v1", "PyTorchJob");
    ApiResource::from_gvk_with_plural(&kind, "pytorchjobs")
}

/// Where TrainJobs are.
pub(in super::super) fn train_job() -> ApiResource {
    let kind = GroupVersionKind::gvk("trainer.kubeflow.org", "v1alpha1", "TrainJob");
    ApiResource::from_gvk_with_plural(&kind, "trainjobs")
}

/// A PyTorchJob: node 0 is its Master, the others are its Workers. Its operator tells agents which node they are.
pub(super) fn of_pytorch(spec: &JobSpec) -> Result<Object> {
    let endpoint = format!("{}-master-0:{PORT}", spec.name);
    let words = agent(spec).endpoint(endpoint).words();
    let mut template = pod::template(spec, "pytorch", words)?;
    if let Some(pod) = &mut template.spec {
        // That of the replica counts.
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

/// A TrainJob. What its runtime does not know of pods is a patch of it.
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
        labels.insert(super::job::QUEUE_LABEL.to_owned(), queue.clone());
    }
    Object { resource, value }
}

fn written(value: &impl Serialize) -> Result<Value> {
    serde_json::to_value(value)
        .map_err(|error| Error::system("cannot write an object").with_source(error))
}
