//! Artifacts that no run needs.

use std::collections::HashSet;
use std::path::Path;

use super::{ListedRun, RunSummary, Runs};
use crate::artifact::{ArtifactStore, PruneReport, Retention};
use crate::error::Result;
use crate::run_id::RunId;

impl Runs {
    /// Finds the versions of artifacts that nothing needs once some runs are removed: other runs neither made them nor use
    /// them, they have no alias, and are not the latest. What no run made is somebody's who put it there.
    ///
    /// # Errors
    ///
    /// If a run or an artifact cannot be read: it is not known what it needs.
    ///
    /// ```
    /// # let temporary = tempfile::tempdir().unwrap();
    /// let runs = accelerator_track::Runs::open(temporary.path())?;
    /// let found = runs.unneeded_artifacts(&runs.list()?)?;
    /// assert_eq!(runs.remove_artifacts(&found)?, found);
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    pub fn unneeded_artifacts(&self, removed: &[ListedRun]) -> Result<PruneReport> {
        let removed: HashSet<_> = removed.iter().map(|run| run.folder.as_path()).collect();
        self.artifacts().plan_prune(&self.needed(&removed)?)
    }

    /// Removes of the versions that were [found](Self::unneeded_artifacts) those that nothing needs now either. No run
    /// begins to use one meanwhile.
    ///
    /// # Errors
    ///
    /// Those of [`unneeded_artifacts`](Self::unneeded_artifacts), with which nothing is removed, and if the store cannot
    /// be written.
    pub fn remove_artifacts(&self, found: &PruneReport) -> Result<PruneReport> {
        let needed = || Ok(self.needed(&HashSet::new())?.among(&found.versions));
        self.artifacts().prune_with(needed)
    }

    fn artifacts(&self) -> ArtifactStore {
        ArtifactStore::of_runs(self.folder())
    }

    /// What keeps versions while all runs but some are there.
    fn needed(&self, removed: &HashSet<&Path>) -> Result<Retention> {
        let store = self.artifacts();
        let mut retention = Retention::keep_last(1).keep_aliased();
        let mut makers: HashSet<RunId> = HashSet::new();
        for run in self.list()? {
            if removed.contains(run.folder.as_path()) {
                continue;
            }
            let run = RunSummary::read(&run.folder)?;
            makers.insert(run.id);
            for artifact in run.artifacts {
                retention = retention.keep(artifact.name, artifact.version);
            }
        }
        for name in store.names()? {
            for version in store.versions(&name)? {
                if version.run().is_none_or(|run| makers.contains(&run)) {
                    retention = retention.keep(&name, version.version());
                }
            }
        }
        Ok(retention)
    }
}
