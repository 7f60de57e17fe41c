//! The TensorBoard of a job.

use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec};
use k8s_openapi::api::core::v1::{
    Container, ContainerPort, PodSpec, PodTemplateSpec, Service, ServicePort, ServiceSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};

use super::pod::{data_mounts, data_volumes, node_selector, pull_secrets, tolerations};
use super::{Object, PART_LABEL, command, labels, metadata};
use crate::error::Result;
use crate::spec::JobSpec;

/// What its Service is called, after the job.
pub(in super::super) const NAME_SUFFIX: &str = "-tensorboard";
/// The part of the job that it is.
const PART: &str = "tensorboard";
/// Where it listens.
pub(in super::super) const PORT: i32 = 6006;

/// Its Deployment and its Service. It sees the job's data, and goes on when the job has ended, until that is removed.
pub(super) fn objects(spec: &JobSpec) -> Result<[Object; 2]> {
    let name = format!("{}{NAME_SUFFIX}", spec.name);
    let mut own_labels = labels(spec);
    own_labels.insert(PART_LABEL.to_owned(), PART.to_owned());
    let image = spec.options.kubernetes.tensorboard_image.clone();
    let words = [
        "tensorboard",
        "--logdir",
        &spec.logdir.to_string_lossy(),
        "--bind_all",
        "--port",
        &PORT.to_string(),
    ];
    let container = Container {
        name: "tensorboard".to_owned(),
        image: image.or_else(|| Some("tensorflow/tensorflow".to_owned())),
        command: Some(command(words)),
        ports: Some(vec![ContainerPort {
            container_port: PORT,
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
            // It writes nothing.
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
                port: PORT,
                ..ServicePort::default()
            }]),
            selector: Some(own_labels),
            ..ServiceSpec::default()
        }),
        ..Service::default()
    };
    Ok([Object::of(&service)?, Object::of(&deployment)?])
}
