//! What a rank measures of one size.

use serde::{Deserialize, Serialize};

use super::args::AllReduceArgs;
use super::size::Size;

/// What one rank has measured.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Sample {
    /// Of an operation in each block of them, in seconds.
    pub(super) seconds: Vec<f64>,
    /// All iterations, in seconds.
    pub(super) elapsed: f64,
    /// The same work without waiting, in seconds an operation; nothing on GPUs.
    pub(super) bound: Vec<f64>,
    /// How many operations there were.
    pub(super) iterations: usize,
    /// How many values inputs have, and after how many operations they are written as a whole, where
    /// they are written.
    pub(super) inputs: (usize, Option<usize>),
    /// Of the last sum.
    pub(super) checksum: String,
}

/// How many operations of a size count.
pub(super) fn iterations(arguments: &AllReduceArgs, size: Size) -> usize {
    match arguments.iterations {
        Some(iterations) => iterations.get(),
        None => (TRAFFIC / size.bytes()).clamp(20, 10_000),
    }
}

/// In how many blocks the iterations are timed, where there are so many.
pub(super) const BLOCKS: usize = 100;

/// How many bytes of a size are reduced where the number of iterations is left open.
pub(super) const TRAFFIC: usize = 400_000_000;
