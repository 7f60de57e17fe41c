//! Folders of checkpoints, and a path that is such a folder or one checkpoint.

use std::num::NonZeroUsize;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use std::{fs, io};

use crate::checkpoint::{
    Checkpoint, LARGEST, LATEST, VerifyLevel, VerifyReport, is_leftover, is_ours, name_of,
    open_file, parse_name, temporary,
};
use crate::draft::Draft;
use crate::error::{Error, Kind, Result};
use crate::staged::{self, State};
use crate::vfs::{Progress, Vfs};

/// A folder that holds checkpoints: `checkpoint-000001`, `checkpoint-000002`, …, and `latest`, a
/// text file with the name of the newest.
///
/// Other things in the folder are left alone.
///
/// ```
/// # use std::num::NonZeroUsize;
/// use accelerator_manifest::{VerifyLevel, Metadata, Folder};
///
/// # fn main() -> accelerator_manifest::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// let folder = Folder::create(temporary.path().join("checkpoints/a"))?;
/// assert!(folder.latest_good()?.found.is_none());
/// for step in [100, 200, 300] {
///     folder.begin(0)?.commit(Metadata { step, ..Metadata::new(NonZeroUsize::MIN) })?;
/// }
/// assert_eq!(folder.prune(NonZeroUsize::MIN, VerifyLevel::Sizes, &[])?, [1, 2]);
/// assert_eq!(folder.latest_good()?.found.map(|x| x.number()), Some(3));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
    vfs: Vfs,
}

/// The newest good checkpoint, and what was passed over.
#[derive(Clone, Debug)]
pub struct Search {
    /// The newest one that nothing is wrong with.
    pub found: Option<Checkpoint>,
    /// Newer ones, the newest first, with what is wrong with them.
    pub rejected: Vec<VerifyReport>,
}

