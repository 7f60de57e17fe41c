//! Where a run goes, and what is there.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use accelerator_manifest::StagedFolder;

use super::marker::Marker;
use crate::artifact::OnConflict;
use crate::error::{Error, Kind, Result};
use crate::history::HistoryReader;
use crate::journal::RunLock;
use crate::run_id::RunId;

/// Where a run goes.
#[derive(Debug)]
pub(super) struct Place {
    /// Where it lies in the end.
    pub(super) target: PathBuf,
    /// Where files are put: the target where that is this run, or else a hidden folder beside.
    pub(super) work: PathBuf,
}

impl Place {
    /// `None` where another run has the name and stays.
    pub(super) fn choose(
        destination: &Path,
        name: &str,
        run: RunId,
        on_conflict: OnConflict,
    ) -> Result<Option<Self>> {
        let hidden = destination.join(format!(".{name}.uploading-{run}"));
        for number in 1_u32.. {
            let target = destination.join(match number {
                1 => name.to_owned(),
                _ => format!("{name}-{number}"),
            });
            let place = match Occupant::of(&target, run)? {
                Occupant::None => Self {
                    work: hidden,
                    target,
                },
                Occupant::ThisRun => Self {
                    work: target.clone(),
                    target,
                },
                Occupant::Other(what) => match on_conflict {
                    OnConflict::Skip => return Ok(None),
                    OnConflict::Error => {
                        let message = format!(
                            "{} has {what} already; rename it, or choose to skip, to replace it or to keep both",
                            target.display()
                        );
                        return Err(Error::new(Kind::Conflict, message));
                    }
                    OnConflict::NewVersion => continue,
                    OnConflict::Replace => Self {
                        work: hidden,
                        target,
                    },
                },
            };
            return Ok(Some(place));
        }
        unreachable!("there are more numbers than folders")
    }

    /// Gives the run its name, in place of another that has it.
    pub(super) fn publish(&self) -> Result<()> {
        let Self { target, work } = self;
        if work == target {
            return Ok(());
        }
        let parent = target.parent().unwrap_or(Path::new("."));
        let replaced = match target.symlink_metadata() {
            Err(_) => None,
            Ok(_) => {
                if RunLock::is_held(target) {
                    let message = format!(
                        "the run in {} is being written, and cannot be replaced",
                        target.display()
                    );
                    return Err(Error::new(Kind::Conflict, message));
                }
                let staged = StagedFolder::create(parent, REPLACED, |target| target == REPLACED)
                    .map_err(|error| Error::io("create a folder in", parent, error))?;
                let aside = staged.path().join("run");
                fs::rename(target, &aside)
                    .map_err(|error| Error::io("move away", target, error))?;
                // With its folder, it is removed when this one is in its place.
                Some((staged, aside))
            }
        };
        let renamed = fs::rename(work, target);
        if let (Err(_), Some((_, aside))) = (&renamed, &replaced) {
            let _ = fs::rename(aside, target);
        }
        renamed.map_err(|error| Error::io("write the folder", target, error))?;
        // The name is there; on file systems that cannot flush a folder it may be lost with the machine.
        if let Ok(folder) = File::open(parent) {
            let _ = folder.sync_all();
        }
        Ok(())
    }
}

/// What has a name at the destination.
enum Occupant {
    None,
    ThisRun,
    /// In words.
    Other(String),
}

impl Occupant {
    fn of(target: &Path, run: RunId) -> Result<Self> {
        match target.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::None),
            Err(error) => return Err(Error::io("read", target, error)),
            Ok(metadata) if !metadata.is_dir() => {
                return Ok(Self::Other("something that is no run".to_owned()));
            }
            Ok(_) => {}
        }
        // An update that was interrupted may have left no journal that can be read; its marker is there.
        if Marker::read(target).is_some_and(|marker| marker.run == run) {
            return Ok(Self::ThisRun);
        }
        Ok(match HistoryReader::open(target) {
            Ok(reader) if reader.history().id == run => Self::ThisRun,
            Ok(reader) => Self::Other(format!("the run {}", reader.history().id)),
            Err(_) => Self::Other("something that is no run".to_owned()),
        })
    }
}

const REPLACED: &str = "replaced";
