//! The engine that runs a job, its address, and the options that only one engine knows.

use std::fmt;
#[cfg(any(feature = "ray", feature = "slurm"))]
use std::path::PathBuf;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::values::JobName;

/// The engine that runs a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum EngineKind {
    /// Processes of this machine, one agent per node.
    Local,
    /// Slurm, by sbatch.
    #[cfg(feature = "slurm")]
    Slurm,
    /// Kubernetes, by its API.
    #[cfg(feature = "kubernetes")]
    Kubernetes,
    /// Ray, by its Jobs API.
    #[cfg(feature = "ray")]
    Ray,
}

impl EngineKind {
    /// Returns `true` if something of a job that has ended may remain until `stop` removes it: objects of Kubernetes,
    /// an entry of Ray, local agents whose supervisor was killed.
    pub(crate) fn leaves_remains(self) -> bool {
        match self {
            Self::Local => true,
            #[cfg(feature = "slurm")]
            Self::Slurm => false,
            #[cfg(feature = "kubernetes")]
            Self::Kubernetes => true,
            #[cfg(feature = "ray")]
            Self::Ray => true,
        }
    }

    /// Returns `true` if the engine keeps the nonce of a job, which identifies a job whose submission got no answer.
    pub(crate) fn keeps_nonce(self) -> bool {
        match self {
            Self::Local => false,
            #[cfg(feature = "slurm")]
            Self::Slurm => false,
            #[cfg(feature = "kubernetes")]
            Self::Kubernetes => true,
            #[cfg(feature = "ray")]
            Self::Ray => true,
        }
    }

    /// Returns the engine's own command that shows a job with this name, in parentheses, if it has one.
    pub(crate) fn how_to_look(self, name: &JobName) -> String {
        // Not every engine's command has the name.
        let _ = name;
        match self {
            #[cfg(feature = "slurm")]
            Self::Slurm => format!(" (`squeue --me --name {name}`)"),
            #[cfg(feature = "kubernetes")]
            Self::Kubernetes => format!(" (`kubectl get jobs,pods -l accel-jobs/job={name}`)"),
            #[cfg(feature = "ray")]
            Self::Ray => " (`ray job list`)".to_owned(),
            Self::Local => String::new(),
        }
    }
}

/// The addresses of engines, as the options give them.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct EngineAddress {
    /// The namespace of Kubernetes [default: that of the kubeconfig's context].
    #[cfg(feature = "kubernetes")]
    #[arg(long, value_name = "NAME", global = true)]
    pub(crate) namespace: Option<String>,

    /// The context of the kubeconfig [default: its current one].
    #[cfg(feature = "kubernetes")]
    #[arg(long, value_name = "NAME", global = true)]
    pub(crate) context: Option<String>,

    /// The address of Ray's dashboard [default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, or http://127.0.0.1:8265].
    #[cfg(feature = "ray")]
    #[arg(long, value_name = "URL", global = true)]
    pub(crate) ray_address: Option<String>,
}

/// The options of single engines, as `submit` takes them.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
pub(crate) struct EngineOptions {
    #[cfg(feature = "slurm")]
    #[command(flatten)]
    pub(crate) slurm: SlurmOptions,
    #[cfg(feature = "kubernetes")]
    #[command(flatten)]
    pub(crate) kubernetes: super::kubernetes::KubernetesOptions,
    #[cfg(feature = "ray")]
    #[command(flatten)]
    pub(crate) ray: RayOptions,
}

impl EngineOptions {
    /// Returns the given options that only engines other than `kind` know.
    pub(crate) fn options_of_other_engines(&self, kind: EngineKind) -> Vec<String> {
        let given = serde_json::to_value(self).unwrap_or_default();
        let defaults = serde_json::to_value(Self::default()).unwrap_or_default();
        let mut foreign = Vec::new();
        for (engine, options) in given.as_object().into_iter().flatten() {
            if *engine == kind.to_string() {
                continue;
            }
            let differs = |(name, value): &(&String, &Value)| **value != defaults[engine][*name];
            let names = options.as_object().into_iter().flatten().filter(differs);
            foreign.extend(names.map(|(name, _)| format!("--{}", name.replace('_', "-"))));
        }
        foreign
    }
}

impl EngineAddress {
    /// Returns this address, with its missing parts taken from `other`.
    pub(crate) fn or(&self, other: &Self) -> Self {
        // Without engines on a network there is no address.
        let _ = other;
        Self {
            #[cfg(feature = "kubernetes")]
            namespace: self.namespace.clone().or_else(|| other.namespace.clone()),
            #[cfg(feature = "kubernetes")]
            context: self.context.clone().or_else(|| other.context.clone()),
            #[cfg(feature = "ray")]
            ray_address: self
                .ray_address
                .clone()
                .or_else(|| other.ray_address.clone()),
        }
    }
}

