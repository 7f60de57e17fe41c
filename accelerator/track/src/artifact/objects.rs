//! The files of a store: contents by their hashes, and what is changed under its locks.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use accelerator_host::lock::{FileLock, LockMode};
use accelerator_manifest::{ContentHash, internal::StagedFolder};
use serde::{Deserialize, Serialize};

use super::{ArtifactName, Version};
use crate::error::{Error, Kind, Result};

/// The folder of objects of a store. An object has its name when all of it is on the disk.
#[derive(Clone, Debug)]
pub(super) struct Objects(PathBuf);

impl Objects {
    pub(super) fn new(root: &Path) -> Self {
        Self(root.join("objects"))
    }

    /// Returns the path of the object with a hash.
    pub(super) fn path(&self, hash: ContentHash) -> PathBuf {
        let name = hash.to_string();
        self.0.join(&name[..2]).join(name)
    }

    /// Makes a file's content an object, unless it is one already and intact. Returns the bytes that were written.
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

    /// Lists all objects, with their lengths.
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

/// Lists the folders in a folder, sorted; none if it does not exist.
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

/// A file that was read from its begin to its end, and did not change meanwhile.
#[derive(Clone, Debug)]
pub(crate) struct SourceFile {
    path: PathBuf,
    pub(crate) hash: ContentHash,
    pub(crate) bytes: u64,
    stamp: Stamp,
}

impl SourceFile {
    /// Reads a file.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        Self::pass(path, None)
    }

    /// Reads it again, and writes it to `to`.
    ///
    /// Fails if the contents are not what was read before; the copy is then useless.
    pub(crate) fn copy(&self, to: &Path) -> Result<()> {
        let mut copy = File::create_new(to).map_err(|error| Error::io("create", to, error))?;
        let again = Self::pass(&self.path, Some((to, &mut copy)))?;
        if (again.hash, again.stamp) != (self.hash, self.stamp) {
            return Err(changed(&self.path));
        }
        Ok(())
    }

    /// Fails if the file has changed since it was read.
    pub(crate) fn check_unchanged(&self) -> Result<()> {
        let metadata =
            fs::metadata(&self.path).map_err(|error| Error::io("read", &self.path, error))?;
        if Stamp::of(&metadata) == self.stamp {
            Ok(())
        } else {
            Err(changed(&self.path))
        }
    }

    fn pass(path: &Path, mut copy: Option<(&Path, &mut File)>) -> Result<Self> {
        let unreadable = |error| Error::io("read", path, error);
        // Opening a pipe would wait.
        expect_plain(path, &fs::metadata(path).map_err(unreadable)?)?;
        let mut file = File::open(path).map_err(unreadable)?;
        let before = file.metadata().map_err(unreadable)?;
        expect_plain(path, &before)?;
        let mut hash = blake3::Hasher::new();
        let mut bytes = 0;
        let mut buffer = vec![0; 1 << 18];
        loop {
            let read = match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(unreadable(error)),
            };
            hash.update(&buffer[..read]);
            bytes += read as u64;
            if let Some((to, copy)) = &mut copy {
                copy.write_all(&buffer[..read])
                    .map_err(|error| Error::io("write", to, error))?;
            }
        }
        let stamp = Stamp::of(&before);
        if bytes != before.len() || Stamp::of(&file.metadata().map_err(unreadable)?) != stamp {
            return Err(changed(path));
        }
        Ok(Self {
            path: path.to_owned(),
            hash: hash.finalize().into(),
            bytes,
            stamp,
        })
    }
}

/// Lists the files below a folder, by their paths in it with `/`, sorted.
///
/// Links to files are followed. Links to folders, which may lead in a circle, and what is neither a file nor a folder
/// are errors.
pub(crate) fn files_below(root: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut files = Vec::new();
    let mut folders = vec![(String::new(), root.to_owned())];
    while let Some((prefix, folder)) = folders.pop() {
        let unreadable = |error| Error::io("list the folder", &folder, error);
        for entry in fs::read_dir(&folder).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            let path = entry.path();
            let Ok(name) = entry.file_name().into_string() else {
                return Err(Error::new(
                    Kind::Misuse,
                    format!(
                        "the name of {} is no text in UTF-8; rename it",
                        path.display()
                    ),
                ));
            };
            let name = format!("{prefix}{name}");
            let kind = entry.file_type().map_err(unreadable)?;
            if kind.is_dir() {
                folders.push((format!("{name}/"), path));
                continue;
            }
            let metadata = fs::metadata(&path).map_err(|error| Error::io("read", &path, error))?;
            if metadata.is_dir() {
                return Err(Error::new(
                    Kind::Misuse,
                    format!(
                        "{} is a link to a folder, which is not followed; add that folder itself",
                        path.display()
                    ),
                ));
            }
            expect_plain(&path, &metadata)?;
            files.push((name, path));
        }
    }
    files.sort();
    Ok(files)
}

/// Fails unless this is a file, or a link to one.
pub(crate) fn expect_plain(path: &Path, metadata: &Metadata) -> Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    let found = if metadata.is_dir() {
        "a folder"
    } else {
        "something that is neither a file nor a folder, as a pipe or a device"
    };
    Err(Error::new(
        Kind::Misuse,
        format!("expected a file at {}, found {found}", path.display()),
    ))
}

