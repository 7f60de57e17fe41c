//! What the ranks tell the store, kept for the report of a failure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use accelerator_collective::rendezvous::Report;

use crate::supervise::Notice;

/// What has been heard of the ranks of one attempt. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hearing {
    heard: Arc<Mutex<Heard>>,
}

/// What a rank said first when its group failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Statement {
    /// The rank that said it.
    pub(crate) rank: usize,
    /// Whom it accused.
    pub(crate) accused: BTreeSet<usize>,
    /// Its error in full.
    pub(crate) text: String,
}

impl Hearing {
    /// Takes in what the store reports, and tells `notices` what matters to the supervision.
    pub(crate) fn hear(&self, report: Report, notices: &Sender<Notice>) {
        let notice = match report {
            Report::Joined { rank, host, .. } => {
                self.lock().joined.insert(rank, host);
                Notice::Joined(rank)
            }
            Report::Failed(report) => {
                let is_first = self.lock().keep(Statement {
                    rank: report.rank,
                    accused: report.blamed.iter().copied().collect(),
                    text: report.text,
                });
                if !is_first {
                    return;
                }
                Notice::Accused {
                    rank: report.rank,
                    accused: report.blamed,
                }
            }
            Report::Closed { rank, .. } => {
                self.lock().closed.insert(rank);
                Notice::Closed(rank)
            }
            _ => return,
        };
        // Without a listener the attempt is over.
        let _ = notices.send(notice);
    }

    /// Whether any rank joined the job.
    pub(crate) fn has_anybody_joined(&self) -> bool {
        !self.lock().joined.is_empty()
    }

    /// Whether `rank` joined the job and has not left it in good order.
    pub(crate) fn is_inside(&self, rank: usize) -> bool {
        let heard = self.lock();
        heard.joined.contains_key(&rank) && !heard.closed.contains(&rank)
    }

    /// Whether `rank` has said why it failed, or never joined those who could hear it.
    pub(crate) fn has_spoken(&self, rank: usize) -> bool {
        let heard = self.lock();
        !heard.joined.contains_key(&rank) || heard.has_spoken(rank)
    }

    /// The host that `rank` joined from.
    pub(crate) fn host(&self, rank: usize) -> Option<String> {
        self.lock().joined.get(&rank).cloned()
    }

    /// What was said, in order; of each rank the first.
    pub(crate) fn statements(&self) -> Vec<Statement> {
        self.lock().statements.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
struct Heard {
    /// The host of each rank that joined.
    joined: BTreeMap<usize, String>,
    closed: BTreeSet<usize>,
    /// At most one of each rank.
    statements: Vec<Statement>,
}

impl Heard {
    /// Keeps what a rank says first, and no more: it must not fill the launcher's memory. Whether
    /// it was the first.
    fn keep(&mut self, said: Statement) -> bool {
        let is_first = !self.has_spoken(said.rank);
        if is_first {
            self.statements.push(said);
        }
        is_first
    }

    fn has_spoken(&self, rank: usize) -> bool {
        self.statements.iter().any(|said| said.rank == rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_rank_says_first_is_kept() {
        let said = |rank, accused, text: &str| Statement {
            rank,
            accused: BTreeSet::from([accused]),
            text: text.to_owned(),
        };
        let mut heard = Heard::default();
        assert!(heard.keep(said(1, 2, "first")));
        for _ in 0..1000 {
            assert!(!heard.keep(said(1, 0, "and again")));
        }
        assert!(heard.keep(said(0, 2, "another")));
        assert_eq!(
            heard.statements,
            [said(1, 2, "first"), said(0, 2, "another")]
        );
    }
}
