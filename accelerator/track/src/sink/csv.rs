//! The sink that writes a table.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use super::{Origin, RunInfo, Sink, SinkPosition};
use crate::error::{Error, Result};
use crate::record::{Entry, Record};
use crate::run_files::{TABLE, new_of};

/// Writes the metrics of a run to a file of comma-separated values: `n,ms,step,epoch,key,value,count`.
///
/// The file is written anew where a resume superseded a part of it, so it holds each point once.
///
/// ```
/// use accelerator_track::{CsvFile, Run};
///
/// # let temporary = tempfile::tempdir().unwrap();
/// let run = Run::builder("a").runs_folder(temporary.path()).sink(CsvFile::in_run()).start()?;
/// run.log("train", [("loss", 0.5)], 1, None);
/// let path = run.folder().join("metrics.csv");
/// run.finish()?;
/// let table = std::fs::read_to_string(path).unwrap();
/// assert!(table.starts_with("n,ms,step,epoch,key,value,count\n"));
/// assert!(table.ends_with(",1,,train/loss,0.5,\n"));
/// # Ok::<(), accelerator_track::Error>(())
/// ```
#[derive(Debug)]
pub struct CsvFile {
    /// None: in the run's folder.
    path: Option<PathBuf>,
    open: Option<OpenFile>,
}

#[derive(Debug)]
struct OpenFile {
    file: BufWriter<File>,
    /// It has this name until it holds everything that was there when it was opened.
    staged: Option<PathBuf>,
    path: PathBuf,
    keys: HashMap<u32, String>,
}

impl CsvFile {
    /// In the run's folder, as `metrics.csv`.
    #[must_use]
    pub fn in_run() -> Self {
        Self {
            path: None,
            open: None,
        }
    }

    /// At a path, whose folder must be there.
    ///
    /// ```
    /// let sink = accelerator_track::CsvFile::at("mnist.csv");
    /// ```
    #[must_use]
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self {
            path: Some(path.into()),
            open: None,
        }
    }
}

impl Sink for CsvFile {
    fn name(&self) -> String {
        match &self.path {
            Some(path) => path.display().to_string(),
            None => TABLE.to_owned(),
        }
    }

    fn sync_options(&self) -> Vec<String> {
        match &self.path {
            Some(_) => Vec::new(),
            None => ["--to", "csv"].map(str::to_owned).into(),
        }
    }

    fn open(&mut self, run: &RunInfo) -> Result<SinkPosition> {
        let path = self.path.clone().unwrap_or_else(|| run.folder.join(TABLE));
        let staged = new_of(&path);
        let file = File::create(&staged).map_err(|error| Error::io("create", &staged, error))?;
        let mut file = BufWriter::new(file);
        file.write_all(b"n,ms,step,epoch,key,value,count\n")
            .map_err(|error| Error::io("write", &staged, error))?;
        self.open = Some(OpenFile {
            file,
            staged: Some(staged),
            path,
            keys: HashMap::new(),
        });
        Ok(SinkPosition::default())
    }

    fn write(&mut self, _: Origin, entry: &Entry) -> Result<()> {
        match &mut self.open {
            Some(open) => open.write(entry),
            None => Ok(()),
        }
    }

    fn flush(&mut self) -> Result<()> {
        match &mut self.open {
            Some(open) => open.flush(),
            None => Ok(()),
        }
    }
}

impl OpenFile {
    fn write(&mut self, entry: &Entry) -> Result<()> {
        match &entry.record {
            Record::Series { i, key } => {
                self.keys.insert(*i, quoted(key));
            }
            Record::Metrics(metrics) => {
                let epoch = metrics
                    .epoch
                    .map(|epoch| epoch.to_string())
                    .unwrap_or_default();
                for point in &metrics.points {
                    let Some(key) = self.keys.get(&point.series) else {
                        continue;
                    };
                    let count = point
                        .count
                        .map(|count| count.to_string())
                        .unwrap_or_default();
                    let Entry { n, ms, .. } = entry;
                    let (step, value) = (metrics.step, point.value.0);
                    let written =
                        writeln!(self.file, "{n},{ms},{step},{epoch},{key},{value},{count}");
                    written.map_err(|error| Error::io("write", &self.path, error))?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let flushed = self.file.flush();
        flushed.map_err(|error| Error::io("write", &self.path, error))?;
        if let Some(staged) = self.staged.take() {
            rename(&staged, &self.path)?;
        }
        Ok(())
    }
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(|error| Error::io("replace", to, error))
}

/// A field as RFC 4180 has it.
fn quoted(text: &str) -> String {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_with_commas_and_quotes_are_quoted() {
        assert_eq!(quoted("train/loss"), "train/loss");
        assert_eq!(quoted("a,\"b\""), "\"a,\"\"b\"\"\"");
    }
}
