//! Checkpoint folders: manifest, hashes, commit, verification.
//!
//! A [`Folder`] holds [`Checkpoint`]s. A new one is a [`Draft`] first, under a hidden name, and
//! gets its own name when everything is on the disk. The [`Manifest`] holds
//! the length and hash of every file, and a seal over itself: damage is detected and reported, and
//! [the newest valid checkpoint](Folder::latest_good) is used. This crate does not know Burn: files are bytes.
//!
//! ```
//! use std::num::NonZeroUsize;
//! use accelerator_manifest::{VerifyLevel, Metadata, Folder, Role};
//!
//! # fn main() -> accelerator_manifest::Result<()> {
//! # let temporary = tempfile::tempdir().unwrap();
//! # let path = temporary.path().join("checkpoints/a");
//! let folder = Folder::create(&path)?;
//! let mut draft = folder.begin(0)?;
//! draft.write(&"model.bin".parse()?, Role::Model, |file| file.write_all(b"weights"))?;
//! let saved = draft.commit(Metadata { step: 10, ..Metadata::new(NonZeroUsize::MIN) })?;
//! assert!(saved.path().ends_with("checkpoint-000001"));
//!
//! // Later, in another process.
//! let search = Folder::open(&path)?.latest_good()?;
//! let checkpoint = search.found.expect("one was saved");
//! assert_eq!(checkpoint.manifest()?.metadata.step, 10);
//! assert_eq!(checkpoint.read(&"model.bin".parse()?)?, b"weights");
//!
//! // A flipped bit is found, and named.
//! std::fs::write(saved.path().join("model.bin"), b"weighus").unwrap();
//! let report = saved.verify(VerifyLevel::Hashes);
//! assert_eq!(report.defects[0].file, "model.bin");
//! # Ok(())
//! # }
//! ```

pub use checkpoint::{Checkpoint, Defect, VerifyLevel, VerifyReport};
pub use draft::Draft;
pub use error::{Error, Result};
pub use folder::{Folder, Search};
pub use hash::ContentHash;
pub use manifest::{CheckpointKind, FileEntry, LoaderState, Manifest, Metadata, Parameter, Role};
pub use name::FileName;

/// Items for the launcher and the other crates of this project. They are not part of the public API.
#[doc(hidden)]
pub mod internal {
    pub use crate::folder::Place;
    #[cfg(any(test, feature = "fuzzing"))]
    pub use crate::manifest::fuzz_manifest;
    pub use crate::staged::StagedFolder;
}

mod checkpoint;
mod draft;
mod error;
mod folder;
mod hash;
mod manifest;
mod name;
mod staged;
mod vfs;
