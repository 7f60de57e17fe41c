//! Replaces `cuda.rs` in a build without the feature `cuda`.

use accelerator_collective::ProcessGroup;

use super::args::AllReduceArgs;
use super::figures::GpuInfo;
use super::sample::Sample;
use super::size::Size;
use crate::error::{BoxResult, Error, Result};
use crate::number::Small;

/// Refuses `--device cuda`.
///
/// # Errors
/// Always.
pub(super) fn check(_: &AllReduceArgs) -> Result<()> {
    Err(Error::usage(WITHOUT))
}

/// A rank with a GPU; it does not exist in this build.
#[derive(Debug)]
pub(super) enum GpuRank {}

impl GpuRank {
    pub(super) fn connect(_: &ProcessGroup) -> BoxResult<Self> {
        Err(WITHOUT.into())
    }

    pub(super) fn gpus(&self) -> GpuInfo {
        match *self {}
    }

    pub(super) fn sample<T: Small>(&self, _: &AllReduceArgs, _: Size) -> BoxResult<Sample> {
        match *self {}
    }
}

const WITHOUT: &str = "--device cuda needs an accel-launch that was built with the feature `cuda`: \
    `cargo install --path launcher --features cuda`, or `cargo run --release -p accel-launch --features cuda -- \
    bench all-reduce --device cuda`";
