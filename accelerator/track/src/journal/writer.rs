//! Writing a journal.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use super::line;
use super::reader::LineReader;
use crate::error::{Error, Result};
use crate::record::{Entry, Record};

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
    /// Those that the journal does not tell of yet.
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

    /// A journal that is there: gives each entry to `visit`, and goes on behind the last one that is intact.
    pub(crate) fn open(path: &Path, mut visit: impl FnMut(Entry)) -> Result<Self> {
        let mut lines = LineReader::open(path)?;
        let mut next = 0;
        loop {
            let at = lines.offset();
            let Some(line) = lines.next()? else { break };
            // It must not be cut off as damaged.
            let entry = line::parse(line).ok_or_else(|| super::unknown_line(path, at))?;
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

    /// Counts entries that are not written, to be told in the journal.
    pub(crate) fn lose(&mut self, entries: u64) {
        self.lost += entries;
        self.lost_in_all += entries;
    }

    /// How many entries the journal lacks: those that were lost, and those that wait.
    pub(crate) fn missing(&self) -> u64 {
        let waiting = self.waiting.iter().filter(|&&x| x == b'\n').count();
        self.lost_in_all + waiting as u64
    }

    /// How many bytes wait.
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
        // Of a line that is not whole nothing stays.
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
        match line::encode(&entry, &mut self.waiting) {
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
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().as_millis() as u64
}

/// What waits for a disk that is full.
const MOST_WAITING_BYTES: usize = 16 << 20;
