//! Records where this process comes from.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use accelerator_env::{LAUNCH_COMMAND, SET_BY_LAUNCHER};
use serde::Serialize;

use super::facts::{HostFacts, Provenance, is_input, is_world_size};
use super::files::{FolderDigest, HashedFile, hash_file, hash_opened};
use super::git::{Repository, State};
use super::mask::{mask_arguments, mask_text};
use crate::blob::write_blob;

/// For how long the program's file is read; one that is built without optimization hashes 20 MB a second.
const PATIENCE: Duration = Duration::from_secs(3);

/// Captures where this process comes from: the program tells what only it knows, and the rest is found.
///
/// Capturing never fails: what is not known is absent, and [`notes`](Provenance::notes) say what was left out. It takes
/// up to four seconds if git does not answer, and up to three to read the program's file meanwhile.
///
/// ```
/// use accelerator_track::Capture;
///
/// # let temporary = tempfile::tempdir().unwrap();
/// # let run_folder = temporary.path();
/// let capture = Capture::new().features(["cuda"]).devices(["cuda:0"]).seed("model", 42).world(1);
/// let provenance = capture.take(run_folder);
/// assert_eq!(provenance.seeds["model"], 42);
/// assert!(provenance.binary.unwrap().bytes > 0);
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
    pub fn take(self, run_folder: impl AsRef<Path>) -> Provenance {
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
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let mut provenance = Provenance {
            arguments: mask_arguments(&arguments),
            launched_by: launch_command(),
            directory: directory.map(|path| path.to_string_lossy().into_owned()),
            lock_file: lock_file(&folders),
            binary,
            host: HostFacts::of_this_machine(),
            pid: Some(std::process::id()),
            started_ms: u64::try_from(now.as_millis()).ok(),
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
                && let Err(error) = write_blob(run_folder.as_ref(), &diff)
            {
                let folder = run_folder.as_ref().display();
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

/// Where the sources may be, the most certain first. Cargo and `accel-launch` name the package; a program that was
/// built in a package is below it.
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
    let text = accelerator_env::variable(LAUNCH_COMMAND.name).unwrap_or_default();
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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn of(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        recorded(
            pairs
                .iter()
                .map(|(name, value)| (name.into(), value.into())),
        )
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
        assert!(
            provenance
                .lock_file
                .clone()
                .unwrap()
                .path
                .ends_with("Cargo.lock")
        );
        if let Some(diff) = provenance
            .commit
            .as_ref()
            .and_then(|commit| commit.diff.as_ref())
        {
            let blob = fs::read(temporary.path().join("blobs").join(diff)).unwrap();
            assert_eq!(&blake3::hash(&blob).to_string(), diff);
        }
        // It comes back from a journal.
        let value = serde_json::Value::from(provenance.clone());
        assert_eq!(Provenance::from(&value), provenance);
        assert_eq!(
            Provenance::from(&serde_json::Value::Null),
            Provenance::default()
        );
    }

    #[test]
    fn a_run_folder_that_cannot_be_written_costs_the_diff_only() {
        let temporary = tempfile::tempdir().unwrap();
        let file = temporary.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(write_blob(&file, b"x").is_err());
        assert!(
            Capture::new()
                .take(&file)
                .commit
                .is_none_or(|commit| commit.diff.is_none())
        );
    }
}
