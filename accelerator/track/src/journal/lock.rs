//! Who writes a run.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::folder_name::folder_name;
use crate::run_files::LOCK;

/// Held by the one process that writes a run, or delivers it to a sink, until it ends.
#[derive(Debug)]
pub(crate) struct RunLock {
    file: File,
}

impl Drop for RunLock {
    fn drop(&mut self) {
        // Closing the file is not enough: a process that another thread starts has it open, too, until it has become
        // another program.
        let _ = self.file.unlock();
    }
}

impl RunLock {
    /// For writing the run in a folder.
    pub(crate) fn take(folder: &Path) -> Result<Self> {
        Self::take_file(&folder.join(LOCK), |owner| {
            format!(
                "the run in {} is being written by {owner}; give this one another name, or wait until that has ended",
                folder.display()
            )
        })
    }

    /// For delivering the run in a folder to a sink.
    pub(crate) fn take_for_sink(folder: &Path, sink: &str) -> Result<Self> {
        let path = folder.join(format!("{}.lock", folder_name(sink)));
        Self::take_file(&path, |owner| {
            format!(
                "the run in {} is being delivered to {sink} by {owner}; wait until that has ended",
                folder.display()
            )
        })
    }

    fn take_file(path: &Path, taken: impl FnOnce(&str) -> String) -> Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        let mut file = file.map_err(|error| Error::io("write", path, error))?;
        let mut locked = file.try_lock();
        // Who asks whether the run is being written holds it for a moment, and so does a process that another thread is
        // starting, until it has become its program.
        for _ in 0..RETRIES {
            if !matches!(locked, Err(TryLockError::WouldBlock)) {
                break;
            }
            thread::sleep(PAUSE);
            locked = file.try_lock();
        }
        match locked {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut owner = String::new();
                // Only the message needs it.
                let _ = file.read_to_string(&mut owner);
                let owner = match owner.trim() {
                    "" => "another process",
                    owner => owner,
                };
                return Err(Error::new(Kind::Conflict, taken(owner)));
            }
            Err(TryLockError::Error(error)) => return Err(Error::io("lock", path, error)),
        }
        // `run_files` recognizes the file by this text.
        let owner = format!("process {} on {}\n", std::process::id(), host_name());
        // Who owns it is for messages; the lock is the system's.
        let _ = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| file.write_all(owner.as_bytes()));
        Ok(Self { file })
    }

    /// Whether a process writes the run now.
    pub(crate) fn is_held(folder: &Path) -> bool {
        let Ok(file) = File::open(folder.join(LOCK)) else {
            return false;
        };
        matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock))
    }
}

const RETRIES: usize = 20;
const PAUSE: Duration = Duration::from_millis(10);

fn host_name() -> String {
    #[cfg(unix)]
    return rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    #[cfg(not(unix))]
    return std::env::var("COMPUTERNAME").unwrap_or_else(|_| "this host".to_owned());
}
