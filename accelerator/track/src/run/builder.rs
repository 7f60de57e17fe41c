//! Starts a run, a new one or one that continues.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use accelerator_host::RUN_TAGS;
use serde::Serialize;
use serde_json::Value;

use super::Run;
use super::settings::{RunMark, Settings, discard, flatten};
use super::worker::{Pace, Queue, Worker};
use crate::error::{Error, Kind, Result, warn};
use crate::journal::now_ms;
use crate::provenance::Capture;
use crate::record::Record;
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
    settings: Settings,
    sinks: Vec<Box<dyn Sink>>,
    mark: Option<RunMark>,
}

impl Run {
    /// Starts a run in the folder `runs/<name>`, or another one beside it if a run of this name exists.
    ///
    /// # Errors
    ///
    /// If the folder cannot be written, or the hyperparameters are not a map of JSON.
    ///
    /// ```no_run
    /// let run = accelerator_track::Run::create("mnist", &serde_json::json!({ "lr": 1e-3 }))?;
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    pub fn create(name: &str, hyperparameters: &impl Serialize) -> Result<Self> {
        Self::builder(name)
            .hyperparameters(hyperparameters)?
            .start()
    }

    /// Returns the settings of a run, before it starts.
    pub fn builder(name: &str) -> RunBuilder {
        let settings = Settings {
            name: name.to_owned(),
            runs: "runs".into(),
            hyperparameters: BTreeMap::new(),
            tags: BTreeMap::new(),
            world: 1,
            launch: None,
            provenance: Value::Null,
            capture: None,
            pace: Pace::default(),
        };
        RunBuilder::of(settings, Vec::new())
    }

    /// Continues from the checkpoint with a mark, if the program learns of it after the start of a run;
    /// [`RunBuilder::resume`] is for one that knows it before.
    ///
    /// With this run's mark, earlier entries for greater steps do not count any more once something is logged. With
    /// another run's mark, that run continues instead, unless this one has metrics or the other does not exist; this
    /// one is deleted if nothing was logged to it.
    ///
    /// ```
    /// use accelerator_track::Run;
    ///
    /// # let temporary = tempfile::tempdir().unwrap();
    /// # let runs = temporary.path();
    /// let run = Run::builder("mnist").runs_folder(runs).start()?;
    /// let (id, mark) = (run.id(), run.mark()?);
    /// drop(run);
    ///
    /// let run = Run::builder("mnist").runs_folder(runs).start()?;
    /// assert_ne!(run.id(), id);
    /// assert_eq!(run.resume(&mark)?.id(), id);
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the other run cannot be read or written.
    pub fn resume(self, mark: &RunMark) -> Result<Self> {
        if mark.run == self.id {
            self.record(Record::Rewind { to: mark.step });
            return Ok(self);
        }
        let here = self.mark()?;
        if here.step.is_some() || !self.settings.can_reopen(mark) {
            tracing::warn!(
                run = self.name,
                from = %mark.run,
                "the run of the checkpoint does not continue: it is not there or in use, or metrics were logged before the resume"
            );
            return Ok(self);
        }
        let Self {
            folder,
            settings,
            attempt,
            worker,
            begun,
            ..
        } = self;
        let sinks = worker.release();
        if here.next > begun {
            warn(&format!(
                "the run of the checkpoint continues, and the one in {} stays: it has tags, hyperparameters or artifacts of its \
                 own, which the other does not get",
                folder.display()
            ));
        } else if attempt == 0 {
            discard(&folder);
        }
        RunBuilder::of(settings, sinks).resume(mark).start()
    }
}

