//! Where a run came from: source, program, machine, inputs; how two runs differ in that, and how to start one again.

pub use capture::Capture;
pub use diff::{Difference, diff};
pub use facts::{Commit, HashedFile, HostFacts, Provenance, SourceState};
pub use files::{FolderDigest, digest_folder};
pub(crate) use mask::mask_value;
pub use mask::{MASK, mask_arguments};
pub use reproduce::Reproduction;

mod arguments;
mod bounded;
mod capture;
mod diff;
mod environment;
mod facts;
mod files;
mod git;
mod host;
mod mask;
mod now;
mod reproduce;
#[cfg(test)]
mod tests;
