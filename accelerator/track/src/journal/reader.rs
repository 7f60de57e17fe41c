//! Reads a journal: its lines, and what a resume superseded; follows it while it is written.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::{Error, Kind, Result};
use crate::record::{Entry, Metrics, Record};
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
    /// The end of an attempt that may continue, after entries that a resume may supersede.
    open_end: Option<Entry>,
    /// The number of lines of the journal.
    lines_seen: u64,
}

/// The result of [`Follower::poll`].
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

    /// Returns up to `limit` further entries; none if all that were written have been returned.
    pub(crate) fn poll(&mut self, limit: usize) -> Result<Followed> {
        if self.look_ahead()? == Found::Rewind {
            *self = Self::open(&self.path, self.delivery)?;
            return Ok(Followed::Superseded);
        }
        let mut entries = Vec::new();
        while entries.len() < limit {
            let before = self.lines.offset();
            // Entries that the other reader has not seen may follow a rewind that it has not seen.
            if before >= self.scout.offset() {
                break;
            }
            let Some(entry) = self.lines.next()?.and_then(parse) else {
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

    /// Returns the number of entries in the journal, including those that are not returned.
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
                    if settles.iter().any(|tag| starts(line, tag)) {
                        let entry = parse(line);
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

/// Reads the lines of a journal in order, as far as it has been written.
#[derive(Debug)]
pub(crate) struct LineReader {
    path: PathBuf,
    file: BufReader<File>,
    /// The position of the next line.
    offset: u64,
    line: Vec<u8>,
}

impl LineReader {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|error| Error::io("read", path, error))?;
        Ok(Self {
            path: path.to_owned(),
            file: BufReader::with_capacity(256 * 1024, file),
            offset: 0,
            line: Vec::new(),
        })
    }

    /// Returns the position of the next line in bytes: the length of the intact part once [`next`](Self::next) returned
    /// `None`.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// The next intact line, without its newline; none at the end of what has been written so far. A damaged line at
    /// the end is one that was not written to its end.
    pub(crate) fn next(&mut self) -> Result<Option<&[u8]>> {
        Ok(self.advance()?.then_some(&self.line))
    }

    fn advance(&mut self) -> Result<bool> {
        if !self.read_line()? {
            return Ok(false);
        }
        let damaged = self.offset;
        self.offset += self.line.len() as u64 + 1;
        if is_intact(&self.line) {
            return Ok(true);
        }
        while self.read_line()? {
            if is_intact(&self.line) {
                return Err(Error::new(
                    Kind::Corrupt,
                    format!(
                        "the line at byte {damaged} of {} is damaged, and intact ones follow; restore the file, or cut it \
                         there",
                        self.path.display()
                    ),
                ));
            }
            self.offset += self.line.len() as u64 + 1;
        }
        self.return_to(damaged)?;
        Ok(false)
    }

    /// Reads a line that ends with a newline. Of one that does not, nothing is consumed.
    fn read_line(&mut self) -> Result<bool> {
        self.line.clear();
        let read = self.file.read_until(b'\n', &mut self.line);
        read.map_err(|error| Error::io("read", &self.path, error))?;
        if self.line.last() == Some(&b'\n') {
            self.line.pop();
            return Ok(true);
        }
        self.return_to(self.offset)?;
        Ok(false)
    }

    /// Reads on from where a line begins.
    pub(crate) fn return_to(&mut self, offset: u64) -> Result<()> {
        self.offset = offset;
        let sought = self.file.seek(SeekFrom::Start(offset));
        sought
            .map(|_| ())
            .map_err(|error| Error::io("read", &self.path, error))
    }
}

/// Knows of each entry whether a resume superseded it.
///
/// If the run resumed from a checkpoint at step `to`, what was logged before for greater steps does not count. What
/// is logged afterwards for an earlier step replaces what was logged for it before.
///
/// A rewind takes effect with the first entry that follows it. A program that dies before that has replaced nothing,
/// and its successor may resume from a later step.
#[derive(Debug, Default)]
pub(crate) struct Supersession {
    /// The rewinds that have taken effect: the number of the entry, and the step of the checkpoint.
    rewinds: Vec<(u64, Option<u64>)>,
    /// The last rewind, until an entry follows it.
    pending: Option<(u64, Option<u64>)>,
    /// The last entry that logged a step once more.
    relogged: HashMap<Slot, u64>,
}

impl Supersession {
    /// Takes notice of a line, and says whether it superseded earlier ones.
    pub(crate) fn note(&mut self, line: &[u8]) -> bool {
        let is_rewind = starts(line, "rewind");
        // Most runs never resume, and their lines need not be parsed.
        if !is_rewind && self.rewinds.is_empty() && self.pending.is_none() {
            return false;
        }
        let Some(entry) = parse(line) else {
            return false;
        };
        if let Record::Rewind { to } = entry.record {
            self.pending = Some((entry.n, to));
            return false;
        }
        let taken = self.pending.take_if(|_| is_logged(&entry.record));
        self.rewinds.extend(taken);
        let latest = self.rewinds.iter().filter_map(|&(_, to)| to).max();
        for slot in slots(&entry.record).filter(|slot| Some(slot.step) <= latest) {
            self.relogged.insert(slot, entry.n);
        }
        taken.is_some()
    }

    /// Returns what still counts of an entry.
    pub(crate) fn filter(&self, mut entry: Entry) -> Option<Entry> {
        let at = self.rewinds.partition_point(|&(n, _)| n < entry.n);
        let later = &self.rewinds[at..];
        let Some(&(first, _)) = later.first() else {
            return Some(entry);
        };
        let counts = |slot: &Slot| {
            later.iter().all(|&(_, to)| Some(slot.step) <= to)
                && self.relogged.get(slot).is_none_or(|&n| n < first)
        };
        let still_counts = match &mut entry.record {
            Record::Metrics(metrics) => {
                let step = metrics.step;
                let points = &mut metrics.points;
                points.retain(|point| counts(&Slot::of_point(point.series, step)));
                !points.is_empty()
            }
            Record::Weights { step, .. } => later.iter().all(|&(_, to)| Some(*step) <= to),
            Record::Checkpoint { step, .. } => later.iter().all(|&(_, to)| *step <= to),
            record => slots(record).all(|slot| counts(&slot)),
        };
        still_counts.then_some(entry)
    }
}

/// Returns true if a record belongs to a step.
fn is_logged(record: &Record) -> bool {
    matches!(record, Record::Checkpoint { .. } | Record::Weights { .. })
        || slots(record).next().is_some()
}

/// A place that holds one value per step.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Slot {
    of: SlotOf,
    step: u64,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
enum SlotOf {
    Series(u32),
    Media(&'static str, String),
}

impl Slot {
    fn of_point(series: u32, step: u64) -> Self {
        Self {
            of: SlotOf::Series(series),
            step,
        }
    }
}

/// The slots that a record fills.
fn slots(record: &Record) -> impl Iterator<Item = Slot> {
    let (points, step) = match record {
        Record::Metrics(metrics) => (metrics.points.as_slice(), metrics.step),
        _ => (&[][..], 0),
    };
    let media = match record {
        Record::Text { key, step, .. } => Some(("text", key, *step)),
        Record::Histogram { key, step, .. } => Some(("histogram", key, *step)),
        Record::Image { key, step, .. } => Some(("image", key, *step)),
        Record::Plot { key, step, .. } => Some(("plot", key, *step)),
        _ => None,
    };
    let media = media.map(|(kind, key, step)| Slot {
        of: SlotOf::Media(kind, key.clone()),
        step,
    });
    points
        .iter()
        .map(move |point| Slot::of_point(point.series, step))
        .chain(media)
}

/// Appends an entry as a line.
pub(crate) fn encode(entry: &Entry, line: &mut Vec<u8>) -> serde_json::Result<()> {
    let start = line.len();
    serde_json::to_writer(&mut *line, &entry.record)?;
    // `{"t":"word"` comes first: the number and the time go behind it.
    let word = TAG.len()
        + line[start + TAG.len()..]
            .iter()
            .take_while(|&&x| x != b'"')
            .count()
        + 1;
    let position = format!(r#","n":{},"ms":{}"#, entry.n, entry.ms);
    line.splice(start + word..start + word, position.into_bytes());
    // The brace at the end.
    line.pop();
    let checksum = crc32c::crc32c(&line[start..]);
    line.extend_from_slice(format!("{CHECKSUM}{checksum:08x}\"}}\n").as_bytes());
    Ok(())
}

/// Parses a line without its newline; `None` if it is damaged.
pub(crate) fn parse(line: &[u8]) -> Option<Entry> {
    if !is_intact(line) {
        return None;
    }
    if starts(line, "m") {
        let line: MetricsLine = serde_json::from_slice(line).ok()?;
        return Some(Entry {
            n: line.n,
            ms: line.ms,
            record: Record::Metrics(line.metrics()),
        });
    }
    let Position { n, ms } = serde_json::from_slice(line).ok()?;
    let record = serde_json::from_slice(line).ok()?;
    Some(Entry { n, ms, record })
}

/// Returns true if a line is as it was written.
pub(crate) fn is_intact(line: &[u8]) -> bool {
    let Some(at) = line.len().checked_sub(CHECKSUM.len() + 8 + 2) else {
        return false;
    };
    let (covered, end) = line.split_at(at);
    let found = end
        .strip_prefix(CHECKSUM.as_bytes())
        .and_then(|x| x.strip_suffix(b"\"}"))
        .and_then(|x| std::str::from_utf8(x).ok())
        .and_then(|x| u32::from_str_radix(x, 16).ok());
    found == Some(crc32c::crc32c(covered))
}

/// Returns true if a line is a record with this tag.
pub(crate) fn starts(line: &[u8], tag: &str) -> bool {
    line.strip_prefix(TAG.as_bytes())
        .and_then(|x| x.strip_prefix(tag.as_bytes()))
        .is_some_and(|x| x.first() == Some(&b'"'))
}

const TAG: &str = r#"{"t":""#;
const CHECKSUM: &str = r#","c":""#;

#[derive(Deserialize)]
struct Position {
    n: u64,
    ms: u64,
}

/// Most lines are metrics: they are read without serde's buffer for tagged enums.
#[derive(Deserialize)]
struct MetricsLine {
    n: u64,
    ms: u64,
    s: u64,
    #[serde(default)]
    e: Option<f64>,
    p: Vec<crate::record::PointValue>,
}

impl MetricsLine {
    fn metrics(self) -> Metrics {
        Metrics {
            step: self.s,
            epoch: self.e,
            points: self.p,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Number, PointValue};

    fn metrics() -> Entry {
        Entry {
            n: 12,
            ms: 1_700_000_000_000,
            record: Record::Metrics(Metrics {
                step: 100,
                epoch: Some(1.5),
                points: vec![
                    PointValue {
                        series: 0,
                        value: Number(0.5),
                        count: None,
                    },
                    PointValue {
                        series: 1,
                        value: Number(f64::INFINITY),
                        count: Some(30),
                    },
                ],
            }),
        }
    }

    fn line(entry: &Entry) -> Vec<u8> {
        let mut line = Vec::new();
        encode(entry, &mut line).unwrap();
        assert_eq!(line.pop(), Some(b'\n'));
        line
    }

    #[test]
    fn a_line_is_json_with_the_tag_first_and_the_checksum_last() {
        let line = String::from_utf8(line(&metrics())).unwrap();
        let (text, checksum) = line.split_at(line.len() - 16);
        assert_eq!(
            text,
            r#"{"t":"m","n":12,"ms":1700000000000,"s":100,"e":1.5,"p":[[0,0.5],[1,"inf",30]]"#
        );
        assert_eq!(
            checksum,
            format!(",\"c\":\"{:08x}\"}}", crc32c::crc32c(text.as_bytes()))
        );
        serde_json::from_str::<serde_json::Value>(&line).unwrap();
    }

    #[test]
    fn entries_come_back() {
        let text = Entry {
            n: 0,
            ms: 1,
            record: Record::Text {
                key: "a\"b/c".to_owned(),
                step: 3,
                text: "line\nbreak \u{1F600}".to_owned(),
            },
        };
        for entry in [metrics(), text] {
            assert_eq!(parse(&line(&entry)), Some(entry));
        }
    }

    #[test]
    fn a_flipped_bit_is_noticed() {
        let line = line(&metrics());
        for at in 0..line.len() {
            let mut damaged = line.clone();
            damaged[at] ^= 1;
            assert_eq!(parse(&damaged), None, "byte {at}");
            assert_eq!(parse(&line[..at]), None, "cut at {at}");
        }
    }

    #[test]
    fn what_a_later_version_adds_is_passed_over() {
        let text = r#"{"t":"later","n":3,"ms":4,"x":[1]"#;
        let line = format!("{text},\"c\":\"{:08x}\"}}", crc32c::crc32c(text.as_bytes()));
        let entry = parse(line.as_bytes()).unwrap();
        assert_eq!((entry.n, entry.record), (3, Record::Unknown));
    }
}
