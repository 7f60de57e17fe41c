//! Decides which versions stay, and removes the others.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;

use accelerator_manifest::ContentHash;

use super::objects::{Adding, LockKind, Objects, StoreLock};
use super::store::ArtifactStore;
use super::{ArtifactId, ArtifactName, Version};
use crate::error::{Error, Result};

/// The rules that decide which versions of artifacts stay: a version stays if any of them keeps it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Retention {
    /// Keeps the latest versions of each name, so many.
    pub(crate) last: usize,
    /// Keeps versions that have an alias.
    pub(crate) is_aliased_kept: bool,
    /// Keeps these versions, as those that runs refer to.
    pub(crate) kept: BTreeSet<(String, u32)>,
    /// Keeps all but these versions.
    pub(crate) among: Option<Vec<ArtifactId>>,
}

/// The versions and contents that were removed from a store, or would be.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct PruneReport {
    /// The versions, by name and number.
    pub versions: Vec<ArtifactId>,
    /// The number of contents that no version refers to any more.
    pub objects: usize,
    /// The length of these contents.
    pub bytes: u64,
}

impl ArtifactStore {
    /// Returns the report of a [`prune_with`](Self::prune_with) without removing anything.
    ///
    /// # Errors
    ///
    /// If the store cannot be read, or a manifest is damaged.
    pub(crate) fn plan_prune(&self, retention: &Retention) -> Result<PruneReport> {
        let _lock = StoreLock::take(self.folder(), LockKind::Read)?;
        Ok(self.plan(retention)?.report)
    }

    /// Removes all but the latest versions of each name.
    #[cfg(test)]
    pub(crate) fn keep_last(&self, last: usize) -> PruneReport {
        let retention = Retention {
            last,
            ..Retention::default()
        };
        self.prune_with(|| Ok(retention)).unwrap()
    }

    /// Removes the versions that nothing keeps, and then the contents that no version refers to. Waits while another
    /// process stores or reads an artifact, then calls `retention`. If it is killed meanwhile, the next call
    /// removes the rest.
    ///
    /// # Errors
    ///
    /// If the store cannot be written; if a manifest is damaged, since what it refers to is then not known, and nothing
    /// is removed.
    pub(crate) fn prune_with(
        &self,
        retention: impl FnOnce() -> Result<Retention>,
    ) -> Result<PruneReport> {
        if !self.folder().exists() {
            return Ok(PruneReport::default());
        }
        let lock = StoreLock::take(self.folder(), LockKind::Remove)?;
        let removing = Adding::begin(self.folder(), lock)?;
        let _publish = StoreLock::take(self.folder(), LockKind::Publish)?;
        let plan = self.plan(&retention()?)?;
        for (name, versions) in &plan.versions {
            self.remove_versions(&removing, name, &mut self.index(name)?, versions)?;
        }
        for path in plan.objects {
            fs::remove_file(&path).map_err(|error| Error::io("remove", &path, error))?;
        }
        Ok(plan.report)
    }

    fn plan(&self, retention: &Retention) -> Result<Plan> {
        let mut plan = Plan::default();
        let mut referred = HashSet::new();
        for name in self.artifact_names()? {
            let versions = self.read_versions(&name)?;
            let aliased: BTreeSet<_> = self.index(&name)?.aliases.into_values().collect();
            let old = versions.len().saturating_sub(retention.last);
            for (at, version) in versions.into_iter().enumerate() {
                let is_kept = retention
                    .among
                    .as_ref()
                    .is_some_and(|among| !among.iter().any(|id| version.is(id)))
                    || at >= old
                    || (retention.is_aliased_kept && aliased.contains(&version.version))
                    || retention
                        .kept
                        .contains(&(version.name.clone(), version.version));
                if is_kept {
                    referred.extend(version.contents.files.iter().map(|file| file.hash));
                } else {
                    plan.remove(&name, &version);
                }
            }
        }
        for (path, hash, bytes) in Objects::new(self.folder()).list()? {
            if !referred.contains(&hash) {
                plan.report.objects += 1;
                plan.report.bytes += bytes;
                plan.objects.push(path);
            }
        }
        Ok(plan)
    }
}

#[derive(Debug, Default)]
struct Plan {
    versions: BTreeMap<ArtifactName, BTreeMap<u32, ContentHash>>,
    objects: Vec<std::path::PathBuf>,
    report: PruneReport,
}

impl Plan {
    fn remove(&mut self, name: &ArtifactName, version: &Version) {
        self.versions
            .entry(name.clone())
            .or_default()
            .insert(version.version, version.digest);
        self.report.versions.push(ArtifactId {
            name: version.name.clone(),
            version: version.version,
            digest: version.digest.to_string(),
        });
    }
}
