//! What a store tells the process that hosts it.

use crate::error::Error;

/// Something that a store has learnt; see
/// [`StoreOptions::with_observer`](super::StoreOptions::with_observer).
///
/// ```
/// use accelerator_collective::rendezvous::Report;
///
/// /// A line for the launcher's log.
/// fn told(report: &Report) -> String {
///     match report {
///         Report::Joined { rank, host, pid, .. } => format!("rank {rank} is process {pid} on {host}"),
///         Report::Met => "all ranks have met".to_owned(),
///         Report::Failed(report) => report.text.clone(),
///         Report::Closed { rank, .. } => format!("rank {rank} is done"),
///         Report::Rejected { note, .. } => format!("turned away: {note}"),
///         other => format!("{other:?}"),
///     }
/// }
/// assert_eq!(told(&Report::Met), "all ranks have met");
/// ```
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

/// What a rank says about the failure of its group.
///
/// ```
/// use accelerator_collective::rendezvous::FailureReport;
///
/// /// Whom to look at: the ranks that others name, unless one speaks for itself.
/// fn suspects(reports: &[FailureReport]) -> Vec<usize> {
///     match reports.iter().find(|report| report.is_self_reported()) {
///         Some(self_reported) => {
///             println!("rank {}: {}", self_reported.rank, self_reported.text);
///             vec![self_reported.rank]
///         }
///         None => {
///             // A hung rank is alive, and can be asked what it does.
///             let lost = reports.iter().filter(|report| !report.error().is_timeout());
///             lost.flat_map(|report| report.blamed.clone()).collect()
///         }
///     }
/// }
/// assert_eq!(suspects(&[]), [] as [usize; 0]);
/// ```
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
