//! Versions from another store.

use super::lock::{LockKind, StoreLock};
use super::name::ArtifactName;
use super::store::ArtifactStore;
use super::stored::StoredArtifact;
use super::version::Version;
use crate::error::Result;

impl ArtifactStore {
    /// Stores a version of another store under the same number, with those of its aliases that this store does not
    /// have. If other contents have or had the number here, it becomes a new version. Returns the version with these
    /// contents, and the bytes written.
    pub(crate) fn import(&self, artifact: &StoredArtifact) -> Result<(StoredArtifact, u64)> {
        let wanted = artifact.record();
        let name = ArtifactName::parse(&wanted.name)?;
        let adding = self.begin()?;
        let mut bytes = 0;
        let _reading = artifact.lock()?;
        for file in &wanted.contents.files {
            let source = artifact.object(file)?;
            bytes += adding.objects.add(&source, &adding.staged)?;
        }
        let _publish = StoreLock::take(self.folder(), LockKind::Publish)?;
        let mut index = self.index(&name)?;
        let is_same = |there: &Version| there.contents == wanted.contents;
        let there = self.version(&name, wanted.version)?;
        let is_taken = match &there {
            Some(there) => !is_same(there),
            None => index.is_of_another(wanted),
        };
        // As a new version it may have been stored before.
        let there = match is_taken {
            true => self.read_versions(&name)?.into_iter().find(is_same),
            false => there,
        };
        let version = match there {
            Some(there) => there,
            None => {
                let latest = self.numbers(&name)?.last().map_or(1, |latest| latest + 1);
                let version = Version {
                    version: match is_taken {
                        true => index.next.max(latest),
                        false => wanted.version,
                    },
                    ..wanted.clone()
                };
                index.next = index.next.max(version.version + 1);
                self.write_index(&adding, &name, &index)?;
                self.write_version(&adding, &name, &version)?;
                version
            }
        };
        let aliases = artifact
            .aliases()?
            .into_iter()
            .map(|alias| (alias, version.version));
        self.change_aliases(&adding, &name, index, |there| {
            for (alias, of) in aliases {
                there.entry(alias).or_insert(of);
            }
        })?;
        Ok((self.stored(version), bytes))
    }
}
