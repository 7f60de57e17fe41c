//! Objects are compared with files that people read; `UPDATE_SNAPSHOTS=1 cargo test -p accel-jobs` writes those anew.

use std::num::NonZeroUsize;
use std::path::Path;
use std::time::Duration;

use super::*;
use crate::spec::{EngineAddress, EngineKind, EngineOptions, Resources, SyncMode};

const TOKEN: &str = "0123456789abcdef";

pub(in crate::engine::kubernetes) fn spec() -> JobSpec {
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

/// With all that pods can have.
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
