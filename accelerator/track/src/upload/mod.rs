//! Copying finished runs to another folder, with their artifacts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use accelerator_manifest::StagedFolder;

use self::marker::{Marker, UploadState};
use self::place::Place;
use crate::artifact::source::{self, SourceFile};
use crate::artifact::{ArtifactId, ArtifactStore, OnConflict};
use crate::error::{Error, Kind, Result};
use crate::history::RunHistory;
use crate::journal::JOURNAL;
use crate::run_files::{LOCK, SUMMARY, UPLOAD};
use crate::run_id::RunId;

mod marker;
mod place;
#[cfg(test)]
mod tests;

/// Copies a run, and the artifacts that it made and used, to a folder of runs on another disk or a mounted file system.
///
/// The run is there with all of its files, or not at all. An upload that was killed goes on where it was when it is
/// called again: files that are there with their hashes are not copied twice. A run that went on since its last upload
/// is brought up to date; one that did not is left as it is. The destination is a folder of runs as the one that it came
/// from.
///
/// Where another run has the name there, [`OnConflict::NewVersion`] uses the next free name (`mnist-2`),
/// [`OnConflict::Replace`] removes that run when this one is whole, unless its folder holds what neither it nor its upload put there,
/// [`OnConflict::Skip`] copies nothing and
/// [`OnConflict::Error`] is an error. The same holds for versions of artifacts whose number has other contents there;
/// skipped ones stay what they are there. An alias is given where the destination does not have it.
///
/// ```
/// use accelerator_track::{MakeFolder, OnConflict, Run, RunHistory, upload};
///
/// # fn main() -> accelerator_track::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// let run = Run::builder("mnist").runs_folder(temporary.path().join("runs")).start()?;
/// run.log("train", [("loss", 0.5)], 1, None);
/// let folder = run.folder().to_owned();
/// run.finish()?;
///
/// let shared = temporary.path().join("shared/runs");
/// let report = upload(&folder, &shared, MakeFolder::Yes, OnConflict::Error)?;
/// assert_eq!(report.folder, shared.join("mnist"));
/// assert_eq!(RunHistory::read(&report.folder)?.last_step(), Some(1));
///
/// let again = upload(&folder, &shared, MakeFolder::No, OnConflict::Error)?;
/// assert_eq!((again.copied_files, again.present_files), (0, report.copied_files));
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// If the folder has no run, or one that is being written or uploaded; if the destination is not there, where
/// [`MakeFolder::No`] is given, or cannot be written; if a file changes while it is read; and those of `on_conflict`.
pub fn upload(
    run_folder: impl AsRef<Path>,
    destination: impl AsRef<Path>,
    make_folder: MakeFolder,
    on_conflict: OnConflict,
) -> Result<UploadReport> {
    let run_folder = run_folder.as_ref();
    let run_folder =
        std::path::absolute(run_folder).map_err(|error| Error::io("find", run_folder, error))?;
    let destination = destination.as_ref();
    let _alone = lock(&run_folder)?;
    if place::is_written(&run_folder) {
        let message = format!(
            "the run in {} is being written; upload it when it has ended",
            run_folder.display()
        );
        return Err(Error::new(Kind::Conflict, message));
    }
    let run = RunHistory::read(&run_folder)?;
    let (Some(runs), Some(name)) = (
        run_folder.parent(),
        run_folder.file_name().and_then(|name| name.to_str()),
    ) else {
        let message = format!(
            "the name of {} is no text in UTF-8; rename it",
            run_folder.display()
        );
        return Err(Error::new(Kind::Misuse, message));
    };
    prepare(destination, make_folder)?;
    let canonical =
        |path: &Path| fs::canonicalize(path).map_err(|error| Error::io("find", path, error));
    if canonical(runs)? == canonical(destination)? {
        let message = format!(
            "the run {name} lies in {} already; upload it to another folder",
            destination.display()
        );
        return Err(Error::new(Kind::Misuse, message));
    }

    let Some(place) = Place::choose(destination, name, run.id, on_conflict)? else {
        return Ok(UploadReport {
            outcome: UploadOutcome::Skipped,
            ..UploadReport::new(destination.join(name))
        });
    };
    let mut report = UploadReport::new(place.target.clone());
    let store = ArtifactStore::of_runs(destination);
    // Until the run is there, nothing else shows that they are needed.
    let _kept = match run.artifacts.is_empty() {
        true => None,
        false => Some(store.make()?),
    };
    copy_artifacts(&run, runs, &store, on_conflict, &mut report)?;
    copy_files(&run_folder, &place, run.id, &mut report)?;
    place.publish()?;
    Ok(report)
}

