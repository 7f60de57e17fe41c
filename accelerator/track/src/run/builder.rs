//! Starting a run, a new one or one that goes on.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use accelerator_env::RUN_TAGS;
use serde::Serialize;
use serde_json::Value;

use super::hyperparameters::flatten;
use super::queue::Queue;
use super::worker::{Journal, Worker};
use super::{Run, RunMark};
use crate::error::{Error, Kind, Result};
use crate::folder_name::folder_name;
use crate::history::HistoryReader;
use crate::journal::{self, JOURNAL, JournalWriter, RunLock, now_ms};
use crate::provenance::Capture;
use crate::record::Record;
use crate::run_files::{self, expect_no_checkpoints};
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
    settings: Settings,
    sinks: Vec<Box<dyn Sink>>,
    mark: Option<RunMark>,
}

/// What a run is started with.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    name: String,
    runs: PathBuf,
    hyperparameters: BTreeMap<String, Value>,
    tags: BTreeMap<String, String>,
    world: usize,
    launch: Option<String>,
    provenance: Value,
    capture: Option<Capture>,
}

impl RunBuilder {
    pub(super) fn new(name: &str) -> Self {
        let settings = Settings {
            name: name.to_owned(),
            runs: "runs".into(),
            hyperparameters: BTreeMap::new(),
            tags: BTreeMap::new(),
            world: 1,
            launch: None,
            provenance: Value::Null,
            capture: None,
        };
        Self::of(settings, Vec::new())
    }

    pub(super) fn of(settings: Settings, sinks: Vec<Box<dyn Sink>>) -> Self {
        Self {
            settings,
            sinks,
            mark: None,
        }
    }

    /// The folder of all runs; `runs` where it is not set.
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

    /// On how many ranks it trains; 1 where it is not set.
    pub fn world(mut self, world: usize) -> Self {
        self.settings.world = world;
        self
    }

    /// The launch that the program belongs to. Where the last attempt at a run of this name was of the same launch, and no
    /// checkpoint is resumed, the run starts over instead of a new one: the launcher restarted it.
    pub fn launch(mut self, launch: impl Into<String>) -> Self {
        self.settings.launch = Some(launch.into());
        self
    }

    /// Where the program comes from and what it runs on.
    pub fn provenance(mut self, provenance: Value) -> Self {
        self.settings.provenance = provenance;
        self
    }

    /// Records where the program comes from and what it runs on, as [`Capture`] finds it.
    ///
    /// ```
    /// use accelerator_track::{Capture, Run};
    ///
    /// # let temporary = tempfile::tempdir().unwrap();
    /// let capture = Capture::new().seed("model", 42);
    /// let run = Run::builder("mnist").runs_folder(temporary.path()).capture(capture).start()?;
    /// # let history = accelerator_track::RunHistory::read(run.folder())?;
    /// # assert_eq!(history.attempts[0].provenance["seeds"]["model"], 42);
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    pub fn capture(mut self, capture: Capture) -> Self {
        self.settings.capture = Some(capture);
        self
    }

    /// Delivers the run to a sink while it is written.
    pub fn sink(self, sink: impl Sink + 'static) -> Self {
        self.sinks([Box::new(sink) as Box<dyn Sink>])
    }

    /// Delivers the run to several sinks while it is written.
    pub fn sinks(mut self, sinks: impl IntoIterator<Item = Box<dyn Sink>>) -> Self {
        self.sinks.extend(sinks);
        self
    }

    /// Goes on with the run of a checkpoint's mark, from there. Where its folder is not there any more, it is a new run.
    pub fn resume(mut self, mark: &RunMark) -> Self {
        self.mark = Some(mark.clone());
        self
    }

    /// Starts it. It gets the tags of the environment variable `ACCEL_RUN_TAGS` too: `key=value`, with commas between.
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
        let queue = Arc::new(Queue::default());
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
}

impl Settings {
    /// The folder of all runs.
    pub(super) fn runs(&self) -> &Path {
        &self.runs
    }

    /// Whether the run of a mark is there, and no other process writes it.
    pub(super) fn can_reopen(&self, mark: &RunMark) -> bool {
        let Some(folder) = self.folder_of(mark) else {
            return false;
        };
        let found = HistoryReader::open(&folder);
        found.is_ok_and(|found| found.history().id == mark.run) && !RunLock::is_held(&folder)
    }

