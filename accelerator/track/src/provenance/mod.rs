//! The origin of a run: source, program, machine, inputs. Compares two runs by it, and starts one again.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use accelerator_host::machine::{Memory, host_name};
use accelerator_host::{LAUNCH_COMMAND, PREFIX, RUN_TAGS, Reader, SET_BY_LAUNCHER, find};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, Kind, Result};
use crate::history::RunHistory;
pub use capture::Capture;
use mask::is_secret_variable;
pub use mask::mask_arguments;
pub(crate) use mask::mask_value;
pub use reproduce::Reproduction;

mod capture;
pub(crate) mod diff;
mod mask;
mod reproduce;
#[cfg(test)]
mod tests;

/// The origin of a run and its machine. Unknown facts are absent.
///
/// [`Capture`](crate::Capture) makes it, and an [attempt](crate::Record::Attempt) of a run's journal holds it.
///
/// ```
/// use accelerator_track::internal::Provenance;
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
    /// The command line of the process, the program's name first. Secrets are [masked](crate::internal::mask_arguments).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub arguments: Vec<String>,
    /// The command line of `accel-launch`, if that started the process. Secrets are masked.
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
    /// The cargo features of the program, if it named them.
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
    /// The setup of the ranks, as the program describes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<Value>,
    /// The number of ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub world: Option<usize>,
    /// The time at which this was captured, in milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_ms: Option<u64>,
    /// Environment variables of a list that holds no secrets.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// Notes on what could not be recorded, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

impl Provenance {
    /// Returns the provenance of a run's last attempt, whose results count; the default if the program recorded
    /// something else.
    ///
    /// ```
    /// use accelerator_track::{Capture, Run, RunHistory, internal::Provenance};
    ///
    /// # let temporary = tempfile::tempdir().unwrap();
    /// let capture = Capture::new().seed("model", 42);
    /// let run = Run::builder("mnist").runs_folder(temporary.path()).capture(capture).start()?;
    /// assert_eq!(Provenance::of(&RunHistory::read(run.folder())?).seeds["model"], 42);
    /// let plain = Run::builder("plain").runs_folder(temporary.path()).start()?;
    /// assert_eq!(Provenance::of(&RunHistory::read(plain.folder())?), Provenance::default());
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    #[must_use]
    pub fn of(run: &RunHistory) -> Self {
        let last = run.last_attempt();
        last.and_then(|attempt| Self::deserialize(&attempt.provenance).ok())
            .unwrap_or_default()
    }

    /// The environment variables that users set: those of [`environment`](Self::environment) that neither a launcher
    /// nor a scheduler sets.
    ///
    /// ```
    /// use accelerator_track::internal::Provenance;
    ///
    /// let environment = [("WORLD_SIZE".into(), "2".into()), ("NCCL_DEBUG".into(), "INFO".into())].into();
    /// let provenance = Provenance { environment, ..Provenance::default() };
    /// assert_eq!(provenance.own_environment().collect::<Vec<_>>(), ["NCCL_DEBUG"]);
    /// ```
    pub fn own_environment(&self) -> impl Iterator<Item = &str> {
        let of_launcher: Vec<&str> = self.set_by_launcher().collect();
        let names = self.environment.keys().map(String::as_str);
        names.filter(move |name| is_input(name) && !of_launcher.contains(name))
    }

    /// Returns the variables that the launcher set from its own options.
    fn set_by_launcher(&self) -> impl Iterator<Item = &str> {
        let listed = self.environment.get(SET_BY_LAUNCHER.name);
        listed.map_or("", String::as_str).split(',').map(str::trim)
    }

    /// Returns true if `accel-launch` started the process.
    #[must_use]
    pub fn is_launched(&self) -> bool {
        !self.launched_by.is_empty()
    }
}

/// The state of a git repository.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Commit {
    /// The folder of the repository on the host of the run.
    pub root: String,
    /// The commit; absent before the first one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hash: Option<String>,
    /// The branch; absent if the commit is checked out by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub branch: Option<String>,
    /// The address of `origin`, else of another remote, without user and password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote: Option<String>,
    /// True if tracked files differ from the commit.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dirty: bool,
    /// BLAKE3 of `git diff HEAD`, which is `blobs/HASH` in the run's folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub diff: Option<String>,
}

impl Commit {
    /// Returns true if tracked files differ from the commit.
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        // `git status` may have taken too long.
        self.dirty || self.diff.is_some()
    }
}

/// A machine.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostFacts {
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The user who runs the program.
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
    /// The number of cores that the process may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<usize>,
    /// The machine's memory in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
}

