//! The journal of a run: lines with checksums, of which some supersede others.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Kind, Result, warn};
use crate::record::{Entry, Record};
pub(crate) use crate::run_files::JOURNAL;
use crate::run_files::{SYSTEM, rank_journal_name, rank_of};
use crate::sink::Delivery;
use reader::LineReader;
pub(crate) use reader::{Followed, Follower};
pub(crate) use writer::{JournalWriter, RunLock, now_ms};

mod reader;
#[cfg(test)]
mod tests;
mod writer;

/// The version of the format, in the head of each journal.
pub(crate) const VERSION: u32 = 1;

/// The launch of a run's last attempt, unless that finished.
pub(crate) fn unfinished_launch(path: &Path) -> Result<Option<String>> {
    let mut lines = LineReader::open(path)?;
    let mut of = None;
    while let Some(line) = lines.next()? {
        if !["attempt", "end"]
            .iter()
            .any(|tag| reader::starts(line, tag))
        {
            continue;
        }
        match reader::parse(line).map(|entry| entry.record) {
            Some(Record::Attempt { launch, .. }) => of = launch,
            Some(Record::End { status, .. }) if status.is_final() => of = None,
            _ => {}
        }
    }
    Ok(of)
}

/// The journal of what the host of a rank measured.
pub(crate) fn rank_journal(folder: &Path, rank: usize) -> PathBuf {
    folder.join(SYSTEM).join(rank_journal_name(rank))
}

/// The journals of ranks that are in a run's folder.
pub(crate) fn rank_journals(folder: &Path) -> Vec<(usize, PathBuf)> {
    let Ok(files) = folder.join(SYSTEM).read_dir() else {
        return Vec::new();
    };
    let journals = files.filter_map(|file| {
        let path = file.ok()?.path();
        Some((rank_of(path.file_name()?.to_str()?)?, path))
    });
    journals.collect()
}

/// Returns the first entry of a journal; `None` if it is empty.
pub(crate) fn first_entry(path: &Path) -> Result<Option<Entry>> {
    let mut lines = LineReader::open(path)?;
    let Some(line) = lines.next()? else {
        let file = fs::metadata(path).map_err(|error| Error::io("read", path, error))?;
        return match file.len() {
            0 => Ok(None),
            bytes => Err(Error::new(
                Kind::Corrupt,
                format!(
                    "{} is no journal of a run: none of its {bytes} bytes make up an intact line; restore it, or remove its \
                     folder",
                    path.display()
                ),
            )),
        };
    };
    match reader::parse(line) {
        Some(entry) => Ok(Some(entry)),
        None => Err(unknown_line(path, 0)),
    }
}

/// The error for an intact line that this version does not know.
fn unknown_line(path: &Path, byte: u64) -> Error {
    Error::new(
        Kind::Incompatible,
        format!(
            "the line at byte {byte} of {} is intact, and not of format {VERSION}, which this program knows; use a newer one",
            path.display()
        ),
    )
}

/// The journals of all ranks. One that cannot be read is skipped with a warning: it is not part of the run's results.
#[derive(Debug, Default)]
pub(crate) struct RankJournals {
    /// The followers by rank; `None` if the journal cannot be read.
    followers: BTreeMap<usize, Option<Follower>>,
}

impl RankJournals {
    /// Up to `limit` further entries of each rank.
    pub(crate) fn poll(&mut self, folder: &Path, limit: usize) -> Vec<(usize, Vec<Entry>)> {
        let mut polled = Vec::new();
        for (rank, path) in rank_journals(folder) {
            let open = || Follower::open(&path, Delivery::Live);
            let follower = match self.followers.remove(&rank) {
                None => open(),
                Some(Some(follower)) => Ok(follower),
                Some(None) => {
                    self.followers.insert(rank, None);
                    continue;
                }
            };
            let read =
                follower.and_then(|mut follower| Ok((next(&mut follower, limit)?, follower)));
            let follower = match read {
                Ok((entries, follower)) => {
                    if !entries.is_empty() {
                        polled.push((rank, entries));
                    }
                    Some(follower)
                }
                Err(error) => {
                    warn(&format!(
                        "what the host of rank {rank} measured is left out from here on: {error}"
                    ));
                    None
                }
            };
            self.followers.insert(rank, follower);
        }
        polled
    }
}

fn next(follower: &mut Follower, limit: usize) -> Result<Vec<Entry>> {
    Ok(match follower.poll(limit)? {
        Followed::Entries(entries) => entries,
        // Nothing in them is ever taken back.
        Followed::Superseded => Vec::new(),
    })
}
