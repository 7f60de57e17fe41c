//! The store of artifacts: versions of names, and aliases.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use accelerator_manifest::ContentHash;

use super::draft::Artifact;
use super::objects::{
    Adding, INDEX, Index, LockKind, NAMES, SourceFile, StoreLock, folder_of, subfolders,
};
use super::stored::StoredArtifact;
use super::{
    ArtifactFile, ArtifactName, ArtifactReference, Contents, FORMAT, Query, Version, VersionQuery,
    parse_alias, parse_version,
};
use crate::error::{Error, Kind, Result};
use crate::journal::now_ms;

/// A folder of artifacts, `.artifacts` beside the runs: versions by name, contents each once by their hashes.
///
/// Versions count from 1, never change, and a number is never used again. A version is there with all of its files, or
/// not at all, whenever the process dies. Processes that commit at once get versions of their own.
///
/// ```
/// use accelerator_track::{Artifact, ArtifactStore};
///
/// # fn main() -> accelerator_track::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// # let file = temporary.path().join("model.bin");
/// let store = ArtifactStore::of_runs(temporary.path().join("runs"));
/// for weights in ["one", "two", "two"] {
///     std::fs::write(&file, weights).unwrap();
///     store.commit(&Artifact::create("model").add_file(&file)?)?;
/// }
/// assert_eq!(store.open("model:latest")?.version(), 2, "the same contents are the same version");
/// assert_eq!(store.open("model:v1")?.read("model.bin")?, b"one");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ArtifactStore {
    root: PathBuf,
}

impl ArtifactStore {
    /// The store of a folder of runs, which is made with the first artifact.
    #[must_use]
    pub fn of_runs(runs: impl AsRef<Path>) -> Self {
        Self {
            root: runs.as_ref().join(".artifacts"),
        }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.root
    }

    /// Stores an artifact as the next version of its name; or as the latest version, if that has the same files,
    /// references, kind and metadata.
    ///
    /// # Errors
    ///
    /// If a file cannot be read or changes meanwhile ([`Error::is_conflict`]), if the store cannot be written, or if a
    /// name cannot be one. There is then no new version.
    pub fn commit(&self, artifact: &Artifact) -> Result<StoredArtifact> {
        let name = ArtifactName::parse(&artifact.name)?;
        let aliases = artifact.aliases.iter().map(|alias| parse_alias(alias));
        let aliases = aliases.collect::<Result<Vec<_>>>()?;
        let sources = artifact
            .files
            .iter()
            .map(|(path, source)| Ok((path, SourceFile::read(source)?)));
        let sources = sources.collect::<Result<Vec<_>>>()?;
        let contents = Contents {
            kind: artifact.kind.clone(),
            files: Vec::from_iter(sources.iter().map(|(path, source)| ArtifactFile {
                path: (*path).clone(),
                hash: source.hash,
                bytes: source.bytes,
            })),
            references: Vec::from_iter(artifact.references.iter().map(|url| ArtifactReference {
                url: url.clone(),
                digest: None,
            })),
            metadata: artifact.metadata.clone(),
        };
        let adding = self.begin()?;
        for (_, source) in &sources {
            adding.objects.add(source, &adding.staged)?;
        }
        for (_, source) in &sources {
            source.check_unchanged()?;
        }
        let _publish = StoreLock::take(&self.root, LockKind::Publish)?;
        let latest = self.latest(&name)?;
        let mut index = self.index(&name)?;
        let version = match latest {
            Some(latest) if latest.contents == contents => latest,
            latest => {
                let version = Version {
                    format: FORMAT,
                    name: name.as_str().to_owned(),
                    version: index
                        .next
                        .max(latest.as_ref().map_or(1, |latest| latest.version + 1)),
                    created_ms: now_ms(),
                    run: artifact.run,
                    digest: contents.digest(),
                    contents,
                };
                index.next = version.version + 1;
                // First: the number is not used again, even if this version is not written.
                self.write_index(&adding, &name, &index)?;
                self.write_version(&adding, &name, &version)?;
                version
            }
        };
        let aliased = aliases.into_iter().map(|alias| (alias, version.version));
        self.change_aliases(&adding, &name, index, |of| of.extend(aliased))?;
        Ok(self.stored(version))
    }

