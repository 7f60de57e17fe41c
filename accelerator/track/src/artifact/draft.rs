//! Artifacts before they are stored.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Map, Value};

use super::check_path;
use super::objects::{expect_plain, files_below};
use crate::error::{Error, Kind, Result};
use crate::record::RunId;

/// Files, folders and references that become a version of an artifact when they are
/// [committed](crate::ArtifactStore::commit).
///
/// Which files there are is looked up when they are added, and their contents are read by the commit. Links to files
/// are followed; links to folders, pipes and devices are errors. Empty folders and the rights of files are not kept.
///
/// ```
/// use accelerator_track::{Artifact, ArtifactStore};
///
/// # fn main() -> accelerator_track::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// # let weights = temporary.path().join("model.bin");
/// # let runs = temporary.path().join("runs");
/// # std::fs::write(&weights, "weights").unwrap();
/// let model = Artifact::create("mnist-model")
///     .kind("model")
///     .alias("best")
///     .add_file(&weights)?
///     .add_reference("https://example.org/mnist.gz")?;
/// let stored = ArtifactStore::of_runs(&runs).commit(&model)?;
/// assert_eq!(stored.reference(), "mnist-model:v1");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Artifact {
    pub(super) name: String,
    pub(super) kind: Option<String>,
    pub(super) aliases: Vec<String>,
    /// The places of the files, by their paths in the artifact.
    pub(super) files: BTreeMap<String, PathBuf>,
    pub(super) references: BTreeSet<String>,
    pub(super) metadata: Map<String, Value>,
    pub(super) run: Option<RunId>,
}

