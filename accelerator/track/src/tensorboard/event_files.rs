//! Files of events.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use accelerator_host::fs::{Draft, Durability, Replace};

use super::event::{Event, EventKind, ProtobufMessage, SummaryValue};
use crate::error::{Error, Result};
use crate::record::RunId;
use crate::run_files::{EVENTS, STAGED};
use crate::sink::RunInfo;

/// The time after which every reader has passed on to the next file. TensorBoard looks every 5 seconds, later if there
/// is much to read.
const PASSED_ON: Duration = Duration::from_secs(300);

/// A file that grows, and one that is read before it.
///
/// Readers take files in the order of their names, and keep the first word about a run's hyperparameters and end. So
/// what becomes known later is written to a file that comes before: a reader that starts then finds the last word
/// first.
#[derive(Debug)]
pub(super) struct EventFiles {
    folder: PathBuf,
    run: RunId,
    created_ms: u64,
    /// A number in place of the time of creation in names: greater than in every name that exists.
    order: u64,
    events: RecordFile<Draft>,
    message: ProtobufMessage,
    /// The files that the visible one took the place of, and when they are removed.
    older: Option<(Vec<PathBuf>, Instant)>,
}

impl EventFiles {
    /// Begins the run anew, in a file that no reader sees before it is flushed.
    pub(super) fn create(folder: &Path, run: &RunInfo) -> Result<Self> {
        fs::create_dir_all(folder).map_err(|e| Error::io("create the folder", folder, e))?;
        let names = names(folder)?;
        let greatest = names.iter().filter_map(|name| order(name)).max();
        let created = run.created_ms / 1000;
        let order = greatest.map_or(created, |greatest| created.max(greatest + 1));
        let hidden = folder.join(hidden_name(run.id));
        let path = path_of(folder, order, EVENTS_PLACE, run.id);
        let file = Replace::new(&path, Durability::Cached).draft(hidden.clone());
        let file = file
            .begin()
            .map_err(|e| Error::io("create the file", &hidden, e))?;
        let mut files = Self {
            folder: folder.to_owned(),
            run: run.id,
            created_ms: run.created_ms,
            order,
            events: RecordFile::new(file),
            message: ProtobufMessage::default(),
            older: None,
        };
        files.write(run.created_ms, 0, EventKind::FileVersion)?;
        // One reader needs this to give up what it holds, and passes over the first of them that it sees.
        files.write(run.created_ms, 0, EventKind::SessionStart)?;
        Ok(files)
    }

    pub(super) fn write(&mut self, ms: u64, step: u64, kind: EventKind<'_>) -> Result<()> {
        Event { ms, step, kind }.encode(&mut self.message);
        self.events
            .write(self.message.bytes())
            .map_err(|e| Error::io("write event files in", &self.folder, e))
    }

    /// Makes what was written visible; the first time, instead of what was there of this run.
    pub(super) fn flush(&mut self) -> Result<()> {
        self.events
            .flush()
            .map_err(|e| Error::io("write event files in", &self.folder, e))?;
        match &mut self.older {
            None => {
                let published = self.events.0.get_mut().publish();
                published.map_err(|e| Error::io("rename", &self.path_of_events(), e))?;
                self.older = Some((self.empty_older()?, Instant::now() + PASSED_ON));
            }
            Some((older, time)) if Instant::now() >= *time => {
                for path in older.drain(..) {
                    let removed = fs::remove_file(&path);
                    tell(removed, "remove", &path);
                }
            }
            Some(_) => {}
        }
        Ok(())
    }

    /// Writes values that are read before those written here earlier, in place of those that this wrote earlier.
    pub(super) fn write_before(&self, values: &[SummaryValue<'_>]) -> Result<()> {
        let path = self.path_before();
        let draft = self.folder.join(format!("{}.first", hidden_name(self.run)));
        let file = Replace::new(&path, Durability::Cached).draft(draft);
        let write = || {
            let mut file = RecordFile::new(file.begin()?);
            let mut message = ProtobufMessage::default();
            for kind in [EventKind::FileVersion, EventKind::Summary(values)] {
                let (ms, step) = (self.created_ms, 0);
                Event { ms, step, kind }.encode(&mut message);
                file.write(message.bytes())?;
            }
            file.flush()?;
            file.0.get_mut().publish()
        };
        write().map_err(|e| Error::io("write", &path, e))
    }

    fn path_before(&self) -> PathBuf {
        path_of(&self.folder, self.order, BEFORE_PLACE, self.run)
    }

    fn path_of_events(&self) -> PathBuf {
        path_of(&self.folder, self.order, EVENTS_PLACE, self.run)
    }

    /// Empties this run's files of earlier times. Other programs' stay, and so do those of other runs.
    ///
    /// Without the file that it reads, one reader never comes to the next: files are removed when it has.
    fn empty_older(&self) -> Result<Vec<PathBuf>> {
        let end = format!(".{}", self.run);
        let kept = [self.path_before(), self.path_of_events()];
        let older: Vec<_> = names(&self.folder)?
            .iter()
            .filter(|name| name.starts_with(EVENTS) && name.ends_with(&end))
            .map(|name| self.folder.join(name))
            .filter(|path| !kept.contains(path))
            .collect();
        for path in &older {
            tell(File::create(path).map(drop), "empty", path);
        }
        Ok(older)
    }
}

/// The rest of an earlier file must not stop the sink.
fn tell(result: io::Result<()>, doing: &str, path: &Path) {
    if let Err(error) = result {
        let path = path.display();
        tracing::warn!("cannot {doing} {path}: {error}; TensorBoard may show what was taken back");
    }
}

fn path_of(folder: &Path, order: u64, place: u8, run: RunId) -> PathBuf {
    folder.join(format!("{EVENTS}{order:010}.{place}.{run}"))
}

/// The place, among the two files of a run, of the one with values that became known later.
const BEFORE_PLACE: u8 = 0;
/// The place of the file that grows.
const EVENTS_PLACE: u8 = 1;

/// The name of a file that is not to be read yet. There is one per run, so none is left behind for ever.
fn hidden_name(run: RunId) -> String {
    format!("{STAGED}{run}")
}

fn order(name: &str) -> Option<u64> {
    let (order, _) = name.strip_prefix(EVENTS)?.split_once('.')?;
    // Ten digits sort as numbers do.
    order.parse().ok().filter(|order| *order < 9_999_999_999)
}

fn names(folder: &Path) -> Result<Vec<String>> {
    let read = || {
        fs::read_dir(folder)?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<io::Result<_>>()
    };
    read().map_err(|e| Error::io("read the folder", folder, e))
}

/// Writes records: the length, its checksum, the data, its checksum; all little-endian.
#[derive(Debug)]
pub(super) struct RecordFile<W: Write>(BufWriter<W>);

impl<W: Write> RecordFile<W> {
    pub(super) fn new(file: W) -> Self {
        Self(BufWriter::with_capacity(1 << 16, file))
    }

