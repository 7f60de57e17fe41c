//! Artifacts: files that runs make and use, by name and version.

pub use draft::Artifact;
pub use id::ArtifactId;
pub use reader::ArtifactReader;
pub use retention::{PruneReport, Retention};
pub use store::ArtifactStore;
pub use stored::StoredArtifact;
pub use version::{ArtifactFile, ArtifactReference};

mod adding;
mod draft;
mod id;
mod import;
mod lock;
mod name;
mod objects;
mod reader;
mod retention;
pub(crate) mod source;
mod store;
mod stored;
mod version;

#[cfg(test)]
mod tests;
