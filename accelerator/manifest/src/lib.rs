//! Checkpoint folders: manifest, hashes, commit, verification.
//!
//! A [`Folder`] holds [`Checkpoint`]s. A new one is a [`Draft`] first, under a hidden name, and
//! gets its own name when everything is on the disk. Every file has its length and its sum in the
//! [`Manifest`], and the manifest its own seal: what is torn or changed is found and named, and
//! [the newest good one](Folder::latest_good) is used. Burn is not known here: files are bytes.
//!
//! ```
//! use std::num::NonZeroUsize;
//! use accelerator_manifest::{Depth, Facts, Folder, Role};
//!
//! # fn main() -> accelerator_manifest::Result<()> {
//! # let temporary = tempfile::tempdir().unwrap();
//! # let path = temporary.path().join("runs/a");
//! let folder = Folder::create(&path)?;
//! let mut draft = folder.begin(0)?;
//! draft.write(&"model.bin".parse()?, Role::Model, |file| file.write_all(b"weights"))?;
//! let saved = draft.commit(Facts { step: 10, ..Facts::new(NonZeroUsize::MIN) })?;
//! assert!(saved.path().ends_with("checkpoint-000001"));
//!
//! // Later, in another process.
//! let search = Folder::open(&path)?.latest_good()?;
//! let checkpoint = search.found.expect("one was saved");
//! assert_eq!(checkpoint.manifest()?.facts.step, 10);
//! assert_eq!(checkpoint.read(&"model.bin".parse()?)?, b"weights");
//!
//! // A flipped bit is found, and named.
//! std::fs::write(saved.path().join("model.bin"), b"weighus").unwrap();
//! let verdict = saved.verify(Depth::Hashes);
//! assert_eq!(verdict.defects[0].file, "model.bin");
//! # Ok(())
//! # }
//! ```

pub use checkpoint::{Checkpoint, Defect, Depth, Verdict, VerifiedReader};
pub use draft::Draft;
pub use error::{Error, Result};
pub use folder::{Folder, Search};
pub use hash::ContentHash;
#[cfg(any(test, feature = "fuzzing"))]
pub use manifest::fuzz_manifest;
pub use manifest::{CheckpointKind, Facts, FileEntry, LoaderState, Manifest, Parameter, Role};
pub use name::FileName;
pub use staged::StagedFolder;

mod checkpoint;
mod disk;
mod draft;
mod error;
mod folder;
mod hash;
mod manifest;
mod name;
mod progress;
mod staged;
mod tree;
