//! The folder of all runs.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use accelerator_host::fs::{Durability, Replace};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::history::{ArtifactUse, Hyperparameter, RunEnd, RunHistory, RunStatus, Series};
use crate::journal::{self, JOURNAL, RunLock};
use crate::record::{Number, RunId};
use crate::run_files::{self, LOCK, SUMMARY, folder_name};

pub(crate) mod leftovers;
#[cfg(test)]
mod tests;

/// The folder of all runs: lists and finds them.
///
/// ```
/// use accelerator_track::{Run, Runs};
///
/// # let temporary = tempfile::tempdir().unwrap();
/// # let folder = temporary.path();
/// let run = Run::builder("mnist").runs_folder(folder).start()?;
/// let runs = Runs::open(folder)?;
/// assert_eq!(runs.list()?.len(), 1);
/// assert_eq!(runs.find("mnist")?, run.folder());
/// assert_eq!(runs.find(&run.id().to_string())?, run.folder());
/// assert!(runs.find("another").unwrap_err().is_not_found());
/// # Ok::<(), accelerator_track::Error>(())
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Runs {
    folder: PathBuf,
}

/// A run in a folder of runs, of which the beginning was read.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ListedRun {
    /// Its folder.
    pub folder: PathBuf,
    /// Its identity and its name, or why they cannot be read.
    pub head: Result<(RunId, String)>,
    journal: Option<JournalState>,
}