/// The properties of a file that change with it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Stamp {
    bytes: u64,
    modified: Option<SystemTime>,
    /// Device and number: another file may be renamed into its place.
    place: (u64, u64),
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        #[cfg(unix)]
        let place = {
            use std::os::unix::fs::MetadataExt;
            (metadata.dev(), metadata.ino())
        };
        #[cfg(not(unix))]
        let place = (0, 0);
        Self {
            bytes: metadata.len(),
            modified: metadata.modified().ok(),
            place,
        }
    }
}

fn changed(path: &Path) -> Error {
    Error::new(
        Kind::Conflict,
        format!(
            "{} changed while it was read, so that nothing was stored; wait until it is written, and try again",
            path.display()
        ),
    )
}

/// A store that is being changed.
#[derive(Debug)]
pub(super) struct Adding {
    pub(super) objects: Objects,
    pub(super) staged: StagedFolder,
    _lock: StoreLock,
}

impl Adding {
    /// Removes what processes that are gone have left.
    pub(super) fn begin(root: &Path, lock: StoreLock) -> Result<Self> {
        let staged = StagedFolder::create(root, STAGED, |target| target == STAGED);
        Ok(Self {
            objects: Objects::new(root),
            staged: staged.map_err(|error| Error::io("create a folder in", root, error))?,
            _lock: lock,
        })
    }

    pub(super) fn write(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let write = || {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)?;
            }
            fs::write(self.staged.path().join(SMALL), bytes)?;
            self.staged.publish(SMALL, path)
        };
        write().map_err(|error| Error::io("write", path, error))
    }
}

/// The part of a store that belongs to a name and to no version of it.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub(super) struct Index {
    /// The number of the next version, which those before never had.
    pub(super) next: u32,
    pub(super) aliases: BTreeMap<String, u32>,
    /// The digests of removed versions, so that no other contents get their numbers.
    #[serde(default)]
    pub(super) removed: BTreeMap<u32, ContentHash>,
}

impl Index {
    /// Reads the index of a name in the store at `root`.
    pub(super) fn read(root: &Path, name: &ArtifactName) -> Result<Self> {
        let path = folder_of(root, name).join(INDEX);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Self::default());
            }
            Err(error) => return Err(Error::io("read", &path, error)),
        };
        serde_json::from_slice(&text).map_err(|error| {
            let message = format!(
                "{} cannot be read: {error}; remove it, and set the aliases again",
                path.display()
            );
            Error::new(Kind::Corrupt, message).with_source(error)
        })
    }

    /// Returns true if a removed version with other contents had the number of this one.
    pub(super) fn is_of_another(&self, version: &Version) -> bool {
        let removed = self.removed.get(&version.version);
        removed.is_some_and(|digest| *digest != version.digest)
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let json = serde_json::json!({
            "next": self.next, "aliases": self.aliases, "removed": self.removed
        });
        format!("{json}\n").into_bytes()
    }
}

/// The folder of a name's versions.
pub(super) fn folder_of(root: &Path, name: &ArtifactName) -> PathBuf {
    root.join(NAMES).join(name.as_str())
}

pub(super) const NAMES: &str = "names";
pub(super) const INDEX: &str = "index.json";
const STAGED: &str = "commit";
const SMALL: &str = "manifest";

/// Held while a store is used in one of the ways of [`LockKind`]; ends with the process.
#[derive(Debug)]
pub(crate) struct StoreLock {
    _lock: Option<FileLock>,
}

/// The use that a lock protects.
#[derive(Clone, Copy, Debug)]
pub(super) enum LockKind {
    /// Objects are read: nobody removes them meanwhile.
    Read,
    /// Objects are added, and versions that refer to them: nobody removes them meanwhile.
    Add,
    /// The versions and aliases of names are changed, for a moment, by one.
    Publish,
    /// Objects are removed, by one, while nobody uses any.
    Remove,
}

impl StoreLock {
    /// Waits for the lock, though not forever: whoever has it may have been stopped.
    pub(super) fn take(root: &Path, kind: LockKind) -> Result<Self> {
        let path = root.join(match kind {
            LockKind::Publish => "publish.lock",
            LockKind::Read | LockKind::Add | LockKind::Remove => "objects.lock",
        });
        let taken = match kind {
            LockKind::Read => match FileLock::open(&path, LockMode::Shared, LONGEST_WAIT) {
                // Nobody has ever changed this store here, for example in a read-only place.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Ok(Self { _lock: None });
                }
                taken => taken,
            },
            LockKind::Add => FileLock::create(&path, LockMode::Shared, LONGEST_WAIT),
            LockKind::Publish | LockKind::Remove => {
                FileLock::create(&path, LockMode::Exclusive, LONGEST_WAIT)
            }
        };
        match taken.map_err(|error| Error::io("lock", &path, error))? {
            Some(lock) => Ok(Self { _lock: Some(lock) }),
            None => Err(Error::new(
                Kind::Conflict,
                format!(
                    "another process has used the artifacts in {} for {} s; try again when it has ended",
                    root.display(),
                    LONGEST_WAIT.as_secs()
                ),
            )),
        }
    }
}

const LONGEST_WAIT: Duration = Duration::from_secs(60);
