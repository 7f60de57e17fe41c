//! Artifacts that a run made, with their files.

use super::OpenRun;
use super::client::Failure;
use super::name::server_path;
use crate::artifact::{ArtifactStore, StoredArtifact};
use crate::error::{Error, Kind, Result};

/// A version of an artifact, as the journal names it.
#[derive(Clone, Debug)]
pub(super) struct MadeArtifact {
    pub(super) name: String,
    pub(super) version: u32,
    pub(super) digest: String,
}

impl OpenRun {
    /// Sends the files that the server does not have yet, and then the manifest. What is not in the store any more is said,
    /// and the rest is sent.
    pub(super) fn send_artifact(&mut self, made: &MadeArtifact) -> Result<(), Failure> {
        let (root, stored) = match (self.run.artifact_root(), self.stored(made)) {
            (Ok(root), Ok(stored)) => (root, stored),
            (Err(error), _) | (_, Err(error)) => {
                self.warn(&error);
                return Ok(());
            }
        };
        let folder = format!("artifacts/{}/v{}", made.name, made.version);
        for file in stored.files() {
            let object = match stored.verified_path(file) {
                Ok(object) => object,
                Err(error) => {
                    self.warn(&error);
                    continue;
                }
            };
            let sent = self
                .run
                .send_file(&format!("{folder}/{}", server_path(&file.path)), &object);
            match sent {
                Err(failure) if failure.is_here() || failure.is_of_content() => {
                    self.warn(&failure.into());
                }
                sent => sent?,
            }
        }
        let manifest = stored.manifest()?;
        let path = format!("{root}/{folder}.json");
        self.run
            .server
            .put_bytes(&path, "application/json", &manifest)
    }

    fn stored(&self, made: &MadeArtifact) -> Result<StoredArtifact> {
        let folder = &self.info.folder;
        let absolute =
            std::path::absolute(folder).map_err(|error| Error::io("find", folder, error))?;
        let store = ArtifactStore::of_runs(absolute.parent().unwrap_or(&absolute));
        let stored = store.open(&format!("{}:v{}", made.name, made.version))?;
        if stored.digest().to_string() == made.digest {
            return Ok(stored);
        }
        Err(Error::new(
            Kind::NotFound,
            format!(
                "expected {} with the digest {} in {}, as the run made it, found {}",
                stored.reference(),
                made.digest,
                store.folder().display(),
                stored.digest()
            ),
        ))
    }
}