impl Runs {
    /// A folder of runs; by default programs write to `runs`.
    ///
    /// # Errors
    ///
    /// If there is no such folder.
    pub fn open(folder: impl Into<PathBuf>) -> Result<Self> {
        let folder = folder.into();
        if !folder.is_dir() {
            let found = match folder.exists() {
                true => "is no folder",
                false => "is not there",
            };
            return Err(Error::new(
                Kind::NotFound,
                format!(
                    "expected the folder of all runs at {}, which {found}",
                    folder.display()
                ),
            ));
        }
        Ok(Self { folder })
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// All runs, the oldest first, then those whose beginning cannot be read. Folders without a journal are passed
    /// over.
    ///
    /// # Errors
    ///
    /// If the folder cannot be read.
    pub fn list(&self) -> Result<Vec<ListedRun>> {
        let unread = |error| Error::io("read the folder", &self.folder, error);
        let mut runs = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(unread)? {
            let folder = entry.map_err(unread)?.path();
            let name = folder.file_name().unwrap_or_default().to_string_lossy();
            if !name.starts_with('.') && Self::is_run(&folder) {
                // Read first, so that everything written from here on counts as a change.
                let journal = JournalState::of(&folder);
                let head = head(&folder);
                runs.push(ListedRun {
                    folder,
                    head,
                    journal,
                });
            }
        }
        let by_age = |run: &ListedRun| match &run.head {
            Ok((id, _)) => (0, Some(*id), run.folder.clone()),
            Err(_) => (1, None, run.folder.clone()),
        };
        runs.sort_by_cached_key(by_age);
        Ok(runs)
    }

    /// The folder of a run, by the folder's name, the run's identity, its first characters (four at least), or the name
    /// that the run was given.
    ///
    /// # Errors
    ///
    /// If there is no such run, or several.
    pub fn find(&self, run: &str) -> Result<PathBuf> {
        for name in [run.to_owned(), folder_name(run)] {
            let folder = self.folder.join(&name);
            let is_inside = Path::new(&name).components().count() == 1;
            if is_inside && Self::is_run(&folder) {
                return Ok(folder);
            }
        }
        let runs = self.list()?;
        let heads = || {
            let read = runs.iter();
            read.filter_map(|x| Some((&x.folder, x.head.as_ref().ok()?)))
        };
        let by_name = heads().filter(|(_, (_, name))| name == run);
        let mut found: Vec<&PathBuf> = by_name.map(|(folder, _)| folder).collect();
        let prefix = run.to_ascii_lowercase();
        if found.is_empty() && prefix.len() >= SHORTEST_PREFIX {
            let by_id = heads().filter(|(_, (id, _))| id.to_string().starts_with(&prefix));
            found = by_id.map(|(folder, _)| folder).collect();
        }
        match found.as_slice() {
            [folder] => Ok(folder.to_path_buf()),
            [] => Err(Error::new(
                Kind::NotFound,
                format!(
                    "there is no run {run:?} in {}; `accel-launch runs list` shows those that are",
                    self.folder.display()
                ),
            )),
            several => {
                let names = several.iter().filter_map(|x| x.file_name());
                let names: Vec<_> = names.map(|x| x.to_string_lossy()).collect();
                Err(Error::new(
                    Kind::Misuse,
                    format!(
                        "{} runs in {} are called {run:?}: name one by its folder: {}",
                        several.len(),
                        self.folder.display(),
                        names.join(", ")
                    ),
                ))
            }
        }
    }

    /// Removes a run that nobody has written since it was listed: the files that it wrote, and its folder unless that
    /// holds other files. Returns these, which stay. Artifacts stay: they are beside the runs.
    ///
    /// # Errors
    ///
    /// If the run is being written or was written since it was listed, or if a file cannot be removed.
    ///
    /// ```
    /// # let temporary = tempfile::tempdir().unwrap();
    /// # let folder = temporary.path();
    /// let run = accelerator_track::Run::builder("a").runs_folder(folder).start()?;
    /// std::fs::write(run.folder().join("notes.txt"), "mine").unwrap();
    /// let runs = accelerator_track::Runs::open(folder)?;
    /// assert!(runs.remove(&runs.list()?[0]).unwrap_err().is_conflict());
    /// drop(run);
    /// assert_eq!(runs.remove(&runs.list()?[0])?, [folder.join("a/notes.txt")]);
    /// assert!(runs.list()?.is_empty());
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    pub fn remove(&self, run: &ListedRun) -> Result<Vec<PathBuf>> {
        let folder = &run.folder;
        let _lock = RunLock::take(folder)?;
        let state = JournalState::of(folder);
        if state.is_none() || state != run.journal {
            if state.is_none() {
                // Another process has removed the run, and this one has made its lock file again.
                let _ = fs::remove_file(folder.join(LOCK));
            }
            return Err(Error::new(
                Kind::Conflict,
                format!(
                    "the run in {} has been written or removed since it was listed",
                    folder.display()
                ),
            ));
        }
        run_files::remove(folder)
    }

    /// Returns true if a folder is that of a run: then nothing else, such as checkpoints, belongs there.
    ///
    /// ```
    /// # let temporary = tempfile::tempdir().unwrap();
    /// # let folder = temporary.path();
    /// use accelerator_track::{Run, Runs};
    ///
    /// let run = Run::builder("a").runs_folder(folder).start()?;
    /// assert!(Runs::is_run(run.folder()) && !Runs::is_run(folder));
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    #[must_use]
    pub fn is_run(folder: impl AsRef<Path>) -> bool {
        folder.as_ref().join(JOURNAL).is_file()
    }
}

/// The summary of a run, without its points.
///
/// ```
/// use accelerator_track::{Run, RunStatus, RunSummary};
///
/// # let temporary = tempfile::tempdir().unwrap();
/// let run = Run::builder("mnist").runs_folder(temporary.path()).start()?;
/// run.log("train", [("loss", 0.5)], 1, None);
/// run.log("train", [("loss", 0.25)], 2, None);
/// let folder = run.folder().to_owned();
/// run.finish()?;
///
/// let summary = RunSummary::read(folder)?;
/// assert_eq!(summary.status, RunStatus::Finished);
/// let loss = summary.series("train/loss").unwrap();
/// assert_eq!((loss.points, loss.last.0, loss.max.0), (2, 0.25, 0.5));
/// # Ok::<(), accelerator_track::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RunSummary {
    /// The run's folder.
    pub folder: PathBuf,
    /// Its identity.
    pub id: RunId,
    /// Its name, as it was given.
    pub name: String,
    /// Its status.
    pub status: RunStatus,
    /// The time of its creation, in milliseconds since 1970.
    pub created_ms: u64,
    /// The time of its last entry, in milliseconds since 1970.
    pub last_ms: u64,
    /// The number of starts of the program for it.
    pub attempts: usize,
    /// The time that its attempts took, in milliseconds.
    pub duration_ms: u64,
    /// The number of ranks on which the last attempt ran that logged something.
    pub world: usize,
    /// The greatest step that was logged.
    pub last_step: Option<u64>,
    /// Hyperparameters by key.
    pub hyperparameters: BTreeMap<String, Hyperparameter>,
    /// Tags by key.
    pub tags: BTreeMap<String, String>,
    /// The metrics, in the order of their first points.
    pub series: Vec<SeriesSummary>,
    /// Artifacts that it made or used.
    pub artifacts: Vec<ArtifactUse>,
    /// The number of entries that could not be written.
    pub lost_entries: u64,
    /// The end of the last attempt, if it is recorded.
    pub end: Option<RunEnd>,
}

/// The summary of a metric, without its points.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SeriesSummary {
    /// `kind/name`, as `train/loss`.
    pub key: String,
    /// The number of points.
    pub points: usize,
    /// The least step.
    pub first_step: u64,
    /// The greatest step.
    pub last_step: u64,
    /// The value at the greatest step.
    pub last: Number,
    /// The least value; NaN if all points are.
    pub min: Number,
    /// The greatest value.
    pub max: Number,
}

impl RunSummary {
    /// Reads the run in a folder, or what was kept of it beside its journal when it was read before.
    ///
    /// # Errors
    ///
    /// If there is none, if a newer version wrote it, or if its journal is damaged.
    pub fn read(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let state = JournalState::of(folder);
        if let Some(state) = &state
            && !RunLock::is_held(folder)
            && let Some(kept) = KeptSummary::read(folder, state)
        {
            return Ok(kept);
        }
        let summary = Self::of(&RunHistory::read(folder)?);
        // For a run that is being written it would be out of date at once.
        if summary.status != RunStatus::Running
            && let Some(state) = state.filter(|x| Some(x) == JournalState::of(folder).as_ref())
        {
            KeptSummary::keep(&summary, state);
        }
        Ok(summary)
    }

