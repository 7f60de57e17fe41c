//! Where a run came from: source, program, machine, inputs; how two runs differ in that, and how to start one again.

pub use capture::Capture;
pub use diff::{Difference, diff};
pub use facts::{Commit, HostFacts, Provenance};
pub use files::{FolderDigest, HashedFile, digest_folder};
pub use mask::mask_arguments;
pub(crate) use mask::mask_value;
pub use reproduce::Reproduction;

mod capture;
mod diff;
mod facts;
mod files;
mod git;
mod mask;
mod reproduce;
#[cfg(test)]
mod tests;
