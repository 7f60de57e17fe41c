//! What only Ray understands.

use std::path::PathBuf;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// What only Ray understands.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct RayOptions {
    /// Ray: a file or folder that the job gets beside its program, in the folder that it starts in; can be repeated.
    #[arg(long, value_name = "PATH")]
    pub(crate) ray_include: Vec<PathBuf>,

    /// Ray: nodes have the program and accel-launch at the paths of this machine, in a folder that they share.
    #[arg(long)]
    pub(crate) no_upload: bool,

    /// Ray: whether every agent has a node of its own.
    #[arg(long, value_enum, value_name = "STRATEGY", default_value_t)]
    pub(crate) placement: RayPlacement,
}

/// How agents are placed on Ray's nodes, in the words of its placement groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub(crate) enum RayPlacement {
    /// Each on a node of its own.
    #[default]
    StrictSpread,
    /// On as many nodes as have room.
    Spread,
}
