use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A checkpoint that was saved.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Saved {
    pub(super) number: u64,
    pub(super) path: PathBuf,
    pub(super) step: u64,
}

impl Saved {
    /// Returns its number: 1 for the first in a folder.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns its folder, on the host of the rank that wrote it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of optimizer steps done.
    pub fn step(&self) -> u64 {
        self.step
    }
}