    /// Makes the summary of a run that was read.
    ///
    /// ```
    /// # let temporary = tempfile::tempdir().unwrap();
    /// # let run = accelerator_track::Run::builder("mnist").runs_folder(temporary.path()).start()?;
    /// # let folder = run.folder();
    /// let history = accelerator_track::RunHistory::read(folder)?;
    /// assert_eq!(accelerator_track::RunSummary::of(&history).id, history.id);
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    #[must_use]
    pub fn of(history: &RunHistory) -> Self {
        Self {
            folder: history.folder.clone(),
            id: history.id,
            name: history.name.clone(),
            status: history.status(),
            created_ms: history.created_ms,
            last_ms: history.last_ms,
            attempts: history.attempts.len(),
            duration_ms: history.duration_ms(),
            world: history.last_attempt().map_or(0, |x| x.world),
            last_step: history.last_step(),
            hyperparameters: history.hyperparameters.clone(),
            tags: history.tags.clone(),
            series: history
                .series
                .iter()
                .filter_map(SeriesSummary::of)
                .collect(),
            artifacts: history.artifacts.clone(),
            lost_entries: history.lost_entries,
            end: history.end.clone(),
        }
    }

    /// The series of a key, as `train/loss`.
    #[must_use]
    pub fn series(&self, key: &str) -> Option<&SeriesSummary> {
        self.series.iter().find(|series| series.key == key)
    }
}

impl SeriesSummary {
    /// `None` if a resume has superseded all its points.
    fn of(series: &Series) -> Option<Self> {
        let first = series.points.first()?;
        let mut summary = Self {
            key: series.key.clone(),
            points: series.points.len(),
            first_step: first.step,
            last_step: first.step,
            last: Number(first.value),
            min: Number(f64::NAN),
            max: Number(f64::NAN),
        };
        for point in &series.points {
            summary.first_step = summary.first_step.min(point.step);
            if point.step >= summary.last_step {
                summary.last_step = point.step;
                summary.last = Number(point.value);
            }
            // Of a number and NaN, `min` and `max` return the number.
            summary.min.0 = summary.min.0.min(point.value);
            summary.max.0 = summary.max.0.max(point.value);
        }
        Some(summary)
    }
}

/// The identity and the name in the first line of a run's journal.
fn head(folder: &Path) -> Result<(RunId, String)> {
    let entry = journal::first_entry(&folder.join(JOURNAL))?.ok_or_else(|| {
        Error::new(
            Kind::Corrupt,
            format!(
                "the run in {} has no beginning: its journal is empty, or cut within its first line",
                folder.display()
            ),
        )
    })?;
    let history = RunHistory::new(folder, &entry)?;
    Ok((history.id, history.name))
}

const SHORTEST_PREFIX: usize = 4;

/// A journal's length and when it was written, by which a change is seen.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
struct JournalState {
    bytes: u64,
    modified_ns: u128,
}

impl JournalState {
    fn of(folder: &Path) -> Option<Self> {
        let file = fs::metadata(folder.join(JOURNAL)).ok()?;
        let modified = file.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        Some(Self {
            bytes: file.len(),
            modified_ns: modified.as_nanos(),
        })
    }
}

/// The file `summary.json`, which may be deleted at any time.
#[derive(Serialize, Deserialize)]
struct KeptSummary<S> {
    version: u32,
    journal: JournalState,
    summary: S,
}

impl KeptSummary<RunSummary> {
    fn read(folder: &Path, state: &JournalState) -> Option<RunSummary> {
        let bytes = fs::read(folder.join(SUMMARY)).ok()?;
        let kept: Self = serde_json::from_slice(&bytes).ok()?;
        let is_good = kept.version == VERSION && kept.journal == *state;
        // The folder may have been moved since.
        is_good.then(|| RunSummary {
            folder: folder.to_owned(),
            ..kept.summary
        })
    }
}

impl KeptSummary<&RunSummary> {
    /// The folder may be read-only, or another user's: then the run is read again next time.
    fn keep(summary: &RunSummary, journal: JournalState) {
        let kept = KeptSummary {
            version: VERSION,
            journal,
            summary,
        };
        let path = summary.folder.join(SUMMARY);
        let file = Replace::new(&path, Durability::Cached).private();
        let written = serde_json::to_vec(&kept)
            .map_err(std::io::Error::from)
            .and_then(|bytes| file.write(|file| file.write_all(&bytes)));
        if let Err(error) = written {
            tracing::debug!(folder = %summary.folder.display(), %error, "no summary is kept");
        }
    }
}

/// The version of the file. Another one is written anew.
const VERSION: u32 = 1;
