//! What is recorded.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::environment::{self, Meaning};
use super::files::FolderDigest;
use crate::history::RunHistory;

/// Where a run came from and what it ran on. What is not known is absent.
///
/// [`Capture`](crate::Capture) makes it, and an [attempt](crate::Record::Attempt) of a run's journal holds it.
///
/// ```
/// use accelerator_track::Provenance;
///
/// // A journal of another version may have fewer fields, or more.
/// let text = r#"{"arguments": ["./mnist", "--epochs", "2"], "seeds": {"model": 42}, "later": 1}"#;
/// let provenance: Provenance = serde_json::from_str(text).unwrap();
/// assert_eq!(provenance.seeds["model"], 42);
/// assert!(provenance.commit.is_none() && !provenance.is_launched());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Provenance {
    /// The command line of the process, the program's name first. Secrets are [masked](crate::mask_arguments).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub arguments: Vec<String>,
    /// The command line of `accel-launch`, where that started the process. Secrets are masked.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub launched_by: Vec<String>,
    /// The working directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub directory: Option<String>,
    /// The state of the git repository that has the sources.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<Commit>,
    /// The `Cargo.lock` of the package.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lock_file: Option<HashedFile>,
    /// The cargo features that the program is built with, where it told them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub features: Vec<String>,
    /// The program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub binary: Option<HashedFile>,
    /// The machine.
    pub host: HostFacts,
    /// The process's id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The devices of the ranks, as the program names them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
    /// Seeds by what they are for.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub seeds: BTreeMap<String, u64>,
    /// Digests of folders of data, by what they are for.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub data: BTreeMap<String, FolderDigest>,
    /// How the ranks are set up, as the program describes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<Value>,
    /// How many ranks there are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub world: Option<usize>,
    /// When this was captured, in milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_ms: Option<u64>,
    /// Environment variables of a list that holds no secrets.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// What could not be recorded, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

impl Provenance {
    /// That of a run's last attempt, whose results count. Where the program recorded something of its own, nothing is known.
    ///
    /// ```
    /// use accelerator_track::{Capture, Provenance, Run, RunHistory};
    ///
    /// # let temporary = tempfile::tempdir().unwrap();
    /// let capture = Capture::new().seed("model", 42);
    /// let run = Run::builder("mnist").runs_folder(temporary.path()).capture(capture).start()?;
    /// assert_eq!(Provenance::of(&RunHistory::read(run.folder())?).seeds["model"], 42);
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    #[must_use]
    pub fn of(run: &RunHistory) -> Self {
        let last = run.attempts.last();
        last.map(|attempt| Self::from(&attempt.provenance))
            .unwrap_or_default()
    }

    /// The environment variables that the program was given: those of [`environment`](Self::environment) by which no
    /// launcher or scheduler tells a process its place, and that `accel-launch` did not set.
    ///
    /// ```
    /// use accelerator_track::Provenance;
    ///
    /// let environment = [("RANK", "0"), ("RUST_LOG", "info")].map(|(name, value)| (name.into(), value.into()));
    /// let provenance = Provenance { environment: environment.into(), ..Provenance::default() };
    /// assert_eq!(provenance.own_environment().collect::<Vec<_>>(), ["RUST_LOG"]);
    /// ```
    pub fn own_environment(&self) -> impl Iterator<Item = &str> {
        let of_launcher: Vec<&str> = environment::of_options(&self.environment).collect();
        let names = self.environment.keys().map(String::as_str);
        names.filter(move |name| {
            Meaning::of(name) == Some(Meaning::Input) && !of_launcher.contains(name)
        })
    }

    /// Whether `accel-launch` started the process.
    #[must_use]
    pub fn is_launched(&self) -> bool {
        !self.launched_by.is_empty()
    }
}

/// The state of a git repository.
///
/// ```
/// use accelerator_track::{Commit, SourceState};
///
/// let mut commit = Commit { hash: Some("1a2b3c4".into()), ..Commit::default() };
/// assert!(!commit.is_dirty());
/// commit.changed.insert("src/main.rs".into(), SourceState::Deleted);
/// assert!(commit.is_dirty());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Commit {
    /// The folder of the repository on the host of the run.
    pub root: String,
    /// The commit; absent before the first one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hash: Option<String>,
    /// The branch; absent where the commit is checked out by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub branch: Option<String>,
    /// The address of `origin`, else of another remote, without user and password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote: Option<String>,
    /// Tracked files that differ from the commit, by their path in the repository.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub changed: BTreeMap<String, SourceState>,
    /// Source files that git does not track nor ignore, by their path in the repository.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub untracked: BTreeMap<String, SourceState>,
    /// BLAKE3 of `git diff HEAD`, which is `blobs/HASH` in the run's folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub diff: Option<String>,
}

impl Commit {
    /// Whether tracked files differ from the commit.
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        !self.changed.is_empty()
    }
}

/// What a source file was that is not as in the commit.
///
/// ```
/// use accelerator_track::SourceState;
///
/// let state: SourceState = serde_json::from_str("\"deleted\"").unwrap();
/// assert_eq!(state, SourceState::Deleted);
/// assert_eq!(SourceState::Hash("af1349b9".into()).to_string(), "af1349b9");
/// ```
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SourceState {
    /// A file with this BLAKE3 sum, hexadecimal.
    Hash(String),
    /// It was not there.
    Deleted,
    /// It was not read: it is too large, or no plain file, or there are too many.
    Unread,
}

/// A file and its hash.
///
/// ```
/// use accelerator_track::HashedFile;
///
/// let file: HashedFile = serde_json::from_str(r#"{"path": "Cargo.lock", "hash": "af13", "bytes": 3}"#).unwrap();
/// assert_eq!(file.bytes, 3);
/// ```
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HashedFile {
    /// Where it was.
    pub path: String,
    /// Its BLAKE3 sum, hexadecimal; absent where that would have held the program up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hash: Option<String>,
    /// Its length.
    pub bytes: u64,
}

/// A machine.
///
/// ```
/// use accelerator_track::HostFacts;
///
/// let host: HostFacts = serde_json::from_str(r#"{"name": "node1", "cores": 8}"#).unwrap();
/// assert_eq!((host.name.as_deref(), host.memory), (Some("node1"), None));
/// ```
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostFacts {
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Who runs the program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The operating system, as its vendor names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub os: Option<String>,
    /// The version of the kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    /// The architecture that the program is built for, as `x86_64`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arch: Option<String>,
    /// The model of the processor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// How many cores the process may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<usize>,
    /// The machine's memory in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
}

impl From<Provenance> for Value {
    /// As an attempt of a journal holds it.
    fn from(provenance: Provenance) -> Self {
        // Maps of it have text for keys, so this does not fail.
        serde_json::to_value(provenance).unwrap_or_default()
    }
}

impl From<&Value> for Provenance {
    /// From an attempt of a journal. In what is no provenance, nothing is known.
    fn from(value: &Value) -> Self {
        Self::deserialize(value).unwrap_or_default()
    }
}

impl std::fmt::Display for SourceState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Hash(hash) => hash,
            Self::Deleted => "deleted",
            Self::Unread => "not read",
        })
    }
}
