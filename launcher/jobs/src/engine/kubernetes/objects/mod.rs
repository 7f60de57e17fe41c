//! The objects of a job. Nothing here sends a request.

mod job;
mod object;

use accelerator_host::cli::{Error, Result};
use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec};
use k8s_openapi::api::core::v1::{
    Container, ContainerPort, PodSpec, PodTemplateSpec, Service, ServicePort, ServiceSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};

use super::cluster::ServerVersion;
use crate::spec::{JobSpec, ObjectKind};
use job::{data_mounts, data_volumes, node_selector, pull_secrets, tolerations};
pub(super) use job::{pytorch_job, train_job};
pub(super) use object::{AGENT, NODE_LABEL, Object, PART_LABEL, selector};
use object::{
    GIT_CREDENTIALS, command, git_secret, labels, metadata, needs_git_secret, secret, service,
    token_secret,
};

/// The end of the name of TensorBoard's Service, after the job's name.
pub(super) const TENSORBOARD_SUFFIX: &str = "-tensorboard";
/// The part of the job that TensorBoard is.
const TENSORBOARD_PART: &str = "tensorboard";
/// TensorBoard's port.
pub(super) const TENSORBOARD_PORT: i32 = 6006;

/// All objects of a job.
#[derive(Clone, Debug)]
pub(super) struct Objects {
    /// The object whose deletion also deletes the others.
    pub(super) owner: Object,
    /// The objects in the order in which they are made.
    pub(super) owned: Vec<Object>,
}

impl Objects {
    /// Makes the objects of `spec` for a server of that version. `token` is the secret of the job's agents.
    ///
    /// # Errors
    /// When such a job cannot run there; the message names the option.
    pub(super) fn of(spec: &JobSpec, version: ServerVersion, token: &str) -> Result<Self> {
        check(spec)?;
        let (owner, mut owned) = match spec.options.kubernetes.kind {
            ObjectKind::Job => {
                let (first, others) = job::jobs(spec, version)?;
                let mut owned = vec![service(spec)?];
                owned.extend(others);
                (first, owned)
            }
            ObjectKind::PyTorchJob => (job::of_pytorch(spec)?, Vec::new()),
            ObjectKind::TrainJob => (job::of_trainer(spec)?, Vec::new()),
        };
        owned.insert(0, secret(token_secret(spec), spec, [("token", token)])?);
        if needs_git_secret(spec) {
            let values =
                GIT_CREDENTIALS.map(|name| (name, spec.env.get(name).map_or("", String::as_str)));
            owned.insert(1, secret(git_secret(spec), spec, values)?);
        }
        if spec.tensorboard {
            owned.extend(tensorboard(spec)?);
        }
        Ok(Self { owner, owned })
    }

    /// Writes the objects as YAML, one document per object.
    pub(super) fn yaml(&self) -> Result<String> {
        let values: Vec<_> = self.all().map(|object| &object.value).collect();
        // A long word stays on its line, where readers look for it.
        let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
        serde_saphyr::to_string_multiple_with_options(&values, options)
            .map_err(|error| Error::system("cannot write YAML").with_source(error))
    }

    /// The objects in the order in which they are made.
    pub(super) fn all(&self) -> impl Iterator<Item = &Object> {
        std::iter::once(&self.owner).chain(&self.owned)
    }
}

