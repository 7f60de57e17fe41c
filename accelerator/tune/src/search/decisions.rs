//! The decision log: a line for each decision.
//!
//! It follows from the journal. In ordered mode it is the same, byte for byte, whatever the slots, the timing and the
//! interruptions were.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use accelerator_host::fs::{Durability, Replace};

use crate::core::Decision;
use crate::error::{Error, Kind, Result};

/// The file of decisions in a search's folder.
pub(crate) const DECISIONS: &str = "decisions.jsonl";

/// The log, while it is written.
#[derive(Debug)]
pub(crate) struct DecisionLog {
    file: File,
    path: PathBuf,
}

impl DecisionLog {
    /// Opens the log of a search that has come to these decisions.
    ///
    /// # Errors
    /// [`Error::is_conflict`] where it holds others.
    pub(crate) fn open(folder: &Path, decisions: &[Decision]) -> Result<Self> {
        let path = folder.join(DECISIONS);
        let before = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(Error::io("read", &path, error)),
        };
        let mut text = Vec::new();
        for decision in decisions {
            add_line(&mut text, decision)?;
        }
        let common = before.len().min(text.len());
        if let Some(at) = (0..common).find(|at| before[*at] != text[*at]) {
            let line = text[..at].iter().filter(|byte| **byte == b'\n').count() + 1;
            return Err(Error::new(
                Kind::Conflict,
                format!(
                    "decision {line} of {} differs from what its journal leads to now: the program was changed, or a closure of \
                     it is not deterministic; resume with the program that began the search, or use another folder",
                    path.display()
                ),
            ));
        }
        let write = || {
            Replace::new(&path, Durability::Cached)
                .draft(folder.join("decisions.new"))
                .write(|file| file.write_all(&text))?;
            OpenOptions::new().append(true).open(&path)
        };
        let file = write().map_err(|error| Error::io("write", &path, error))?;
        Ok(Self { file, path })
    }

    pub(crate) fn append(&mut self, decision: &Decision) -> Result<()> {
        let mut line = Vec::new();
        add_line(&mut line, decision)?;
        let written = self.file.write_all(&line);
        written.map_err(|error| Error::io("write", &self.path, error))
    }
}

fn add_line(text: &mut Vec<u8>, decision: &Decision) -> Result<()> {
    serde_json::to_writer(&mut *text, decision).map_err(|error| {
        Error::new(Kind::Io, format!("the decision log's line: {error}")).with_source(error)
    })?;
    text.push(b'\n');
    Ok(())
}
