//! The journal of a search, with a line of JSON for each event. It is the source of truth: all other files follow from
//! it.

use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use accelerator_host::fs::Durability;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::appended::{AppendedFile, json_lines};
use crate::core::Event;
use crate::error::{Error, Kind, Result};

pub(crate) const JOURNAL: &str = "journal.jsonl";

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Head {
    pub(crate) version: u32,
    /// Part of the names of trials.
    pub(crate) id: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    pub(crate) asks: Asking,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) searcher: Option<String>,
    /// The folder in which the search was begun; names in a program's arguments are relative to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) directory: Option<PathBuf>,
    pub(crate) spec: Value,
}

/// The time at which a searcher is asked for a trial.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Asking {
    /// Before the trial can begin.
    Ahead,
    /// Once the trial can begin, since the reply depends on what trials reported.
    InTime,
}

/// A line after the head: an event and its number, which reveals that a line is missing.
#[derive(Deserialize, Serialize)]
struct Line<E> {
    #[serde(flatten)]
    event: E,
    /// The number, counted from 1. Journals of earlier versions have none.
    #[serde(default)]
    line: Option<u64>,
}

pub(crate) const VERSION: u32 = 1;

/// A journal that is being written.
///
/// A line is handed to the system before its event takes effect, so it survives the end of this process. It is on the
/// disk within [`SYNC`], and before any action that cannot be undone. A machine that loses power loses the newest
/// events, and the search repeats the work that they record.
#[derive(Debug)]
pub(crate) struct Journal {
    file: AppendedFile,
    lines: u64,
    synced: Instant,
    is_synced: bool,
}

impl Journal {
    /// Creates a journal in a folder. A reader that finds the file also finds its head.
    pub(crate) fn create(folder: &Path, head: &Head) -> Result<Self> {
        let head = json_lines("the journal's head", [head])?;
        let file = AppendedFile::replace(folder.join(JOURNAL), &head, Durability::Flushed)?;
        Ok(Self::append_to(file, 0))
    }

    /// Continues a journal that was [read](read); cuts off anything after its last intact line.
    pub(crate) fn reopen(folder: &Path, before: &Journaled) -> Result<Self> {
        let file = AppendedFile::open(folder.join(JOURNAL))?;
        file.cut(before.intact)?;
        Ok(Self::append_to(file, before.events.len() as u64))
    }

    pub(crate) fn append(&mut self, event: &Event) -> Result<()> {
        self.lines += 1;
        let line = Some(self.lines);
        self.file
            .append(&json_lines("the journal's line", [Line { event, line }])?)?;
        self.is_synced = false;
        self.sync_if_due()
    }

    /// Waits until every line is on the disk, if the last sync is longer ago than [`SYNC`].
    pub(crate) fn sync_if_due(&mut self) -> Result<()> {
        match self.synced.elapsed() > SYNC {
            true => self.sync(),
            false => Ok(()),
        }
    }

    /// Waits until every line is on the disk.
    pub(crate) fn sync(&mut self) -> Result<()> {
        if !self.is_synced {
            self.file.sync()?;
            self.is_synced = true;
        }
        self.synced = Instant::now();
        Ok(())
    }

    fn append_to(file: AppendedFile, lines: u64) -> Self {
        Self {
            file,
            lines,
            synced: Instant::now(),
            is_synced: true,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Journaled {
    pub(crate) head: Head,
    pub(crate) events: Vec<Event>,
    pub(crate) intact: u64,
}

impl Journaled {
    /// Returns `true` if trials have done anything.
    pub(crate) fn has_results(&self) -> bool {
        let is_result =
            |event: &Event| !matches!(event, Event::Opened { .. } | Event::Suggested { .. });
        self.events.iter().any(is_result)
    }
}

pub(crate) fn written(folder: &Path) -> Option<SystemTime> {
    let metadata = fs::metadata(folder.join(JOURNAL)).ok()?;
    metadata.modified().ok()
}

/// Reads the journal in a folder; returns `None` if there is none. Leaves out an incomplete last line, as written by a
/// process that was killed or a machine that lost power.
pub(crate) fn read(folder: &Path) -> Result<Option<Journaled>> {
    let path = folder.join(JOURNAL);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("read", &path, error)),
    };
    let mut lines = BufReader::new(file);
    let mut line = Vec::new();
    let mut next = |line: &mut Vec<u8>| {
        line.clear();
        let bytes = lines.read_until(b'\n', line);
        bytes.map_err(|error| Error::io("read", &path, error))
    };
    let corrupt = |at: u64, error: &dyn Display| {
        let what = format!(
            "the line at byte {at} of {} is not a line of a search's journal of format {VERSION} ({error}); restore it, or remove \
             the folder and search anew",
            path.display()
        );
        Error::new(Kind::Corrupt, what)
    };
    let mut intact = next(&mut line)? as u64;
    let head: Head = serde_json::from_slice(&line).map_err(|error| corrupt(0, &error))?;
    if head.version != VERSION {
        return Err(Error::new(
            Kind::Corrupt,
            format!(
                "{} has format {}; this program knows format {VERSION}",
                path.display(),
                head.version
            ),
        ));
    }
    let mut events = Vec::new();
    let mut torn: Option<(u64, serde_json::Error)> = None;
    loop {
        let bytes = next(&mut line)? as u64;
        if bytes == 0 {
            break;
        }
        let is_whole = line.ends_with(b"\n");
        match serde_json::from_slice(&line) {
            // A line follows one that is not intact, which therefore was not the last.
            Ok::<Line<Event>, _>(_) if torn.is_some() => {
                if let Some((at, error)) = &torn {
                    return Err(corrupt(*at, error));
                }
            }
            Ok(line) if is_whole => {
                let expected = events.len() as u64 + 1;
                if let Some(found) = line.line.filter(|found| *found != expected) {
                    let error = format!("it is line {found}, and line {expected} is expected");
                    return Err(corrupt(intact, &error));
                }
                events.push(line.event);
                intact += bytes;
            }
            Ok(_) => break,
            Err(error) => torn = torn.or(Some((intact, error))),
        }
    }
    Ok(Some(Journaled {
        head,
        events,
        intact,
    }))
}

/// The time within which a line is on the disk.
const SYNC: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::io::Write;

