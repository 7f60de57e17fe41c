//! How far a run was delivered to a server, in the run's folder.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::run_files::{MLFLOW, new_of};
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

/// The file of a [`Cursor`].
#[derive(Debug)]
pub(super) struct CursorFile(PathBuf);

impl CursorFile {
    pub(super) fn in_folder(folder: &Path) -> Self {
        Self(folder.join(MLFLOW))
    }

    /// None where it is not there, or is not whole.
    pub(super) fn read(&self) -> Option<Cursor> {
        serde_json::from_slice(&fs::read(&self.0).ok()?).ok()
    }

    pub(super) fn write(&self, cursor: &Cursor) -> Result<()> {
        let staged = new_of(&self.0);
        let text = serde_json::to_vec(cursor)
            .map_err(|error| Error::io("write", &self.0, error.into()))?;
        fs::write(&staged, text).map_err(|error| Error::io("write", &staged, error))?;
        fs::rename(&staged, &self.0).map_err(|error| Error::io("replace", &self.0, error))
    }
}
