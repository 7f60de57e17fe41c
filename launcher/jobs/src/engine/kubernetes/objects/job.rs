//! The objects that run a job: Jobs, the PyTorchJob and TrainJob of Kubeflow, and the pods of their agents.

use std::collections::BTreeMap;

use accelerator_host::cli::{Error, Result};
use k8s_openapi::api::batch::v1::{
    Job, JobSpec as BatchJobSpec, PodFailurePolicy, PodFailurePolicyOnExitCodesRequirement,
    PodFailurePolicyOnPodConditionsPattern, PodFailurePolicyRule,
};
use k8s_openapi::api::core::v1::{
    Affinity, Container, EmptyDirVolumeSource, EnvVar, EnvVarSource, LocalObjectReference,
    PersistentVolumeClaimVolumeSource, PodAffinityTerm, PodAntiAffinity, PodSpec, PodTemplateSpec,
    ResourceRequirements, SecretKeySelector, SecretVolumeSource, Toleration, Volume, VolumeMount,
    WeightedPodAffinityTerm,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::object::{
    AGENT, GIT_CREDENTIALS, JOB_LABEL, NODE_LABEL, Object, PART_LABEL, agent, command, git_secret,
    labels, literal, metadata, needs_git_secret, token_secret,
};
use crate::engine::kubernetes::cluster::ServerVersion;
use crate::spec::{DataMount, JobSpec, SyncMode, Taint};

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

pub(crate) fn pytorch_job() -> ApiResource {
    let kind = GroupVersionKind::gvk("kubeflow.org", "v1", "PyTorchJob");
    ApiResource::from_gvk_with_plural(&kind, "pytorchjobs")
}

pub(crate) fn train_job() -> ApiResource {
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
        "resourcesPerNode": written(&resources(spec))?,
        "env": written(&environment(spec))?,
    });
    if let Ok(ranks) = spec.nproc_per_node.parse::<u32>() {
        trainer["numProcPerNode"] = json!(ranks);
    }
    let mut pod_spec = Map::new();
    let mut set = |key: &str, value: Value| pod_spec.insert(key.to_owned(), value);
    set("affinity", written(&anti_affinity(spec))?);
    set("volumes", written(&volumes(spec))?);
    set(
        "containers",
        json!([{"name": NODE, "volumeMounts": written(&mounts(spec))?}]),
    );
    if let Some(labels) = node_selector(spec) {
        set("nodeSelector", written(&labels)?);
    }
    if let Some(tolerations) = lost_node_tolerations(spec) {
        set("tolerations", written(&tolerations)?);
    }
    if let Some(secrets) = pull_secrets(spec) {
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

const TOKEN_FOLDER: &str = "/etc/accel";
const DEFAULT_WORKING_DIR: &str = "/root";
/// Seconds that a node may be silent, after the cluster has noticed it, if the job is started again.
const LOST_NODE_SECONDS: i64 = 10;
/// Seconds that agents have to end their ranks.
const GRACE_SECONDS: i64 = 60;

/// Makes the template of the pods of a job, whose container `name` runs `words`.
pub(super) fn template(spec: &JobSpec, name: &str, words: Vec<String>) -> Result<PodTemplateSpec> {
    let options = &spec.options.kubernetes;
    let mut pod_labels = labels(spec);
    pod_labels.insert(PART_LABEL.to_owned(), AGENT.to_owned());
    let container = Container {
        name: name.to_owned(),
        image: options.image.clone(),
        command: Some(command(words)),
        working_dir: working_dir(spec),
        env: Some(environment(spec)),
        resources: Some(resources(spec)),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        volume_mounts: Some(mounts(spec)),
        ..Container::default()
    };
    Ok(PodTemplateSpec {
        metadata: Some(ObjectMeta {
            labels: Some(pod_labels),
            ..ObjectMeta::default()
        }),
        spec: Some(PodSpec {
            affinity: Some(anti_affinity(spec)),
            // Nothing in them uses the API, unless an account for that is given.
            automount_service_account_token: options.service_account.is_none().then_some(false),
            containers: vec![container],
            enable_service_links: Some(false),
            image_pull_secrets: pull_secrets(spec),
            init_containers: sync(spec)?.map(|container| vec![container]),
            node_selector: node_selector(spec),
            priority_class_name: spec.priority.clone(),
            restart_policy: Some("Never".to_owned()),
            service_account_name: options.service_account.clone(),
            termination_grace_period_seconds: Some(GRACE_SECONDS),
            tolerations: lost_node_tolerations(spec),
            volumes: Some(volumes(spec)),
            ..PodSpec::default()
        }),
    })
}

/// Returns the job's variables without secrets, and the path of its token.
pub(super) fn environment(spec: &JobSpec) -> Vec<EnvVar> {
    let is_secret = |name: &str| GIT_CREDENTIALS.contains(&name);
    let variable = |name: &str, value: &str| EnvVar {
        name: name.to_owned(),
        value: Some(literal(value)),
        ..EnvVar::default()
    };
    let given = spec.env.iter().filter(|(name, _)| !is_secret(name));
    let mut variables: Vec<_> = given.map(|(name, value)| variable(name, value)).collect();
    variables.push(variable(
        "ACCEL_TOKEN_FILE",
        &format!("{TOKEN_FOLDER}/token"),
    ));
    variables
}

/// Returns the resources of each pod, whose requests are its limits.
pub(super) fn resources(spec: &JobSpec) -> ResourceRequirements {
    let mut amounts = BTreeMap::new();
    let mut amount = |name: &str, text: String| amounts.insert(name.to_owned(), Quantity(text));
    if let Some(cpus) = spec.resources.cpus {
        amount("cpu", cpus.to_string());
    }
    if let Some(memory) = spec.resources.memory {
        amount("memory", memory.to_string());
    }
    if spec.resources.gpus > 0 {
        amount("nvidia.com/gpu", spec.resources.gpus.to_string());
    }
    ResourceRequirements {
        limits: Some(amounts.clone()),
        requests: Some(amounts),
        ..ResourceRequirements::default()
    }
}

/// Returns the job's volumes: its token, memory for ranks of a node, its data, and its code.
pub(super) fn volumes(spec: &JobSpec) -> Vec<Volume> {
    let options = &spec.options.kubernetes;
    let mut volumes = vec![
        Volume {
            name: "token".to_owned(),
            secret: Some(SecretVolumeSource {
                secret_name: Some(token_secret(spec)),
                default_mode: Some(0o400),
                ..SecretVolumeSource::default()
            }),
            ..Volume::default()
        },
        // Ranks of a node exchange data there; by default a container has 64 MB.
        Volume {
            name: "shm".to_owned(),
            empty_dir: Some(EmptyDirVolumeSource {
                medium: Some("Memory".to_owned()),
                ..EmptyDirVolumeSource::default()
            }),
            ..Volume::default()
        },
    ];
    volumes.extend(data_volumes(spec));
    if options.sync_mode.is_some() {
        volumes.push(Volume {
            name: "code".to_owned(),
            empty_dir: Some(EmptyDirVolumeSource::default()),
            ..Volume::default()
        });
    }
    volumes
}

/// Returns the mounts of the job's volumes in the container.
pub(super) fn mounts(spec: &JobSpec) -> Vec<VolumeMount> {
    let mut mounts = vec![
        VolumeMount {
            read_only: Some(true),
            ..mount("token", TOKEN_FOLDER)
        },
        mount("shm", "/dev/shm"),
    ];
    mounts.extend(data_mounts(spec));
    if spec.options.kubernetes.sync_mode.is_some() {
        mounts.push(mount("code", code_folder(spec)));
    }
    mounts
}

/// Returns the volumes of --data.
pub(super) fn data_volumes(spec: &JobSpec) -> Vec<Volume> {
    let volume = |(at, data): (usize, &DataMount)| Volume {
        name: format!("data-{at}"),
        persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
            claim_name: data.claim.clone(),
            ..PersistentVolumeClaimVolumeSource::default()
        }),
        ..Volume::default()
    };
    let data = &spec.options.kubernetes.data;
    data.iter().enumerate().map(volume).collect()
}