impl RunBuilder {
    /// Sets the folder of all runs, by default `runs`.
    pub fn runs_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.settings.runs = folder.into();
        self
    }

    /// Adds hyperparameters: a struct or a map, which may be nested.
    ///
    /// # Errors
    ///
    /// If they cannot be written as a map of JSON.
    pub fn hyperparameters(mut self, hyperparameters: &impl Serialize) -> Result<Self> {
        self.settings
            .hyperparameters
            .extend(flatten(hyperparameters)?);
        Ok(self)
    }

    /// Adds a tag.
    pub fn tag(mut self, key: &str, value: &str) -> Self {
        self.settings.tags.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Sets the number of ranks that train, by default 1.
    pub fn world(mut self, world: usize) -> Self {
        self.settings.world = world;
        self
    }

    /// Sets the launch that the program belongs to. If the last attempt at a run of this name was of the same launch, and
    /// no checkpoint is resumed, the run starts over instead of a new one: the launcher restarted it.
    pub fn launch(mut self, launch: impl Into<String>) -> Self {
        self.settings.launch = Some(launch.into());
        self
    }

    /// Sets the program's origin and machine.
    pub fn provenance(mut self, provenance: Value) -> Self {
        self.settings.provenance = provenance;
        self
    }

    /// Records the program's origin and machine, as [`Capture`] finds it.
    pub fn capture(mut self, capture: Capture) -> Self {
        self.settings.capture = Some(capture);
        self
    }

    /// Writes each entry at once instead of several times a second. Use it if this process may be killed and another
    /// one may then continue the run.
    pub fn prompt(mut self) -> Self {
        self.settings.pace = Pace::Prompt;
        self
    }

    /// Delivers the run to a sink while it is written.
    pub fn sink(mut self, sink: impl Into<Box<dyn Sink>>) -> Self {
        self.sinks.push(sink.into());
        self
    }

    /// Continues the run of a checkpoint's mark, from there. If its folder does not exist any more, it is a new
    /// run.
    pub fn resume(mut self, mark: &RunMark) -> Self {
        self.mark = Some(mark.clone());
        self
    }

    /// Starts the run. It also gets the tags of the environment variable `ACCEL_RUN_TAGS`: `key=value`, with commas
    /// between.
    ///
    /// # Errors
    ///
    /// If its folder cannot be written or holds checkpoints, if a newer version wrote the run to be continued, if its
    /// journal is damaged, or if another process is writing it.
    pub fn start(self) -> Result<Run> {
        let Self {
            mut settings,
            sinks,
            mark,
        } = self;
        settings.tags.extend(tags_of_environment());
        if settings.name.is_empty() {
            return Err(Error::new(
                Kind::Misuse,
                "a run needs a name, found an empty one",
            ));
        }
        let resumed = match &mark {
            Some(mark) => settings.reopen(mark)?,
            None => None,
        };
        let advice = match &mark {
            Some(_) => "; to begin a new run, start without the checkpoint",
            None => "",
        };
        let to = mark.filter(|_| resumed.is_some()).and_then(|x| x.step);
        let (mut journal, (id, name)) = match resumed {
            Some(resumed) => resumed,
            None => settings.create()?,
        };
        let attempt = journal.attempts;
        let begins = Record::Attempt {
            attempt,
            world: settings.world,
            launch: settings.launch.clone(),
            provenance: settings.provenance(&journal.folder),
        };
        let now = now_ms();
        journal.append(now, begins);
        if attempt > 0 {
            journal.append(now, Record::Rewind { to });
        }
        let changes = changes(&journal.hyperparameters, &settings.hyperparameters);
        if !changes.is_empty() {
            warn(&format!(
                "the run {name} resumes with different hyperparameters: {}; it takes them over with its next step{advice}",
                changes.join("; ")
            ));
        }
        if !settings.hyperparameters.is_empty() {
            let set = settings.hyperparameters.clone();
            journal.append(now, Record::Param { set });
        }
        if !settings.tags.is_empty() {
            let set = settings.tags.clone();
            journal.append(now, Record::Tag { set });
        }
        let folder = journal.folder.clone();
        let begun = journal.next();
        // Sinks read the journal: it has its head before they start.
        journal.flush_or_fail().inspect_err(|_| {
            if attempt == 0 {
                discard(&folder);
            }
        })?;
        let queue = Arc::new(Queue::new(settings.pace));
        let worker = Worker::start(journal, Arc::clone(&queue), sinks)?;
        Ok(Run {
            id,
            name,
            folder,
            attempt,
            settings,
            begun,
            queue,
            worker,
        })
    }

    fn of(settings: Settings, sinks: Vec<Box<dyn Sink>>) -> Self {
        Self {
            settings,
            sinks,
            mark: None,
        }
    }
}

impl std::fmt::Debug for RunBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunBuilder")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// Describes each hyperparameter in both maps whose value has changed.
pub(super) fn changes(had: &BTreeMap<String, Value>, set: &BTreeMap<String, Value>) -> Vec<String> {
    let changes = set.iter().filter_map(|(key, value)| {
        let had = had.get(key).filter(|had| *had != value)?;
        Some(format!("{key} changed from {had} to {value}"))
    });
    changes.collect()
}

/// Returns the tags that the starter of the program set, such as `accel-launch runs reproduce`.
fn tags_of_environment() -> Vec<(String, String)> {
    let tags = accelerator_host::variable(RUN_TAGS.name).unwrap_or_default();
    let tags = tags.to_string_lossy();
    let tags = tags.split(',').filter(|tag| !tag.is_empty());
    tags.map(|tag| tag.split_once('=').unwrap_or((tag, "")))
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}