impl Artifact {
    /// Creates an artifact without files. The name has at most 128 bytes, and none of the characters that paths and
    /// shells use; the commit checks that.
    ///
    /// ```
    /// use accelerator_track::{Artifact, ArtifactStore};
    ///
    /// # let temporary = tempfile::tempdir().unwrap();
    /// let store = ArtifactStore::of_runs(temporary.path());
    /// assert!(store.commit(&Artifact::create("../elsewhere")).unwrap_err().is_misuse());
    /// ```
    #[must_use]
    pub fn create(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            kind: None,
            aliases: Vec::new(),
            files: BTreeMap::new(),
            references: BTreeSet::new(),
            metadata: Map::new(),
            run: None,
        }
    }

    /// Sets the kind: `model`, `dataset`.
    #[must_use]
    pub fn kind(mut self, kind: impl Into<String>) -> Self {
        self.kind = Some(kind.into());
        self
    }

    /// Gives the version an alias, as `best`; another version of this artifact that has it loses it.
    #[must_use]
    pub fn alias(mut self, alias: impl Into<String>) -> Self {
        self.aliases.push(alias.into());
        self
    }

    /// The run that made it.
    #[must_use]
    pub fn produced_by(mut self, run: RunId) -> Self {
        self.run = Some(run);
        self
    }

    /// Adds a file under its own name.
    ///
    /// # Errors
    ///
    /// If there is none, if it is a folder, a pipe or a device, or if the artifact has another file of this name.
    pub fn add_file(self, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .ok_or_else(|| {
                Error::new(
                    Kind::Misuse,
                    format!(
                        "{} has no name in UTF-8; name the file with add_file_as",
                        path.display()
                    ),
                )
            })?;
        let name = name.to_owned();
        self.add_file_as(path, name)
    }

    /// Adds a file under another name, which may have folders: `weights/model.bin`.
    ///
    /// ```
    /// use accelerator_track::Artifact;
    ///
    /// # let temporary = tempfile::tempdir().unwrap();
    /// # let file = temporary.path().join("checkpoint-000001.bin");
    /// # std::fs::write(&file, "weights").unwrap();
    /// let model = Artifact::create("model");
    /// assert!(model.clone().add_file_as(&file, "../model.bin").unwrap_err().is_misuse());
    /// assert!(model.add_file_as(&file, "weights/model.bin").is_ok());
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`add_file`](Self::add_file), and if the name leads out of the artifact.
    pub fn add_file_as(mut self, path: impl AsRef<Path>, name: impl Into<String>) -> Result<Self> {
        let path = path.as_ref();
        let metadata = fs::metadata(path).map_err(|error| Error::io("read", path, error))?;
        expect_plain(path, &metadata)?;
        self.insert(name.into(), path)?;
        Ok(self)
    }

    /// Adds all files below a folder, under their paths in it.
    ///
    /// ```
    /// use accelerator_track::{Artifact, ArtifactStore};
    ///
    /// # fn main() -> accelerator_track::Result<()> {
    /// # let temporary = tempfile::tempdir().unwrap();
    /// # let folder = temporary.path().join("model");
    /// # std::fs::create_dir_all(folder.join("weights")).unwrap();
    /// std::fs::write(folder.join("config.json"), "{}").unwrap();
    /// std::fs::write(folder.join("weights/0.bin"), "weights").unwrap();
    /// let model = Artifact::create("model").add_dir(&folder)?;
    /// let stored = ArtifactStore::of_runs(temporary.path()).commit(&model)?;
    /// assert_eq!(stored.files()[1].path, "weights/0.bin");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If it cannot be listed, if something in it is a link to a folder, a pipe or a device, or has a name that is no
    /// text, or if the artifact has another file of the same path.
    pub fn add_dir(mut self, path: impl AsRef<Path>) -> Result<Self> {
        for (name, path) in files_below(path.as_ref())? {
            self.insert(name, &path)?;
        }
        Ok(self)
    }

    /// Adds something that stays where it is: `s3://bucket/data`, `https://…`. It is not read.
    ///
    /// # Errors
    ///
    /// If this is not a URL, or one with a password: artifacts are shared.
    pub fn add_reference(mut self, url: impl Into<String>) -> Result<Self> {
        let url = url.into();
        let misuse = |url: &str, why: &str| {
            Err(Error::new(
                Kind::Misuse,
                format!("{url:?} cannot be a reference: {why}"),
            ))
        };
        let (scheme, rest) = url.split_once(':').unwrap_or_default();
        let is_scheme = scheme.starts_with(|x: char| x.is_ascii_alphabetic())
            && scheme
                .chars()
                .all(|x| x.is_ascii_alphanumeric() || "+-.".contains(x));
        if !is_scheme || rest.is_empty() || url.contains(char::is_control) {
            return misuse(&url, "expected a URL, as \"s3://bucket/data\"");
        }
        let host = rest
            .strip_prefix("//")
            .and_then(|rest| rest.split(['/', '?', '#']).next());
        if let Some((user, host)) = host.and_then(|host| host.rsplit_once('@'))
            && user.contains(':')
        {
            return misuse(
                &format!("{scheme}://…@{host}"),
                "it holds a password, which everybody would read",
            );
        }
        self.references.insert(url);
        Ok(self)
    }

    /// Adds the fields of a value to the artifact's metadata.
    ///
    /// ```
    /// use accelerator_track::Artifact;
    ///
    /// let model = Artifact::create("model").metadata(std::collections::HashMap::from([("accuracy", 0.99)]))?;
    /// assert!(model.metadata("no object").unwrap_err().is_misuse());
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the value is not an object in JSON.
    pub fn metadata(mut self, metadata: impl Serialize) -> Result<Self> {
        match serde_json::to_value(metadata) {
            Ok(Value::Object(fields)) => self.metadata.extend(fields),
            Ok(other) => {
                return Err(Error::new(
                    Kind::Misuse,
                    format!(
                        "the metadata of the artifact {:?} is no object with fields, but {other}",
                        self.name
                    ),
                ));
            }
            Err(error) => {
                let message = format!(
                    "the metadata of the artifact {:?} cannot be JSON: {error}",
                    self.name
                );
                return Err(Error::new(Kind::Misuse, message).with_source(error));
            }
        }
        Ok(self)
    }

    fn insert(&mut self, name: String, path: &Path) -> Result<()> {
        check_path(&name)?;
        // The program may go to another folder before the commit.
        let path = std::path::absolute(path).map_err(|error| Error::io("find", path, error))?;
        if self.files.get(&name).is_some_and(|there| *there == path) {
            return Ok(());
        }
        let below = format!("{name}/");
        let mut folders = name.match_indices('/').map(|(at, _)| &name[..at]);
        let taken = folders
            .find(|folder| self.files.contains_key(*folder))
            .or_else(|| self.files.contains_key(&name).then_some(name.as_str()))
            .or_else(|| {
                let next = self.files.range(below.clone()..).next()?;
                next.0.starts_with(&below).then_some(next.0.as_str())
            });
        if let Some(taken) = taken {
            return Err(Error::new(
                Kind::Misuse,
                format!(
                    "the artifact {:?} cannot have {name:?} of {} beside {taken:?} of {}; name one otherwise with add_file_as",
                    self.name,
                    path.display(),
                    self.files[taken].display()
                ),
            ));
        }
        self.files.insert(name, path);
        Ok(())
    }
}
