//! Which engine runs a job, where it is, and what only one engine understands.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Which engine runs a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum EngineKind {
    /// Processes of this machine, one agent a node.
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

/// Where engines are, as the options say.
#[derive(Clone, Debug, Default, clap::Args, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct EngineAddress {
    /// The namespace of Kubernetes [default: that of the kubeconfig's context].
    #[cfg(feature = "kubernetes")]
    #[arg(short, long, value_name = "NAME", global = true)]
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
#[derive(Clone, Debug, Default, clap::Args, Serialize, Deserialize)]
pub(crate) struct EngineOptions {
    #[cfg(feature = "slurm")]
    #[command(flatten)]
    pub(crate) slurm: super::slurm::SlurmOptions,
    #[cfg(feature = "kubernetes")]
    #[command(flatten)]
    pub(crate) kubernetes: super::kubernetes::KubernetesOptions,
    #[cfg(feature = "ray")]
    #[command(flatten)]
    pub(crate) ray: super::ray::RayOptions,
}

impl EngineAddress {
    /// This address, with what it leaves open taken from `other`.
    pub(crate) fn or(&self, other: &Self) -> Self {
        // Without engines of a network there is no address.
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
    /// This address, with what the environment says of that of the engine `kind`.
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

    /// Where Ray's dashboard is.
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
