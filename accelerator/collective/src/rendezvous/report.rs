//! What a store tells the process that hosts it.

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
        /// Its process id there.
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
        /// Who, and why.
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
    /// Its error in full.
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

    /// Whether the rank speaks of itself, as one does that panicked.
    pub fn is_self_reported(&self) -> bool {
        self.blamed == [self.rank]
    }

    /// The error of the rank, with its `is_*` predicates and the culprit.
    pub fn error(&self) -> &Error {
        &self.error
    }
}
