//! What an upload leaves with a run.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use accelerator_manifest::{ContentHash, StagedFolder};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::run_files::UPLOAD;
use crate::run_id::RunId;

/// Says which files of an uploaded run's folder came with it.
#[derive(Debug, Serialize, Deserialize, PartialEq)]
pub(super) struct Marker {
    pub(super) run: RunId,
    pub(super) state: UploadState,
    /// With their hashes where they are there.
    pub(super) files: BTreeMap<String, Option<ContentHash>>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub(super) enum UploadState {
    Partial,
    Complete,
}

impl Marker {
    pub(super) fn read(folder: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(folder.join(UPLOAD)).ok()?).ok()
    }

    pub(super) fn write(&self, staged: &StagedFolder, folder: &Path) -> Result<()> {
        let path = folder.join(UPLOAD);
        let write = || {
            fs::write(staged.path().join(UPLOAD), serde_json::to_vec(self)?)?;
            staged.publish(UPLOAD, &path)
        };
        write().map_err(|error| Error::io("write", &path, error))
    }
}
