//! Copies a finished run to another folder of runs, with its artifacts.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use accelerator_host::fs::{Durability, place, sync_folder};
use accelerator_manifest::internal::StagedFolder;

use crate::artifact::objects::{self, SourceFile};
use crate::artifact::{ArtifactId, ArtifactStore};
use crate::error::{Error, Kind, Result};
use crate::history::{HistoryReader, RunHistory};
use crate::journal::{JOURNAL, RunLock};
use crate::record::RunId;
use crate::run_files::{LOCK, RunFiles, SUMMARY, TENSORBOARD};

/// Copies a run, and the artifacts that it made and used, to a folder of runs on another disk or a mounted file system.
///
/// The run appears there with all of its files, or not at all. Files that are there already are not copied again: an
/// upload that was killed continues, and a run that was written since its last upload is brought up to date. If another
/// run has the name there, the copy gets the next free one (`mnist-2`); if a version of an artifact has other contents
/// there, the copy becomes a new version.
///
/// ```
/// use accelerator_track::{Run, RunHistory, upload};
///
/// # fn main() -> accelerator_track::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// let run = Run::builder("mnist").runs_folder(temporary.path().join("runs")).start()?;
/// run.log("train", [("loss", 0.5)], 1, None);
/// let folder = run.folder().to_owned();
/// run.finish()?;
///
/// let shared = temporary.path().join("shared");
/// std::fs::create_dir(&shared).unwrap();
/// let report = upload(&folder, &shared)?;
/// assert_eq!(report.folder, shared.join("mnist"));
/// assert_eq!(RunHistory::read(&report.folder)?.last_step(), Some(1));
/// assert_eq!(upload(&folder, &shared)?.copied_bytes, 0);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// If the folder has no run, or one that is being written; if the destination does not exist or cannot be written; or
/// if a file changes while it is read.
pub fn upload(run_folder: impl AsRef<Path>, destination: impl AsRef<Path>) -> Result<UploadReport> {
    let run_folder = run_folder.as_ref();
    let run_folder =
        std::path::absolute(run_folder).map_err(|error| Error::io("find", run_folder, error))?;
    let destination = destination.as_ref();
    if RunLock::is_held(&run_folder) {
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
            "the name of {} is not UTF-8; rename it",
            run_folder.display()
        );
        return Err(Error::new(Kind::Misuse, message));
    };
    if !destination.is_dir() {
        let message = format!(
            "there is no folder {} to upload to; mount it, create it, or correct the path",
            destination.display()
        );
        return Err(Error::new(Kind::NotFound, message));
    }
    let canonical =
        |path: &Path| fs::canonicalize(path).map_err(|error| Error::io("find", path, error));
    if canonical(runs)? == canonical(destination)? {
        let message = format!(
            "the run {name} is in {} already; upload it to another folder",
            destination.display()
        );
        return Err(Error::new(Kind::Misuse, message));
    }

    let target = target(destination, name, run.id)?;
    let mut report = UploadReport {
        folder: target.clone(),
        copied_bytes: 0,
        missing: Vec::new(),
    };
    let store = ArtifactStore::of_runs(destination);
    // Nothing else shows that they are needed before the run appears.
    let _kept = match run.artifacts.is_empty() {
        true => None,
        false => Some(store.make()?),
    };
    copy_artifacts(&run, runs, &store, &mut report)?;
    if target.exists() {
        copy_files(&run_folder, &target, &mut report)?;
        return Ok(report);
    }
    let hidden = destination.join(format!(".{name}.uploading-{}", run.id));
    copy_files(&run_folder, &hidden, &mut report)?;
    place(&hidden, &target, Durability::Cached)
        .map_err(|error| Error::io("write the folder", &target, error))?;
    // The files of the run are on the disk. If the folder cannot be flushed, a power cut may lose the name.
    let _ = sync_folder(destination);
    Ok(report)
}

/// The result of an [`upload`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct UploadReport {
    /// The folder of the run at the destination.
    pub folder: PathBuf,
    /// The bytes that were copied, of the run and of artifacts.
    pub copied_bytes: u64,
    /// Artifacts of the run that were removed from its store before.
    pub missing: Vec<ArtifactId>,
}