    use super::*;
    use crate::config::TrialId;

    fn ended(trial: u32) -> Event {
        let trial = TrialId::new(trial);
        Event::Ended { trial }
    }

    fn begun(folder: &Path) -> Journal {
        let head = Head {
            version: VERSION,
            id: "358bb".to_owned(),
            created: 0,
            asks: Asking::Ahead,
            searcher: None,
            directory: None,
            spec: Value::Null,
        };
        let mut journal = Journal::create(folder, &head).unwrap();
        journal.append(&ended(1)).unwrap();
        journal.append(&ended(2)).unwrap();
        journal
    }

    #[test]
    fn an_incomplete_last_line_is_cut_off() {
        for torn in [
            "{\"ended\":{\"trial\"",
            "{\"ended\":{\"trial\":3}}",
            "\0\0\0\n",
        ] {
            let folder = tempfile::tempdir().unwrap();
            begun(folder.path());
            let path = folder.path().join(JOURNAL);
            let mut file = OpenOptions::new().append(true).open(&path).unwrap();
            file.write_all(torn.as_bytes()).unwrap();
            let read_back = read(folder.path()).unwrap().unwrap();
            assert_eq!(read_back.events, [ended(1), ended(2)], "{torn:?}");
            let mut journal = Journal::reopen(folder.path(), &read_back).unwrap();
            journal.append(&ended(4)).unwrap();
            let again = read(folder.path()).unwrap().unwrap();
            assert_eq!(again.events, [ended(1), ended(2), ended(4)], "{torn:?}");
        }
    }

    #[test]
    fn a_damaged_line_before_others_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        begun(folder.path());
        let path = folder.path().join(JOURNAL);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replacen("\"ended\"", "\"ebded\"", 1)).unwrap();
        let error = read(folder.path()).unwrap_err();
        assert!(error.is_corrupt(), "{error}");
    }

    #[test]
    fn a_line_that_is_gone_or_there_twice_is_an_error() {
        for keep in [&[0, 2][..], &[0, 1, 1, 2], &[0, 2, 1]] {
            let folder = tempfile::tempdir().unwrap();
            begun(folder.path());
            let path = folder.path().join(JOURNAL);
            let text = fs::read_to_string(&path).unwrap();
            let lines: Vec<_> = text.lines().collect();
            let kept: String = keep.iter().map(|at| format!("{}\n", lines[*at])).collect();
            fs::write(&path, kept).unwrap();
            let error = read(folder.path()).unwrap_err();
            assert!(error.is_corrupt(), "{error}");
            let error = error.to_string();
            assert!(error.contains("is expected"), "{error}");
        }
    }

    #[test]
    fn a_journal_without_numbers_is_read_and_continued_with_them() {
        let folder = tempfile::tempdir().unwrap();
        begun(folder.path());
        let path = folder.path().join(JOURNAL);
        let text = fs::read_to_string(&path).unwrap();
        let text = text.replace(",\"line\":1", "").replace(",\"line\":2", "");
        assert!(!text.contains("line"), "{text}");
        fs::write(&path, text).unwrap();
        let before = read(folder.path()).unwrap().unwrap();
        let mut journal = Journal::reopen(folder.path(), &before).unwrap();
        journal.append(&Event::Finished).unwrap();
        let events = read(folder.path()).unwrap().unwrap().events;
        assert_eq!(events, [ended(1), ended(2), Event::Finished]);
    }
}