    /// A version: `model`, `model:latest`, `model:v3`, or by an alias as `model:best`.
    ///
    /// # Errors
    ///
    /// If there is none, or its manifest is damaged.
    pub fn open(&self, reference: &str) -> Result<StoredArtifact> {
        let Query { name, version } = Query::parse(reference)?;
        let number = match version {
            VersionQuery::Number(number) => Some(number),
            VersionQuery::Latest => self.numbers(&name)?.last().copied(),
            VersionQuery::Alias(alias) => self.index(&name)?.aliases.get(&alias).copied(),
        };
        let version = number
            .map(|number| self.version(&name, number))
            .transpose()?
            .flatten();
        version.map(|version| self.stored(version)).ok_or_else(|| {
            let there = self.numbers(&name).unwrap_or_default();
            let aliases = self.index(&name).unwrap_or_default().aliases;
            let there = there
                .iter()
                .map(|number| format!("v{number}"))
                .chain(aliases.into_keys());
            let there: Vec<_> = there.collect();
            Error::new(
                Kind::NotFound,
                format!(
                    "there is no artifact {reference} in {}; {}",
                    self.root.display(),
                    if there.is_empty() {
                        format!("it has none of the name {name}")
                    } else {
                        format!("of {name} it has {}", there.join(", "))
                    }
                ),
            )
        })
    }

    /// The names of all artifacts, sorted.
    ///
    /// # Errors
    ///
    /// If the store cannot be read.
    pub fn names(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for name in self.artifact_names()? {
            if !self.numbers(&name)?.is_empty() {
                names.push(name.as_str().to_owned());
            }
        }
        Ok(names)
    }

    /// The versions of a name, the oldest first.
    ///
    /// ```
    /// use accelerator_track::{Artifact, ArtifactStore};
    ///
    /// # fn main() -> accelerator_track::Result<()> {
    /// # let temporary = tempfile::tempdir().unwrap();
    /// let store = ArtifactStore::of_runs(temporary.path());
    /// store.commit(&Artifact::create("data").add_reference("s3://bucket/data")?)?;
    /// assert_eq!(store.names()?, ["data"]);
    /// assert_eq!(store.versions("data")?[0].reference(), "data:v1");
    /// assert!(store.versions("model")?.is_empty());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the store cannot be read, or a manifest is damaged.
    pub fn versions(&self, name: &str) -> Result<Vec<StoredArtifact>> {
        let versions = self.read_versions(&ArtifactName::parse(name)?)?;
        Ok(Vec::from_iter(
            versions.into_iter().map(|version| self.stored(version)),
        ))
    }

    /// Gives a version an alias; another version of the name that has it loses it.
    ///
    /// ```
    /// use accelerator_track::{Artifact, ArtifactStore};
    ///
    /// # fn main() -> accelerator_track::Result<()> {
    /// # let temporary = tempfile::tempdir().unwrap();
    /// let store = ArtifactStore::of_runs(temporary.path());
    /// store.commit(&Artifact::create("data").add_reference("s3://bucket/data")?)?;
    /// store.set_alias("data:v1", "best")?;
    /// assert_eq!(store.open("data:best")?.version(), 1);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If there is no such version, if the alias cannot be one, or if the store cannot be written.
    pub fn set_alias(&self, reference: &str, alias: &str) -> Result<()> {
        let alias = parse_alias(alias)?;
        let Query { name, .. } = Query::parse(reference)?;
        // Fails before it creates a folder.
        self.open(reference)?;
        let adding = self.begin()?;
        let _publish = StoreLock::take(&self.root, LockKind::Publish)?;
        let version = self.open(reference)?.version();
        let index = self.index(&name)?;
        self.change_aliases(&adding, &name, index, |aliases| {
            aliases.insert(alias, version);
        })
    }

    /// All names that there are or were.
    pub(super) fn artifact_names(&self) -> Result<Vec<ArtifactName>> {
        let folders = subfolders(&self.root.join(NAMES))?;
        let names = folders
            .iter()
            .filter_map(|folder| ArtifactName::parse(folder.file_name()?.to_str()?).ok());
        Ok(names.collect())
    }

    pub(super) fn read_versions(&self, name: &ArtifactName) -> Result<Vec<Version>> {
        let numbers = self.numbers(name)?.into_iter();
        numbers
            .filter_map(|number| self.version(name, number).transpose())
            .collect()
    }

    pub(super) fn index(&self, name: &ArtifactName) -> Result<Index> {
        Index::read(&self.root, name)
    }

    /// Removes versions, with their aliases, and reserves their numbers so that no other contents get them.
    pub(super) fn remove_versions(
        &self,
        adding: &Adding,
        name: &ArtifactName,
        index: &mut Index,
        versions: &BTreeMap<u32, ContentHash>,
    ) -> Result<()> {
        index.aliases.retain(|_, of| !versions.contains_key(of));
        index.removed.extend(versions);
        self.write_index(adding, name, index)?;
        for version in versions.keys() {
            let path = self.version_path(name, *version);
            fs::remove_file(&path).map_err(|error| Error::io("remove", &path, error))?;
        }
        Ok(())
    }

