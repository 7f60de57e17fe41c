//! Records where this process comes from. The program `git` describes the sources; it runs for a short time at most, and
//! writes nothing.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use accelerator_host::process::{self, Group, Limits, Outcome};
use accelerator_host::{LAUNCH_COMMAND, SET_BY_LAUNCHER};
use serde::Serialize;

use super::mask::{MASK, mask_arguments, mask_text};
use super::{
    Commit, FolderDigest, HashedFile, HostFacts, Provenance, hash_file, hash_opened, is_input,
    is_world_size,
};
use crate::journal::now_ms;
use crate::run_files::write_blob;

/// The time for which the program's file is read; one that is built without optimization hashes 20 MB a second.
const PATIENCE: Duration = Duration::from_secs(3);

/// Captures where this process comes from: the program adds what only it knows.
///
/// Capturing never fails: what is not known is absent, and the field `notes` says what was left out. It takes
/// up to four seconds if git does not answer, and up to three to read the program's file meanwhile.
///
/// ```
/// use accelerator_track::{Capture, Run, RunHistory};
///
/// # let temporary = tempfile::tempdir().unwrap();
/// let capture = Capture::new().features(["cuda"]).devices(["cuda:0"]).seed("model", 42).world(1);
/// let run = Run::builder("mnist").runs_folder(temporary.path()).capture(capture).start()?;
/// let provenance = RunHistory::read(run.folder())?.attempts[0].provenance.clone();
/// assert_eq!(provenance["seeds"]["model"], 42);
/// assert!(provenance["binary"]["bytes"].as_u64() > Some(0));
/// # Ok::<(), accelerator_track::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct Capture {
    told: Provenance,
}

impl Capture {
    /// Begins with what any program has.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the cargo features that the program is built with, which it finds by `cfg!(feature = …)`.
    pub fn features<S: Into<String>>(mut self, features: impl IntoIterator<Item = S>) -> Self {
        self.told.features = features.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the devices of the ranks, by their names.
    pub fn devices<S: Into<String>>(mut self, devices: impl IntoIterator<Item = S>) -> Self {
        self.told.devices = devices.into_iter().map(Into::into).collect();
        self
    }

    /// Adds a seed, and what it is for.
    pub fn seed(mut self, name: impl Into<String>, seed: u64) -> Self {
        self.told.seeds.insert(name.into(), seed);
        self
    }

    /// Adds the digest of a folder of data, and what it is for. [`digest_folder`](crate::digest_folder) makes it.
    pub fn data(mut self, name: impl Into<String>, digest: FolderDigest) -> Self {
        self.told.data.insert(name.into(), digest);
        self
    }

    /// Sets how the ranks are set up. A value that has no JSON is left out.
    pub fn plan(mut self, plan: impl Serialize) -> Self {
        self.told.plan = serde_json::to_value(plan).ok();
        self
    }

    /// Sets the number of ranks.
    pub fn world(mut self, ranks: usize) -> Self {
        self.told.world = Some(ranks);
        self
    }

    /// Finds the rest, and writes what differs from the commit into `blobs` of the run's folder.
    pub(crate) fn take(self, run_folder: &Path) -> Provenance {
        let arguments = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
        let arguments: Vec<String> = arguments.collect();
        let directory = std::env::current_dir().ok();
        let executable = std::env::current_exe().ok();
        let folders = source_folders(directory.as_deref(), executable.as_deref());
        let repository = folders.iter().find_map(|folder| Repository::around(folder));
        let (state, binary) = thread::scope(|scope| {
            let state = scope.spawn(|| repository.and_then(|repository| repository.state()));
            let binary = executable.as_deref().and_then(binary);
            // A thread that panics has found nothing.
            (state.join().ok().flatten(), binary)
        });
        let mut provenance = Provenance {
            arguments: mask_arguments(&arguments),
            launched_by: launch_command(),
            directory: directory.map(|path| path.to_string_lossy().into_owned()),
            lock_file: lock_file(&folders),
            binary,
            host: HostFacts::of_this_machine(),
            pid: Some(std::process::id()),
            started_ms: Some(now_ms()),
            environment: recorded(std::env::vars_os()),
            ..self.told
        };
        let is_unread = |file: &&HashedFile| file.hash.is_none();
        if let Some(binary) = provenance.binary.as_ref().filter(is_unread) {
            provenance.notes.push(format!(
                "the program of {} bytes takes longer than {} s to hash: its hash is not recorded",
                binary.bytes,
                PATIENCE.as_secs()
            ));
        }
        if let Some(State {
            mut commit,
            diff,
            notes,
        }) = state
        {
            provenance.notes.extend(notes);
            if let (Some(_), Some(diff)) = (&commit.diff, diff)
                && let Err(error) = write_blob(run_folder, &diff)
            {
                let folder = run_folder.display();
                tracing::warn!(
                    "the diff to the commit cannot be written into blobs of {folder}: {error}"
                );
                provenance
                    .notes
                    .push(format!("the diff to the commit was not written: {error}"));
                commit.diff = None;
            }
            provenance.commit = Some(commit);
        }
        provenance
    }
}

/// Returns folders that may have the sources, the most certain first. Cargo and `accel-launch` name the package; a
/// program that was built in a package is below it.
fn source_folders(directory: Option<&Path>, executable: Option<&Path>) -> Vec<PathBuf> {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let folders = [
        package.filter(|path| path.is_absolute()),
        directory.map(Path::to_path_buf),
        executable.and_then(Path::parent).map(Path::to_path_buf),
    ];
    folders.into_iter().flatten().collect()
}

/// Returns the variables that are recorded; one without a value is not set.
fn recorded(variables: impl Iterator<Item = (OsString, OsString)>) -> BTreeMap<String, String> {
    let text = |(name, value): (OsString, OsString)| {
        let name = name.into_string().ok()?;
        let is_recorded = is_input(&name) || is_world_size(&name) || name == SET_BY_LAUNCHER.name;
        (is_recorded && !value.is_empty()).then(|| (name, mask_text(&value.to_string_lossy())))
    };
    variables.filter_map(text).collect()
}

/// Returns the command line of the `accel-launch` that started this process, if any.
fn launch_command() -> Vec<String> {
    let text = accelerator_host::variable(LAUNCH_COMMAND.name).unwrap_or_default();
    let words: Option<Vec<String>> = serde_json::from_str(&text.to_string_lossy()).ok();
    mask_arguments(&words.unwrap_or_default())
}

/// Returns the nearest `Cargo.lock` upwards from one of these folders.
fn lock_file(folders: &[PathBuf]) -> Option<HashedFile> {
    let mut above = folders.iter().flat_map(|folder| folder.ancestors());
    above.find_map(|folder| hash_file(&folder.join("Cargo.lock")).ok())
}

/// Hashes the program that runs, even if its file was replaced since.
fn binary(path: &Path) -> Option<HashedFile> {
    let shown = path.to_string_lossy();
    let shown = Path::new(shown.strip_suffix(" (deleted)").unwrap_or(&shown));
    let file = File::open("/proc/self/exe")
        .or_else(|_| File::open(path))
        .ok()?;
    hash_opened(file, shown, Some(PATIENCE)).ok()
}

/// The time that one question may take. Tests may run on a busy machine.
const GIT_PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 2 });

