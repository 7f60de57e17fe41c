//! Removes what nothing needs from a folder of runs: leftover files, and artifacts of runs that are gone.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::{ListedRun, RunSummary, Runs};
use crate::artifact::{ArtifactStore, PruneReport, Retention};
use crate::error::{Error, Kind, Result};
use crate::journal::{Followed, Follower, JOURNAL, RunLock};
use crate::record::{Record, RunId};
use crate::run_files::{self, BLOBS, LOCK, RunFiles};
use crate::sink::Delivery;

/// A file or a folder that nothing needs.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Leftover {
    /// Its path.
    pub path: PathBuf,
    /// The bytes that its removal frees.
    pub bytes: u64,
    /// The time at which the last of it was written.
    pub modified: SystemTime,
}

/// Finds files that nothing needs: incomplete files of runs, images that a resume superseded, and runs whose removal was
/// interrupted. Runs that are being written, or cannot be read, have no leftovers, and files that a run did not write
/// are not leftovers.
///
/// # Errors
///
/// If the folder cannot be read.
///
/// ```
/// use accelerator_track::internal::{leftovers, remove_leftovers};
///
/// # let temporary = tempfile::tempdir().unwrap();
/// let runs = accelerator_track::Runs::open(temporary.path())?;
/// let found = leftovers(&runs)?;
/// assert!(found.is_empty());
/// assert_eq!(remove_leftovers(&runs, &found)?, found);
/// # Ok::<(), accelerator_track::Error>(())
/// ```
pub fn leftovers(runs: &Runs) -> Result<Vec<Leftover>> {
    let mut found = Vec::new();
    for folder in entries(runs)? {
        if !RunLock::is_held(&folder) {
            found.extend(of_folder(&folder));
        }
    }
    Ok(found.into_iter().map(Leftover::at).collect())
}

/// Removes those of the [found](leftovers) files that still nothing needs. Returns those that it has removed.
///
/// # Errors
///
/// If something cannot be removed.
pub fn remove_leftovers(runs: &Runs, found: &[Leftover]) -> Result<Vec<Leftover>> {
    let mut removed = Vec::new();
    for folder in entries(runs)? {
        let is_concerned = found.iter().any(|x| x.path.starts_with(&folder));
        // While it is held, the run cannot continue and need its leftovers.
        let Some(Ok(_lock)) = is_concerned.then(|| RunLock::take(&folder)) else {
            continue;
        };
        for path in of_folder(&folder) {
            if found.iter().any(|x| x.path == path) {
                let leftover = Leftover::at(path);
                leftover.remove()?;
                removed.push(leftover);
            }
        }
    }
    Ok(removed)
}

/// Finds folders that are not runs yet: those of uploads, and those in which a program has not begun its journal. They
/// stay if the program was killed; one that was written long ago is a leftover.
///
/// # Errors
///
/// If the folder cannot be read.
///
/// ```
/// use accelerator_track::internal::{remove_unfinished, unfinished};
///
/// # let temporary = tempfile::tempdir().unwrap();
/// let runs = accelerator_track::Runs::open(temporary.path())?;
/// std::fs::create_dir(temporary.path().join("mnist")).unwrap();
/// let found = unfinished(&runs)?;
/// assert!(found[0].path.ends_with("mnist"));
/// remove_unfinished(&found[0])?;
/// assert!(unfinished(&runs)?.is_empty());
/// # Ok::<(), accelerator_track::Error>(())
/// ```
pub fn unfinished(runs: &Runs) -> Result<Vec<Leftover>> {
    let mut found = entries(runs)?;
    found.retain(|path| is_upload(path) || is_without_journal(path));
    Ok(found.into_iter().map(Leftover::at).collect())
}