/// Returns the folder of the run at the destination, or the first free one of its name.
fn target(destination: &Path, name: &str, run: RunId) -> Result<PathBuf> {
    let mut number = 1_u32;
    loop {
        let target = destination.join(match number {
            1 => name.to_owned(),
            _ => format!("{name}-{number}"),
        });
        let exists = target
            .try_exists()
            .map_err(|error| Error::io("read", &target, error))?;
        let is_it = || HistoryReader::open(&target).is_ok_and(|there| there.history().id == run);
        if !exists || is_it() {
            return Ok(target);
        }
        number += 1;
    }
}

/// Copies the files of a run, the journal last: a folder without one is no run yet.
fn copy_files(from: &Path, to: &Path, report: &mut UploadReport) -> Result<()> {
    const COPY: &str = "copy";
    let mut names = objects::files_below(from)?;
    names.retain(|(name, _)| !is_kept_back(name));
    names.sort_by_key(|(name, _)| name == JOURNAL);
    fs::create_dir_all(to).map_err(|error| Error::io("create the folder", to, error))?;
    // Also removes the copy that a killed upload left.
    let staged = StagedFolder::create(to, COPY, |target| target == COPY)
        .map_err(|error| Error::io("create a folder in", to, error))?;
    let mut kept = BTreeSet::new();
    for (name, path) in names {
        let source = SourceFile::read(&path)?;
        let target = name
            .split('/')
            .fold(to.to_owned(), |path, part| path.join(part));
        kept.insert(target.clone());
        if SourceFile::read(&target).is_ok_and(|there| there.hash == source.hash) {
            continue;
        }
        if let Some(folder) = target.parent() {
            fs::create_dir_all(folder)
                .map_err(|error| Error::io("create the folder", folder, error))?;
        }
        source.copy(&staged.path().join(COPY))?;
        staged
            .publish(COPY, &target)
            .map_err(|error| Error::io("write", &target, error))?;
        report.copied_bytes += source.bytes;
    }
    // A resume writes events anew, and TensorBoard would also show those of an earlier upload.
    let events = to.join(TENSORBOARD);
    if kept.iter().any(|path| path.starts_with(&events)) {
        let there = RunFiles::list(to)?.own.into_iter();
        for path in there.filter(|path| path.starts_with(&events) && !kept.contains(path)) {
            fs::remove_file(&path).map_err(|error| Error::io("remove", &path, error))?;
        }
    }
    Ok(())
}

fn copy_artifacts(
    run: &RunHistory,
    runs: &Path,
    to: &ArtifactStore,
    report: &mut UploadReport,
) -> Result<()> {
    let from = ArtifactStore::of_runs(runs);
    let artifacts = run.artifacts.iter().map(|used| ArtifactId {
        name: used.name.clone(),
        version: used.version,
        digest: used.digest.clone(),
    });
    for artifact in BTreeSet::from_iter(artifacts) {
        let stored = match from.open(&artifact.to_string()) {
            Err(error) if error.is_not_found() => None,
            opened => Some(opened?).filter(|stored| stored.digest().to_string() == artifact.digest),
        };
        match stored {
            Some(stored) => report.copied_bytes += to.import(&stored)?.1,
            None => report.missing.push(artifact),
        }
    }
    Ok(())
}

