//! What is left in a folder of runs that nothing needs.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::{ListedRun, REMOVED, Runs};
use crate::error::{Error, Kind, Result};
use crate::journal::{Followed, Follower, JOURNAL, RunLock};
use crate::record::Record;
use crate::sink::Delivery;

/// A file or a folder that nothing needs.
///
/// ```
/// fn describe(leftover: &accelerator_track::Leftover) -> String {
///     format!("{} with {} bytes", leftover.path.display(), leftover.bytes)
/// }
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Leftover {
    /// Where it is.
    pub path: PathBuf,
    /// What its removal frees.
    pub bytes: u64,
    /// When the last of it was written.
    pub modified: SystemTime,
}

impl Runs {
    /// What nothing needs: files that were not written to their end, images that a resume superseded, runs whose removal
    /// was cut off. Runs that are being written, or cannot be read, have none.
    ///
    /// # Errors
    ///
    /// If the folder cannot be read.
    ///
    /// ```
    /// # let temporary = tempfile::tempdir().unwrap();
    /// let runs = accelerator_track::Runs::open(temporary.path())?;
    /// assert!(runs.leftovers()?.is_empty());
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    pub fn leftovers(&self) -> Result<Vec<Leftover>> {
        let mut found = self.removed()?;
        for run in self.list()? {
            if !RunLock::is_held(&run.folder) {
                found.extend(of_run(&run.folder));
            }
        }
        Ok(found.into_iter().map(Leftover::at).collect())
    }

    /// Removes [what nothing needs](Self::leftovers), and says what it was.
    ///
    /// # Errors
    ///
    /// If something cannot be removed.
    pub fn remove_leftovers(&self) -> Result<Vec<Leftover>> {
        let mut removed = Vec::new();
        let mut remove = |path: PathBuf| {
            let leftover = Leftover::at(path);
            leftover.remove()?;
            removed.push(leftover);
            Ok::<(), Error>(())
        };
        self.removed()?.into_iter().try_for_each(&mut remove)?;
        for run in self.list()? {
            // While it is held, the run does not go on and need what it left.
            if let Ok(_lock) = RunLock::take(&run.folder) {
                of_run(&run.folder).into_iter().try_for_each(&mut remove)?;
            }
        }
        Ok(removed)
    }

    /// Folders that are not runs yet: those of uploads, and those in which a program has not begun its journal. They stay
    /// where the program was killed; one that was written long ago is a leftover.
    ///
    /// # Errors
    ///
    /// If the folder cannot be read.
    ///
    /// ```
    /// # let temporary = tempfile::tempdir().unwrap();
    /// let runs = accelerator_track::Runs::open(temporary.path())?;
    /// std::fs::create_dir(temporary.path().join("mnist")).unwrap();
    /// let found = runs.unfinished()?;
    /// assert!(found[0].path.ends_with("mnist"));
    /// runs.remove_unfinished(&found[0])?;
    /// assert!(runs.unfinished()?.is_empty());
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    pub fn unfinished(&self) -> Result<Vec<Leftover>> {
        let mut found = self.entries()?;
        found.retain(|path| is_upload(path) || is_without_journal(path));
        found.sort();
        Ok(found.into_iter().map(Leftover::at).collect())
    }

    /// Removes an [unfinished](Self::unfinished) folder.
    ///
    /// # Errors
    ///
    /// If it was written since it was found, or cannot be removed.
    pub fn remove_unfinished(&self, found: &Leftover) -> Result<()> {
        let path = &found.path;
        let is_unchanged = Leftover::at(path.clone()) == *found;
        // While it is held, no run begins in it.
        let lock = (!is_upload(path))
            .then(|| RunLock::take(path))
            .transpose()?;
        if !is_unchanged || path.join(JOURNAL).exists() && lock.is_some() {
            return Err(Error::new(
                Kind::Conflict,
                format!("{} has been written since it was found", path.display()),
            ));
        }
        found.remove()
    }

    fn removed(&self) -> Result<Vec<PathBuf>> {
        let mut found = self.entries()?;
        found.retain(|path| starts(path, REMOVED));
        Ok(found)
    }

    fn entries(&self) -> Result<Vec<PathBuf>> {
        let folder = self.folder();
        let entries = fs::read_dir(folder);
        let entries = entries.map_err(|error| Error::io("read the folder", folder, error))?;
        Ok(entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .collect())
    }
}