impl HostFacts {
    /// Returns what is known of this machine.
    fn of_this_machine() -> Self {
        let user = ["USER", "LOGNAME", "USERNAME"];
        let mut user = user.into_iter().filter_map(|name| std::env::var(name).ok());
        Self {
            name: Some(host_name()),
            user: user.find(|user| !user.is_empty()).or_else(user_id),
            os: field("/etc/os-release", "PRETTY_NAME", '=')
                .or_else(|| Some(std::env::consts::OS.to_owned())),
            kernel: kernel(),
            arch: Some(std::env::consts::ARCH.to_owned()),
            cpu: field("/proc/cpuinfo", "model name", ':'),
            cores: std::thread::available_parallelism().ok().map(Into::into),
            memory: Memory::of_this_machine().map(|memory| memory.total),
        }
    }
}

/// The version of the kernel.
#[cfg(unix)]
fn kernel() -> Option<String> {
    let system = rustix::system::uname();
    Some(system.release().to_string_lossy().into_owned())
}

#[cfg(not(unix))]
fn kernel() -> Option<String> {
    None
}

#[cfg(unix)]
fn user_id() -> Option<String> {
    Some(rustix::process::getuid().as_raw().to_string())
}

#[cfg(not(unix))]
fn user_id() -> Option<String> {
    None
}

/// The first value of a key in a file of keys and values.
fn field(path: &str, key: &str, between: char) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let mut pairs = text.lines().filter_map(|line| line.split_once(between));
    let (_, value) = pairs.find(|(found, _)| found.trim() == key)?;
    Some(value.trim().trim_matches('"').to_owned())
}

/// Returns true for variables that a user sets, and that a run with the same settings also has.
fn is_input(name: &str) -> bool {
    const PREFIXES: [&str; 7] = [
        "CUBECL_", "CUDA_", "MLFLOW_", "NCCL_", "OMP_", "RAYON_", "WGPU_",
    ];
    if is_secret_variable(name) || [LAUNCH_COMMAND.name, RUN_TAGS.name].contains(&name) {
        return false;
    }
    match name.starts_with(PREFIX) {
        // An unknown one may hold anything.
        true => find(name).is_some_and(|known| {
            !matches!(known.reader, Reader::SetByLauncher)
                && known.name != accelerator_host::JOB.name
        }),
        // The package, by which the sources are found.
        false if name == "CARGO_MANIFEST_DIR" => true,
        false => PREFIXES.iter().any(|prefix| name.starts_with(prefix)),
    }
}

/// Returns true for variables by which launchers tell a process how many ranks there are.
fn is_world_size(name: &str) -> bool {
    ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"].contains(&name)
}

/// The digest of a folder's contents.
///
/// [`digest_folder`] makes it.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FolderDigest {
    /// Its absolute path.
    pub path: String,
    /// The digest, hexadecimal.
    pub hash: String,
    /// The number of files, at every depth.
    pub files: u64,
    /// The length of all of them.
    pub bytes: u64,
}

/// A file and its hash.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HashedFile {
    /// Its path.
    pub path: String,
    /// Its BLAKE3 sum, hexadecimal; absent if that would have delayed the program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hash: Option<String>,
    /// Its length.
    pub bytes: u64,
}

/// The digest of a folder, or of a file: BLAKE3 over the relative paths in their order, the sizes and the contents. It
/// does not depend on where the folder is, nor on times or permissions. Links are followed.
///
/// Every byte is read.
///
/// # Errors
/// If something cannot be read, or a link leads to a folder that contains it.
///
/// ```
/// # let temporary = tempfile::tempdir().unwrap();
/// # let folder = temporary.path();
/// std::fs::write(folder.join("train.bin"), [1, 2, 3]).unwrap();
/// let before = accelerator_track::digest_folder(folder)?;
/// assert_eq!((before.files, before.bytes), (1, 3));
///
/// std::fs::write(folder.join("train.bin"), [1, 2, 4]).unwrap();
/// assert_ne!(accelerator_track::digest_folder(folder)?.hash, before.hash);
/// # Ok::<(), accelerator_track::Error>(())
/// ```
pub fn digest_folder(path: impl AsRef<Path>) -> Result<FolderDigest> {
    let path = path.as_ref();
    let root = fs::canonicalize(path).map_err(|error| Error::io("read", path, error))?;
    let mut files = Vec::new();
    if root.is_dir() {
        walk(&root, "", &mut vec![root.clone()], &mut files)?;
    } else {
        files.push((String::new(), root.clone()));
    }
    files.sort();
    let mut digest = blake3::Hasher::new();
    let mut bytes = 0;
    for (name, path) in &files {
        let file = hash_file(path).map_err(|error| Error::io("read", path, error))?;
        let hash = file.hash.unwrap_or_default();
        for part in [name.as_bytes(), hash.as_bytes()] {
            digest
                .update(&(part.len() as u64).to_le_bytes())
                .update(part);
        }
        digest.update(&file.bytes.to_le_bytes());
        bytes += file.bytes;
    }
    Ok(FolderDigest {
        path: root.to_string_lossy().into_owned(),
        hash: digest.finalize().to_string(),
        files: files.len() as u64,
        bytes,
    })
}

/// Returns the length and BLAKE3 sum of a file.
fn hash_file(path: &Path) -> io::Result<HashedFile> {
    hash_opened(File::open(path)?, path, None)
}

