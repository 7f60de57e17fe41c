//! Reading a journal, also one that is being written.

use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::line;
use crate::error::{Error, Kind, Result};

/// Reads the lines of a journal in order, as far as it has been written.
#[derive(Debug)]
pub(crate) struct LineReader {
    path: PathBuf,
    file: BufReader<File>,
    /// Where the next line begins.
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

    /// Where the next line begins, in bytes: the length of what is intact when [`next`](Self::next) gave none.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// The next intact line, without its newline; none at the end of what has been written so far. A damaged line at the
    /// end is one that was not written to its end.
    pub(crate) fn next(&mut self) -> Result<Option<&[u8]>> {
        Ok(self.advance()?.then_some(&self.line))
    }

    fn advance(&mut self) -> Result<bool> {
        if !self.read_line()? {
            return Ok(false);
        }
        let damaged = self.offset;
        self.offset += self.line.len() as u64 + 1;
        if line::is_intact(&self.line) {
            return Ok(true);
        }
        while self.read_line()? {
            if line::is_intact(&self.line) {
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