impl ListedRun {
    /// How much of the disk its folder takes, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        bytes_of(&self.folder)
    }
}

impl Leftover {
    fn at(path: PathBuf) -> Self {
        Self {
            bytes: bytes_of(&path),
            modified: modified(&path),
            path,
        }
    }

    fn remove(&self) -> Result<()> {
        let removed = match self.path.is_dir() {
            true => fs::remove_dir_all(&self.path),
            false => fs::remove_file(&self.path),
        };
        match removed {
            // Another process was quicker.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(|error| Error::io("remove", &self.path, error)),
        }
    }
}

/// Where an upload puts a run's files until all are there.
fn is_upload(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    starts(path, ".") && name.contains(UPLOADING)
}

/// Has nothing but what a run has before its journal: other folders are somebody's.
fn is_without_journal(path: &Path) -> bool {
    if starts(path, ".") || !path.is_dir() || RunLock::is_held(path) {
        return false;
    }
    let Ok(entries) = fs::read_dir(path) else {
        return false;
    };
    let is_of_start = |entry: fs::DirEntry| entry.file_name() == LOCK;
    entries
        .into_iter()
        .all(|entry| entry.is_ok_and(is_of_start))
}

fn of_run(folder: &Path) -> Vec<PathBuf> {
    let staged = files(folder).filter(|path| {
        starts(path, TEMPORARY) || path.extension().is_some_and(|extension| extension == "new")
    });
    let mut found: Vec<PathBuf> = staged.collect();
    let blobs: Vec<PathBuf> = files(&folder.join("blobs")).collect();
    if !blobs.is_empty()
        && let Ok(Some(referenced)) = referenced(folder)
    {
        let is_referenced = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default();
            referenced.contains(&*name.to_string_lossy())
        };
        found.extend(blobs.into_iter().filter(|path| !is_referenced(path)));
    }
    found
}

/// The strings of the journal's entries that still count, among them all names of blobs; none where a newer program wrote
/// entries of which it is not known what they refer to.
fn referenced(folder: &Path) -> Result<Option<HashSet<String>>> {
    let mut strings = HashSet::new();
    let mut journal = Follower::open(&folder.join(JOURNAL), Delivery::Live)?;
    loop {
        let Followed::Entries(entries) = journal.poll(BATCH)? else {
            strings.clear();
            continue;
        };
        if entries.is_empty() {
            return Ok(Some(strings));
        }
        for entry in entries {
            match entry.record {
                Record::Metrics(_) => {}
                Record::Unknown => return Ok(None),
                record => match serde_json::to_value(record) {
                    Ok(value) => collect(value, &mut strings),
                    Err(_) => return Ok(None),
                },
            }
        }
    }
}

fn collect(value: Value, strings: &mut HashSet<String>) {
    match value {
        Value::String(text) => {
            strings.insert(text);
        }
        Value::Array(values) => values.into_iter().for_each(|x| collect(x, strings)),
        Value::Object(values) => values.into_values().for_each(|x| collect(x, strings)),
        _ => {}
    }
}

fn files(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.filter(|path| path.is_file())
}

fn starts(path: &Path, prefix: &str) -> bool {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().starts_with(prefix)
}

/// Of a link its own, not those of what it refers to.
fn bytes_of(path: &Path) -> u64 {
    let Ok(metadata) = fs::symlink_metadata(path) else {
        return 0;
    };
    if !metadata.is_dir() {
        return metadata.len();
    }
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.map(|entry| bytes_of(&entry.path())).sum()
}

/// The newest of a folder and what is in it.
fn modified(path: &Path) -> SystemTime {
    let own = fs::symlink_metadata(path).and_then(|found| found.modified());
    let is_folder = path.is_dir() && !path.is_symlink();
    let entries = is_folder.then(|| fs::read_dir(path).ok()).flatten();
    let below = entries.into_iter().flatten().flatten();
    let below = below.map(|entry| modified(&entry.path()));
    below.chain(own).max().unwrap_or(UNIX_EPOCH)
}

/// How the files begin that `tempfile` writes.
const TEMPORARY: &str = ".tmp";
/// What is in the names of folders to which runs are uploaded.
const UPLOADING: &str = ".uploading-";
/// The file that a program locks before it begins a journal.
const LOCK: &str = "lock";
const BATCH: usize = 8192;
