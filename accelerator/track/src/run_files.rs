//! The files of a run in its folder.
//!
//! Users may put files of their own there. They do not belong to the run, and nothing that removes a run removes them.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use accelerator_host::fs::{DRAFT_PREFIX, Durability, Replace};
use accelerator_manifest::{ContentHash, Folder};

use crate::error::{Error, Kind, Result};
use crate::record::RunId;

/// The journal, which makes a folder a run.
pub(crate) const JOURNAL: &str = "journal.jsonl";
/// The lock of the process that writes the run.
pub(crate) const LOCK: &str = "lock";
/// The summary of the run, beside its journal.
pub(crate) const SUMMARY: &str = "summary.json";
/// The launcher's report of a job that failed.
pub(crate) const FAILURE: &str = "failure.json";
/// The table of metrics.
pub(crate) const TABLE: &str = "metrics.csv";
/// The progress of the delivery to an MLflow server.
pub(crate) const MLFLOW: &str = "mlflow.json";
/// The folder of files named by their contents.
pub(crate) const BLOBS: &str = "blobs";
/// The folder of measurements of the hosts of ranks.
pub(crate) const SYSTEM: &str = "system";
/// The folder of TensorBoard's files.
pub(crate) const TENSORBOARD: &str = "tensorboard";
/// The prefix of the names of TensorBoard's files.
pub(crate) const EVENTS: &str = "events.out.tfevents.";
/// The prefix of the hidden names of incomplete files.
pub(crate) const STAGED: &str = DRAFT_PREFIX;

/// The contents of a run's folder.
#[derive(Debug, Default)]
pub(crate) struct RunFiles {
    /// Files of the run.
    pub(crate) own: Vec<PathBuf>,
    /// Files and folders that the run did not write.
    pub(crate) foreign: Vec<PathBuf>,
}

impl RunFiles {
    /// Lists a run's folder.
    pub(crate) fn list(folder: &Path) -> Result<Self> {
        let mut this = Self::default();
        this.list_in(folder, None)?;
        this.own.sort();
        this.foreign.sort();
        Ok(this)
    }

    fn list_in(&mut self, folder: &Path, part: Option<&str>) -> Result<()> {
        let unread = |error| Error::io("read the folder", folder, error);
        for entry in fs::read_dir(folder).map_err(unread)? {
            let entry = entry.map_err(unread)?;
            // The type of the link itself, not of its target.
            let is_folder = entry.file_type().map_err(unread)?.is_dir();
            let (name, path) = (entry.file_name(), entry.path());
            match (name.to_str(), part) {
                (Some(name), None) if is_folder && FOLDERS.contains(&name) => {
                    self.list_in(&path, Some(name))?;
                }
                (Some(name), _) if !is_folder && is_own(&path, name, part) => self.own.push(path),
                _ => self.foreign.push(path),
            }
        }
        Ok(())
    }
}

/// Returns true if a name in a run's folder is that of an incomplete file.
pub(crate) fn is_staged(name: &str) -> bool {
    name.starts_with(STAGED)
        || name
            .strip_suffix(NEW)
            .is_some_and(|name| [TABLE, MLFLOW].contains(&name))
}

/// Returns the name of a file until it is complete and replaces another one.
pub(crate) fn new_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(NEW);
    name.into()
}

/// Returns the name of the journal of a rank's host.
pub(crate) fn rank_journal_name(rank: usize) -> String {
    format!("{RANK}{rank}{EXTENSION}")
}

/// Returns the rank whose journal has this name.
pub(crate) fn rank_of(name: &str) -> Option<usize> {
    let rank = name.strip_prefix(RANK)?.strip_suffix(EXTENSION)?;
    rank.parse().ok()
}

/// Removes the run's files, and the folder unless it holds other files. Returns these.
///
/// Nobody else may write the run meanwhile. The first step makes the run disappear; if the rest is interrupted,
/// [`is_cut_off`] returns true, and a second call removes the rest.
pub(crate) fn remove(folder: &Path) -> Result<Vec<PathBuf>> {
    let (journal, cut_off) = (folder.join(JOURNAL), folder.join(REMOVED));
    let lock = folder.join(LOCK);
    let failed = |error| Error::io("remove", folder, error);
    let mut files = RunFiles::list(folder)?;
    if let Some(found) = files.own.iter_mut().find(|path| **path == journal) {
        fs::rename(&journal, &cut_off).map_err(failed)?;
        *found = cut_off.clone();
    }
    // The renamed journal goes last, and the lock before it.
    files
        .own
        .sort_by_key(|path| (*path == cut_off, *path == lock));
    for path in &files.own {
        ignore_missing(fs::remove_file(path)).map_err(|error| Error::io("remove", path, error))?;
    }
    for name in FOLDERS {
        // It does not exist, or holds other files.
        let _ = fs::remove_dir(folder.join(name));
    }
    match fs::remove_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
        removed => ignore_missing(removed).map_err(failed)?,
    }
    Ok(files.foreign)
}