/// Hashes an opened file that is, or was, at `path`; without the hash if that takes longer than `patience`.
fn hash_opened(mut file: File, path: &Path, patience: Option<Duration>) -> io::Result<HashedFile> {
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("expected a plain file"));
    }
    let start = Instant::now();
    let path = path.to_string_lossy().into_owned();
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 17];
    loop {
        if patience.is_some_and(|patience| start.elapsed() > patience) {
            let bytes = metadata.len();
            return Ok(HashedFile {
                path,
                hash: None,
                bytes,
            });
        }
        match io::Read::read(&mut file, &mut buffer) {
            Ok(0) => break,
            Ok(count) => hasher.update(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
    }
    Ok(HashedFile {
        path,
        hash: Some(hasher.finalize().to_string()),
        bytes: hasher.count(),
    })
}

/// Lists the files below `folder`, by their names below the root; `above` are the folders on the way, for links.
fn walk(
    folder: &Path,
    prefix: &str,
    above: &mut Vec<PathBuf>,
    files: &mut Vec<(String, PathBuf)>,
) -> Result<()> {
    let fault = |error| Error::io("read", folder, error);
    for entry in fs::read_dir(folder).map_err(fault)? {
        let entry = entry.map_err(fault)?;
        let (name, path) = (entry.file_name(), entry.path());
        let name = format!("{prefix}{}", name.to_string_lossy());
        let metadata = fs::metadata(&path).map_err(|error| Error::io("read", &path, error))?;
        if metadata.is_dir() {
            let real = fs::canonicalize(&path).map_err(|error| Error::io("read", &path, error))?;
            if above.contains(&real) {
                let message = format!(
                    "{} leads to a folder that it is in; remove the link, or take the digest of another folder",
                    path.display()
                );
                return Err(Error::new(Kind::Misuse, message));
            }
            above.push(real);
            walk(&path, &format!("{name}/"), above, files)?;
            above.pop();
        } else if metadata.is_file() {
            files.push((name, path));
        }
        // A pipe or a socket holds no data.
    }
    Ok(())
}

#[cfg(test)]
mod fact_tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_has_a_name_a_kernel_cores_and_memory() {
        let host = HostFacts::of_this_machine();
        let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        assert_eq!(host.name.as_deref(), Some(name.trim()));
        assert!(
            host.kernel
                .unwrap()
                .starts_with(|c: char| c.is_ascii_digit())
        );
        assert!(host.cores.unwrap() > 0 && host.memory.unwrap() > 1 << 24);
        assert!(!host.user.unwrap().is_empty());
    }

    #[test]
    fn a_digest_is_of_names_and_contents_and_not_of_the_place() {
        let temporary = tempfile::tempdir().unwrap();
        let make = |folder: &str, files: &[(&str, &str)]| {
            let folder = temporary.path().join(folder);
            for (name, text) in files {
                let path = folder.join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            digest_folder(folder).unwrap()
        };
        let first = make("a", &[("x/1", "one"), ("x-", "two"), ("é", "")]);
        assert_eq!((first.files, first.bytes), (3, 6));
        assert_eq!(
            make("b", &[("é", ""), ("x-", "two"), ("x/1", "one")]).hash,
            first.hash
        );
        // A name, where contents end, and one more file all count.
        assert_ne!(
            make("c", &[("x/2", "one"), ("x-", "two"), ("é", "")]).hash,
            first.hash
        );
        assert_ne!(
            make("d", &[("x/1", "onet"), ("x-", "wo"), ("é", "")]).hash,
            first.hash
        );
        assert_ne!(make("e", &[("x/1", "one"), ("x-", "two")]).hash, first.hash);
        assert!(
            digest_folder(temporary.path().join("none"))
                .unwrap_err()
                .is_not_found()
        );
    }

    #[test]
    fn a_hash_that_takes_too_long_is_left_out() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "text").unwrap();
        let hashed =
            hash_opened(file.reopen().unwrap(), file.path(), Some(Duration::ZERO)).unwrap();
        assert_eq!((hashed.hash, hashed.bytes), (None, 4));
    }

    #[test]
    #[cfg(unix)]
    fn links_are_followed_and_circles_refused() {
        let temporary = tempfile::tempdir().unwrap();
        let (data, other) = (
            temporary.path().join("data"),
            temporary.path().join("other"),
        );
        fs::create_dir_all(&data).unwrap();
        fs::create_dir_all(&other).unwrap();
        fs::write(other.join("big"), "1").unwrap();
        std::os::unix::fs::symlink(&other, data.join("linked")).unwrap();
        let before = digest_folder(&data).unwrap();
        fs::write(other.join("big"), "2").unwrap();
        assert_ne!(digest_folder(&data).unwrap().hash, before.hash);
        std::os::unix::fs::symlink(&data, other.join("back")).unwrap();
        let error = digest_folder(&data).unwrap_err();
        assert!(
            error.is_misuse() && error.to_string().contains("back"),
            "{error}"
        );
    }
}