    pub(super) fn write(&mut self, data: &[u8]) -> io::Result<()> {
        let length = (data.len() as u64).to_le_bytes();
        self.0.write_all(&length)?;
        self.0.write_all(&masked_checksum(&length))?;
        self.0.write_all(data)?;
        self.0.write_all(&masked_checksum(data))
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// CRC-32C, masked since a checksum of data that hold checksums is a poor one.
fn masked_checksum(data: &[u8]) -> [u8; 4] {
    crc32c::crc32c(data)
        .rotate_right(15)
        .wrapping_add(0xa282_ead8)
        .to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::super::event::SummaryData;
    use super::*;

    #[test]
    fn a_new_file_takes_the_place_of_the_runs_older_ones_and_of_no_other() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = temporary.path().join("new/folder");
        let [run, other] = [1_700_000_000_000, 1_600_000_000_000].map(|created_ms| RunInfo {
            id: RunId::new(),
            name: "a".to_owned(),
            folder: folder.clone(),
            created_ms,
        });
        let path = |order: u64, place: u32, run: &RunInfo| {
            folder.join(format!(
                "events.out.tfevents.{order:010}.{place}.{}",
                run.id
            ))
        };

        let mut first = EventFiles::create(&folder, &run).unwrap();
        assert!(
            names(&folder)
                .unwrap()
                .iter()
                .all(|name| !name.contains("tfevents"))
        );
        first.flush().unwrap();
        first.write_before(&[]).unwrap();
        EventFiles::create(&folder, &other)
            .unwrap()
            .flush()
            .unwrap();
        let foreign = folder.join("events.out.tfevents.1700000005.host.1.0");
        fs::write(&foreign, "foreign").unwrap();

        // The rest of a process that was killed is overwritten.
        drop(EventFiles::create(&folder, &run).unwrap());
        let mut second = EventFiles::create(&folder, &run).unwrap();
        let value = SummaryValue {
            tag: "a",
            data: SummaryData::Scalar(1.0),
        };
        second.write(0, 1, EventKind::Summary(&[value])).unwrap();
        let first_paths = [path(1_700_000_000, 0, &run), path(1_700_000_000, 1, &run)];
        for path in &first_paths {
            assert_ne!(path.metadata().unwrap().len(), 0, "before it is flushed");
        }
        second.flush().unwrap();
        for path in &first_paths {
            assert_eq!(
                path.metadata().unwrap().len(),
                0,
                "a reader may still be there"
            );
        }
        // Its name comes after all that were there.
        let second_path = path(1_700_000_006, 1, &run);
        let length = second_path.metadata().unwrap().len();

        second.older.as_mut().unwrap().1 = Instant::now();
        second.flush().unwrap();
        second.flush().unwrap();
        let mut left: Vec<_> = names(&folder)
            .unwrap()
            .iter()
            .map(|name| folder.join(name))
            .collect();
        left.sort();
        let other_path = path(1_700_000_001, 1, &other);
        assert_eq!(
            left,
            [other_path.clone(), foreign.clone(), second_path.clone()]
        );
        assert_ne!(other_path.metadata().unwrap().len(), 0);
        assert_eq!(fs::read(&foreign).unwrap(), b"foreign");
        assert_eq!(second_path.metadata().unwrap().len(), length);
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let temporary = tempfile::NamedTempFile::new().unwrap();
        let run = RunInfo {
            id: RunId::new(),
            name: "a".to_owned(),
            folder: temporary.path().to_owned(),
            created_ms: 0,
        };
        let error = EventFiles::create(temporary.path(), &run).unwrap_err();
        assert!(error.is_io(), "{error}");
        assert!(
            error
                .to_string()
                .contains(temporary.path().to_str().unwrap()),
            "{error}"
        );
    }

    #[test]
    fn records_are_framed_as_tensorflow_frames_them() {
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
        let mut bytes = Vec::new();
        let mut file = RecordFile::new(&mut bytes);
        file.write(b"\x09\0\0\0\x40\xfc\x54\xd9\x41\x1a\x0dbrain.Event:2")
            .unwrap();
        file.flush().unwrap();
        drop(file);
        let expected = b"\x18\0\0\0\0\0\0\0\xa3\x7f\x4b\x22\
        \x09\0\0\0\x40\xfc\x54\xd9\x41\x1a\x0dbrain.Event:2\xec\xed\x8f\x9d";
        assert_eq!(bytes, expected);
    }
}
