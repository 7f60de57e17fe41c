//! In the place of `cuda.rs`, in a build without the feature: there are no GPUs.

use accelerator_collective::ProcessGroup;

use super::AllReduceArgs;
use super::rank::{self, Sample};
use super::report::Gpus;
use super::size::Size;
use crate::error::{Error, Result};
use crate::number::Small;

/// Refuses `--device cuda`.
///
/// # Errors
/// Always.
pub(super) fn check(_: &AllReduceArgs) -> Result<()> {
    Err(Error::usage(WITHOUT))
}

/// Ranks with a GPU each, which there are not.
#[derive(Debug)]
pub(super) enum Ranks {}

impl Ranks {
    pub(super) fn connect(_: &ProcessGroup) -> rank::Result<Self> {
        Err(WITHOUT.into())
    }

    pub(super) fn gpus(&self) -> Gpus {
        match *self {}
    }

    pub(super) fn sample<T: Small>(&self, _: &AllReduceArgs, _: Size) -> rank::Result<Sample> {
        match *self {}
    }
}

const WITHOUT: &str = "--device cuda needs an accel-launch that was built with the feature `cuda`: \
    `cargo install --path launcher --features cuda`, or `cargo run --release -p accel-launch --features cuda -- \
    bench all-reduce --device cuda`";
