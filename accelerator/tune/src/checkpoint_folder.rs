//! A checkpoint is a folder that appears under its name when it is complete.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use accelerator_host::fs::{Durability, place, sync_folder};

use crate::error::{Error, Result};

/// Returns the folder to which a checkpoint is saved first.
pub(crate) fn partial(folder: &Path) -> PathBuf {
    folder.with_added_extension("partial")
}

/// Makes the folder to save to, without what an earlier attempt has left.
pub(crate) fn begin(folder: &Path) -> io::Result<()> {
    let partial = partial(folder);
    match fs::remove_dir_all(&partial) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::create_dir_all(&partial)
}

/// Gives a checkpoint its name, once it is on the disk; its bytes.
pub(crate) fn commit(folder: &Path) -> Result<u64> {
    let partial = partial(folder);
    let write = || {
        let bytes = sync(&partial)?;
        if folder.exists() {
            fs::remove_dir_all(folder)?;
        }
        place(&partial, folder, Durability::Flushed)?;
        Ok(bytes)
    };
    write().map_err(|error| Error::io("write", folder, error))
}

/// Returns the file or folder that a program reported as its checkpoint. It is alone in its folder.
pub(crate) fn named(folder: &Path) -> Option<PathBuf> {
    Some(folder.read_dir().ok()?.next()?.ok()?.path())
}

/// Removes what an attempt has left that ended while it saved.
pub(crate) fn abandon(folder: &Path) {
    // The next attempt removes it otherwise.
    let _ = fs::remove_dir_all(partial(folder));
}

/// Removes every checkpoint of a trial's folder that is not complete.
pub(crate) fn remove_partial(trial: &Path) {
    // What cannot be read or removed costs room on the disk, and no result.
    for entry in trial.read_dir().into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("checkpoint_") && name.ends_with(".partial") {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn sync(folder: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in folder.read_dir()? {
        let entry = entry?;
        bytes += match entry.file_type()?.is_dir() {
            true => sync(&entry.path())?,
            false => {
                let file = File::open(entry.path())?;
                file.sync_all()?;
                file.metadata()?.len()
            }
        };
    }
    sync_folder(folder)?;
    Ok(bytes)
}