/// Whether a destination that is not there is made.
///
/// ```
/// use accelerator_track::{MakeFolder, OnConflict, Run, upload};
///
/// # fn main() -> accelerator_track::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// let run = Run::builder("mnist").runs_folder(temporary.path().join("runs")).start()?;
/// let folder = run.folder().to_owned();
/// run.finish()?;
/// let missing = temporary.path().join("not/mounted");
/// let error = upload(&folder, &missing, MakeFolder::No, OnConflict::Error).unwrap_err();
/// assert!(error.is_not_found());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum MakeFolder {
    /// It is made, with the folders above it.
    Yes,
    /// It is an error: nothing is mounted there, or the path is wrong.
    No,
}

/// What [`upload`] did.
///
/// ```
/// use accelerator_track::{UploadOutcome, UploadReport};
///
/// fn print(report: &UploadReport) {
///     match report.outcome {
///         UploadOutcome::Uploaded => println!(
///             "{}: {} files copied ({} bytes), {} there already",
///             report.folder.display(), report.copied_files, report.copied_bytes, report.present_files
///         ),
///         UploadOutcome::Skipped => println!("{} is another run", report.folder.display()),
///     }
/// }
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct UploadReport {
    /// Where the run lies now; for one that was skipped, where the other one lies.
    pub folder: PathBuf,
    /// Whether it was copied.
    pub outcome: UploadOutcome,
    /// Files of the run that were copied.
    pub copied_files: usize,
    /// Files of the run that were there.
    pub present_files: usize,
    /// The length of what was copied, of the run and of its artifacts.
    pub copied_bytes: u64,
    /// The run's artifacts, with the versions that they are at the destination.
    pub artifacts: Vec<UploadedArtifact>,
    /// The run's artifacts that its own store does not have any more.
    pub missing: Vec<ArtifactId>,
}

/// Whether a run was copied.
///
/// ```
/// assert_ne!(accelerator_track::UploadOutcome::Uploaded, accelerator_track::UploadOutcome::Skipped);
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum UploadOutcome {
    /// All of it is at the destination.
    Uploaded,
    /// Another run has its name there, and stays.
    Skipped,
}

/// An artifact at the destination of an [`upload`].
///
/// ```
/// fn has_moved(artifact: &accelerator_track::UploadedArtifact) -> bool {
///     artifact.stored_as != artifact.artifact.to_string()
/// }
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct UploadedArtifact {
    /// What the run calls it.
    pub artifact: ArtifactId,
    /// What opens it there: `model:v3`. With [`OnConflict::Skip`] it may have other contents.
    pub stored_as: String,
}

impl UploadReport {
    fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            outcome: UploadOutcome::Uploaded,
            copied_files: 0,
            present_files: 0,
            copied_bytes: 0,
            artifacts: Vec::new(),
            missing: Vec::new(),
        }
    }
}

