//! The journal of a run: lines with checksums, of which some supersede others.

pub(crate) use follower::{Followed, Follower};
pub(crate) use lock::RunLock;
pub(crate) use writer::{JournalWriter, now_ms};

mod follower;
mod line;
mod lock;
mod reader;
mod supersession;
#[cfg(test)]
mod tests;
mod writer;

/// The journal's file in a run's folder.
pub(crate) const JOURNAL: &str = "journal.jsonl";
