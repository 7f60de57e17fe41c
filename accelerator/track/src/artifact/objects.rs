//! Contents of files, each once, by their hashes.

use std::fs;
use std::path::{Path, PathBuf};

use accelerator_manifest::{ContentHash, StagedFolder};

use super::source::SourceFile;
use crate::error::{Error, Result};

/// The folder of objects of a store. An object has its name when all of it is on the disk.
#[derive(Clone, Debug)]
pub(super) struct Objects(PathBuf);

impl Objects {
    pub(super) fn new(root: &Path) -> Self {
        Self(root.join("objects"))
    }

    /// Where the object of a hash lies.
    pub(super) fn path(&self, hash: ContentHash) -> PathBuf {
        let name = hash.to_string();
        self.0.join(&name[..2]).join(name)
    }

    /// Makes a file's content an object, where it is none, or a damaged one. Returns the bytes that were written.
    pub(super) fn add(&self, source: &SourceFile, staged: &StagedFolder) -> Result<u64> {
        let path = self.path(source.hash);
        if SourceFile::read(&path).is_ok_and(|there| there.hash == source.hash) {
            return Ok(0);
        }
        let name = source.hash.to_string();
        let copy = staged.path().join(&name);
        let publish = || {
            source.copy(&copy)?;
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)
                    .map_err(|error| Error::io("create the folder", folder, error))?;
            }
            staged
                .publish(&name, &path)
                .map_err(|error| Error::io("write", &path, error))
        };
        publish().inspect_err(|_| {
            // Room for others; the folder goes anyway.
            let _ = fs::remove_file(&copy);
        })?;
        Ok(source.bytes)
    }

    /// All objects, with their lengths.
    pub(super) fn list(&self) -> Result<Vec<(PathBuf, ContentHash, u64)>> {
        let mut objects = Vec::new();
        for folder in subfolders(&self.0)? {
            let unreadable = |error| Error::io("list the folder", &folder, error);
            for entry in fs::read_dir(&folder).map_err(unreadable)? {
                let path = entry.map_err(unreadable)?.path();
                let name = path
                    .file_name()
                    .and_then(|x| x.to_str())
                    .unwrap_or_default();
                let (Ok(hash), Ok(metadata)) = (name.parse(), path.symlink_metadata()) else {
                    continue;
                };
                objects.push((path, hash, metadata.len()));
            }
        }
        Ok(objects)
    }
}

/// The folders in a folder, sorted; none where it is not there.
pub(super) fn subfolders(folder: &Path) -> Result<Vec<PathBuf>> {
    let list = || {
        let mut folders = Vec::new();
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            }
        }
        folders.sort();
        Ok(folders)
    };
    match list() {
        Err(error) if std::io::Error::kind(&error) == std::io::ErrorKind::NotFound => {
            Ok(Vec::new())
        }
        listed => listed.map_err(|error| Error::io("list the folder", folder, error)),
    }
}