/// The longest answer but a diff.
const LONGEST_ANSWER: usize = 32 << 20;

/// The longest diff that is recorded.
const LONGEST_DIFF: usize = 8 << 20;

/// A repository with a work tree.
#[derive(Clone, Debug)]
pub(super) struct Repository {
    root: PathBuf,
}

/// The state of a repository.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    pub(super) commit: Commit,
    /// The contents of which `commit.diff` is the hash.
    pub(super) diff: Option<Vec<u8>>,
    pub(super) notes: Vec<String>,
}

impl Repository {
    /// Finds the repository that contains `folder`.
    pub(super) fn around(folder: &Path) -> Option<Self> {
        let root = folder
            .ancestors()
            .find(|folder| folder.join(".git").exists())?;
        Some(Self {
            root: root.to_path_buf(),
        })
    }

    /// Returns the present state; `None` if git cannot tell.
    pub(super) fn state(&self) -> Option<State> {
        let (status, diff, remote) = thread::scope(|scope| {
            let diff = scope.spawn(|| self.diff());
            let remote = scope.spawn(|| self.remote());
            let status = self.status();
            // A thread that panics has no answer.
            (
                status,
                diff.join().unwrap_or(Err(Stopped::Failed)),
                remote.join().unwrap_or_default(),
            )
        });
        let mut notes = Vec::new();
        let status = match status {
            Ok(status) => Some(status),
            Err(Stopped::Failed) => None,
            Err(_) => {
                notes.push(format!(
                    "git status takes longer than {} s: whether files differ from the commit is not recorded",
                    GIT_PATIENCE.as_secs()
                ));
                None
            }
        };
        let mut commit = match status {
            Some(status) => commit_of(&status),
            None => {
                let hash = self.ask(&["rev-parse", "--verify", "HEAD"], LONGEST_ANSWER);
                Commit {
                    hash: Some(String::from_utf8(hash.ok()?).ok()?.trim_end().to_owned()),
                    ..Commit::default()
                }
            }
        };
        commit.root = self.root.to_string_lossy().into_owned();
        commit.remote = remote;
        let diff = match diff {
            Ok(diff) => Some(diff).filter(|diff| !diff.is_empty()),
            // Before the first commit there is none.
            Err(Stopped::Failed) => None,
            Err(why) => {
                let why = match why {
                    Stopped::TooLong => format!("is larger than {} MiB", LONGEST_DIFF >> 20),
                    _ => format!("takes longer than {} s", GIT_PATIENCE.as_secs()),
                };
                notes.push(format!("git diff HEAD {why}: it is not recorded"));
                None
            }
        };
        commit.diff = diff.as_ref().map(|diff| blake3::hash(diff).to_string());
        Some(State {
            commit,
            diff,
            notes,
        })
    }

