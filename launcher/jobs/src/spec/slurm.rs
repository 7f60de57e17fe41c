//! What only Slurm understands.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What only Slurm understands.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct SlurmOptions {
    /// The partition of Slurm [default: that of the site].
    #[arg(long, value_name = "NAME")]
    pub(crate) partition: Option<String>,

    /// Whom Slurm accounts the job to [default: your default account].
    #[arg(long, value_name = "NAME")]
    pub(crate) account: Option<String>,

    /// Features that nodes of Slurm must have: a100, 'rack1|rack2'.
    #[arg(long, value_name = "FEATURES")]
    pub(crate) constraint: Option<String>,

    /// Any other option of sbatch, such as --sbatch-arg=--exclusive; can be repeated.
    #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
    pub(crate) sbatch_arg: Vec<String>,

    /// Copy the program as it is now, and at its start to DIR of each of Slurm's nodes [default DIR: /tmp].
    #[arg(long, value_name = "DIR", num_args = 0..=1, require_equals = true, default_missing_value = "/tmp")]
    pub(crate) broadcast: Option<PathBuf>,
}
