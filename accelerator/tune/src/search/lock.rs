//! One search writes a folder at a time.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::Path;

use crate::error::{Error, Kind, Result};

/// Held by the process that carries a search out.
#[derive(Debug)]
pub(crate) struct SearchLock {
    file: File,
}

impl SearchLock {
    /// Takes the lock of a folder.
    ///
    /// # Errors
    /// [`Error::is_conflict`] where another process holds it; the message names it.
    pub(crate) fn acquire(folder: &Path) -> Result<Self> {
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
                let owner = owner(&mut file).unwrap_or_else(|| "another process".to_owned());
                return Err(Error::new(
                    Kind::Conflict,
                    format!(
                        "the search in {} is carried out by {owner}; wait until that has ended, or stop it: accel-launch tune \
                         stop {}",
                        folder.display(),
                        folder.display()
                    ),
                ));
            }
            Err(TryLockError::Error(error)) => return Err(Error::io("lock", &path, error)),
        }
        let host = rustix::system::uname();
        let host = host.nodename().to_string_lossy();
        let text = format!("process {} on {host}\n", std::process::id());
        let write = || {
            file.set_len(0)?;
            file.rewind()?;
            file.write_all(text.as_bytes())
        };
        let mut write = write;
        write().map_err(|error| Error::io("write", &path, error))?;
        Ok(Self { file })
    }

    /// The process on this host that holds the lock of a folder.
    pub(crate) fn holder(folder: &Path) -> Option<u32> {
        let mut file = File::open(folder.join(LOCK)).ok()?;
        match file.try_lock_shared() {
            Err(TryLockError::WouldBlock) => {}
            _ => return None,
        }
        let owner = owner(&mut file)?;
        let (pid, host) = owner.strip_prefix("process ")?.split_once(" on ")?;
        let here = rustix::system::uname();
        (here.nodename().to_string_lossy() == host).then_some(pid.parse().ok()?)
    }
}

impl Drop for SearchLock {
    fn drop(&mut self) {
        // Closing is not enough: a process that is being started has the file open, too.
        let _ = self.file.unlock();
    }
}

const LOCK: &str = "search.lock";

fn owner(file: &mut File) -> Option<String> {
    let mut text = String::new();
    file.read_to_string(&mut text).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
