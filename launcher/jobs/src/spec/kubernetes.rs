//! The options that only Kubernetes knows.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The options that only Kubernetes knows.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct KubernetesOptions {
    /// Kubernetes: the object that runs the job.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) kind: ObjectKind,

    /// Kubernetes: the image of the pods, which holds accel-launch and the program.
    #[arg(long, value_name = "REF")]
    pub(crate) image: Option<String>,

    /// Kubernetes: make an image with accel-launch and the program on top of this one, and run it.
    #[arg(long, value_name = "REF", requires = "push", conflicts_with = "image")]
    pub(crate) base_image: Option<String>,

    /// Kubernetes: push the image made with --base-image under this reference, such as registry.example/team/mnist:1.
    #[arg(long, value_name = "REF", requires = "base_image")]
    pub(crate) push: Option<String>,

    /// Kubernetes: also add a file or folder to that image, as /app/DEST; can be repeated.
    #[arg(long, value_name = "PATH[:DEST]", requires = "base_image", value_parser = super::values::include)]
    pub(crate) include: Vec<(PathBuf, String)>,

    /// Kubernetes: a registry to connect to without TLS; can be repeated.
    #[arg(long, value_name = "HOST:PORT", requires = "base_image")]
    pub(crate) insecure_registry: Vec<String>,

    /// Kubernetes: a Secret with which images are pulled; can be repeated.
    #[arg(long, value_name = "NAME")]
    pub(crate) image_pull_secret: Vec<String>,

    /// Kubernetes: mount a PersistentVolumeClaim in the pods, such as training-data:/data; can be repeated.
    #[arg(long, value_name = "PVC:PATH")]
    pub(crate) data: Vec<DataMount>,

    /// Kubernetes: use only nodes with this label; can be repeated.
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    pub(crate) node_selector: Vec<(String, String)>,

    /// Kubernetes: also use nodes with this taint (KEY, KEY:EFFECT or KEY=VALUE:EFFECT); can be repeated.
    #[arg(long, value_name = "TAINT")]
    pub(crate) toleration: Vec<Taint>,

    /// Kubernetes: the Kueue LocalQueue in which the job waits.
    #[arg(long, value_name = "NAME")]
    pub(crate) queue: Option<String>,

    /// Kubernetes: the service account of the pods.
    #[arg(long, value_name = "NAME")]
    pub(crate) service_account: Option<String>,

    /// Kubernetes: before the program starts, copy code into the folder `code` of --working-dir by git or rsync.
    #[arg(long, value_enum, requires = "sync_source")]
    pub(crate) sync_mode: Option<SyncMode>,

    /// Kubernetes: the source of that code, a git URL or an rsync source.
    #[arg(long, value_name = "URL", requires = "sync_mode")]
    pub(crate) sync_source: Option<String>,

    /// Kubernetes: the image that runs git or rsync [default for git: alpine/git].
    #[arg(long, value_name = "REF")]
    pub(crate) sync_image: Option<String>,

    /// Kubernetes: the image that runs TensorBoard [default: tensorflow/tensorflow].
    #[arg(long, value_name = "REF")]
    pub(crate) tensorboard_image: Option<String>,
}

/// The object that runs a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
#[value(rename_all = "lower")]
pub(crate) enum ObjectKind {
    /// A Job, which every cluster has.
    #[default]
    Job,
    /// A PyTorchJob of the Kubeflow training operator.
    PyTorchJob,
    /// A TrainJob of the Kubeflow Trainer, with its runtime torch-distributed.
    TrainJob,
}

/// The program that brings code into the pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SyncMode {
    /// `git clone`.
    Git,
    /// `rsync -a`.
    Rsync,
}

/// A PersistentVolumeClaim, and its path in the pods.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DataMount {
    pub(crate) claim: String,
    pub(crate) path: PathBuf,
}

/// A taint of nodes. A field that is `None` matches any value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Taint {
    pub(crate) key: String,
    pub(crate) value: Option<String>,
    pub(crate) effect: Option<String>,
}

const EFFECTS: [&str; 3] = ["NoSchedule", "PreferNoSchedule", "NoExecute"];

impl KubernetesOptions {
    /// Returns `true` if `path` is in a folder that --data mounts.
    pub(crate) fn is_in_data(&self, path: &Path) -> bool {
        self.data.iter().any(|mount| path.starts_with(&mount.path))
    }
}

impl FromStr for DataMount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some((claim, path)) if !claim.is_empty() && path.starts_with('/') => Ok(Self {
                claim: claim.to_owned(),
                path: PathBuf::from(path),
            }),
            _ => Err("expected PVC:PATH with a whole path, such as training-data:/data".to_owned()),
        }
    }
}

impl FromStr for Taint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (taint, effect) = match text.rsplit_once(':') {
            Some((taint, effect)) => (taint, Some(effect.to_owned())),
            None => (text, None),
        };
        let (key, value) = match taint.split_once('=') {
            Some((key, value)) => (key, Some(value.to_owned())),
            None => (taint, None),
        };
        let is_effect = |effect: &String| EFFECTS.contains(&effect.as_str());
        if key.is_empty() || !effect.as_ref().is_none_or(is_effect) {
            return Err(format!(
                "expected KEY, KEY:EFFECT or KEY=VALUE:EFFECT with an effect of {}",
                EFFECTS.join(", ")
            ));
        }
        Ok(Self {
            key: key.to_owned(),
            value,
            effect,
        })
    }
}

fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("expected KEY=VALUE, such as gpu-type=h100".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_and_taints_are_read() {
        let mount: DataMount = "data:/mnt/data".parse().unwrap();
        assert_eq!(
            (mount.claim.as_str(), mount.path.as_path()),
            ("data", Path::new("/mnt/data"))
        );
        for text in ["", "data", "data:", "data:mnt", ":/mnt"] {
            assert!(text.parse::<DataMount>().is_err(), "{text}");
        }
        let read = |text: &str| {
            text.parse::<Taint>()
                .map(|taint| (taint.key, taint.value, taint.effect))
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(read("a"), Ok(("a".to_owned(), None, None)));
        assert_eq!(
            read("a/b:NoSchedule"),
            Ok(("a/b".to_owned(), None, some("NoSchedule")))
        );
        assert_eq!(
            read("a=b:NoExecute"),
            Ok(("a".to_owned(), some("b"), some("NoExecute")))
        );
        for text in ["", "=b", "a:Never", ":NoSchedule"] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_folder_below_a_mount_is_in_it() {
        let options = KubernetesOptions {
            data: vec!["data:/mnt".parse().unwrap()],
            ..KubernetesOptions::default()
        };
        assert!(options.is_in_data(Path::new("/mnt/logs")));
        assert!(!options.is_in_data(Path::new("/mntlogs")));
    }
}
