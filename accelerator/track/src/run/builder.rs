//! Starting a run, a new one or one that goes on.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use super::hyperparameters::flatten;
use super::name::folder_name;
use super::queue::Queue;
use super::worker::{Journal, Worker};
use super::{Run, RunMark};
use crate::error::{Error, Kind, Result};
use crate::journal::{self, JOURNAL, JournalWriter, RunLock, now_ms};
use crate::record::Record;
use crate::run_id::RunId;
use crate::sink::Sink;

/// Settings of a [`Run`], before it starts.
///
/// ```
/// # let temporary = tempfile::tempdir().unwrap();
/// # let folder = temporary.path();
/// let run = accelerator_track::Run::builder("mnist")
///     .runs_folder(folder)
///     .tag("branch", "wide")
///     .world(4)
///     .start()?;
/// assert_eq!(run.folder(), folder.join("mnist"));
/// # Ok::<(), accelerator_track::Error>(())
/// ```
#[must_use = "it does nothing until `start`"]
pub struct RunBuilder {
    name: String,
    runs: PathBuf,
    hyperparameters: BTreeMap<String, Value>,
    tags: BTreeMap<String, String>,
    world: usize,
    provenance: Value,
    sinks: Vec<Box<dyn Sink>>,
    mark: Option<RunMark>,
}

impl RunBuilder {
    pub(super) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            runs: "runs".into(),
            hyperparameters: BTreeMap::new(),
            tags: BTreeMap::new(),
            world: 1,
            provenance: Value::Null,
            sinks: Vec::new(),
            mark: None,
        }
    }

    /// The folder of all runs; `runs` where it is not set.
    pub fn runs_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.runs = folder.into();
        self
    }

    /// Adds hyperparameters: a struct or a map, which may be nested.
    ///
    /// # Errors
    ///
    /// If they cannot be written as a map of JSON.
    pub fn hyperparameters(mut self, hyperparameters: &impl Serialize) -> Result<Self> {
        self.hyperparameters.extend(flatten(hyperparameters)?);
        Ok(self)
    }

    /// Adds a tag.
    pub fn tag(mut self, key: &str, value: &str) -> Self {
        self.tags.insert(key.to_owned(), value.to_owned());
        self
    }

    /// On how many ranks it trains; 1 where it is not set.
    pub fn world(mut self, world: usize) -> Self {
        self.world = world;
        self
    }

    /// Where the program comes from and what it runs on.
    pub fn provenance(mut self, provenance: Value) -> Self {
        self.provenance = provenance;
        self
    }

    /// Delivers the run to a sink while it is written.
    pub fn sink(mut self, sink: impl Sink + 'static) -> Self {
        self.sinks.push(Box::new(sink));
        self
    }

    /// Goes on with the run of a checkpoint's mark, from there. Where its folder is not there any more, it is a new run.
    pub fn resume(mut self, mark: &RunMark) -> Self {
        self.mark = Some(mark.clone());
        self
    }

    /// Starts it.
    ///
    /// # Errors
    ///
    /// If its folder cannot be written, if a newer version wrote the run that is to go on, if its journal is damaged, or
    /// if another process writes it.
    pub fn start(mut self) -> Result<Run> {
        if self.name.is_empty() {
            return Err(Error::new(
                Kind::Misuse,
                "a run needs a name, found an empty one",
            ));
        }
        let mark = self.mark.take();
        let resumed = match &mark {
            Some(mark) => self.reopen(mark)?,
            None => None,
        };
        let (mut journal, head) = match resumed {
            Some(resumed) => resumed,
            None => self.create()?,
        };
        let is_resumed = journal.attempts > 0;
        let attempt = journal.attempts;
        let now = now_ms();
        journal.append(
            now,
            Record::Attempt {
                attempt,
                world: self.world,
                provenance: self.provenance,
            },
        );
        if let Some(mark) = mark.filter(|_| is_resumed) {
            journal.append(now, Record::Rewind { to: mark.step });
        }
        if !self.hyperparameters.is_empty() {
            let set = self.hyperparameters;
            journal.append(now, Record::Param { set });
        }
        if !self.tags.is_empty() {
            journal.append(now, Record::Tag { set: self.tags });
        }
        let folder = journal.folder.clone();
        // Sinks read the journal: it has its head before they start.
        journal.flush_or_fail()?;
        let queue = Arc::new(Queue::default());
        let worker = Worker::start(journal, Arc::clone(&queue), self.sinks)?;
        Ok(Run {
            id: head.0,
            name: head.1,
            folder,
            attempt,
            queue,
            worker,
        })
    }

    /// The first of `name`, `name-2`, `name-3`… that is not there.
    fn create(&self) -> Result<(Journal, (RunId, String))> {
        fs::create_dir_all(&self.runs)
            .map_err(|error| Error::io("create the folder", &self.runs, error))?;
        let name = folder_name(&self.name);
        for number in 1.. {
            let folder = self.runs.join(match number {
                1 => name.clone(),
                _ => format!("{name}-{number}"),
            });
            match fs::create_dir(&folder) {
                Ok(()) => {
                    let lock = RunLock::take(&folder)?;
                    let writer = JournalWriter::create(&folder.join(JOURNAL))?;
                    let mut journal = Journal::new(folder, lock, writer);
                    let id = RunId::new();
                    journal.append(
                        now_ms(),
                        Record::Head {
                            version: journal::VERSION,
                            run: id,
                            name: self.name.clone(),
                        },
                    );
                    return Ok((journal, (id, self.name.clone())));
                }
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(Error::io("create the folder", &folder, error)),
            }
        }
        unreachable!("there are more numbers than folders")
    }

    /// The run of a mark, where it is there.
    fn reopen(&self, mark: &RunMark) -> Result<Option<(Journal, (RunId, String))>> {
        let folder = self.runs.join(&mark.folder);
        if !folder.join(JOURNAL).exists() {
            return Ok(None);
        }
        let lock = RunLock::take(&folder)?;
        let (journal, head) = Journal::reopen(folder, lock)?;
        if head.0 != mark.run {
            return Ok(None);
        }
        if journal.next() < mark.next {
            tracing::warn!(
                run = head.1,
                "the journal of the run is shorter than when the checkpoint was saved: metrics before it are lost"
            );
        }
        Ok(Some((journal, head)))
    }
}

impl std::fmt::Debug for RunBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunBuilder")
            .field("name", &self.name)
            .field("runs", &self.runs)
            .finish_non_exhaustive()
    }
}

/// The name of a run's folder.
pub(super) fn folder_name_of(folder: &Path) -> String {
    let name = folder.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}
