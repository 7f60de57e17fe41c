//! The folder of all runs.

use std::fs;
use std::path::{Path, PathBuf};

pub use leftovers::Leftover;
use summary::JournalState;
pub use summary::{RunSummary, SeriesSummary};

use crate::error::{Error, Kind, Result};
use crate::folder_name::folder_name;
use crate::history::RunHistory;
use crate::journal::{self, JOURNAL, RunLock};
use crate::run_files;
use crate::run_id::RunId;

mod artifacts;
mod leftovers;
mod summary;

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
///
/// ```
/// fn describe(run: &accelerator_track::ListedRun) -> String {
///     match &run.head {
///         Ok((_, name)) => name.clone(),
///         Err(error) => format!("{}: {error}", run.folder.display()),
///     }
/// }
/// ```
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

    /// The folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// All runs, the oldest first, then those whose beginning cannot be read. Folders without a journal are passed over.
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

#[cfg(test)]
mod tests;
