//! Writes a journal, and locks it for the process that does.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

use accelerator_host::lock::{FileLock, LockMode};
use accelerator_host::machine::{host_name, unix_time};

use super::reader::{self, LineReader};
use crate::error::{Error, Kind, Result};
use crate::record::{Entry, Record};
use crate::run_files::{LOCK, folder_name};

/// Appends to a journal.
///
/// Entries that could not be written wait, and are written with the next ones; where too many wait, further ones are
/// counted and dropped.
#[derive(Debug)]
pub(crate) struct JournalWriter {
    file: File,
    /// The length of what is intact.
    length: u64,
    next: u64,
    waiting: Vec<u8>,
    /// Lost entries that the journal does not mention yet.
    lost: u64,
    lost_in_all: u64,
}

impl JournalWriter {
    /// A journal that is not there yet.
    pub(crate) fn create(path: &Path) -> Result<Self> {
        let file = OpenOptions::new().write(true).create_new(true).open(path);
        Ok(Self {
            file: file.map_err(|error| Error::io("create", path, error))?,
            length: 0,
            next: 0,
            waiting: Vec::new(),
            lost: 0,
            lost_in_all: 0,
        })
    }

    /// Opens an existing journal, passes each entry to `visit`, and continues after the last one that is intact.
    pub(crate) fn open(path: &Path, mut visit: impl FnMut(Entry)) -> Result<Self> {
        let mut lines = LineReader::open(path)?;
        let mut next = 0;
        loop {
            let at = lines.offset();
            let Some(line) = lines.next()? else { break };
            // It must not be cut off as damaged.
            let entry = reader::parse(line).ok_or_else(|| super::unknown_line(path, at))?;
            next = entry.n + 1;
            visit(entry);
        }
        let length = lines.offset();
        let file = OpenOptions::new().write(true).open(path);
        let file = file.map_err(|error| Error::io("write", path, error))?;
        let mut this = Self {
            file,
            length,
            next,
            waiting: Vec::new(),
            lost: 0,
            lost_in_all: 0,
        };
        this.cut_tail()
            .map_err(|error| Error::io("cut the damaged end of", path, error))?;
        Ok(this)
    }

    /// The number of the next entry.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Takes an entry, to be written by the next [`flush`](Self::flush).
    pub(crate) fn append(&mut self, ms: u64, record: Record) {
        // Without another record, the metrics that are kept would mean something else.
        if self.waiting.len() >= MOST_WAITING_BYTES && matches!(record, Record::Metrics(_)) {
            self.lose(1);
            return;
        }
        self.take_lost(ms);
        self.encode(ms, record);
    }

    /// Counts entries that are not written, for the journal's record of them.
    pub(crate) fn lose(&mut self, entries: u64) {
        self.lost += entries;
        self.lost_in_all += entries;
    }

    /// Returns the number of entries that the journal lacks: those that were lost, and those that wait.
    pub(crate) fn missing(&self) -> u64 {
        let waiting = self.waiting.iter().filter(|&&x| x == b'\n').count();
        self.lost_in_all + waiting as u64
    }

    /// Returns the number of bytes that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Gives what waits to the system.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.take_lost(now_ms());
        if self.waiting.is_empty() {
            return Ok(());
        }
        let mut written = 0;
        let result = loop {
            match self.file.write(&self.waiting[written..]) {
                Ok(0) => break Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => written += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => break Err(error),
            }
            if written == self.waiting.len() {
                break Ok(());
            }
        };
        // Nothing of an incomplete line may stay.
        let newline = self.waiting[..written].iter().rposition(|&x| x == b'\n');
        let whole = newline.map_or(0, |at| at + 1);
        self.length += whole as u64;
        self.waiting.drain(..whole);
        if result.is_err() {
            self.cut_tail()?;
            return result;
        }
        match self.lost {
            0 => Ok(()),
            _ => self.flush(),
        }
    }

    /// Has everything on the disk.
    pub(crate) fn sync(&mut self) -> io::Result<()> {
        self.flush()?;
        self.file.sync_data()
    }

    fn take_lost(&mut self, ms: u64) {
        if self.lost > 0 && self.waiting.len() < MOST_WAITING_BYTES {
            let entries = std::mem::take(&mut self.lost);
            self.encode(ms, Record::Lost { entries });
        }
    }

    fn encode(&mut self, ms: u64, record: Record) {
        let entry = Entry {
            n: self.next,
            ms,
            record,
        };
        let before = self.waiting.len();
        match reader::encode(&entry, &mut self.waiting) {
            Ok(()) => self.next += 1,
            Err(error) => {
                self.waiting.truncate(before);
                tracing::warn!(%error, "a record cannot be written as JSON, and is left out of the run's journal");
            }
        }
    }

    fn cut_tail(&mut self) -> io::Result<()> {
        self.file.set_len(self.length)?;
        self.file.seek(SeekFrom::Start(self.length))?;
        Ok(())
    }
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    unix_time().as_millis() as u64
}

/// Limits what waits while the disk is full.
const MOST_WAITING_BYTES: usize = 16 << 20;

/// Held by the one process that writes a run, or delivers it to a sink, until it ends.
#[derive(Debug)]
pub(crate) struct RunLock {
    _lock: FileLock,
}

impl RunLock {
    /// Takes the lock for writing the run in a folder.
    pub(crate) fn take(folder: &Path) -> Result<Self> {
        Self::take_file(&folder.join(LOCK), |owner| {
            format!(
                "the run in {} is being written by {owner}; give this one another name, or wait until that has ended",
                folder.display()
            )
        })
    }

    /// Takes the lock for delivering the run in a folder to a sink.
    pub(crate) fn take_for_sink(folder: &Path, sink: &str) -> Result<Self> {
        let path = folder.join(format!("{}.lock", folder_name(sink)));
        Self::take_file(&path, |owner| {
            format!(
                "the run in {} is being delivered to {sink} by {owner}; wait until that has ended",
                folder.display()
            )
        })
    }

    fn take_file(path: &Path, taken: impl FnOnce(&str) -> String) -> Result<Self> {
        let locked = FileLock::create(path, LockMode::Exclusive, LONGEST_WAIT);
        let Some(mut lock) = locked.map_err(|error| Error::io("lock", path, error))? else {
            // Only the message needs the owner.
            let owner = fs::read_to_string(path).unwrap_or_default();
            let owner = match owner.trim() {
                "" => "another process",
                owner => owner,
            };
            return Err(Error::new(Kind::Conflict, taken(owner)));
        };
        // `run_files` recognizes the file by this text.
        let owner = format!("process {} on {}\n", std::process::id(), host_name());
        // The owner is only for messages; the system holds the lock.
        let _ = lock.write(owner.as_bytes());
        Ok(Self { _lock: lock })
    }

    /// Returns `true` if a process writes the run now.
    pub(crate) fn is_held(folder: &Path) -> bool {
        FileLock::is_held(&folder.join(LOCK)).unwrap_or(false)
    }
}

/// The longest wait for the lock. A process that checks if the run is being written holds it for a moment, and so does
/// a process that another thread starts, until it executes its program.
const LONGEST_WAIT: Duration = Duration::from_millis(200);
