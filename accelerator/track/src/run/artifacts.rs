//! What a run makes and uses.

use super::Run;
use crate::artifact::{Artifact, ArtifactStore, StoredArtifact};
use crate::error::Result;
use crate::record::{ArtifactRole, Record};

impl Run {
    /// Stores an artifact beside the runs, and records that this run made it. Files are copied before it returns; where
    /// the latest version of the name has the same contents, it is that version.
    ///
    /// ```
    /// use accelerator_track::{Artifact, Run};
    ///
    /// # let temporary = tempfile::tempdir().unwrap();
    /// # let (runs, file) = (temporary.path(), temporary.path().join("model.safetensors"));
    /// # std::fs::write(&file, "weights").unwrap();
    /// let run = Run::builder("mnist").runs_folder(runs).start()?;
    /// let model = run.mark_output(Artifact::create("mnist-cnn").kind("model").add_file(&file)?)?;
    /// assert_eq!(model.reference(), "mnist-cnn:v1");
    ///
    /// let other = Run::builder("evaluation").runs_folder(runs).start()?;
    /// let model = other.use_input("mnist-cnn:latest")?;
    /// assert_eq!(model.read("model.safetensors")?, b"weights");
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If a file cannot be read or changes meanwhile, the store cannot be written, or a name cannot be one.
    pub fn mark_output(&self, artifact: Artifact) -> Result<StoredArtifact> {
        let store = self.artifacts();
        let _kept = store.make()?;
        let stored = store.commit(&artifact.produced_by(self.id))?;
        self.record_artifact(ArtifactRole::Output, &stored);
        Ok(stored)
    }

    /// Opens an artifact by `name`, `name:v3` or `name:alias`, and records that this run uses it.
    ///
    /// # Errors
    ///
    /// If there is none.
    pub fn use_input(&self, reference: &str) -> Result<StoredArtifact> {
        let store = self.artifacts();
        let _kept = store.keep()?;
        let stored = store.open(reference)?;
        self.record_artifact(ArtifactRole::Input, &stored);
        Ok(stored)
    }

    fn artifacts(&self) -> ArtifactStore {
        ArtifactStore::of_runs(self.settings.runs())
    }

    /// Records it on disk while it cannot be removed: whoever removes artifacts reads the references of all runs.
    fn record_artifact(&self, role: ArtifactRole, stored: &StoredArtifact) {
        self.record(Record::Artifact {
            role,
            name: stored.name().to_owned(),
            version: stored.version(),
            digest: stored.digest().to_string(),
        });
        // The writing thread reports a disk error.
        let _ = self.flush();
    }
}
