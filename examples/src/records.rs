use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::error::{Error, Kind, Result};

/// A file of JSON objects, one per line. Each line is in the file as soon as it is written, and in one piece: several
/// processes can write to one file.
#[derive(Debug)]
pub(crate) struct JsonLines {
    file: File,
    path: PathBuf,
}

/// The metrics of a step.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct StepRecord {
    /// The step, counted from 1 through all epochs.
    pub(crate) step: usize,
    pub(crate) epoch: u64,
    pub(crate) loss: f64,
    pub(crate) lr: f64,
    pub(crate) samples_per_second: f64,
}

/// The metrics of an epoch.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct EpochRecord {
    pub(crate) epoch: u64,
    pub(crate) validation_loss: f64,
    pub(crate) validation_accuracy: f64,
}

/// The metrics of the test.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct TestRecord {
    pub(crate) test_loss: f64,
    pub(crate) test_accuracy: f64,
}

impl JsonLines {
    /// Creates an empty file; replaces an existing one.
    pub(crate) fn create(path: &Path) -> Result<Self> {
        // Other processes may move its end.
        let file = File::create(path).and_then(|_| OpenOptions::new().append(true).open(path));
        Ok(Self {
            file: file.map_err(|error| Error::io("create", path, error))?,
            path: path.to_owned(),
        })
    }

    pub(crate) fn write(&mut self, record: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(record).map_err(|error| {
            Error::with_source(Kind::Io, "a record could not be put into JSON", error)
        })?;
        line.push(b'\n');
        self.file
            .write_all(&line)
            .map_err(|error| Error::io("write to", &self.path, error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_record_is_a_line_that_is_there_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut metrics = JsonLines::create(&path).unwrap();
        let test = TestRecord {
            test_loss: 0.25,
            test_accuracy: 0.97,
        };
        metrics.write(&test).unwrap();
        metrics.write(&test).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(
            text,
            "{\"test_loss\":0.25,\"test_accuracy\":0.97}\n".repeat(2)
        );
    }

    #[test]
    fn a_file_that_cannot_be_made_is_named() {
        let error = JsonLines::create(Path::new("/nowhere/metrics.jsonl")).unwrap_err();
        assert!(error.is_io());
        assert!(
            error.to_string().contains("/nowhere/metrics.jsonl"),
            "{error}"
        );
    }
}
