//! Where a run goes, and what is there.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use accelerator_manifest::StagedFolder;

use super::below;
use super::marker::Marker;
use crate::artifact::{OnConflict, source};
use crate::error::{Error, Kind, Result};
use crate::history::HistoryReader;
use crate::journal::RunLock;
use crate::run_files::RunFiles;
use crate::run_id::RunId;
use crate::runs::Runs;

/// Where a run goes.
#[derive(Debug)]
pub(super) struct Place {
    /// Where it lies in the end.
    pub(super) target: PathBuf,
    /// Where files are put: the target where that is this run, or else a hidden folder beside.
    pub(super) work: PathBuf,
    /// Whether another run is removed, which lies at the target.
    replaces_another: bool,
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
            let (work, replaces_another) = match Occupant::of(&target, run)? {
                Occupant::None => (hidden, false),
                Occupant::ThisRun => (target.clone(), false),
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
                    OnConflict::Replace => {
                        expect_nothing_foreign(&target)?;
                        (hidden, true)
                    }
                },
            };
            return Ok(Some(Self {
                target,
                work,
                replaces_another,
            }));
        }
        unreachable!("there are more numbers than folders")
    }

    /// Gives the run its name, in place of another that has it.
    pub(super) fn publish(&self) -> Result<()> {
        let Self {
            target,
            work,
            replaces_another,
        } = self;
        let parent = target.parent().unwrap_or(Path::new("."));
        // Removes what an upload that was killed has moved away, too.
        let staged = StagedFolder::create(parent, REPLACED, |target| target == REPLACED)
            .map_err(|error| Error::io("create a folder in", parent, error))?;
        if work == target {
            return Ok(());
        }
        // With its folder, it is removed when this run is in its place.
        let aside = staged.path().join("run");
        if *replaces_another {
            if is_written(target) {
                let message = format!(
                    "the run in {} is being written, and cannot be replaced",
                    target.display()
                );
                return Err(Error::new(Kind::Conflict, message));
            }
            expect_nothing_foreign(target)?;
            fs::rename(target, &aside).map_err(|error| Error::io("move away", target, error))?;
        }
        let renamed = fs::rename(work, target);
        if renamed.is_err() && *replaces_another {
            let _ = fs::rename(&aside, target);
        }
        renamed.map_err(|error| {
            if target.exists() {
                let message = format!(
                    "another run has come to {} meanwhile; upload this one again",
                    target.display()
                );
                return Error::new(Kind::Conflict, message).with_source(error);
            }
            Error::io("write the folder", target, error)
        })?;
        // The name is there; on file systems that cannot flush a folder it may be lost with the machine.
        if let Ok(folder) = File::open(parent) {
            let _ = folder.sync_all();
        }
        Ok(())
    }
}

/// Refuses to replace what is no run, and a run in whose folder others have something that no upload brought.
fn expect_nothing_foreign(target: &Path) -> Result<()> {
    let what = match target.is_dir() && Runs::is_run(target) {
        false => "is no run".to_owned(),
        true => match first_foreign(target)? {
            None => return Ok(()),
            Some(foreign) => format!(
                "holds what its run did not write, such as {}",
                foreign.display()
            ),
        },
    };
    let message = format!(
        "{} cannot be replaced: it {what}; move that elsewhere, or choose to keep both",
        target.display()
    );
    Err(Error::new(Kind::Conflict, message))
}

/// Returns a file or folder that neither the run nor the upload of the run put there.
fn first_foreign(target: &Path) -> Result<Option<PathBuf>> {
    let marker = Marker::read(target);
    let brought = marker.iter().flat_map(|marker| marker.files.keys());
    let brought: BTreeSet<_> = brought.map(|name| below(target, name)).collect();
    let is_brought = |path: &PathBuf| match path.is_dir() && !path.is_symlink() {
        // An upload copies the folders of others, too, unless they are empty.
        true => source::files_below(path).is_ok_and(|files| {
            !files.is_empty() && files.iter().all(|(_, path)| brought.contains(path))
        }),
        false => brought.contains(path),
    };
    let mut foreign = RunFiles::list(target)?.foreign.into_iter();
    Ok(foreign.find(|path| !is_brought(path)))
}

/// Whether a process writes the run in a folder.
pub(super) fn is_written(folder: &Path) -> bool {
    wait_for(|| (!RunLock::is_held(folder)).then_some(())).is_none()
}

/// Asks again for a moment: a process that another thread starts holds the locks of this one until it has become another
/// program.
pub(super) fn wait_for<T>(mut free: impl FnMut() -> Option<T>) -> Option<T> {
    const TRIES: u32 = 50;
    for _ in 1..TRIES {
        if let Some(answer) = free() {
            return Some(answer);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    free()
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
