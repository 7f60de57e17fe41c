//! Following a journal while it is written.

use std::path::{Path, PathBuf};

use super::line;
use super::reader::LineReader;
use super::supersession::Supersession;
use crate::error::Result;
use crate::record::{Entry, Record};
use crate::sink::Delivery;

/// Gives the entries of a journal that still count, as they are written.
///
/// One reader looks ahead for what supersedes or settles entries, and another gives those behind it.
#[derive(Debug)]
pub(crate) struct Follower {
    path: PathBuf,
    delivery: Delivery,
    scout: LineReader,
    supersession: Supersession,
    lines: LineReader,
    /// The first entry that may not be given yet.
    until: u64,
    /// The end of an attempt that may go on, with what a resume may supersede before it.
    open_end: Option<Entry>,
    /// How many lines the journal has.
    lines_seen: u64,
}

/// What [`Follower::poll`] gives.
#[derive(Debug)]
pub(crate) enum Followed {
    /// Entries that still count, in order.
    Entries(Vec<Entry>),
    /// Entries that were given may not count any more: follow the journal from its start.
    Superseded,
}

impl Follower {
    pub(crate) fn open(path: &Path, delivery: Delivery) -> Result<Self> {
        let mut this = Self {
            path: path.to_owned(),
            delivery,
            scout: LineReader::open(path)?,
            supersession: Supersession::default(),
            lines: LineReader::open(path)?,
            until: 0,
            open_end: None,
            lines_seen: 0,
        };
        this.look_ahead()?;
        Ok(this)
    }

    /// Up to `limit` further entries; none where all have been given that were written.
    pub(crate) fn poll(&mut self, limit: usize) -> Result<Followed> {
        if self.look_ahead()? == Found::Rewind {
            *self = Self::open(&self.path, self.delivery)?;
            return Ok(Followed::Superseded);
        }
        let mut entries = Vec::new();
        while entries.len() < limit {
            let before = self.lines.offset();
            // What the other reader has not seen yet may follow a rewind that it has not seen.
            if before >= self.scout.offset() {
                break;
            }
            let Some(entry) = self.lines.next()?.and_then(line::parse) else {
                break;
            };
            if entry.n >= self.until {
                self.lines.return_to(before)?;
                break;
            }
            entries.extend(self.supersession.filter(entry));
        }
        if entries.is_empty() {
            entries.extend(self.open_end.take());
        }
        Ok(Followed::Entries(entries))
    }

    /// How many entries the journal has, those included that are not given.
    pub(crate) fn journal_length(&self) -> u64 {
        self.lines_seen
    }

    fn look_ahead(&mut self) -> Result<Found> {
        let mut found = Found::Nothing;
        while let Some(line) = self.scout.next()? {
            self.lines_seen += 1;
            if self.supersession.note(line) {
                found = Found::Rewind;
            }
            match self.delivery {
                Delivery::Live => self.until = u64::MAX,
                Delivery::Settled => {
                    let settles = ["checkpoint", "attempt", "end"];
                    if settles.iter().any(|tag| line::starts(line, tag)) {
                        let entry = line::parse(line);
                        self.settle(entry);
                    }
                }
            }
        }
        Ok(found)
    }

    fn settle(&mut self, entry: Option<Entry>) {
        let Some(entry) = entry else {
            return;
        };
        self.open_end = None;
        match entry.record {
            Record::Checkpoint { covers, .. } => self.until = self.until.max(covers),
            Record::End { status, .. } if status.is_final() => self.until = entry.n + 1,
            Record::End { .. } => self.open_end = Some(entry),
            _ => {}
        }
    }
}

#[derive(Debug, Eq, PartialEq)]
enum Found {
    Nothing,
    Rewind,
}