impl EngineAddress {
    /// Returns the given options that only engines other than `kind` know.
    pub(crate) fn options_of_other_engines(&self, kind: EngineKind) -> Vec<String> {
        let options: &[(EngineKind, &str, &Option<String>)] = &[
            #[cfg(feature = "kubernetes")]
            (EngineKind::Kubernetes, "--namespace", &self.namespace),
            #[cfg(feature = "kubernetes")]
            (EngineKind::Kubernetes, "--context", &self.context),
            #[cfg(feature = "ray")]
            (EngineKind::Ray, "--ray-address", &self.ray_address),
        ];
        let given = options
            .iter()
            .filter(|(of, _, value)| *of != kind && value.is_some());
        given.map(|(_, name, _)| (*name).to_owned()).collect()
    }

    /// Returns this address, completed from the environment for the engine `kind`.
    pub(crate) fn of(&self, kind: EngineKind) -> Self {
        match kind {
            #[cfg(feature = "ray")]
            EngineKind::Ray => {
                let mut address = self.clone();
                address.ray_address = Some(self.ray());
                address
            }
            _ => self.clone(),
        }
    }

    /// Returns the address of Ray's dashboard.
    #[cfg(feature = "ray")]
    pub(crate) fn ray(&self) -> String {
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let given = self.ray_address.clone();
        let found = given
            .or_else(|| variable("RAY_API_SERVER_ADDRESS"))
            .or_else(|| variable("RAY_ADDRESS"));
        found.unwrap_or_else(|| "http://127.0.0.1:8265".to_owned())
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Local => "local",
            #[cfg(feature = "slurm")]
            Self::Slurm => "slurm",
            #[cfg(feature = "kubernetes")]
            Self::Kubernetes => "kubernetes",
            #[cfg(feature = "ray")]
            Self::Ray => "ray",
        })
    }
}

/// The options that only Slurm knows.
#[cfg(feature = "slurm")]
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct SlurmOptions {
    /// The Slurm partition [default: the site's].
    #[arg(long, value_name = "NAME")]
    pub(crate) partition: Option<String>,

    /// The Slurm account that is charged for the job [default: your default account].
    #[arg(long, value_name = "NAME")]
    pub(crate) account: Option<String>,

    /// Features that Slurm nodes must have, such as a100 or 'rack1|rack2'.
    #[arg(long, value_name = "FEATURES")]
    pub(crate) constraint: Option<String>,

    /// Any other option of sbatch, such as --sbatch-arg=--exclusive; can be repeated.
    #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
    pub(crate) sbatch_arg: Vec<String>,

    /// Save the program as it is now, and when the job starts, copy it to DIR on each Slurm node [default DIR: /tmp].
    #[arg(long, value_name = "DIR", num_args = 0..=1, require_equals = true, default_missing_value = "/tmp")]
    pub(crate) broadcast: Option<PathBuf>,
}

/// The options that only Ray knows.
#[cfg(feature = "ray")]
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct RayOptions {
    /// Ray: also upload this file or folder into the folder in which the program starts; can be repeated.
    #[arg(long, value_name = "PATH")]
    pub(crate) ray_include: Vec<PathBuf>,

    /// Ray: upload nothing, since all nodes have the program and accel-launch in a shared folder, at the paths of this
    /// machine.
    #[arg(long)]
    pub(crate) no_upload: bool,

    /// Ray: the placement of agents on nodes.
    #[arg(long, value_enum, value_name = "STRATEGY", default_value_t)]
    pub(crate) placement: RayPlacement,
}

/// The placement of agents on Ray's nodes, in the words of its placement groups.
#[cfg(feature = "ray")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub(crate) enum RayPlacement {
    /// Each agent on a node of its own.
    #[default]
    StrictSpread,
    /// On as many nodes as have room; agents may share a node.
    Spread,
}

#[cfg(all(test, feature = "kubernetes", feature = "slurm"))]
mod tests {
    use super::*;

    #[test]
    fn options_of_another_engine_are_found() {
        let mut options = EngineOptions::default();
        options.kubernetes.image_pull_secret = vec!["key".to_owned()];
        options.slurm.partition = Some("gpu".to_owned());
        assert_eq!(
            options.options_of_other_engines(EngineKind::Slurm),
            ["--image-pull-secret"]
        );
        assert_eq!(
            options.options_of_other_engines(EngineKind::Kubernetes),
            ["--partition"]
        );
        assert_eq!(
            EngineOptions::default().options_of_other_engines(EngineKind::Local),
            [""; 0]
        );
    }
}