    fn status(&self) -> Result<Vec<u8>, Stopped> {
        let status = [
            "status",
            "--porcelain=v2",
            "--branch",
            "-z",
            "--untracked-files=no",
        ];
        self.ask(&status, LONGEST_ANSWER)
    }

    fn diff(&self) -> Result<Vec<u8>, Stopped> {
        let arguments = [
            "diff",
            "--binary",
            "--no-color",
            "--no-ext-diff",
            "--no-textconv",
            "--no-renames",
            "--src-prefix=a/",
            "--dst-prefix=b/",
            "HEAD",
            "--",
        ];
        self.ask(&arguments, LONGEST_DIFF)
    }

    fn remote(&self) -> Option<String> {
        let answer = self
            .ask(
                &["config", "--get-regexp", r"^remote\..*\.url$"],
                LONGEST_ANSWER,
            )
            .ok()?;
        let answer = String::from_utf8_lossy(&answer);
        let mut remotes = answer.lines().filter_map(|line| line.split_once(' '));
        let is_origin = |(key, _): &(&str, &str)| *key == "remote.origin.url";
        let (_, url) = remotes.clone().find(is_origin).or_else(|| remotes.next())?;
        Some(mask_text(url).replace(&format!("{MASK}@"), ""))
    }

    fn ask(&self, arguments: &[&str], limit: usize) -> Result<Vec<u8>, Stopped> {
        let mut command = Command::new("git");
        command
            .current_dir(&self.root)
            // Neither a daemon nor a prompt, and no write to the index.
            .args([
                "-c",
                "core.fsmonitor=false",
                "-c",
                "core.quotePath=false",
                "--no-pager",
            ])
            .args(arguments)
            .env("GIT_OPTIONAL_LOCKS", "0")
            .env("GIT_TERMINAL_PROMPT", "0")
            .env("LC_ALL", "C");
        // The folder says which repository, not a hook in which this runs.
        for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"] {
            command.env_remove(name);
        }
        output(&mut command, limit, GIT_PATIENCE)
    }
}

/// Reads the answer of `git status`.
fn commit_of(status: &[u8]) -> Commit {
    let mut commit = Commit::default();
    for record in status.split(|&byte| byte == 0) {
        let record = String::from_utf8_lossy(record);
        match record.split(' ').collect::<Vec<_>>()[..] {
            ["#", "branch.oid", "(initial)"] | ["#", "branch.head", "(detached)"] => {}
            ["#", "branch.oid", hash] => commit.hash = Some(hash.to_owned()),
            ["#", "branch.head", branch] => commit.branch = Some(branch.to_owned()),
            ["1" | "2" | "u", ..] => commit.dirty = true,
            _ => {}
        }
    }
    commit
}

/// The reason for missing output.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stopped {
    /// It could not be started, or said that it failed.
    Failed,
    /// It took too long.
    TooLate,
    /// It wrote too much.
    TooLong,
}

/// Returns what `command` writes to standard output: at most `limit` bytes, within `time`.
fn output(command: &mut Command, limit: usize, time: Duration) -> Result<Vec<u8>, Stopped> {
    let limits = Limits {
        time,
        output: limit,
        group: Group::Own,
    };
    let output = process::run(command, limits).map_err(|_| Stopped::Failed)?;
    match output.outcome {
        Outcome::Ended(_) if output.is_success() => Ok(output.stdout),
        Outcome::Ended(_) => Err(Stopped::Failed),
        Outcome::OutOfTime => Err(Stopped::TooLate),
        Outcome::OutputTooLong => Err(Stopped::TooLong),
    }
}

