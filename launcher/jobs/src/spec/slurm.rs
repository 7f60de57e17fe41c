//! What only Slurm understands.

use serde::{Deserialize, Serialize};

/// What only Slurm understands.
#[derive(Clone, Debug, Default, clap::Args, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct SlurmOptions {}