/// Returns true for files that belong to where the run is: locks, and what is computed anew.
fn is_kept_back(name: &str) -> bool {
    matches!(name, LOCK | SUMMARY) || !name.contains('/') && name.ends_with(".lock")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::artifact::Artifact;
    use crate::run::Run;

    fn trained(runs: &Path, weights: &str) -> PathBuf {
        let run = Run::builder("mnist").runs_folder(runs).start().unwrap();
        run.log("train", [("loss", 0.5)], 1, None);
        let file = runs.join("weights");
        fs::write(&file, weights).unwrap();
        let model = Artifact::create("model").add_file(&file).unwrap();
        run.mark_output(model).unwrap();
        let folder = run.folder().to_owned();
        run.finish().unwrap();
        folder
    }

    fn id(folder: &Path) -> RunId {
        RunHistory::read(folder).unwrap().id
    }

    #[test]
    fn a_run_comes_with_its_artifacts_and_once() {
        let temporary = tempfile::tempdir().unwrap();
        let [ours, theirs, shared] = ["ours", "theirs", "shared"].map(|x| temporary.path().join(x));
        for folder in [&ours, &theirs, &shared] {
            fs::create_dir(folder).unwrap();
        }
        let (first, second) = (trained(&ours, "one"), trained(&theirs, "two"));
        fs::write(first.join("summary.json"), "{}").unwrap();
        fs::write(first.join("notes.txt"), "mine").unwrap();
        let report = upload(&first, &shared).unwrap();
        assert_eq!(report.folder, shared.join("mnist"));
        assert!(report.copied_bytes > 0 && report.missing.is_empty());
        assert_eq!(id(&report.folder), id(&first));
        assert!(report.folder.join("notes.txt").exists());
        assert!(!report.folder.join("lock").exists() && !report.folder.join(SUMMARY).exists());
        let store = ArtifactStore::of_runs(&shared);
        let weights = |reference: &str| store.open(reference).unwrap().read("weights").unwrap();
        assert_eq!(weights("model:v1"), b"one");

        // Another run of the name, whose artifact has other contents.
        for copied in [true, false] {
            let report = upload(&second, &shared).unwrap();
            assert_eq!(report.folder, shared.join("mnist-2"));
            assert_eq!(report.copied_bytes > 0, copied);
            assert_eq!(id(&report.folder), id(&second));
        }
        assert_eq!(weights("model:v2"), b"two");

        // Damage is mended, events that the run replaced go, and what others put there stays.
        let there = shared.join("mnist");
        let events = |at: u32| format!("tensorboard/events.out.tfevents.{at}.1.{}", id(&first));
        fs::create_dir(first.join("tensorboard")).unwrap();
        fs::write(first.join(events(1)), "new").unwrap();
        fs::create_dir(there.join("tensorboard")).unwrap();
        fs::write(there.join(events(0)), "earlier").unwrap();
        fs::write(there.join("notes.txt"), "damaged").unwrap();
        fs::write(there.join("others.txt"), "good").unwrap();
        upload(&first, &shared).unwrap();
        assert_eq!(fs::read(there.join("notes.txt")).unwrap(), b"mine");
        assert!(there.join("others.txt").exists());
        assert!(there.join(events(1)).exists() && !there.join(events(0)).exists());
        let names = fs::read_dir(&shared).unwrap();
        assert_eq!(names.count(), 3, "two runs and the artifacts");
    }

    #[test]
    fn an_upload_that_was_killed_continues() {
        let temporary = tempfile::tempdir().unwrap();
        let [runs, shared] = ["runs", "shared"].map(|x| temporary.path().join(x));
        fs::create_dir(&runs).unwrap();
        let run = trained(&runs, "one");
        let hidden = shared.join(format!(".mnist.uploading-{}", id(&run)));
        fs::create_dir_all(&hidden).unwrap();
        fs::write(hidden.join(JOURNAL), "earlier").unwrap();
        let report = upload(&run, &shared).unwrap();
        assert!(!hidden.exists());
        assert_eq!(id(&report.folder), id(&run));
    }

    #[test]
    fn a_number_of_a_removed_version_is_not_used_again() {
        let temporary = tempfile::tempdir().unwrap();
        let [ours, theirs, shared] = ["ours", "theirs", "shared"].map(|x| temporary.path().join(x));
        for folder in [&ours, &theirs, &shared] {
            fs::create_dir(folder).unwrap();
        }
        let (first, second) = (trained(&ours, "one"), trained(&theirs, "two"));
        upload(&first, &shared).unwrap();
        let store = ArtifactStore::of_runs(&shared);
        store.keep_last(0);
        upload(&second, &shared).unwrap();
        assert_eq!(store.open("model:latest").unwrap().version(), 2);
        // The version that had the number may come back.
        upload(&first, &shared).unwrap();
        let back = store.open("model:v1").unwrap();
        assert_eq!(back.read("weights").unwrap(), b"one");
    }

    #[test]
    fn what_cannot_be_uploaded_is_an_error() {
        let temporary = tempfile::tempdir().unwrap();
        let [runs, shared] = ["runs", "shared"].map(|x| temporary.path().join(x));
        fs::create_dir(&runs).unwrap();
        let run = trained(&runs, "one");
        assert!(upload(&run, &shared).unwrap_err().is_not_found() && !shared.exists());
        assert!(upload(&run, &runs).unwrap_err().is_misuse());
        fs::create_dir(&shared).unwrap();
        let missing = upload(runs.join("none"), &shared).unwrap_err();
        assert!(missing.is_not_found());
        let lock = RunLock::take(&run).unwrap();
        assert!(upload(&run, &shared).unwrap_err().is_conflict());
        drop(lock);
        let store = ArtifactStore::of_runs(&runs);
        store.keep_last(0);
        let report = upload(&run, &shared).unwrap();
        assert_eq!(report.missing[0].to_string(), "model:v1");
    }
}
