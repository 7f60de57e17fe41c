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
///         Report::Failed(accusation) => accusation.text.clone(),
///         Report::Closed { rank, .. } => format!("rank {rank} is done"),
///         Report::Stranger { note, .. } => format!("turned away: {note}"),
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
    Failed(Accusation),
    /// A rank has left in good order.
    #[non_exhaustive]
    Closed {
        /// The rank.
        rank: usize,
    },
    /// Somebody was turned away.
    #[non_exhaustive]
    Stranger {
        /// Who, and why.
        note: String,
    },
}

/// What a rank says about the failure of its group.
///
/// ```
/// use accelerator_collective::rendezvous::Accusation;
///
/// /// Whom to look at: the ranks that others name, unless one speaks for itself.
/// fn suspects(accusations: &[Accusation]) -> Vec<usize> {
///     match accusations.iter().find(|accusation| accusation.is_confession()) {
///         Some(confession) => {
///             println!("rank {}: {}", confession.rank, confession.text);
///             vec![confession.rank]
///         }
///         None => {
///             // A hung rank is alive, and can be asked what it does.
///             let lost = accusations.iter().filter(|accusation| !accusation.error().is_timeout());
///             lost.flat_map(|accusation| accusation.accused.clone()).collect()
///         }
///     }
/// }
/// assert_eq!(suspects(&[]), [] as [usize; 0]);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Accusation {
    /// The rank that says it.
    pub rank: usize,
    /// The ranks that it holds to be lost, missing or at fault; itself where it panicked.
    pub accused: Vec<usize>,
    /// Its error in full.
    pub text: String,
    error: Error,
}

impl Accusation {
    pub(crate) fn new(rank: usize, error: &Error) -> Self {
        Self {
            rank,
            accused: error.ranks().to_vec(),
            text: error.to_string(),
            error: error.clone(),
        }
    }

    /// Whether the rank speaks of itself, as one does that panicked.
    pub fn is_confession(&self) -> bool {
        self.accused == [self.rank]
    }

    /// The error of the rank, with its `is_*` predicates and the culprit.
    pub fn error(&self) -> &Error {
        &self.error
    }
}