/// Returns the mounts of the volumes of --data.
pub(super) fn data_mounts(spec: &JobSpec) -> Vec<VolumeMount> {
    let data = &spec.options.kubernetes.data;
    data.iter()
        .enumerate()
        .map(|(at, data)| mount(&format!("data-{at}"), data.path.to_string_lossy()))
        .collect()
}

/// Returns the labels of --node-selector.
pub(super) fn node_selector(spec: &JobSpec) -> Option<BTreeMap<String, String>> {
    let labels = &spec.options.kubernetes.node_selector;
    (!labels.is_empty()).then(|| labels.iter().cloned().collect())
}

/// Returns the taints of --toleration.
pub(super) fn tolerations(spec: &JobSpec) -> Option<Vec<Toleration>> {
    let toleration = |taint: &Taint| Toleration {
        key: Some(taint.key.clone()),
        operator: Some(
            if taint.value.is_some() {
                "Equal"
            } else {
                "Exists"
            }
            .to_owned(),
        ),
        value: taint.value.clone(),
        effect: taint.effect.clone(),
        ..Toleration::default()
    };
    let taints = &spec.options.kubernetes.toleration;
    (!taints.is_empty()).then(|| taints.iter().map(toleration).collect())
}

/// Returns the taints of --toleration. If the job is started again, the pod of a lost node is replaced sooner than the
/// cluster would do: the launcher has given that node up long before.
fn lost_node_tolerations(spec: &JobSpec) -> Option<Vec<Toleration>> {
    let given = tolerations(spec);
    if spec.max_restarts == 0 {
        return given;
    }
    let lost = |state: &str| Toleration {
        key: Some(format!("node.kubernetes.io/{state}")),
        operator: Some("Exists".to_owned()),
        effect: Some("NoExecute".to_owned()),
        toleration_seconds: Some(LOST_NODE_SECONDS),
        ..Toleration::default()
    };
    let mut all = given.unwrap_or_default();
    all.extend(["not-ready", "unreachable"].map(lost));
    Some(all)
}