/// Removes an [unfinished] folder.
///
/// # Errors
///
/// If it was written since it was found, or cannot be removed.
pub fn remove_unfinished(found: &Leftover) -> Result<()> {
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

/// Finds the versions of artifacts that nothing needs once some runs are removed: no other run made or uses them, they
/// have no alias, and they are not the latest. A version that no run made is kept: a user put it there.
///
/// # Errors
///
/// If a run or an artifact cannot be read, so that its references are unknown.
///
/// ```
/// use accelerator_track::internal::{remove_artifacts, unneeded_artifacts};
///
/// # let temporary = tempfile::tempdir().unwrap();
/// let runs = accelerator_track::Runs::open(temporary.path())?;
/// let found = unneeded_artifacts(&runs, &runs.list()?)?;
/// assert_eq!(remove_artifacts(&runs, &found)?, found);
/// # Ok::<(), accelerator_track::Error>(())
/// ```
pub fn unneeded_artifacts(runs: &Runs, removed: &[ListedRun]) -> Result<PruneReport> {
    let removed: HashSet<_> = removed.iter().map(|run| run.folder.as_path()).collect();
    ArtifactStore::of_runs(runs.folder()).plan_prune(&needed(runs, &removed)?)
}

/// Removes those of the [found](unneeded_artifacts) versions that still nothing needs. No run can begin to use one
/// meanwhile.
///
/// # Errors
///
/// As for [`unneeded_artifacts`], in which case nothing is removed, and if the store cannot be written.
pub fn remove_artifacts(runs: &Runs, found: &PruneReport) -> Result<PruneReport> {
    ArtifactStore::of_runs(runs.folder()).prune_with(|| {
        Ok(Retention {
            among: Some(found.versions.clone()),
            ..needed(runs, &HashSet::new())?
        })
    })
}

/// Returns the versions to keep if all runs except some are there.
fn needed(runs: &Runs, removed: &HashSet<&Path>) -> Result<Retention> {
    let store = ArtifactStore::of_runs(runs.folder());
    let mut kept = BTreeSet::new();
    let mut makers: HashSet<RunId> = HashSet::new();
    for run in runs.list()? {
        if removed.contains(run.folder.as_path()) {
            continue;
        }
        let run = RunSummary::read(&run.folder)?;
        makers.insert(run.id);
        let artifacts = run.artifacts.into_iter();
        kept.extend(artifacts.map(|artifact| (artifact.name, artifact.version)));
    }
    for name in store.names()? {
        for version in store.versions(&name)? {
            if version.run().is_none_or(|run| makers.contains(&run)) {
                kept.insert((name.clone(), version.version()));
            }
        }
    }
    Ok(Retention {
        last: 1,
        is_aliased_kept: true,
        kept,
        among: None,
    })
}

/// Returns the entries of the folder, sorted.
fn entries(runs: &Runs) -> Result<Vec<PathBuf>> {
    let folder = runs.folder();
    let entries = fs::read_dir(folder);
    let entries = entries.map_err(|error| Error::io("read the folder", folder, error))?;
    let mut entries: Vec<_> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    entries.sort();
    Ok(entries)
}

impl ListedRun {
    /// Returns the disk space of the files that the run wrote, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        bytes_of_run(&self.folder)
    }
}

impl Leftover {
    fn at(path: PathBuf) -> Self {
        let is_run = path.is_dir() && !is_upload(&path);
        Self {
            bytes: match is_run {
                true => bytes_of_run(&path),
                false => bytes_of(&path),
            },
            modified: modified(&path),
            path,
        }
    }

    fn remove(&self) -> Result<()> {
        let path = &self.path;
        let removed = match path.is_dir() {
            true if is_upload(path) => fs::remove_dir_all(path),
            true => return run_files::remove(path).map(drop),
            false => fs::remove_file(path),
        };
        match removed {
            // Another process was quicker.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(|error| Error::io("remove", path, error)),
        }
    }
}

/// Returns true for the folder in which an upload collects a run's files.
fn is_upload(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let run = name.rsplit_once(UPLOADING);
    name.starts_with('.') && run.is_some_and(|(_, run)| run.parse::<RunId>().is_ok())
}

/// Returns true for a folder that holds only what a run has before its journal: other folders are somebody's.
fn is_without_journal(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if name.starts_with('.') || !path.is_dir() || RunLock::is_held(path) {
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

/// Returns the leftovers in one entry of the folder of runs.
fn of_folder(folder: &Path) -> Vec<PathBuf> {
    if run_files::is_cut_off(folder) {
        return vec![folder.to_owned()];
    }
    let (true, Ok(files)) = (Runs::is_run(folder), RunFiles::list(folder)) else {
        return Vec::new();
    };
    let blobs = folder.join(BLOBS);
    let is_blob = |path: &Path| path.parent() == Some(&blobs);
    let has_blobs = files.own.iter().any(|path| is_blob(path));
    let referenced = has_blobs.then(|| referenced(folder).ok().flatten());
    let is_left = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        match run_files::is_staged(&name) {
            true => is_blob(path) || path.parent() == Some(folder),
            false if is_blob(path) => {
                matches!(&referenced, Some(Some(names)) if !names.contains(&*name))
            }
            false => false,
        }
    };
    files.own.into_iter().filter(is_left).collect()
}

/// Returns the strings of the journal's entries that still count, among them all names of blobs; `None` if a newer program
/// wrote entries of which it is not known what they refer to.
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

fn bytes_of_run(folder: &Path) -> u64 {
    let files = RunFiles::list(folder).unwrap_or_default();
    files.own.iter().map(|path| bytes_of(path)).sum()
}

/// Returns the bytes of a file or folder; a link counts by itself.
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

/// Returns the newest time of a folder and everything in it.
fn modified(path: &Path) -> SystemTime {
    let own = fs::symlink_metadata(path).and_then(|found| found.modified());
    let is_folder = path.is_dir() && !path.is_symlink();
    let entries = is_folder.then(|| fs::read_dir(path).ok()).flatten();
    let below = entries.into_iter().flatten().flatten();
    let below = below.map(|entry| modified(&entry.path()));
    below.chain(own).max().unwrap_or(UNIX_EPOCH)
}

/// A part of the names of folders to which runs are uploaded.
const UPLOADING: &str = ".uploading-";
const BATCH: usize = 8192;