/// Returns true if the removal of the run in a folder was interrupted.
pub(crate) fn is_cut_off(folder: &Path) -> bool {
    folder.join(REMOVED).is_file() && !folder.join(JOURNAL).exists()
}

/// Fails if a folder holds checkpoints.
pub(crate) fn expect_no_checkpoints(folder: &Path) -> Result<()> {
    let checkpoints = Folder::open(folder).and_then(|folder| folder.checkpoints());
    // Starting the run reports a folder that cannot be listed.
    match checkpoints.unwrap_or_default().last() {
        None => Ok(()),
        Some(checkpoint) => Err(Error::new(
            Kind::Misuse,
            format!(
                "the run's folder {} holds checkpoints, such as {}: move them to a folder of their own, such as \
                 `checkpoints/NAME`, and save them there",
                folder.display(),
                checkpoint.path().display()
            ),
        )),
    }
}

fn is_own(path: &Path, name: &str, part: Option<&str>) -> bool {
    is_staged(name)
        || match part {
            None => FILES.contains(&name) || name.ends_with(".lock") && is_lock(path),
            Some(BLOBS) => name.parse::<ContentHash>().is_ok(),
            Some(SYSTEM) => rank_of(name).is_some(),
            _ => {
                let run = name.rsplit('.').next().map(str::parse::<RunId>);
                name.starts_with(EVENTS) && matches!(run, Some(Ok(_)))
            }
        }
}

/// Returns true if the lock of a sink wrote the file: other programs also have files with such names.
fn is_lock(path: &Path) -> bool {
    let is_short = fs::metadata(path).is_ok_and(|file| file.len() < 1024);
    let text = is_short.then(|| fs::read_to_string(path).ok()).flatten();
    let is_owner = |text: &str| text.starts_with("process ") && text.contains(" on ");
    // A process that is killed while it takes the lock leaves no text.
    text.is_some_and(|text| text.is_empty() || is_owner(&text))
}

fn ignore_missing(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

const FILES: [&str; 6] = [JOURNAL, LOCK, SUMMARY, FAILURE, TABLE, MLFLOW];
const FOLDERS: [&str; 3] = [BLOBS, SYSTEM, TENSORBOARD];
/// The journal's name during the removal of the run.
const REMOVED: &str = ".accel-removed";
const NEW: &str = ".new";
const RANK: &str = "rank-";
const EXTENSION: &str = ".jsonl";

/// Returns the name of a folder for a run: characters with a meaning in paths or shells are written as `%` and two
/// hexadecimal digits.
pub(crate) fn folder_name(name: &str) -> String {
    let mut folder = String::new();
    for (at, character) in name.char_indices() {
        let is_hidden = at == 0 && matches!(character, '.' | '-');
        let is_special = matches!(
            character,
            '/' | '\\' | ':' | '*' | '?' | '"' | '<' | '>' | '|' | '%' | '\0'..='\u{1f}' | '\u{7f}'
        );
        if !is_hidden && !is_special {
            folder.push(character);
        } else {
            folder.push_str(&format!("%{:02X}", u32::from(character)));
        }
        // A file's name has at most 255 bytes, and a number may follow.
        if folder.len() > 200 {
            break;
        }
    }
    folder
}

/// Returns the file of a blob in a run's folder; `None` if a journal names it by anything but a hash, such as a path
/// that leads elsewhere.
pub(crate) fn blob_path(folder: &Path, hash: &str) -> Option<PathBuf> {
    let hash: ContentHash = hash.parse().ok()?;
    Some(folder.join(BLOBS).join(hash.to_string()))
}

/// Writes bytes to `blobs/<hash>` in a run's folder, and returns the hash.
pub(crate) fn write_blob(folder: &Path, bytes: &[u8]) -> Result<String> {
    let hash = ContentHash::of(bytes).to_string();
    let blobs = folder.join(BLOBS);
    let path = blobs.join(&hash);
    if path.exists() {
        return Ok(hash);
    }
    let file = Replace::new(&path, Durability::Cached).private();
    let written =
        fs::create_dir_all(&blobs).and_then(|()| file.write(|file| file.write_all(bytes)));
    written.map_err(|error| Error::io("write", &path, error))?;
    Ok(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separators_and_hidden_names_are_encoded_and_unicode_stays() {
        for (name, folder) in [
            ("mnist", "mnist"),
            ("a/b", "a%2Fb"),
            ("../x", "%2E.%2Fx"),
            ("..", "%2E."),
            ("50%", "50%25"),
            ("模型 é", "模型 é"),
            ("a\nb", "a%0Ab"),
        ] {
            assert_eq!(folder_name(name), folder);
        }
        assert!(folder_name(&"é".repeat(300)).len() < 210);
    }

    #[test]
    fn a_blob_is_within_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let hash = write_blob(folder.path(), b"bytes").unwrap();
        let path = blob_path(folder.path(), &hash).unwrap();
        assert_eq!(fs::read(path).unwrap(), b"bytes");
        for elsewhere in ["/etc/passwd", "../journal.jsonl", "", "abc"] {
            assert_eq!(blob_path(folder.path(), elsewhere), None);
        }
    }
}