/// Returns the Secrets of --image-pull-secret.
pub(super) fn pull_secrets(spec: &JobSpec) -> Option<Vec<LocalObjectReference>> {
    let secrets = &spec.options.kubernetes.image_pull_secret;
    let reference = |name: &String| LocalObjectReference { name: name.clone() };
    (!secrets.is_empty()).then(|| secrets.iter().map(reference).collect())
}

/// Prefers one node per pod.
fn anti_affinity(spec: &JobSpec) -> Affinity {
    let of_this_job = [(JOB_LABEL.to_owned(), spec.name.to_string())].into();
    let term = PodAffinityTerm {
        label_selector: Some(LabelSelector {
            match_labels: Some(of_this_job),
            ..LabelSelector::default()
        }),
        topology_key: "kubernetes.io/hostname".to_owned(),
        ..PodAffinityTerm::default()
    };
    Affinity {
        pod_anti_affinity: Some(PodAntiAffinity {
            preferred_during_scheduling_ignored_during_execution: Some(vec![
                WeightedPodAffinityTerm {
                    pod_affinity_term: term,
                    weight: 100,
                },
            ]),
            ..PodAntiAffinity::default()
        }),
        ..Affinity::default()
    }
}

fn mount(name: &str, path: impl Into<String>) -> VolumeMount {
    VolumeMount {
        name: name.to_owned(),
        mount_path: path.into(),
        ..VolumeMount::default()
    }
}

fn working_dir(spec: &JobSpec) -> Option<String> {
    let synced = spec
        .options
        .kubernetes
        .sync_mode
        .map(|_| DEFAULT_WORKING_DIR.to_owned());
    let given = spec.working_dir.as_ref();
    given
        .map(|folder| folder.to_string_lossy().into_owned())
        .or(synced)
}

fn code_folder(spec: &JobSpec) -> String {
    let folder = working_dir(spec).unwrap_or_default();
    format!("{}/code", folder.trim_end_matches('/'))
}

/// Makes the container that brings the code, as Arena does: a repository becomes `code/NAME`.
fn sync(spec: &JobSpec) -> Result<Option<Container>> {
    let options = &spec.options.kubernetes;
    let (Some(mode), Some(source)) = (options.sync_mode, &options.sync_source) else {
        return Ok(None);
    };
    let folder = code_folder(spec);
    let words = match mode {
        SyncMode::Git => {
            let last = source.trim_end_matches('/').rsplit(['/', ':']).next();
            let name = last.unwrap_or_default().trim_end_matches(".git");
            // Git asks this helper for the credentials, so that no command line has them.
            let helper =
                "!f() { echo username=$GIT_SYNC_USERNAME; echo password=$GIT_SYNC_PASSWORD; }; f";
            let mut words = vec!["git".to_owned()];
            if needs_git_secret(spec) {
                words.extend(["-c".to_owned(), format!("credential.helper={helper}")]);
            }
            let clone = ["clone", "--depth=1", "--", source];
            words.extend(clone.map(str::to_owned));
            words.push(format!("{folder}/{name}"));
            words
        }
        SyncMode::Rsync => ["rsync", "-a", "--", source, &format!("{folder}/")]
            .map(str::to_owned)
            .to_vec(),
    };
    let image = match (mode, &options.sync_image) {
        (_, Some(image)) => image.clone(),
        (SyncMode::Git, None) => "alpine/git".to_owned(),
        (SyncMode::Rsync, None) => {
            return Err(Error::usage(
                "--sync-mode rsync needs an image that has rsync: give one by --sync-image",
            ));
        }
    };
    let credential = |name: &str| EnvVar {
        name: name.to_owned(),
        value_from: Some(EnvVarSource {
            secret_key_ref: Some(SecretKeySelector {
                name: git_secret(spec),
                key: name.to_owned(),
                ..SecretKeySelector::default()
            }),
            ..EnvVarSource::default()
        }),
        ..EnvVar::default()
    };
    Ok(Some(Container {
        name: "sync".to_owned(),
        image: Some(image),
        command: Some(command(words)),
        env: needs_git_secret(spec).then(|| GIT_CREDENTIALS.map(credential).to_vec()),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        volume_mounts: Some(vec![mount("code", folder)]),
        ..Container::default()
    }))
}
