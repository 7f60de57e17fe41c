//! Sinks: places to which a run is delivered, beside its journal.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufWriter, Write};
use std::path::PathBuf;

use accelerator_host::fs::{Draft, Durability, Replace};
use accelerator_host::text::csv_cell;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::record::{Entry, Record, RunId};
use crate::run_files::{TABLE, new_of};

/// A place that runs are delivered to: a format of files, a server.
///
/// A sink is a replay of the journal. It never sees an entry that is superseded when it opens: where the program goes
/// back to a checkpoint while the sink is open, it is opened again. Calls come from one thread, which is not the one
/// that trains; a call may take long, and one that fails is made again later.
///
/// ```
/// use accelerator_track::{Entry, Origin, Record, Result, RunInfo, Sink, SinkPosition};
///
/// /// Prints each metric.
/// struct Print;
///
/// impl Sink for Print {
///     fn name(&self) -> String {
///         "standard output".to_owned()
///     }
///     fn open(&mut self, run: &RunInfo) -> Result<SinkPosition> {
///         println!("{}", run.name);
///         Ok(SinkPosition::default())
///     }
///     fn write(&mut self, _: Origin, entry: &Entry) -> Result<()> {
///         if let Record::Metrics(metrics) = &entry.record {
///             println!("{}: {:?}", metrics.step, metrics.points);
///         }
///         Ok(())
///     }
///     fn flush(&mut self) -> Result<()> {
///         Ok(())
///     }
/// }
/// assert_eq!(Print.name(), "standard output");
/// ```
pub trait Sink: Send {
    /// Returns its name for messages.
    fn name(&self) -> String;

    /// The options with which `accel-launch runs sync` delivers to it, as `--to csv`; none if that command cannot.
    fn sync_options(&self) -> Vec<String> {
        Vec::new()
    }

    /// Tells when entries are delivered.
    fn delivery(&self) -> Delivery {
        Delivery::Live
    }

    /// Begins a run, and returns the position from which to deliver: the start if the sink has nothing, or writes
    /// everything anew. If the journal ends before, entries come from its start again.
    ///
    /// # Errors
    ///
    /// If the sink cannot take a run now. It is opened again later.
    fn open(&mut self, run: &RunInfo) -> Result<SinkPosition>;

    /// Takes an entry, which it may keep until [`flush`](Sink::flush). Series come before their points.
    ///
    /// # Errors
    ///
    /// If it cannot. The sink is then opened again later.
    fn write(&mut self, origin: Origin, entry: &Entry) -> Result<()>;

    /// Makes what was written visible.
    ///
    /// # Errors
    ///
    /// If it cannot. The sink is then opened again later.
    fn flush(&mut self) -> Result<()>;
}

impl<S: Sink + 'static> From<S> for Box<dyn Sink> {
    fn from(sink: S) -> Self {
        Box::new(sink)
    }
}

/// The time at which entries are delivered to a sink.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Delivery {
    /// Delivers entries at once. The sink has to take back those that a resume supersedes.
    #[default]
    Live,
    /// Delivers entries once a resume from the latest checkpoint no longer supersedes them: a checkpoint covers them,
    /// or the run finished. A resume from an earlier checkpoint still does. The end of a run that failed or was
    /// preempted is delivered before entries that may still be superseded.
    Settled,
}

/// The journal that an entry is from.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Origin {
    /// The run's.
    Run,
    /// The journal of a rank, with the measurements of its host.
    Rank(usize),
}

/// The run that is delivered.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RunInfo {
    /// Its identity.
    pub id: RunId,
    /// Its name, as it was given.
    pub name: String,
    /// Its folder.
    pub folder: PathBuf,
    /// The time of its creation, in milliseconds since 1970.
    pub created_ms: u64,
}

/// The position up to which a run was delivered to a sink.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct SinkPosition {
    /// The number of the first entry of the run's journal that has not been delivered.
    pub next: u64,
    /// The same for the journals of ranks.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ranks: BTreeMap<usize, u64>,
}

/// Writes the metrics of a run to a file of comma-separated values: `n,ms,step,epoch,key,value,count`.
///
/// The file is written anew if a resume superseded a part of it, so it holds each point once.
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
    /// The path; `None` is in the run's folder.
    path: Option<PathBuf>,
    open: Option<OpenFile>,
}

#[derive(Debug)]
struct OpenFile {
    /// The file gets its name once it has everything that the run had when the sink was opened.
    file: BufWriter<Draft>,
    path: PathBuf,
    keys: HashMap<u32, String>,
}

impl CsvFile {
    /// Writes in the run's folder, as `metrics.csv`.
    #[must_use]
    pub fn in_run() -> Self {
        Self {
            path: None,
            open: None,
        }
    }

    /// Writes at a path, whose folder must exist.
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
        let file = Replace::new(&path, Durability::Cached).draft(staged.clone());
        let file = file.begin();
        let mut file = BufWriter::new(file.map_err(|error| Error::io("create", &staged, error))?);
        file.write_all(b"n,ms,step,epoch,key,value,count\n")
            .map_err(|error| Error::io("write", &staged, error))?;
        self.open = Some(OpenFile {
            file,
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
                self.keys.insert(*i, csv_cell(key));
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
        let published = self.file.get_mut().publish();
        published.map_err(|error| Error::io("replace", &self.path, error))
    }
}

/// The configuration of clients that get every answer, an error's and a redirection's too.
#[cfg(any(feature = "kubeflow", feature = "mlflow"))]
pub(crate) fn http_config() -> ureq::config::ConfigBuilder<ureq::typestate::AgentScope> {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        // A request with a body is not sent elsewhere, and neither is a token.
        .max_redirects(0)
        .max_redirects_will_error(false)
        .user_agent(concat!("burn-accelerate-track/", env!("CARGO_PKG_VERSION")))
}
