//! Staged files: written under a hidden name, with a lock that shows whether the writer is alive.

use std::collections::hash_map::RandomState;
use std::fmt;
use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use accelerator_host::fs::{Durability, place};
use accelerator_host::lock::{FileLock, LockMode};
use accelerator_host::machine::boot_id;

use crate::hash::ContentHash;
use crate::vfs::Vfs;

/// A hidden folder beside the places of files that are being written:
/// `.model.safetensors.partial-<boot>-<process>-<random>`.
///
/// Each writer has a folder of its own, so that two that write to one place do not write into one
/// file. It is removed when this is dropped. Leftovers of dead writers are distinguished from what
/// is being written by a lock, which the system gives up with its process.
///
/// ```
/// use accelerator_manifest::internal::StagedFolder;
///
/// # let temporary = tempfile::tempdir().unwrap();
/// # let folder = temporary.path();
/// let is_ours = |target: &str| target == "model.safetensors";
/// let staged = StagedFolder::create(folder, "model.safetensors", is_ours)?;
/// std::fs::write(staged.path().join("model.safetensors"), "weights")?;
/// staged.publish("model.safetensors", &folder.join("model.safetensors"))?;
/// assert!(folder.join("model.safetensors").exists());
///
/// let hidden = staged.path().to_owned();
/// drop(staged);
/// assert!(!hidden.exists());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct StagedFolder {
    path: PathBuf,
    _lock: Option<FileLock>,
}

impl StagedFolder {
    /// Makes one in `parent` for what shall be called `target`, and removes what writers that are
    /// gone have left there of the targets that `is_ours` accepts: writers of this host, and others
    /// where nothing has changed for a day. What cannot be removed is left, and logged.
    ///
    /// # Errors
    ///
    /// I/O errors.
    pub fn create(parent: &Path, target: &str, is_ours: impl Fn(&str) -> bool) -> io::Result<Self> {
        let vfs = Vfs::default();
        let is_ours = |name: &StagedName| is_ours(&name.target);
        // A folder that cannot be listed may be written to. First, since the disk may be full of it.
        let _ = sweep(&vfs, parent, None, is_ours);
        let (path, lock) = make(&vfs, parent, target)?;
        let _ = sweep(&vfs, parent, time_of(&path), is_ours);
        Ok(Self { path, _lock: lock })
    }

    /// The path of the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives a file of this folder its own name, `to`, of the same file system, in place of what has that name. The
    /// file is on the disk before it has the name, and the name when this returns.
    ///
    /// # Errors
    ///
    /// I/O errors. What was at `to` is then still there, unless only the name of the new file could not be flushed.
    pub fn publish(&self, file: &str, to: &Path) -> io::Result<()> {
        let from = self.path.join(file);
        File::open(&from)?.sync_all()?;
        place(&from, to, Durability::Flushed)
    }
}

impl Drop for StagedFolder {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::debug!("cannot remove {}: {error}", self.path.display());
        }
    }
}

/// The name of what is being written, or removed, and has another name before or after.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct StagedName {
    boot: String,
    /// The process id, for people: it means nothing in another container.
    process: u32,
    random: String,
    state: State,
    target: String,
}

impl StagedName {
    /// Creates another name for this process.
    pub(crate) fn new(target: &str, state: State) -> Self {
        Self {
            boot: boot().to_owned(),
            process: std::process::id(),
            random: format!("{:016x}", random()),
            state,
            target: target.to_owned(),
        }
    }

    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (target, rest) = name.strip_prefix('.')?.rsplit_once('.')?;
        let (state, rest) = [State::Partial, State::Removed]
            .into_iter()
            .find_map(|x| Some((x, rest.strip_prefix(x.as_str())?.strip_prefix('-')?)))?;
        let mut parts = rest.split('-');
        let (boot, process, random) = (parts.next()?, parts.next()?, parts.next()?);
        let is_hex = |text: &str| text.bytes().all(|x| matches!(x, b'0'..=b'9' | b'a'..=b'f'));
        let is_ours = parts.next().is_none()
            && (boot.len(), random.len()) == (8, 16)
            && is_hex(boot)
            && is_hex(random);
        let process: u32 = process.parse().ok()?;
        is_ours.then(|| Self {
            boot: boot.to_owned(),
            process,
            random: random.to_owned(),
            state,
            target: target.to_owned(),
        })
    }

    /// The name that the thing will have, or had.
    pub(crate) fn target(&self) -> &str {
        &self.target
    }

    /// The right to remove what has this name and lies at `path`: its lock, if it has one; `None` where its writer may live.
    /// `now` is the time of the file system, where it is known.
    fn claim(&self, path: &Path, now: Option<SystemTime>) -> Option<Option<FileLock>> {
        // Locks are of one kernel: on another host, nothing is known of those that are held here.
        if self.boot == boot()
            && let Ok(lock) = try_lock(path)
        {
            return lock.map(Some);
        }
        let silence = now?.duration_since(last_change(path).ok()?).ok()?;
        (silence > ABANDONED).then_some(None)
    }
}

impl fmt::Display for StagedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            boot,
            process,
            random,
            state,
            target,
        } = self;
        let state = state.as_str();
        write!(f, ".{target}.{state}-{boot}-{process}-{random}")
    }
}

