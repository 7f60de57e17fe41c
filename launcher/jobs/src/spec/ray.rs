//! What only Ray understands.

use serde::{Deserialize, Serialize};

/// What only Ray understands.
#[derive(Clone, Debug, Default, clap::Args, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct RayOptions {}
