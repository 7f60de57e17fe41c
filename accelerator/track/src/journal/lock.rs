//! Who writes a run.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::Path;

use crate::error::{Error, Kind, Result};

/// Held by the one process that writes a run, until it ends.
#[derive(Debug)]
pub(crate) struct RunLock {
    _file: File,
}

impl RunLock {
    /// Takes the lock of a run's folder.
    pub(crate) fn take(folder: &Path) -> Result<Self> {
        let path = folder.join(LOCK);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path);
        let mut file = file.map_err(|error| Error::io("write", &path, error))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut owner = String::new();
                // Only the message needs it.
                let _ = file.read_to_string(&mut owner);
                return Err(Error::new(
                    Kind::Conflict,
                    format!(
                        "the run in {} is being written by {}; give this one another name, or wait until that has ended",
                        folder.display(),
                        if owner.is_empty() {
                            "another process"
                        } else {
                            owner.trim()
                        }
                    ),
                ));
            }
            Err(TryLockError::Error(error)) => return Err(Error::io("lock", &path, error)),
        }
        let owner = format!("process {} on {}\n", std::process::id(), host_name());
        // Who owns it is for messages; the lock is the system's.
        let _ = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| file.write_all(owner.as_bytes()));
        Ok(Self { _file: file })
    }

    /// Whether a process writes the run now.
    pub(crate) fn is_held(folder: &Path) -> bool {
        let Ok(file) = File::open(folder.join(LOCK)) else {
            return false;
        };
        matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock))
    }
}

const LOCK: &str = "lock";

fn host_name() -> String {
    #[cfg(unix)]
    return rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    #[cfg(not(unix))]
    return std::env::var("COMPUTERNAME").unwrap_or_else(|_| "this host".to_owned());
}
