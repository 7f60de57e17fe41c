//! The reports of a store to the process that hosts it.

use crate::error::Error;

/// Something that a store has learnt; see
/// [`StoreOptions::with_observer`](super::StoreOptions::with_observer).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Report {
    /// A rank has registered and waits for the others.
    #[non_exhaustive]
    Joined {
        /// The rank.
        rank: usize,
        /// The host where it runs.
        host: String,
        /// The process id on that host.
        pid: u32,
    },
    /// All ranks have come; each gets the table of all.
    Met,
    /// The group of a rank has failed.
    Failed(FailureReport),
    /// A rank has left in good order.
    #[non_exhaustive]
    Closed {
        /// The rank.
        rank: usize,
    },
    /// Somebody was turned away.
    #[non_exhaustive]
    Rejected {
        /// The address that was turned away, and the reason.
        note: String,
    },
}

/// The report of a rank about the failure of its group.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FailureReport {
    /// The rank that says it.
    pub rank: usize,
    /// The ranks that it holds to be lost, missing or at fault; itself where it panicked.
    pub blamed: Vec<usize>,
    /// The full text of the rank's error.
    pub text: String,
    error: Error,
}

impl FailureReport {
    pub(crate) fn new(rank: usize, error: &Error) -> Self {
        Self {
            rank,
            blamed: error.ranks().to_vec(),
            text: error.to_string(),
            error: error.clone(),
        }
    }

    /// Returns `true` if the rank blames itself alone, as one that panicked does.
    pub(crate) fn is_self_reported(&self) -> bool {
        self.blamed == [self.rank]
    }

    /// The error of the rank, with its `is_*` predicates and the culprit.
    pub fn error(&self) -> &Error {
        &self.error
    }
}