    fn change_aliases(
        &self,
        adding: &Adding,
        name: &ArtifactName,
        index: Index,
        change: impl FnOnce(&mut BTreeMap<String, u32>),
    ) -> Result<()> {
        let mut changed = index.clone();
        change(&mut changed.aliases);
        if changed == index {
            return Ok(());
        }
        self.write_index(adding, name, &changed)
    }

    /// Stores a version of another store under the same number, with those of its aliases that this store does not
    /// have. If other contents have or had the number here, it becomes a new version. Returns the version with these
    /// contents, and the bytes written.
    pub(crate) fn import(&self, artifact: &StoredArtifact) -> Result<(StoredArtifact, u64)> {
        let wanted = artifact.record();
        let name = ArtifactName::parse(&wanted.name)?;
        let adding = self.begin()?;
        let mut bytes = 0;
        let _reading = artifact.lock()?;
        for file in &wanted.contents.files {
            let source = artifact.object(file)?;
            bytes += adding.objects.add(&source, &adding.staged)?;
        }
        let _publish = StoreLock::take(self.folder(), LockKind::Publish)?;
        let mut index = self.index(&name)?;
        let is_same = |there: &Version| there.contents == wanted.contents;
        let there = self.version(&name, wanted.version)?;
        let is_taken = match &there {
            Some(there) => !is_same(there),
            None => index.is_of_another(wanted),
        };
        // As a new version it may have been stored before.
        let there = match is_taken {
            true => self.read_versions(&name)?.into_iter().find(is_same),
            false => there,
        };
        let version = match there {
            Some(there) => there,
            None => {
                let latest = self.numbers(&name)?.last().map_or(1, |latest| latest + 1);
                let version = Version {
                    version: match is_taken {
                        true => index.next.max(latest),
                        false => wanted.version,
                    },
                    ..wanted.clone()
                };
                index.next = index.next.max(version.version + 1);
                self.write_index(&adding, &name, &index)?;
                self.write_version(&adding, &name, &version)?;
                version
            }
        };
        let aliases = artifact
            .aliases()?
            .into_iter()
            .map(|alias| (alias, version.version));
        self.change_aliases(&adding, &name, index, |there| {
            for (alias, of) in aliases {
                there.entry(alias).or_insert(of);
            }
        })?;
        Ok((self.stored(version), bytes))
    }

    /// Keeps versions and their contents from being removed: a holder of the lock may record that a run uses one.
    pub(crate) fn keep(&self) -> Result<StoreLock> {
        StoreLock::take(&self.root, LockKind::Read)
    }

    /// Makes the store, and keeps versions and their contents from being removed, including those that are stored
    /// meanwhile.
    pub(crate) fn make(&self) -> Result<StoreLock> {
        fs::create_dir_all(&self.root)
            .map_err(|error| Error::io("create the folder", &self.root, error))?;
        StoreLock::take(&self.root, LockKind::Add)
    }

    /// Makes the store, and keeps its objects from being removed.
    fn begin(&self) -> Result<Adding> {
        Adding::begin(&self.root, self.make()?)
    }

    fn stored(&self, version: Version) -> StoredArtifact {
        StoredArtifact::new(self.root.clone(), version)
    }

    fn latest(&self, name: &ArtifactName) -> Result<Option<Version>> {
        let number = self.numbers(name)?.last().copied();
        number.map_or(Ok(None), |number| self.version(name, number))
    }

    fn version(&self, name: &ArtifactName, number: u32) -> Result<Option<Version>> {
        match Version::read(&self.version_path(name, number), name.as_str(), number) {
            Err(error) if error.is_not_found() => Ok(None),
            read => read.map(Some),
        }
    }

    /// The numbers of a name's versions, sorted.
    fn numbers(&self, name: &ArtifactName) -> Result<Vec<u32>> {
        let folder = self.folder_of(name);
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|error| Error::io("list the folder", &folder, error))?,
        };
        let mut numbers = Vec::new();
        for entry in entries {
            let file = entry
                .map_err(|error| Error::io("list the folder", &folder, error))?
                .file_name();
            numbers.extend(
                file.to_str()
                    .and_then(|file| parse_version(file.strip_suffix(JSON)?)),
            );
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    fn write_version(&self, adding: &Adding, name: &ArtifactName, version: &Version) -> Result<()> {
        adding.write(
            &self.version_path(name, version.version),
            &version.to_bytes()?,
        )
    }

    fn write_index(&self, adding: &Adding, name: &ArtifactName, index: &Index) -> Result<()> {
        adding.write(&self.folder_of(name).join(INDEX), &index.to_bytes())
    }

    fn version_path(&self, name: &ArtifactName, version: u32) -> PathBuf {
        self.folder_of(name).join(format!("v{version}{JSON}"))
    }

    fn folder_of(&self, name: &ArtifactName) -> PathBuf {
        folder_of(&self.root, name)
    }
}

const JSON: &str = ".json";
