//! Artifacts that no run needs.

use std::collections::HashSet;
use std::path::Path;

use super::{ListedRun, RunSummary, Runs};
use crate::artifact::{ArtifactStore, PruneReport, Retention};
use crate::error::Result;
use crate::run_id::RunId;

impl Runs {
    /// Finds the versions of artifacts that nothing needs once some runs are removed: no other run made or uses them,
    /// they have no alias, and they are not the latest. A version that no run made is kept: a user put it there.
    ///
    /// # Errors
    ///
    /// If a run or an artifact cannot be read, so that its references are unknown.
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

    /// Removes those of the [found](Self::unneeded_artifacts) versions that still nothing needs. No run can begin to
    /// use one meanwhile.
    ///
    /// # Errors
    ///
    /// Those of [`unneeded_artifacts`](Self::unneeded_artifacts), in which case nothing is removed, and an error if the
    /// store cannot be written.
    pub fn remove_artifacts(&self, found: &PruneReport) -> Result<PruneReport> {
        let needed = || Ok(self.needed(&HashSet::new())?.among(&found.versions));
        self.artifacts().prune_with(needed)
    }

    fn artifacts(&self) -> ArtifactStore {
        ArtifactStore::of_runs(self.folder())
    }

    /// Returns the versions to keep if all runs except some are there.
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
