//! Which version of which artifact.

use std::fmt;

/// A version of an artifact, in whatever store. The digest tells apart versions that got one number in two stores.
///
/// ```
/// use accelerator_track::ArtifactId;
///
/// let model = ArtifactId { name: "model".to_owned(), version: 3, digest: "af13".to_owned() };
/// assert_eq!(model.to_string(), "model:v3");
/// ```
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ArtifactId {
    /// The artifact's name.
    pub name: String,
    /// Its version.
    pub version: u32,
    /// The hash of its contents.
    pub digest: String,
}

impl fmt::Display for ArtifactId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:v{}", self.name, self.version)
    }
}
