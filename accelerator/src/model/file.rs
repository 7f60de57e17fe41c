use std::io;
use std::path::{Path, PathBuf};

use accelerator_collective::Activity;
use burn::module::Module;

use super::staged::Staged;
use super::write::FileNames;
use super::{ModelSnapshot, SaveOptions};
use crate::context::Context;
use crate::core::error::{Error, Result};

/// Rank 0 writes the model, and the others learn how it went.
#[track_caller]
pub(crate) fn save<M: Module>(
    context: &Context,
    model: &M,
    path: &Path,
    options: &SaveOptions,
) -> Result<()> {
    let activity = context.group().activity();
    let work = || write(&ModelSnapshot::of(model), path, options, activity);
    context.on_main("save the model", work).map(drop)
}

/// Writes the files of a model beside their places, and then puts them there.
fn write(
    snapshot: &ModelSnapshot,
    path: &Path,
    options: &SaveOptions,
    activity: Activity,
) -> Result<()> {
    let failed = |error| Error::io("write the model to", path, error);
    let target = target(path, options).map_err(failed)?;
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let names = FileNames::new(&name);
    let folder = target.with_file_name("");
    let mut staged = Staged::new(folder, names.clone(), activity).map_err(failed)?;
    snapshot.write(&names, options, &mut |name, emit| {
        staged.write(name, emit).map_err(failed)
    })?;
    staged.publish().map_err(failed)
}

/// Returns the path to write to. A symbolic link stays and its target is replaced, but not if there may
/// be several files, whose index is looked for beside the link. Anything that is not a regular file is
/// refused.
fn target(path: &Path, options: &SaveOptions) -> io::Result<PathBuf> {
    match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => {
            Err(io::Error::other("it is there and not a regular file"))
        }
        Ok(_) if options.max_shard_size.is_none() => path.canonicalize(),
        Ok(_) | Err(_) => Ok(path.to_owned()),
    }
}
