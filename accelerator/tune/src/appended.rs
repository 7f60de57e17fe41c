//! Files that are replaced whole, and to which text is then appended.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use accelerator_host::fs::{Durability, Replace};
use serde::Serialize;

use crate::error::{Error, Kind, Result};

#[derive(Debug)]
pub(crate) struct AppendedFile {
    file: File,
    path: PathBuf,
}

impl AppendedFile {
    /// Opens a file that is there.
    pub(crate) fn open(path: PathBuf) -> Result<Self> {
        match OpenOptions::new().append(true).open(&path) {
            Ok(file) => Ok(Self { file, path }),
            Err(error) => Err(Error::io("write", &path, error)),
        }
    }

    /// Puts a file with this text in the place of what is there.
    pub(crate) fn replace(path: PathBuf, text: &[u8], durability: Durability) -> Result<Self> {
        replace(&path, text, durability)?;
        Self::open(path)
    }

    pub(crate) fn append(&mut self, text: &[u8]) -> Result<()> {
        let written = self.file.write_all(text);
        written.map_err(|error| Error::io("write", &self.path, error))
    }

    /// Cuts off what is behind so many bytes.
    pub(crate) fn cut(&self, bytes: u64) -> Result<()> {
        let cut = || match self.file.metadata()?.len() == bytes {
            // It keeps the time at which it was written.
            true => Ok(()),
            false => self.file.set_len(bytes),
        };
        cut().map_err(|error| Error::io("write", &self.path, error))
    }

    /// Waits until everything is on the disk.
    pub(crate) fn sync(&self) -> Result<()> {
        let synced = self.file.sync_data();
        synced.map_err(|error| Error::io("write", &self.path, error))
    }
}

/// Writes a file as a whole or not at all.
pub(crate) fn replace(path: &Path, text: &[u8], durability: Durability) -> Result<()> {
    Replace::new(path, durability)
        .draft(path.with_added_extension("new"))
        .write(|file| file.write_all(text))
        .map_err(|error| Error::io("write", path, error))
}

/// Writes each value as a line; `what` names them in errors.
pub(crate) fn json_lines<T: Serialize>(
    what: &str,
    values: impl IntoIterator<Item = T>,
) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    for value in values {
        serde_json::to_writer(&mut text, &value).map_err(|error| {
            Error::new(
                Kind::Io,
                format!("{what} cannot be written as JSON: {error}"),
            )
        })?;
        text.push(b'\n');
    }
    Ok(text)
}