impl Folder {
    /// A folder that exists.
    ///
    /// # Errors
    ///
    /// [`Error::is_not_found`] if it does not exist, [`Error::is_misuse`] if it is not a folder, and [`Error::is_io`]
    /// for a dangling link, since its target may just not be mounted.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let metadata = fs::metadata(&path).map_err(|error| {
            if error.kind() == io::ErrorKind::NotFound && path.is_symlink() {
                let message = format!(
                    "{} is a link that leads nowhere: mount what it leads to, or remove it",
                    path.display()
                );
                return Error::new(Kind::Io, message).with_source(error);
            }
            Error::io("open the folder of checkpoints", &path, error)
        })?;
        if !metadata.is_dir() {
            return Err(not_a_folder(&path));
        }
        let vfs = Vfs::default();
        Ok(Self { path, vfs })
    }

    /// Creates the folder, with those above it, if it does not exist. New folders are on the disk once this
    /// returns.
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`] where something else has its name, and I/O errors.
    pub fn create(path: impl Into<PathBuf>) -> Result<Self> {
        Self::create_on(Vfs::default(), path.into())
    }

    /// The same folder, which calls `progress` after each block of a file that it, its drafts and its
    /// checkpoints have read, summed up, written or flushed. A block has at most 1 MiB, and what is flushed
    /// at most 1 GiB, so that a program can tell work that lasts from work that hangs.
    #[must_use]
    pub fn with_progress(
        mut self,
        progress: impl Fn() + Send + Sync + UnwindSafe + RefUnwindSafe + 'static,
    ) -> Self {
        self.vfs.progress = Progress::new(progress);
        self
    }

    /// The path of the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The checkpoints by their names, the oldest first. Nothing is read of them.
    ///
    /// # Errors
    ///
    /// I/O errors.
    pub fn checkpoints(&self) -> Result<Vec<Checkpoint>> {
        let names = self.names()?;
        let mut numbers: Vec<u64> = names.iter().filter_map(|x| parse_name(x)).collect();
        numbers.sort_unstable();
        let named = |number| {
            let checkpoint = Checkpoint::named(self.path.join(name_of(number)), number);
            checkpoint.with_callback(self.vfs.progress.clone())
        };
        Ok(numbers.into_iter().map(named).collect())
    }

    /// The newest checkpoint that is whole, every file of which has its sum.
    ///
    /// `latest` is not asked: it may be behind, or gone. Nothing is deleted.
    ///
    /// # Errors
    ///
    /// Only the user may decide to go back behind a checkpoint that may be good: [`Error::is_io`] if the newest one
    /// cannot be read, and [`Error::is_incompatible`] if a newer version of the library wrote it.
    pub fn latest_good(&self) -> Result<Search> {
        self.latest_good_before(u64::MAX)
    }

    /// Searches only the checkpoints with a lower number than `number`, for a caller that cannot use that one.
    ///
    /// # Errors
    ///
    /// The errors of [`latest_good`](Self::latest_good).
    pub fn latest_good_before(&self, number: u64) -> Result<Search> {
        let mut rejected = Vec::new();
        let older = self.checkpoints()?.into_iter();
        for checkpoint in older.rev().filter(|x| x.number() < number) {
            let report = checkpoint.verify(VerifyLevel::Hashes);
            if report.is_good() {
                let found = Some(checkpoint);
                return Ok(Search { found, rejected });
            }
            if let Some(defect) = report.unreadable() {
                return Err(defect.error.clone().undecided(&report.path));
            }
            rejected.push(report);
        }
        let found = None;
        Ok(Search { found, rejected })
    }

    /// The number in the text file `latest`, if it is one. A hint for people: it may be behind.
    #[must_use]
    pub fn latest_hint(&self) -> Option<u64> {
        let path = self.path.join(LATEST);
        let file = open_file(&path).ok()?;
        let mut text = String::new();
        io::Read::read_to_string(&mut io::Read::take(file, 64), &mut text).ok()?;
        parse_name(text.trim_end())
    }

    /// Begins a checkpoint, and removes what processes that are gone have left unfinished: processes
    /// of this host, and of others where nothing has changed for a day. Its number is the one after
    /// the highest that is there, broken checkpoints included. `rank` is the caller's; fault plans
    /// name it.
    ///
    /// # Errors
    ///
    /// I/O errors, and [`Error::is_misuse`] if no number of 18 digits is left.
    pub fn begin(&self, rank: usize) -> Result<Draft> {
        // First, since the disk may be full of it.
        self.sweep(None)?;
        let draft = Draft::begin(&self.path, self.next_number()?, rank, self.vfs.clone())?;
        self.sweep(staged::time_of(draft.path()))?;
        Ok(draft)
    }

    /// The unfinished entries of the folder: drafts, and checkpoints that are being removed, of this process and of
    /// others.
    ///
    /// # Errors
    ///
    /// I/O errors.
    pub fn unfinished(&self) -> Result<Vec<PathBuf>> {
        let names = self.names()?;
        let ours = names.iter().filter(|x| is_leftover(x));
        Ok(ours.map(|x| self.path.join(x)).collect())
    }

    /// Removes the oldest good checkpoints until `keep` good ones are left; returns their numbers.
    ///
    /// Good is what passes verification at this level; [`VerifyLevel::Sizes`] is enough where the newest was
    /// just written, and reads no contents. Broken ones do not count and are left alone, as are the
    /// numbers in `protected`, which count. Emergency checkpoints, which may lack parts, do not count; they are removed
    /// once `keep` full ones are newer. If there are at most `keep` checkpoints, none is verified.
    ///
    /// # Errors
    ///
    /// I/O errors.
    pub fn prune(
        &self,
        keep: NonZeroUsize,
        level: VerifyLevel,
        protected: &[u64],
    ) -> Result<Vec<u64>> {
        let mut good = self.checkpoints()?;
        if good.len() <= keep.get() {
            return Ok(Vec::new());
        }
        good.retain(|x| x.verify(level).is_good());
        let full = good.iter().filter(|x| x.is_full()).count();
        let Some(mut excess) = full.checked_sub(keep.get()) else {
            return Ok(Vec::new());
        };
        // The newest good one is out of reach, whatever is protected.
        good.pop();
        let mut removed = Vec::new();
        for checkpoint in good {
            if protected.contains(&checkpoint.number()) {
                continue;
            }
            if checkpoint.is_full() {
                let Some(less) = excess.checked_sub(1) else {
                    break;
                };
                excess = less;
            }
            self.remove(&checkpoint)?;
            removed.push(checkpoint.number());
        }
        Ok(removed)
    }

    /// Removes a checkpoint of this folder. It loses its name first, so that no half of it can be
    /// taken for a checkpoint.
    fn remove(&self, checkpoint: &Checkpoint) -> Result<()> {
        let path = checkpoint.path();
        let name = name_of(checkpoint.number());
        let away = self.path.join(temporary(&name, State::Removed));
        let remove = || {
            // Nobody who sweeps shall take it away meanwhile; without a lock, that is all that happens.
            let _lock = staged::try_lock(path);
            self.vfs.rename(path, &away)?;
            self.vfs.sync_folder(&self.path)?;
            self.vfs.remove_any(&away)
        };
        remove().map_err(|error| Error::io("remove", path, error))
    }

    fn next_number(&self) -> Result<u64> {
        let last = self.checkpoints()?.last().map_or(0, Checkpoint::number);
        if last >= LARGEST {
            let message = format!(
                "{} has no number left for a checkpoint",
                self.path.display()
            );
            return Err(Error::new(Kind::Misuse, message));
        }
        Ok(last + 1)
    }

    fn create_on(vfs: Vfs, path: PathBuf) -> Result<Self> {
        if let Err(error) = make_folders(&vfs, &path) {
            // "It is not a folder" says more than "it could not be created".
            if fs::metadata(&path).is_ok_and(|x| !x.is_dir()) {
                return Err(not_a_folder(&path));
            }
            return Err(Error::io("make the folder of checkpoints", &path, error));
        }
        let folder = Self::open(path)?;
        Ok(Self { vfs, ..folder })
    }

    #[cfg(test)]
    pub(crate) fn with_vfs(self, vfs: Vfs) -> Self {
        Self { vfs, ..self }
    }

    /// Removes what processes that are gone have left; what cannot be removed is left.
    fn sweep(&self, now: Option<SystemTime>) -> Result<()> {
        staged::sweep(&self.vfs, &self.path, now, is_ours)
            .map_err(|error| Error::io("list", &self.path, error))
    }

    /// Names that are no text are none of ours.
    fn names(&self) -> Result<Vec<String>> {
        list(&self.path).map_err(|error| Error::io("list", &self.path, error))
    }
}

/// A folder of checkpoints or a checkpoint, at a path that a user gave.
///
/// ```
/// use std::num::NonZeroUsize;
/// use accelerator_manifest::{Folder, Metadata, internal::Place};
///
/// # fn main() -> accelerator_manifest::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// # let path = temporary.path().join("checkpoints/a");
/// let saved = Folder::create(&path)?.begin(0)?.commit(Metadata::new(NonZeroUsize::MIN))?;
/// assert!(matches!(Place::open(&path)?, Place::Folder(_)));
///
/// let place = Place::open(saved.path())?;
/// assert!(matches!(place, Place::Checkpoint(_)));
/// assert_eq!((place.path(), place.checkpoints()?.len()), (saved.path(), 1));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub enum Place {
    /// A folder of checkpoints, which may be empty.
    Folder(Folder),
    /// A checkpoint, valid or not.
    Checkpoint(Checkpoint),
}