/// Makes the Deployment and the Service of TensorBoard. It sees the job's data, and runs until the job is removed.
fn tensorboard(spec: &JobSpec) -> Result<[Object; 2]> {
    let name = format!("{}{TENSORBOARD_SUFFIX}", spec.name);
    let mut own_labels = labels(spec);
    own_labels.insert(PART_LABEL.to_owned(), TENSORBOARD_PART.to_owned());
    let image = spec.options.kubernetes.tensorboard_image.clone();
    let words = [
        "tensorboard",
        "--logdir",
        &spec.logdir.to_string_lossy(),
        "--bind_all",
        "--port",
        &TENSORBOARD_PORT.to_string(),
    ];
    let container = Container {
        name: "tensorboard".to_owned(),
        image: image.or_else(|| Some("tensorflow/tensorflow".to_owned())),
        command: Some(command(words)),
        ports: Some(vec![ContainerPort {
            container_port: TENSORBOARD_PORT,
            ..ContainerPort::default()
        }]),
        volume_mounts: Some(data_mounts(spec)),
        ..Container::default()
    };
    let template = PodTemplateSpec {
        metadata: Some(ObjectMeta {
            labels: Some(own_labels.clone()),
            ..ObjectMeta::default()
        }),
        spec: Some(PodSpec {
            automount_service_account_token: Some(false),
            containers: vec![container],
            enable_service_links: Some(false),
            image_pull_secrets: pull_secrets(spec),
            node_selector: node_selector(spec),
            // TensorBoard writes nothing.
            termination_grace_period_seconds: Some(1),
            tolerations: tolerations(spec),
            volumes: Some(data_volumes(spec)),
            ..PodSpec::default()
        }),
    };
    let deployment = Deployment {
        metadata: metadata(name.clone(), spec),
        spec: Some(DeploymentSpec {
            selector: LabelSelector {
                match_labels: Some(own_labels.clone()),
                ..LabelSelector::default()
            },
            template,
            ..DeploymentSpec::default()
        }),
        ..Deployment::default()
    };
    let service = Service {
        metadata: metadata(name, spec),
        spec: Some(ServiceSpec {
            ports: Some(vec![ServicePort {
                port: TENSORBOARD_PORT,
                ..ServicePort::default()
            }]),
            selector: Some(own_labels),
            ..ServiceSpec::default()
        }),
        ..Service::default()
    };
    Ok([Object::of(&service)?, Object::of(&deployment)?])
}