    /// The folder of a mark's run; none where a checkpoint names something else.
    fn folder_of(&self, mark: &RunMark) -> Option<PathBuf> {
        let mut parts = Path::new(&mark.folder).components();
        let is_name = matches!(
            (parts.next(), parts.next()),
            (Some(Component::Normal(_)), None)
        );
        is_name.then(|| self.runs.join(&mark.folder))
    }

    /// Where the program comes from, with the files that this takes in the folder of the run.
    fn provenance(&self, folder: &Path) -> Value {
        let captured = self.capture.clone().map(|capture| capture.take(folder));
        // What is captured is a map of JSON.
        let captured = captured.and_then(|captured| serde_json::to_value(captured).ok());
        captured.unwrap_or_else(|| self.provenance.clone())
    }

    /// The first of `name`, `name-2`, `name-3`… that is not there.
    fn create(&self) -> Result<(Journal, (RunId, String))> {
        fs::create_dir_all(&self.runs).map_err(|error| self.unwritable(error))?;
        let name = folder_name(&self.name);
        for number in 1.. {
            let folder = self.runs.join(match number {
                1 => name.clone(),
                _ => format!("{name}-{number}"),
            });
            match fs::create_dir(&folder) {
                Ok(()) => {
                    let begun = RunLock::take(&folder)
                        .and_then(|lock| Ok((lock, JournalWriter::create(&folder.join(JOURNAL))?)));
                    let (lock, writer) = begun.inspect_err(|_| discard(&folder))?;
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
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                    if !folder.join(JOURNAL).exists() {
                        expect_no_checkpoints(&folder)?;
                    }
                    if let Some(restarted) = self.restarted(&folder)? {
                        return Ok(restarted);
                    }
                }
                Err(error) => return Err(self.unwritable(error)),
            }
        }
        unreachable!("there are more numbers than folders")
    }

    fn unwritable(&self, error: std::io::Error) -> Error {
        let cause = match self.runs.is_file() {
            true => "it is a file".to_owned(),
            false => error.to_string(),
        };
        let runs = std::path::absolute(&self.runs).unwrap_or_else(|_| self.runs.clone());
        let message = format!(
            "no run can be begun in the folder {}: {cause}; make it a folder that this user may write, or choose another \
             one by `runs_folder`",
            runs.display()
        );
        Error::new(Kind::Io, message).with_source(error)
    }

    /// The run in a folder, where its last attempt was of this launch and did not finish.
    fn restarted(&self, folder: &Path) -> Result<Option<(Journal, (RunId, String))>> {
        // A run of somebody else that cannot be read is not this one.
        let of = journal::unfinished_launch(&folder.join(JOURNAL)).unwrap_or_default();
        if self.launch.is_none() || of != self.launch || RunLock::is_held(folder) {
            return Ok(None);
        }
        expect_no_checkpoints(folder)?;
        let lock = RunLock::take(folder)?;
        let (journal, head) = Journal::reopen(folder.to_owned(), lock)?;
        Ok((head.1 == self.name).then_some((journal, head)))
    }

    /// The run of a mark, where it is there.
    fn reopen(&self, mark: &RunMark) -> Result<Option<(Journal, (RunId, String))>> {
        let folder = self.folder_of(mark);
        let Some(folder) = folder.filter(|folder| folder.join(JOURNAL).exists()) else {
            return Ok(None);
        };
        expect_no_checkpoints(&folder)?;
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
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// Those of who starts the program, such as `accel-launch runs reproduce`.
fn tags_of_environment() -> Vec<(String, String)> {
    let tags = accelerator_env::variable(RUN_TAGS.name).unwrap_or_default();
    let tags = tags.to_string_lossy();
    let tags = tags.split(',').filter(|tag| !tag.is_empty());
    tags.map(|tag| tag.split_once('=').unwrap_or((tag, "")))
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

/// Removes a run to which nothing was logged.
pub(super) fn discard(folder: &Path) {
    match run_files::remove(folder) {
        Ok(foreign) if foreign.is_empty() => {}
        Ok(foreign) => tracing::warn!(
            folder = %folder.display(), ?foreign,
            "the folder of an empty run stays: it holds what the run did not write"
        ),
        Err(error) => {
            tracing::warn!(folder = %folder.display(), %error, "the folder of an empty run stays");
        }
    }
}

/// The name of a run's folder.
pub(super) fn folder_name_of(folder: &Path) -> String {
    let name = folder.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}