impl Place {
    /// Opens the path: a folder that has a manifest is a checkpoint. So is one that has lost its manifest, if it has the
    /// name of a checkpoint and no checkpoints in it.
    ///
    /// # Errors
    ///
    /// The errors of [`Folder::open`] and [`Checkpoint::find`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let folder = Folder::open(path)?;
        if let Some(checkpoint) = Checkpoint::find(folder.path())? {
            return Ok(Self::Checkpoint(checkpoint));
        }
        match Checkpoint::at(folder.path()) {
            Ok(named) if folder.checkpoints()?.is_empty() => Ok(Self::Checkpoint(named)),
            _ => Ok(Self::Folder(folder)),
        }
    }

    /// Returns its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Folder(folder) => folder.path(),
            Self::Checkpoint(checkpoint) => checkpoint.path(),
        }
    }

    /// Returns the checkpoints of the folder, oldest first, or the single checkpoint. Reads no contents.
    ///
    /// # Errors
    ///
    /// I/O errors.
    pub fn checkpoints(&self) -> Result<Vec<Checkpoint>> {
        match self {
            Self::Folder(folder) => folder.checkpoints(),
            Self::Checkpoint(checkpoint) => Ok(vec![checkpoint.clone()]),
        }
    }
}

/// Makes a folder and those above it, from the top down, and flushes the name of each: files are
/// lost with a folder that has none.
fn make_folders(vfs: &Vfs, path: &Path) -> io::Result<()> {
    // The empty path has no parent, and is refused when it is opened.
    let Some(parent) = path.parent().filter(|_| !path.is_dir()) else {
        return Ok(());
    };
    let parent = match parent {
        here if here.as_os_str().is_empty() => Path::new("."),
        other => other,
    };
    if !parent.exists() {
        make_folders(vfs, parent)?;
    }
    match vfs.make_folder(path) {
        // Another process was faster, and may not have flushed it yet.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {
            vfs.sync_folder(parent)
        }
        Err(error) => Err(error),
        // Found by the next try, it would be taken for one that lasts.
        Ok(()) => vfs.sync_folder(parent).inspect_err(|_| {
            let _ = vfs.remove_empty(path);
        }),
    }
}

fn list(folder: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        if let Ok(name) = entry?.file_name().into_string() {
            names.push(name);
        }
    }
    Ok(names)
}

fn not_a_folder(path: &Path) -> Error {
    let message = format!(
        "expected a folder for checkpoints at {}, found a file; choose another name",
        path.display()
    );
    Error::new(Kind::Misuse, message)
}

#[cfg(test)]
mod tests;
