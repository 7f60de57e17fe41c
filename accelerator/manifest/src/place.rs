//! Paths that users give: a folder of checkpoints, or one checkpoint.

use std::path::{Path, PathBuf};

use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::folder::Folder;

/// A folder of checkpoints or a checkpoint, at a path that a user gave.
///
/// ```
/// use std::num::NonZeroUsize;
/// use accelerator_manifest::{Folder, Metadata, internal::Place};
///
/// # fn main() -> accelerator_manifest::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// # let path = temporary.path().join("checkpoints/a");
/// let saved = Folder::create(&path)?.begin(0)?.commit(Metadata::new(NonZeroUsize::MIN))?;
/// assert!(matches!(Place::open(&path)?, Place::Folder(_)));
///
/// let place = Place::open(saved.path())?;
/// assert!(matches!(place, Place::Checkpoint(_)));
/// assert_eq!((place.path(), place.checkpoints()?.len()), (saved.path(), 1));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub enum Place {
    /// A folder of checkpoints, which may be empty.
    Folder(Folder),
    /// A checkpoint, valid or not.
    Checkpoint(Checkpoint),
}

impl Place {
    /// Opens the path: a folder that has a manifest is a checkpoint. So is one that has lost its manifest, if it has the
    /// name of a checkpoint and no checkpoints in it.
    ///
    /// # Errors
    ///
    /// The errors of [`Folder::open`] and [`Checkpoint::find`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let folder = Folder::open(path)?;
        if let Some(checkpoint) = Checkpoint::find(folder.path())? {
            return Ok(Self::Checkpoint(checkpoint));
        }
        match Checkpoint::at(folder.path()) {
            Ok(named) if folder.checkpoints()?.is_empty() => Ok(Self::Checkpoint(named)),
            _ => Ok(Self::Folder(folder)),
        }
    }

    /// Returns its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Folder(folder) => folder.path(),
            Self::Checkpoint(checkpoint) => checkpoint.path(),
        }
    }

    /// Returns the checkpoints of the folder, oldest first, or the single checkpoint. Reads no contents.
    ///
    /// # Errors
    ///
    /// I/O errors.
    pub fn checkpoints(&self) -> Result<Vec<Checkpoint>> {
        match self {
            Self::Folder(folder) => folder.checkpoints(),
            Self::Checkpoint(checkpoint) => Ok(vec![checkpoint.clone()]),
        }
    }
}
