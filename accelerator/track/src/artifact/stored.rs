//! Versions that are stored, and reading them.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use accelerator_host::fs::{Durability, place};
use accelerator_manifest::{ContentHash, internal::StagedFolder};
use serde_json::{Map, Value};

use super::objects::{Index, LockKind, Objects, SourceFile, StoreLock};
use super::{ArtifactFile, ArtifactName, ArtifactReference, Version};
use crate::error::{Error, Kind, Result};
use crate::record::RunId;

/// A version of an artifact in a store. Whatever is read from it is compared with its hash.
///
/// ```
/// use accelerator_track::{Artifact, ArtifactStore};
///
/// # fn main() -> accelerator_track::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// # let file = temporary.path().join("model.bin");
/// # std::fs::write(&file, "weights").unwrap();
/// let store = ArtifactStore::of_runs(temporary.path());
/// store.commit(&Artifact::create("model").add_file(&file)?)?;
///
/// let model = store.open("model")?;
/// model.verify()?;
/// let folder = temporary.path().join("out");
/// model.checkout(&folder)?;
/// assert_eq!(std::fs::read(folder.join("model.bin")).unwrap(), b"weights");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct StoredArtifact {
    root: PathBuf,
    version: Box<Version>,
}

impl StoredArtifact {
    /// The artifact's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.version.name
    }

    /// The number of the version, from 1.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version.version
    }

    /// The reference that opens it: `model:v3`.
    #[must_use]
    pub fn reference(&self) -> String {
        format!("{}:v{}", self.name(), self.version())
    }

    /// The hash of its files' paths and hashes and of its references.
    #[must_use]
    pub fn digest(&self) -> ContentHash {
        self.version.digest
    }

    /// The kind, if one was given: `model`, `dataset`.
    #[must_use]
    pub fn kind(&self) -> Option<&str> {
        self.version.contents.kind.as_deref()
    }

    /// The run that stored it first, if a run did.
    #[must_use]
    pub fn run(&self) -> Option<RunId> {
        self.version.run
    }

    /// Its files, by path.
    #[must_use]
    pub fn files(&self) -> &[ArtifactFile] {
        &self.version.contents.files
    }

    /// Returns the references to contents that are stored elsewhere, by URL.
    #[must_use]
    pub fn references(&self) -> &[ArtifactReference] {
        &self.version.contents.references
    }

    /// The metadata that its maker gave it.
    #[must_use]
    pub fn metadata(&self) -> &Map<String, Value> {
        &self.version.contents.metadata
    }

    /// The aliases that it has now.
    ///
    /// # Errors
    ///
    /// If the store cannot be read.
    pub fn aliases(&self) -> Result<Vec<String>> {
        let aliases = Index::read(&self.root, &ArtifactName::parse(self.name())?)?.aliases;
        Ok(aliases
            .into_iter()
            .filter(|(_, version)| *version == self.version())
            .map(|(alias, _)| alias)
            .collect())
    }

    /// The content of a file.
    ///
    /// # Errors
    ///
    /// If there is no such file ([`Error::is_not_found`]), or it is not what was stored ([`Error::is_corrupt`]).
    pub fn read(&self, path: &str) -> Result<Vec<u8>> {
        let file = self
            .files()
            .iter()
            .find(|file| file.path == path)
            .ok_or_else(|| {
                let files: Vec<_> = self
                    .files()
                    .iter()
                    .take(5)
                    .map(|file| file.path.as_str())
                    .collect();
                Error::new(
                    Kind::NotFound,
                    format!(
                        "{} has no file {path:?}; its files are {}",
                        self.reference(),
                        files.join(", ")
                    ),
                )
            })?;
        let object = self.path_of(file);
        let mut opened = File::open(&object).map_err(|error| self.lost(file, &error))?;
        let mut content = Vec::new();
        opened
            .read_to_end(&mut content)
            .map_err(|error| Error::io("read", &object, error))?;
        let (bytes, hash) = (content.len() as u64, ContentHash::of(&content));
        match (bytes, hash) == (file.bytes, file.hash) {
            true => Ok(content),
            false => Err(self.damaged(file, bytes, hash)),
        }
    }

    /// Reads all files, and compares them with their hashes.
    ///
    /// # Errors
    ///
    /// If files are not there, or not what was stored; the message names them.
    pub fn verify(&self) -> Result<()> {
        const SHOWN: usize = 3;
        let _lock = self.lock()?;
        let defects = self
            .files()
            .iter()
            .filter_map(|file| self.object(file).err());
        let defects: Vec<_> = defects.map(|error| error.to_string()).collect();
        if defects.is_empty() {
            return Ok(());
        }
        let more = match defects.len().saturating_sub(SHOWN) {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        let shown = &defects[..defects.len().min(SHOWN)];
        Err(Error::new(
            Kind::Corrupt,
            format!("{}{more}", shown.join("; ")),
        ))
    }

    /// Writes all files into a folder, which is there with all of them, or not at all. A folder that has them already
    /// stays as it is.
    ///
    /// # Errors
    ///
    /// If a file is not what was stored, if the folder has other contents ([`Error::is_conflict`]), or if it cannot be
    /// written.
    pub fn checkout(&self, folder: impl AsRef<Path>) -> Result<()> {
        let given = folder.as_ref();
        let folder = std::path::absolute(given).map_err(|error| Error::io("find", given, error))?;
        let (Some(parent), Some(name)) = (folder.parent(), folder.file_name()) else {
            let message = format!(
                "cannot write {} to {}: name a folder",
                self.reference(),
                given.display()
            );
            return Err(Error::new(Kind::Misuse, message));
        };
        let _lock = self.lock()?;
        if self.is_in(&folder)? {
            return Ok(());
        }
        fs::create_dir_all(parent)
            .map_err(|error| Error::io("create the folder", parent, error))?;
        let name = name.to_string_lossy();
        let staged = StagedFolder::create(parent, &name, |target| target == name)
            .map_err(|error| Error::io("create a folder in", parent, error))?;
        let out = staged.path().join("files");
        fs::create_dir(&out).map_err(|error| Error::io("create the folder", &out, error))?;
        for file in self.files() {
            let to = at(&out, file);
            if let Some(folder) = to.parent() {
                fs::create_dir_all(folder)
                    .map_err(|error| Error::io("create the folder", folder, error))?;
            }
            self.object(file)?.copy(&to)?;
        }
        // An empty folder gives way; one with files does not.
        let _ = fs::remove_dir(&folder);
        match place(&out, &folder, Durability::Cached) {
            Ok(()) => Ok(()),
            // Another rank of this host may have been faster.
            Err(_) if self.is_in(&folder)? => Ok(()),
            Err(error) => Err(Error::io("write the folder", &folder, error)),
        }
    }

    pub(super) fn new(root: PathBuf, version: Version) -> Self {
        Self {
            root,
            version: Box::new(version),
        }
    }

    pub(super) fn record(&self) -> &Version {
        &self.version
    }

    /// Keeps its objects from being removed.
    pub(super) fn lock(&self) -> Result<StoreLock> {
        StoreLock::take(&self.root, LockKind::Read)
    }

    /// The object of a file, with its hash compared.
    pub(super) fn object(&self, file: &ArtifactFile) -> Result<SourceFile> {
        let path = self.path_of(file);
        let source = match SourceFile::read(&path) {
            Err(error) if error.is_not_found() => return Err(self.lost(file, &error)),
            read => read?,
        };
        if (source.hash, source.bytes) == (file.hash, file.bytes) {
            return Ok(source);
        }
        Err(self.damaged(file, source.bytes, source.hash))
    }

    /// Returns true if all files are in a folder, and fails if it holds something else.
    fn is_in(&self, folder: &Path) -> Result<bool> {
        let is_empty = match fs::read_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            entries => entries
                .map_err(|error| Error::io("list the folder", folder, error))?
                .next()
                .is_none(),
        };
        if is_empty {
            return Ok(self.files().is_empty());
        }
        for file in self.files() {
            let there = SourceFile::read(&at(folder, file));
            if !there.is_ok_and(|there| there.hash == file.hash) {
                return Err(Error::new(
                    Kind::Conflict,
                    format!(
                        "{} has files, and {:?} is not that of {}; choose another folder, or empty this one",
                        folder.display(),
                        file.path,
                        self.reference()
                    ),
                ));
            }
        }
        Ok(true)
    }

    /// Returns the path of a file's content, after comparing it with its hash.
    #[cfg(feature = "mlflow")]
    pub(crate) fn verified_path(&self, file: &ArtifactFile) -> Result<PathBuf> {
        self.object(file).map(|_| self.path_of(file))
    }

    /// The manifest, as the store has it.
    #[cfg(feature = "mlflow")]
    pub(crate) fn manifest(&self) -> Result<Vec<u8>> {
        self.version.to_bytes()
    }

    fn path_of(&self, file: &ArtifactFile) -> PathBuf {
        Objects::new(&self.root).path(file.hash)
    }

    /// The error for a file that is not what was stored.
    fn damaged(&self, file: &ArtifactFile, bytes: u64, hash: ContentHash) -> Error {
        Error::new(
            Kind::Corrupt,
            format!(
                "{:?} of {} is not what was stored: expected {} bytes with the hash {}, found {bytes} with {hash} in {}; store the artifact again",
                file.path,
                self.reference(),
                file.bytes,
                file.hash,
                self.path_of(file).display()
            ),
        )
    }

    fn lost(&self, file: &ArtifactFile, error: &dyn std::fmt::Display) -> Error {
        Error::new(
            Kind::Corrupt,
            format!(
                "the content of {:?} of {} is not there: {error}; store the artifact again",
                file.path,
                self.reference()
            ),
        )
    }
}

/// Returns the path of a file of an artifact in a folder.
fn at(folder: &Path, file: &ArtifactFile) -> PathBuf {
    file.path
        .split('/')
        .fold(folder.to_owned(), |path, part| path.join(part))
}