#[cfg(all(test, unix))]
mod output_tests {
    use super::*;

    fn shell(script: &str, limit: usize) -> Result<Vec<u8>, Stopped> {
        let mut command = Command::new("sh");
        output(
            command.args(["-c", script]),
            limit,
            Duration::from_millis(400),
        )
    }

    #[test]
    fn what_hangs_floods_or_fails_is_given_up() {
        assert_eq!(shell("echo a", 2), Ok(b"a\n".to_vec()));
        assert_eq!(shell("yes", 1000), Err(Stopped::TooLong));
        assert_eq!(shell("echo a; exit 3", 10), Err(Stopped::Failed));
        assert_eq!(shell("sleep 20", 10), Err(Stopped::TooLate));
        let mut missing = Command::new("no-such-program");
        assert_eq!(
            output(&mut missing, 1, Duration::from_secs(1)),
            Err(Stopped::Failed)
        );
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn of(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        let pairs = pairs.iter();
        recorded(pairs.map(|(name, value)| (name.into(), value.into())))
    }

    #[test]
    fn what_may_be_a_secret_is_not_recorded() {
        let secrets = [
            "ACCEL_TOKEN_FILE",
            "ACCEL_API_KEY",
            "NCCL_SECRET",
            "NCCL_KEY",
            "WGPU_PASSWORD",
            "CUBECL_TOKEN",
            "MLFLOW_TRACKING_PASSWORD",
            "MLFLOW_TRACKING_TOKEN",
            "AWS_SECRET_ACCESS_KEY",
            "HF_TOKEN",
            "HOME",
            "SLURM_JWT",
            "ACCEL_FUTURE",
            "PATH",
            "ACCEL_LAUNCH_COMMAND",
        ];
        let secrets = secrets.map(|name| (name, "a secret"));
        assert_eq!(of(&secrets), BTreeMap::new());
    }

    #[test]
    fn what_is_listed_is_recorded_without_passwords() {
        let found = of(&[
            ("RANK", "0"),
            ("RUST_LOG", "debug"),
            ("ACCEL_OVERLAP", "off"),
            ("NCCL_DEBUG", "INFO"),
            ("RAYON_NUM_THREADS", ""),
            ("WORLD_SIZE", "2"),
            ("MLFLOW_TRACKING_URI", "https://me:hidden@host:5000/a"),
        ]);
        let found: Vec<_> = found
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        assert_eq!(
            found,
            [
                "ACCEL_OVERLAP=off",
                "MLFLOW_TRACKING_URI=https://***@host:5000/a",
                "NCCL_DEBUG=INFO",
                "WORLD_SIZE=2"
            ]
        );
        assert!(!is_input("ACCEL_PORT") && !is_input("WORLD_SIZE"));
        assert!(is_input("ACCEL_OVERLAP"));
    }

    #[test]
    fn this_process_is_recorded() {
        let temporary = tempfile::tempdir().unwrap();
        let provenance = Capture::new().plan([1, 2]).take(temporary.path());
        assert_eq!(provenance.arguments.len(), std::env::args_os().len());
        let binary = provenance.binary.clone().unwrap();
        let path = std::env::current_exe().unwrap();
        assert_eq!(binary.path, path.to_string_lossy());
        let hashed = hash_file(&path).unwrap();
        assert!(binary.hash == hashed.hash || provenance.notes[0].contains("to hash"));
        let lock_file = provenance.lock_file.clone().unwrap();
        assert!(lock_file.path.ends_with("Cargo.lock"));
        let commit = provenance.commit.as_ref();
        if let Some(diff) = commit.and_then(|commit| commit.diff.as_ref()) {
            let blob = fs::read(temporary.path().join("blobs").join(diff)).unwrap();
            assert_eq!(&blake3::hash(&blob).to_string(), diff);
        }
        // It comes back from a journal.
        let value = serde_json::to_value(&provenance).unwrap();
        assert_eq!(
            serde_json::from_value::<Provenance>(value).unwrap(),
            provenance
        );
    }

    #[test]
    fn a_run_folder_that_cannot_be_written_costs_the_diff_only() {
        let temporary = tempfile::tempdir().unwrap();
        let file = temporary.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(write_blob(&file, b"x").is_err());
        let commit = Capture::new().take(&file).commit;
        assert!(commit.is_none_or(|commit| commit.diff.is_none()));
    }
}
