//! Versions from another store.

use super::lock::{LockKind, StoreLock};
use super::name::ArtifactName;
use super::store::{ArtifactStore, OnConflict};
use super::stored::StoredArtifact;
use super::version::Version;
use crate::error::{Error, Kind, Result};

impl ArtifactStore {
    /// Stores a version of another store under the same number, with those of its aliases that this store does not
    /// have. Returns the version with these contents, or the one that is there instead, and the bytes written. If a
    /// removed version with other contents had the number, it is not used again: the artifact becomes a new version.
    pub(crate) fn import(
        &self,
        artifact: &StoredArtifact,
        on_conflict: OnConflict,
    ) -> Result<(StoredArtifact, u64)> {
        let wanted = artifact.record();
        let name = ArtifactName::parse(&wanted.name)?;
        let adding = self.begin()?;
        let is_same = |there: &Version| there.contents == wanted.contents;
        let find = || -> Result<Option<Version>> {
            let there = self.version(&name, wanted.version)?;
            let is_taken = match &there {
                Some(there) => on_conflict == OnConflict::NewVersion && !is_same(there),
                None => self.index(&name)?.is_of_another(wanted),
            };
            // As a new version it may have been stored before.
            let before = match is_taken {
                true => self.read_versions(&name)?.into_iter().find(is_same),
                false => None,
            };
            match before.or(there) {
                None if is_taken && on_conflict == OnConflict::Error => Err(Error::new(
                    Kind::Conflict,
                    format!(
                        "{name}:v{} was another version in {}, which was removed; store it as a new version",
                        wanted.version,
                        self.folder().display()
                    ),
                )),
                found => Ok(found),
            }
        };
        let conflict = |there: &Version| match on_conflict {
            _ if is_same(there) => Ok(None),
            OnConflict::Skip => Ok(Some(self.stored(there.clone()))),
            OnConflict::Error => Err(Error::new(
                Kind::Conflict,
                format!(
                    "{name}:v{} in {} has other contents; store it as a new version, or replace that one",
                    wanted.version,
                    self.folder().display()
                ),
            )),
            OnConflict::NewVersion | OnConflict::Replace => Ok(None),
        };
        if let Some(there) = find()?.as_ref().map(conflict).transpose()?.flatten() {
            return Ok((there, 0));
        }
        let mut bytes = 0;
        let _reading = artifact.lock()?;
        for file in &wanted.contents.files {
            let source = artifact.object(file)?;
            bytes += adding.objects.add(&source, &adding.staged)?;
        }
        let _publish = StoreLock::take(self.folder(), LockKind::Publish)?;
        let there = find()?;
        if let Some(there) = there.as_ref().map(conflict).transpose()?.flatten() {
            return Ok((there, bytes));
        }
        let mut index = self.index(&name)?;
        let version = match there {
            Some(there) if is_same(&there) => there,
            there => {
                let latest = self.numbers(&name)?.last().map_or(1, |latest| latest + 1);
                let number = match there {
                    Some(_) if on_conflict == OnConflict::NewVersion => index.next.max(latest),
                    None if index.is_of_another(wanted) => index.next.max(latest),
                    _ => wanted.version,
                };
                let version = Version {
                    version: number,
                    ..wanted.clone()
                };
                index.next = index.next.max(number + 1);
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
