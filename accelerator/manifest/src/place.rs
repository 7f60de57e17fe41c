//! Paths that people name: a folder of checkpoints, or one of them.

use std::path::{Path, PathBuf};

use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::folder::Folder;

/// What lies at a path that a user gave.
///
/// ```
/// use std::num::NonZeroUsize;
/// use accelerator_manifest::{Folder, Metadata, Place};
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
    /// A folder of checkpoints, perhaps of none.
    Folder(Folder),
    /// A checkpoint, good or not.
    Checkpoint(Checkpoint),
}

impl Place {
    /// Tells by its manifest that a folder is a checkpoint. One that has lost its manifest has the name of a checkpoint,
    /// and no checkpoints in it.
    ///
    /// # Errors
    ///
    /// Those of [`Folder::open`] and [`Checkpoint::find`].
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

    /// Where it lies.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Folder(folder) => folder.path(),
            Self::Checkpoint(checkpoint) => checkpoint.path(),
        }
    }

    /// The checkpoints of the folder, or the one, the oldest first. Nothing is read of them.
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
