//! The lock of a search's folder: one search writes it at a time.

use std::fs;
use std::path::Path;
use std::time::Duration;

use accelerator_host::lock::{FileLock, LockMode};
use accelerator_host::machine::host_name;
use rustix::io::Errno;
use rustix::process::{Pid, Signal};

use crate::error::{Error, Kind, Result};

/// Held by the process that carries a search out.
#[derive(Debug)]
pub(crate) struct SearchLock {
    lock: FileLock,
}

impl SearchLock {
    /// Takes the lock of a folder.
    ///
    /// # Errors
    /// [`Error::is_conflict`] where another process holds it; the message names it.
    pub(crate) fn acquire(folder: &Path) -> Result<Self> {
        let path = folder.join(LOCK);
        let take = || loop {
            let locked = FileLock::create(&path, LockMode::Exclusive, LONGEST_WAIT)?;
            // Processes that only look for the holder do not keep a search from the lock.
            if locked.is_some() || FileLock::is_held(&path)? {
                return Ok(locked);
            }
        };
        let locked = take().map_err(|error| Error::io("lock", &path, error))?;
        let Some(mut lock) = locked else {
            let owner = owner(&path).unwrap_or_else(|| "another process".to_owned());
            return Err(Error::new(
                Kind::Conflict,
                format!(
                    "the search in {} is carried out by {owner}; wait until that has ended, or stop it: accel-launch tune \
                     stop {}",
                    folder.display(),
                    folder.display()
                ),
            ));
        };
        let text = format!("process {} on {}\n", std::process::id(), host_name());
        lock.write(text.as_bytes())
            .map_err(|error| Error::io("write", &path, error))?;
        Ok(Self { lock })
    }

    /// The process on this host that holds the lock of a folder.
    pub(crate) fn holder(folder: &Path) -> Option<u32> {
        let path = folder.join(LOCK);
        if !FileLock::is_held(&path).ok()? {
            return None;
        }
        let owner = owner(&path)?;
        let (pid, host) = owner.strip_prefix("process ")?.split_once(" on ")?;
        (host_name() == host).then_some(pid.parse().ok()?)
    }

    /// Sends a signal to the process on this host that holds the lock of a folder; returns whether there is one.
    pub(crate) fn signal(folder: &Path, signal: Signal) -> std::io::Result<bool> {
        let holder = Self::holder(folder);
        let Some(pid) = holder.and_then(|pid| Pid::from_raw(pid.cast_signed())) else {
            return Ok(false);
        };
        match send_signal(pid, signal, || Self::holder(folder) == holder) {
            Err(Errno::SRCH) => Ok(false),
            sent => Ok(sent?),
        }
    }
}

impl Drop for SearchLock {
    fn drop(&mut self) {
        // Without this, readers could take the next holder for this process until it has written its own number.
        let _ = self.lock.write(b"");
    }
}

const LOCK: &str = "search.lock";
/// A process that looks for the holder shares the lock for a moment.
const LONGEST_WAIT: Duration = Duration::from_millis(200);

/// Sends a signal if `is_holder` is true once the process can no longer be mistaken for another one of its number.
#[cfg(target_os = "linux")]
fn send_signal(pid: Pid, signal: Signal, is_holder: impl Fn() -> bool) -> rustix::io::Result<bool> {
    use rustix::process::{PidfdFlags, pidfd_open, pidfd_send_signal};

    let process = pidfd_open(pid, PidfdFlags::empty())?;
    if !is_holder() {
        return Ok(false);
    }
    pidfd_send_signal(process, signal).map(|()| true)
}

/// Sends a signal if `is_holder` is true.
#[cfg(not(target_os = "linux"))]
fn send_signal(pid: Pid, signal: Signal, is_holder: impl Fn() -> bool) -> rustix::io::Result<bool> {
    if !is_holder() {
        return Ok(false);
    }
    rustix::process::kill_process(pid, signal).map(|()| true)
}

fn owner(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::thread;

    use super::*;

    const PAUSE: Duration = Duration::from_millis(5);

    #[test]
    fn a_folder_is_locked_once() {
        let folder = tempfile::tempdir().unwrap();
        let lock = SearchLock::acquire(folder.path()).unwrap();
        let error = SearchLock::acquire(folder.path()).unwrap_err();
        assert!(error.is_conflict(), "{error}");
        assert!(error.to_string().contains(&std::process::id().to_string()));
        assert_eq!(SearchLock::holder(folder.path()), Some(std::process::id()));
        drop(lock);
        assert_eq!(SearchLock::holder(folder.path()), None);
        SearchLock::acquire(folder.path()).unwrap();
    }

    #[test]
    fn who_asks_for_the_holder_keeps_no_search_from_beginning() {
        let folder = tempfile::tempdir().unwrap();
        drop(SearchLock::acquire(folder.path()).unwrap());
        let asking = File::open(folder.path().join(LOCK)).unwrap();
        asking.lock_shared().unwrap();
        let path = folder.path().to_owned();
        let begun = thread::spawn(move || SearchLock::acquire(&path).map(drop));
        // The search opens the file, finds it shared, and waits.
        let opened = || {
            let descriptors = std::fs::read_dir("/proc/self/fd").unwrap();
            let targets = descriptors.filter_map(|entry| entry.unwrap().path().read_link().ok());
            let lock = folder.path().join(LOCK).canonicalize().unwrap();
            targets.filter(|target| *target == lock).count()
        };
        while opened() < 2 && !begun.is_finished() {
            thread::sleep(PAUSE);
        }
        // For as long as one that gives up would take.
        thread::sleep(PAUSE * 20);
        assert!(!begun.is_finished(), "it does not wait");
        drop(asking);
        begun.join().unwrap().unwrap();
    }

    /// The number that a killed search left behind may be that of any process by now.
    #[test]
    fn a_process_that_does_not_hold_the_lock_gets_no_signal() {
        let folder = tempfile::tempdir().unwrap();
        let mut stranger = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let host = rustix::system::uname();
        let owner = format!(
            "process {} on {}\n",
            stranger.id(),
            host.nodename().to_string_lossy()
        );
        std::fs::write(folder.path().join(LOCK), &owner).unwrap();
        assert!(!SearchLock::signal(folder.path(), Signal::KILL).unwrap());
        assert!(stranger.try_wait().unwrap().is_none());
        // This process holds the lock, and gets the signal.
        let lock = File::open(folder.path().join(LOCK)).unwrap();
        lock.lock().unwrap();
        assert!(SearchLock::signal(folder.path(), Signal::KILL).unwrap());
        assert!(!stranger.wait().unwrap().success());
    }
}
