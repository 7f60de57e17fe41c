//! The journal of a run: lines with checksums, of which some supersede others.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Kind, Result};
use crate::record::{Entry, Record};
use crate::run_files::{SYSTEM, rank_journal_name, rank_of};
use reader::LineReader;

pub(crate) use crate::run_files::JOURNAL;
pub(crate) use follower::{Followed, Follower};
pub(crate) use lock::RunLock;
pub(crate) use ranks::RankJournals;
pub(crate) use writer::{JournalWriter, now_ms};

mod follower;
mod line;
mod lock;
mod ranks;
mod reader;
mod supersession;
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
        if !["attempt", "end"].iter().any(|tag| line::starts(line, tag)) {
            continue;
        }
        match line::parse(line).map(|entry| entry.record) {
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

/// The first entry of a journal; none where it is empty.
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
    match line::parse(line) {
        Some(entry) => Ok(Some(entry)),
        None => Err(unknown_line(path, 0)),
    }
}

/// The error of an intact line that is none of this version's.
fn unknown_line(path: &Path, byte: u64) -> Error {
    Error::new(
        Kind::Incompatible,
        format!(
            "the line at byte {byte} of {} is intact, and not of format {VERSION}, which this program knows; use a newer one",
            path.display()
        ),
    )
}
