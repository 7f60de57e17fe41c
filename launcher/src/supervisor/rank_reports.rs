//! What ranks report to the store, kept for the failure report.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use accelerator_collective::rendezvous::Report;

use crate::event::Event;

/// What the ranks of one attempt have reported. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct RankReports {
    received: Arc<Mutex<Received>>,
}

/// The first failure report of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FailureReport {
    /// The rank that reports.
    pub(crate) rank: usize,
    /// The ranks that it blames.
    pub(crate) blamed: BTreeSet<usize>,
    /// Its error in full.
    pub(crate) text: String,
}

impl RankReports {
    /// Records what the store reports, and forwards to `events` what the supervisor needs.
    pub(crate) fn record(&self, report: Report, events: &Sender<Event>) {
        let event = match report {
            Report::Joined { rank, host, .. } => {
                self.lock().joined.insert(rank, host);
                Event::Joined(rank)
            }
            Report::Failed(report) => {
                let is_first = self.lock().keep_first(FailureReport {
                    rank: report.rank,
                    blamed: report.blamed.iter().copied().collect(),
                    text: report.text,
                });
                if !is_first {
                    return;
                }
                Event::FailureReported {
                    rank: report.rank,
                    blamed: report.blamed,
                }
            }
            Report::Closed { rank, .. } => {
                self.lock().closed.insert(rank);
                Event::Closed(rank)
            }
            _ => return,
        };
        // Without a receiver the attempt is over.
        let _ = events.send(event);
    }

    /// Whether any rank has joined the job.
    pub(crate) fn has_any_joined(&self) -> bool {
        !self.lock().joined.is_empty()
    }

    /// Whether `rank` has joined the job and not closed its group.
    pub(crate) fn is_joined(&self, rank: usize) -> bool {
        let received = self.lock();
        received.joined.contains_key(&rank) && !received.closed.contains(&rank)
    }

    /// Whether `rank` has reported a failure, or never joined.
    pub(crate) fn has_reported(&self, rank: usize) -> bool {
        let received = self.lock();
        !received.joined.contains_key(&rank) || received.has_reported(rank)
    }

    /// The host that `rank` joined from.
    pub(crate) fn host(&self, rank: usize) -> Option<String> {
        self.lock().joined.get(&rank).cloned()
    }

    /// The first failure report of each rank, in order of arrival.
    pub(crate) fn failure_reports(&self) -> Vec<FailureReport> {
        self.lock().failure_reports.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Received> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
struct Received {
    /// The host of each rank that joined.
    joined: BTreeMap<usize, String>,
    closed: BTreeSet<usize>,
    /// At most one of each rank.
    failure_reports: Vec<FailureReport>,
}

impl Received {
    /// Keeps only the first report of a rank, which bounds the launcher's memory. Returns whether it was the first.
    fn keep_first(&mut self, said: FailureReport) -> bool {
        let is_first = !self.has_reported(said.rank);
        if is_first {
            self.failure_reports.push(said);
        }
        is_first
    }

    fn has_reported(&self, rank: usize) -> bool {
        self.failure_reports.iter().any(|said| said.rank == rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_report_of_a_rank_is_kept() {
        let said = |rank, blamed, text: &str| FailureReport {
            rank,
            blamed: BTreeSet::from([blamed]),
            text: text.to_owned(),
        };
        let mut received = Received::default();
        assert!(received.keep_first(said(1, 2, "first")));
        for _ in 0..1000 {
            assert!(!received.keep_first(said(1, 0, "and again")));
        }
        assert!(received.keep_first(said(0, 2, "another")));
        assert_eq!(
            received.failure_reports,
            [said(1, 2, "first"), said(0, 2, "another")]
        );
    }
}
