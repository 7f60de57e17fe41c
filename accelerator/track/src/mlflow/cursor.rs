//! How far a run was delivered to a server, in the run's folder.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::sink::SinkPosition;

/// What is kept in `mlflow.json`. Without it everything is sent again, which changes nothing on the server.
#[derive(Debug, Eq, PartialEq, Serialize, Deserialize)]
pub(super) struct Cursor {
    pub(super) server: String,
    pub(super) experiment: String,
    /// The server's.
    pub(super) run_id: String,
    pub(super) position: SinkPosition,
}

/// The file of a [`Cursor`], which one process uses at a time.
#[derive(Debug)]
pub(super) struct CursorFile {
    path: PathBuf,
    _lock: File,
}

impl CursorFile {
    pub(super) fn lock(folder: &Path) -> Result<Self> {
        let path = folder.join("mlflow.lock");
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path);
        let lock = lock.map_err(|error| Error::io("write", &path, error))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self {
                path: folder.join("mlflow.json"),
                _lock: lock,
            }),
            Err(TryLockError::WouldBlock) => Err(Error::new(
                Kind::Conflict,
                format!(
                    "another process delivers the run in {} to MLflow now; wait until it has ended",
                    folder.display()
                ),
            )),
            Err(TryLockError::Error(error)) => Err(Error::io("lock", &path, error)),
        }
    }

    /// None where it is not there, or is not whole.
    pub(super) fn read(&self) -> Option<Cursor> {
        serde_json::from_slice(&fs::read(&self.path).ok()?).ok()
    }

    pub(super) fn write(&self, cursor: &Cursor) -> Result<()> {
        let staged = self.path.with_extension("json.new");
        let text = serde_json::to_vec(cursor)
            .map_err(|error| Error::io("write", &self.path, error.into()))?;
        fs::write(&staged, text).map_err(|error| Error::io("write", &staged, error))?;
        fs::rename(&staged, &self.path).map_err(|error| Error::io("replace", &self.path, error))
    }
}