/// Copies the files of a run's folder, the journal last: without one, or with an older one, the folder is no run, or an
/// older state of it.
fn copy_files(from: &Path, place: &Place, run: RunId, report: &mut UploadReport) -> Result<()> {
    let work = &place.work;
    let mut names = source::files_below(from)?;
    names.retain(|(name, _)| !is_kept_back(name));
    names.sort_by_key(|(name, _)| name == JOURNAL);
    let (mut hashes, mut wanted) = (BTreeMap::new(), Vec::new());
    for (name, path) in names {
        let source = SourceFile::read(&path)?;
        let to = below(work, &name);
        if SourceFile::read(&to).is_ok_and(|there| there.hash == source.hash) {
            report.present_files += 1;
        } else {
            wanted.push((source.clone(), to));
        }
        hashes.insert(name, Some(source.hash));
    }
    fs::create_dir_all(work).map_err(|error| Error::io("create the folder", work, error))?;
    // Removes what an upload that was killed has left, too.
    let staged = StagedFolder::create(work, UPLOAD, |target| target == UPLOAD)
        .map_err(|error| Error::io("create a folder in", work, error))?;
    let before = Marker::read(work).filter(|marker| marker.run == run);
    let state = UploadState::Complete;
    let complete = Marker {
        run,
        state,
        files: hashes,
    };
    if wanted.is_empty() && before.as_ref() == Some(&complete) {
        return Ok(());
    }
    let earlier = before.map(|marker| marker.files).unwrap_or_default();
    let files = complete
        .files
        .keys()
        .chain(earlier.keys())
        .map(|name| (name.clone(), None));
    let state = UploadState::Partial;
    Marker {
        run,
        state,
        files: files.collect(),
    }
    .write(&staged, work)?;
    for (source, to) in wanted {
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder)
                .map_err(|error| Error::io("create the folder", folder, error))?;
        }
        source.copy(&staged.path().join(COPY))?;
        staged
            .publish(COPY, &to)
            .map_err(|error| Error::io("write", &to, error))?;
        report.copied_files += 1;
        report.copied_bytes += source.bytes;
    }
    // What an earlier upload brought and the run does not have any more.
    for name in earlier
        .keys()
        .filter(|name| !complete.files.contains_key(*name))
    {
        let leads_elsewhere = name.split('/').any(|part| matches!(part, "" | "." | ".."));
        if leads_elsewhere {
            continue;
        }
        let path = below(work, name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Error::io("remove", &path, error));
            }
            _ => {}
        }
    }
    complete.write(&staged, work)
}

fn copy_artifacts(
    run: &RunHistory,
    runs: &Path,
    to: &ArtifactStore,
    on_conflict: OnConflict,
    report: &mut UploadReport,
) -> Result<()> {
    let from = ArtifactStore::of_runs(runs);
    let artifacts: BTreeSet<_> = run
        .artifacts
        .iter()
        .map(|used| ArtifactId {
            name: used.name.clone(),
            version: used.version,
            digest: used.digest.clone(),
        })
        .collect();
    for artifact in artifacts {
        let stored = match from.open(&artifact.to_string()) {
            Err(error) if error.is_not_found() => None,
            opened => Some(opened?).filter(|stored| stored.digest().to_string() == artifact.digest),
        };
        let Some(stored) = stored else {
            report.missing.push(artifact);
            continue;
        };
        let (there, bytes) = to.import(&stored, on_conflict)?;
        report.copied_bytes += bytes;
        report.artifacts.push(UploadedArtifact {
            artifact,
            stored_as: there.reference(),
        });
    }
    Ok(())
}

/// Keeps others from uploading the run; nothing is written for it, since the run may lie where nothing can be.
fn lock(run_folder: &Path) -> Result<Option<File>> {
    let Ok(file) = File::open(run_folder) else {
        // Either there is none, which is said when it is read, or the system does not open folders.
        return Ok(None);
    };
    let locked = place::wait_for(|| match file.try_lock() {
        Ok(()) => Some(()),
        Err(TryLockError::WouldBlock) => None,
        // The file system has no locks.
        Err(TryLockError::Error(_)) => Some(()),
    });
    match locked {
        Some(()) => Ok(Some(file)),
        None => Err(Error::new(
            Kind::Conflict,
            format!(
                "the run in {} is being uploaded by another process; wait until that has ended",
                run_folder.display()
            ),
        )),
    }
}

fn prepare(destination: &Path, make_folder: MakeFolder) -> Result<()> {
    match make_folder {
        MakeFolder::Yes => fs::create_dir_all(destination)
            .map_err(|error| Error::io("create the folder", destination, error)),
        MakeFolder::No if destination.is_dir() => Ok(()),
        MakeFolder::No => Err(Error::new(
            Kind::NotFound,
            format!(
                "there is no folder {} to upload to; mount it, correct the path, or have it made",
                destination.display()
            ),
        )),
    }
}

/// Whether a file of a run's folder belongs to where it lies: a lock, or what is computed anew.
fn is_kept_back(name: &str) -> bool {
    matches!(name, UPLOAD | LOCK | SUMMARY) || !name.contains('/') && name.ends_with(".lock")
}

fn below(folder: &Path, name: &str) -> PathBuf {
    name.split('/')
        .fold(folder.to_owned(), |path, part| path.join(part))
}

const COPY: &str = "copy";
