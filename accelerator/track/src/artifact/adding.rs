//! Changing a store.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use accelerator_manifest::{ContentHash, StagedFolder};
use serde::{Deserialize, Serialize};

use super::lock::StoreLock;
use super::objects::Objects;
use super::version::Version;
use crate::error::{Error, Result};

/// A store that is being changed.
#[derive(Debug)]
pub(super) struct Adding {
    pub(super) objects: Objects,
    pub(super) staged: StagedFolder,
    _lock: StoreLock,
}

impl Adding {
    /// Removes what processes that are gone have left.
    pub(super) fn begin(root: &Path, lock: StoreLock) -> Result<Self> {
        let staged = StagedFolder::create(root, STAGED, |target| target == STAGED);
        Ok(Self {
            objects: Objects::new(root),
            staged: staged.map_err(|error| Error::io("create a folder in", root, error))?,
            _lock: lock,
        })
    }

    pub(super) fn write(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let write = || {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)?;
            }
            fs::write(self.staged.path().join(SMALL), bytes)?;
            self.staged.publish(SMALL, path)
        };
        write().map_err(|error| Error::io("write", path, error))
    }
}

/// What a name has beside its versions.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub(super) struct Index {
    /// The number of the next version, which those before never had.
    pub(super) next: u32,
    pub(super) aliases: BTreeMap<String, u32>,
    /// The digests of removed versions, so that no other contents get their numbers.
    #[serde(default)]
    pub(super) removed: BTreeMap<u32, ContentHash>,
}

impl Index {
    /// Returns true if a removed version with other contents had the number of this one.
    pub(super) fn is_of_another(&self, version: &Version) -> bool {
        let removed = self.removed.get(&version.version);
        removed.is_some_and(|digest| *digest != version.digest)
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let json = serde_json::json!({
            "next": self.next, "aliases": self.aliases, "removed": self.removed
        });
        format!("{json}\n").into_bytes()
    }
}

const STAGED: &str = "commit";
const SMALL: &str = "manifest";
