//! The error of this crate.

use std::fmt;
use std::sync::Arc;

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// A mistake in the settings of a plan.
///
/// The message says what was found, what was expected and what to do; the predicates tell the
/// causes apart. Cloning is cheap.
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

    /// Returns `true` if the batch size is zero, or does not divide over the ranks.
    #[must_use]
    pub fn is_batch_size(&self) -> bool {
        self.0.kind == Kind::BatchSize
    }

    /// Returns `true` if the world size is zero.
    #[must_use]
    pub fn is_world_size(&self) -> bool {
        self.0.kind == Kind::WorldSize
    }

    /// Returns `true` if an epoch was to start behind its last sample, or within a batch of a batch plan.
    #[must_use]
    pub fn is_start(&self) -> bool {
        self.0.kind == Kind::Start
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
    Other,
}

#[derive(Debug)]
struct Inner {
    kind: Kind,
    message: String,
}
