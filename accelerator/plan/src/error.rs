//! The error of this crate.

use std::fmt;
use std::sync::Arc;

/// The result of this crate's functions.
///
/// ```
/// use accelerator_plan::{BatchSize, PlanConfig};
///
/// fn steps(samples: u64, batch_size: usize) -> accelerator_plan::Result<u64> {
///     let plan = PlanConfig::new(samples, BatchSize::per_rank(batch_size)?).init()?;
///     Ok(plan.epoch(0).steps(0))
/// }
/// assert_eq!(steps(100, 32)?, 4);
/// # Ok::<(), accelerator_plan::Error>(())
/// ```
pub type Result<T> = std::result::Result<T, Error>;

/// What is wrong with the settings of a plan.
///
/// The message says what was found, what was expected and what to do; the predicates tell the
/// causes apart. Cloning is cheap.
///
/// ```
/// use accelerator_plan::{BatchSize, PlanConfig, TailPolicy, WeightedSampler};
///
/// # fn main() -> accelerator_plan::Result<()> {
/// let config = |samples, batch_size| PlanConfig::new(samples, batch_size);
/// assert!(BatchSize::per_rank(0).unwrap_err().is_batch_size());
///
/// let one = BatchSize::per_rank(1)?;
/// assert!(config(8, one).with_world_size(0).init().unwrap_err().is_world_size());
/// assert!(config(u64::MAX, one).init().unwrap_err().is_too_large());
/// assert!(config(8, one).init()?.epoch(0).starting_at(9).unwrap_err().is_start());
///
/// assert!("round".parse::<TailPolicy>().unwrap_err().is_tail());
/// assert!(WeightedSampler::new([0.0, 0.0]).unwrap_err().is_weights());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Error(Arc<Inner>);

impl Error {
    pub(crate) fn new(kind: Kind, message: String) -> Self {
        Self(Arc::new(Inner { kind, message }))
    }

    pub(crate) fn no_ranks() -> Self {
        Self::new(
            Kind::WorldSize,
            "the world size is 0: give the number of ranks, at least 1".to_owned(),
        )
    }

    /// Whether the batch size is zero, or does not divide over the ranks.
    #[must_use]
    pub fn is_batch_size(&self) -> bool {
        self.0.kind == Kind::BatchSize
    }

    /// Whether the world size is zero.
    #[must_use]
    pub fn is_world_size(&self) -> bool {
        self.0.kind == Kind::WorldSize
    }

    /// Whether an epoch was to start behind its last sample.
    #[must_use]
    pub fn is_start(&self) -> bool {
        self.0.kind == Kind::Start
    }

    /// Whether a word names no tail policy.
    #[must_use]
    pub fn is_tail(&self) -> bool {
        self.0.kind == Kind::Tail
    }

    /// Whether samples cannot be drawn by their weights.
    #[must_use]
    pub fn is_weights(&self) -> bool {
        self.0.kind == Kind::Weights
    }

    /// Whether samples, batch size and world size are together too large to count.
    #[must_use]
    pub fn is_too_large(&self) -> bool {
        self.0.kind == Kind::TooLarge
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for Error {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    BatchSize,
    WorldSize,
    Start,
    Tail,
    TooLarge,
    Weights,
}

#[derive(Debug)]
struct Inner {
    kind: Kind,
    message: String,
}
