//! Who changes a store.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::error::{Error, Kind, Result};

/// Held while a store is used in one of the ways of [`LockKind`]; ends with the process.
#[derive(Debug)]
pub(crate) struct StoreLock {
    _file: Option<File>,
}

/// What a store is used for.
#[derive(Clone, Copy, Debug)]
pub(super) enum LockKind {
    /// Objects are read: nobody removes them meanwhile.
    Read,
    /// Objects are added, and versions that refer to them: nobody removes them meanwhile.
    Add,
    /// The versions and aliases of names are changed, for a moment, by one.
    Publish,
    /// Objects are removed, by one, while nobody uses any.
    Remove,
}

impl StoreLock {
    /// Waits for the lock, though not forever: whoever has it may have been stopped.
    pub(super) fn take(root: &Path, kind: LockKind) -> Result<Self> {
        let path = root.join(match kind {
            LockKind::Publish => "publish.lock",
            LockKind::Read | LockKind::Add | LockKind::Remove => "objects.lock",
        });
        let file = match kind {
            LockKind::Read => match File::open(&path) {
                // Nobody has ever changed this store here, as where it is read-only.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Ok(Self { _file: None });
                }
                opened => opened,
            },
            _ => OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path),
        };
        let file = file.map_err(|error| Error::io("open the lock", &path, error))?;
        let begun = Instant::now();
        loop {
            let taken = match kind {
                LockKind::Read | LockKind::Add => file.try_lock_shared(),
                LockKind::Publish | LockKind::Remove => file.try_lock(),
            };
            match taken {
                Ok(()) => return Ok(Self { _file: Some(file) }),
                Err(TryLockError::WouldBlock) if begun.elapsed() < LONGEST_WAIT => {
                    std::thread::sleep(PAUSE)
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::new(
                        Kind::Conflict,
                        format!(
                            "another process has used the artifacts in {} for {} s; try again when it has ended",
                            root.display(),
                            LONGEST_WAIT.as_secs()
                        ),
                    ));
                }
                Err(TryLockError::Error(error)) => return Err(Error::io("lock", &path, error)),
            }
        }
    }
}

const LONGEST_WAIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(5);