/// Refuses options that no kind of object supports.
fn check(spec: &JobSpec) -> Result<()> {
    let options = &spec.options.kubernetes;
    if options.image.is_none() {
        return Err(Error::usage(
            "Kubernetes runs images: give one that holds accel-launch and the program by --image, or have one made by --base-image and --push",
        ));
    }
    if spec.tensorboard && !options.is_in_data(&spec.logdir) {
        return Err(Error::usage(format!(
            "TensorBoard runs in a pod of its own and sees --logdir {} only on a volume: mount one there by --data PVC:PATH",
            spec.logdir.display()
        )));
    }
    if options.kind == ObjectKind::TrainJob {
        let given = [
            ("--sync-mode", options.sync_mode.is_some()),
            ("--working-dir", spec.working_dir.is_some()),
            ("--priority", spec.priority.is_some()),
        ];
        if let Some((option, _)) = given.iter().find(|(_, given)| *given) {
            return Err(Error::usage(format!(
                "a TrainJob has no place for {option}: its runtime decides that; use --kind job, or a runtime that has it"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    //! Objects are compared with readable files; `UPDATE_SNAPSHOTS=1 cargo test -p accel-jobs` writes those again.

    use std::num::NonZeroUsize;
    use std::path::Path;
    use std::time::Duration;

    use super::*;
    use crate::spec::{EngineAddress, EngineKind, EngineOptions, Resources, SyncMode};

    const TOKEN: &str = "0123456789abcdef";

    pub(crate) fn spec() -> JobSpec {
        let mut options = EngineOptions::default();
        options.kubernetes.image = Some("registry/mnist:1".to_owned());
        JobSpec {
            name: "mnist".parse().unwrap(),
            nonce: "89abcdef".to_owned(),
            engine: EngineKind::Kubernetes,
            nodes: NonZeroUsize::new(2).unwrap(),
            nproc_per_node: "4".to_owned(),
            resources: Resources {
                cpus: NonZeroUsize::new(8),
                gpus: 4,
                memory: Some("64Gi".parse().unwrap()),
            },
            time_limit: Some(Duration::from_secs(5400)),
            env: [("RUST_LOG".to_owned(), "info".to_owned())].into(),
            working_dir: None,
            max_restarts: 3,
            priority: None,
            tensorboard: false,
            logdir: "/training_logs".into(),
            program: vec![
                "/app/mnist".to_owned(),
                "--epochs".to_owned(),
                "10".to_owned(),
            ],
            address: EngineAddress::default(),
            options,
        }
    }

    /// Returns a job with every field that pods can have.
    fn full_spec() -> JobSpec {
        let mut spec = spec();
        spec.tensorboard = true;
        spec.logdir = "/mnist_data/logs".into();
        spec.priority = Some("high".to_owned());
        spec.working_dir = Some("/root".into());
        spec.env
            .insert("GIT_SYNC_USERNAME".to_owned(), "ada".to_owned());
        spec.env
            .insert("GIT_SYNC_PASSWORD".to_owned(), "a secret".to_owned());
        let options = &mut spec.options.kubernetes;
        options.data = vec!["training-data:/mnist_data".parse().unwrap()];
        options.sync_mode = Some(SyncMode::Git);
        options.sync_source = Some("https://code.example/mnist-pytorch.git".to_owned());
        options.node_selector = vec![("gpu-type".to_owned(), "h100".to_owned())];
        options.toleration = vec![
            "dedicated=training:NoSchedule".parse().unwrap(),
            "spot".parse().unwrap(),
        ];
        options.queue = Some("team".to_owned());
        options.service_account = Some("trainer".to_owned());
        options.image_pull_secret = vec!["pull".to_owned()];
        spec
    }

    fn yaml(spec: &JobSpec, minor: u32) -> Result<String> {
        Objects::of(spec, ServerVersion::new(1, minor), TOKEN)?.yaml()
    }

    fn compare(name: &str, yaml: &str) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("src/engine/kubernetes/objects/snapshots")
            .join(format!("{name}.yaml"));
        if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
            std::fs::write(&path, yaml).unwrap();
        }
        let expected = std::fs::read_to_string(&path).unwrap();
        assert!(yaml == expected, "{} differs from:\n{yaml}", path.display());
    }

    #[test]
    fn a_job_is_as_it_was() {
        compare("job", &yaml(&spec(), 33).unwrap());
        compare("job-full", &yaml(&full_spec(), 33).unwrap());
    }

    #[test]
    fn a_server_without_pod_failure_policies_gets_none() {
        assert!(yaml(&spec(), 31).unwrap().contains("podFailurePolicy"));
        assert!(!yaml(&spec(), 30).unwrap().contains("podFailurePolicy"));
    }

    #[test]
    fn a_server_without_indexed_jobs_gets_a_job_for_each_node() {
        compare("job-1.20", &yaml(&spec(), 20).unwrap());
        assert!(
            yaml(&full_spec(), 20)
                .unwrap_err()
                .to_string()
                .contains("--queue")
        );
    }

    #[test]
    fn a_pytorchjob_is_as_it_was() {
        let mut spec = spec();
        spec.options.kubernetes.kind = ObjectKind::PyTorchJob;
        compare("pytorchjob", &yaml(&spec, 33).unwrap());
        spec.nodes = NonZeroUsize::MIN;
        assert!(!yaml(&spec, 33).unwrap().contains("Worker"));
    }

    #[test]
    fn a_trainjob_is_as_it_was() {
        let mut spec = spec();
        spec.options.kubernetes.kind = ObjectKind::TrainJob;
        compare("trainjob", &yaml(&spec, 33).unwrap());
        spec.priority = Some("high".to_owned());
        assert!(
            yaml(&spec, 33)
                .unwrap_err()
                .to_string()
                .contains("--priority")
        );
    }

    #[test]
    fn no_pod_has_a_password() {
        let objects = Objects::of(&full_spec(), ServerVersion::CURRENT, TOKEN).unwrap();
        for object in objects
            .all()
            .filter(|object| object.resource.kind != "Secret")
        {
            let text = serde_json::to_string(&object.value).unwrap();
            assert!(
                !text.contains("a secret") && !text.contains(TOKEN),
                "{text}"
            );
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        let mut no_image = spec();
        no_image.options.kubernetes.image = None;
        assert!(
            yaml(&no_image, 33)
                .unwrap_err()
                .to_string()
                .contains("--image")
        );
        let mut no_volume = full_spec();
        no_volume.logdir = "/training_logs".into();
        assert!(
            yaml(&no_volume, 33)
                .unwrap_err()
                .to_string()
                .contains("--data")
        );
        let mut no_rsync = spec();
        no_rsync.options.kubernetes.sync_mode = Some(SyncMode::Rsync);
        no_rsync.options.kubernetes.sync_source = Some("host::module".to_owned());
        assert!(
            yaml(&no_rsync, 33)
                .unwrap_err()
                .to_string()
                .contains("--sync-image")
        );
    }
}