/// The reason why a thing has a hidden name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum State {
    /// The thing is being written.
    Partial,
    /// The thing is being removed.
    Removed,
}

impl State {
    fn as_str(self) -> &'static str {
        match self {
            Self::Partial => "partial",
            Self::Removed => "removed",
        }
    }
}

/// Takes the lock that marks a file or folder as in use by a living process of this kernel; `None` if another
/// process holds it, or has removed the file or folder.
///
/// # Errors
///
/// I/O errors: there is nothing that can be locked, or the file system has no locks.
pub(crate) fn try_lock(path: &Path) -> io::Result<Option<FileLock>> {
    let kind = path.symlink_metadata()?.file_type();
    if !kind.is_dir() && !kind.is_file() {
        // Opening a pipe would wait, and a link leads elsewhere.
        return Err(io::ErrorKind::InvalidInput.into());
    }
    FileLock::open(path, LockMode::Exclusive, Duration::ZERO)
}

/// Makes a folder under a hidden name, which lasts as long as the lock is held; without a lock where
/// the file system has none.
pub(crate) fn make(
    vfs: &Vfs,
    parent: &Path,
    target: &str,
) -> io::Result<(PathBuf, Option<FileLock>)> {
    loop {
        let path = parent.join(StagedName::new(target, State::Partial).to_string());
        vfs.make_folder(&path)?;
        match try_lock(&path) {
            Ok(Some(lock)) => return Ok((path, Some(lock))),
            // Somebody who sweeps has found it before it was locked, and removes it.
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(_) => return Ok((path, None)),
        }
    }
}

/// Removes from `folder` what writers that are gone have left, of what `is_ours`; what cannot be
/// removed is left. `now` is the time of the file system: clocks of hosts differ.
pub(crate) fn sweep(
    vfs: &Vfs,
    folder: &Path,
    now: Option<SystemTime>,
    is_ours: impl Fn(&StagedName) -> bool,
) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let Some(staged) = name.to_str().and_then(StagedName::parse).filter(&is_ours) else {
            continue;
        };
        let path = folder.join(&name);
        let Some(_lock) = staged.claim(&path, now) else {
            continue;
        };
        match vfs.remove_any(&path) {
            Ok(()) => tracing::info!("removed {}, whose writer is gone", path.display()),
            // Another process was faster.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!("cannot remove {}: {error}", path.display()),
        }
    }
    Ok(())
}

/// The time of the last change of a file or folder, by the clock of the file system.
pub(crate) fn time_of(path: &Path) -> Option<SystemTime> {
    path.symlink_metadata().and_then(|x| x.modified()).ok()
}

/// No writer rests for so long. That of another host cannot be asked, nor one of before this host
/// was started.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);

/// The time of the last change of a path, or of anything below it.
fn last_change(path: &Path) -> io::Result<SystemTime> {
    let metadata = path.symlink_metadata()?;
    let mut last = metadata.modified()?;
    if metadata.is_dir() {
        for entry in fs::read_dir(path)? {
            last = last.max(last_change(&entry?.path())?);
        }
    }
    Ok(last)
}

/// Tells running kernels apart: hosts, and the same host when it was started again. Containers of
/// one host have one kernel. Where the system does not tell, every process counts as a host.
fn boot() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| {
        let id = boot_id().unwrap_or_else(|| random().to_string());
        let mut hash = ContentHash::of(id.as_bytes()).to_string();
        hash.truncate(8);
        hash
    })
}

fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_the_folder_and_nothing_else_is_one() {
        for target in ["latest", "model.safetensors", "a.partial-b", ""] {
            for state in [State::Partial, State::Removed] {
                let mine = StagedName::new(target, state);
                assert_eq!(StagedName::parse(&mine.to_string()), Some(mine));
            }
        }
        for name in [
            "model.safetensors",
            ".model.safetensors.partial",
            ".x.partial-01234567-1",
            ".x.partial-01234567-1-0123456789abcdeg",
            ".x.partial-01234567-1-0123456789abcdef-",
            ".x.partial-0123456-1-0123456789abcdef",
            ".x.partial-01234567-x-0123456789abcdef",
            "x.partial-01234567-1-0123456789abcdef",
        ] {
            assert!(StagedName::parse(name).is_none(), "{name}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn links_and_pipes_are_not_locked() {
        let temporary = tempfile::tempdir().unwrap();
        let link = temporary.path().join("link");
        std::os::unix::fs::symlink(temporary.path(), &link).unwrap();
        for path in [&*link, Path::new("/dev/null")] {
            let error = try_lock(path).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        }
        assert!(try_lock(temporary.path()).unwrap().is_some());
    }

    /// Sweepers that come at any moment never take a folder from its writer.
    #[test]
    fn a_folder_is_whole_from_its_first_moment() {
        let temporary = tempfile::tempdir().unwrap();
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                        sweep(&Vfs::default(), temporary.path(), None, |_| true).unwrap();
                    }
                });
            }
            for _ in 0..500 {
                let staged = StagedFolder::create(temporary.path(), "x", |_| true).unwrap();
                fs::write(staged.path().join("file"), "x").unwrap();
            }
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        assert_eq!(temporary.path().read_dir().unwrap().count(), 0);
    }
}
