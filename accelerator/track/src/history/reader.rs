//! Reading a run.

use std::path::Path;

use super::RunHistory;
use crate::error::{Error, Kind, Result};
use crate::journal::{self, Followed, Follower, RankJournals, RunLock};
use crate::sink::Delivery;

/// Reads a run repeatedly while it is written.
#[derive(Debug)]
pub(crate) struct HistoryReader {
    history: RunHistory,
    follower: Follower,
    ranks: RankJournals,
}

impl HistoryReader {
    /// Opens the run in a folder. [`poll`](Self::poll) reads more than its head.
    pub(crate) fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let path = folder.join(journal::JOURNAL);
        let missing = |error: Error| match error.is_not_found() {
            true => Error::new(
                Kind::NotFound,
                format!(
                    "there is no run in {}: expected the file {}",
                    folder.display(),
                    journal::JOURNAL
                ),
            ),
            false => error,
        };
        let head = journal::first_entry(&path).map_err(missing)?;
        let head = head.ok_or_else(|| {
            Error::new(
                Kind::NotFound,
                format!(
                    "the run in {} has not begun: its journal is empty",
                    folder.display()
                ),
            )
        })?;
        Ok(Self {
            history: RunHistory::new(folder, &head)?,
            follower: Follower::open(&path, Delivery::Live)?,
            ranks: RankJournals::default(),
        })
    }

    /// Reads what was written since, and says whether anything has changed.
    ///
    /// # Errors
    ///
    /// If the journal cannot be read, or is damaged.
    pub(crate) fn poll(&mut self) -> Result<bool> {
        let is_written_now = RunLock::is_held(&self.history.folder);
        let mut has_changed =
            std::mem::replace(&mut self.history.is_written_now, is_written_now) != is_written_now;
        loop {
            let entries = match self.follower.poll(BATCH)? {
                Followed::Entries(entries) => entries,
                Followed::Superseded => {
                    *self = Self::open(&self.history.folder)?;
                    self.history.is_written_now = is_written_now;
                    has_changed = true;
                    continue;
                }
            };
            if entries.is_empty() {
                break;
            }
            has_changed = true;
            for entry in entries {
                self.history.take(entry);
            }
        }
        loop {
            let polled = self.ranks.poll(&self.history.folder, BATCH);
            if polled.is_empty() {
                break;
            }
            has_changed = true;
            for (rank, entries) in polled {
                for entry in entries {
                    self.history.take_system(rank, entry);
                }
            }
        }
        Ok(has_changed)
    }

    /// The run as it was at the last [`poll`](Self::poll).
    #[must_use]
    pub(crate) fn history(&self) -> &RunHistory {
        &self.history
    }

    pub(super) fn into_history(self) -> RunHistory {
        self.history
    }
}

const BATCH: usize = 8192;
