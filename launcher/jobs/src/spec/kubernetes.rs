//! What only Kubernetes understands.

use serde::{Deserialize, Serialize};

/// What only Kubernetes understands.
#[derive(Clone, Debug, Default, clap::Args, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct KubernetesOptions {}
