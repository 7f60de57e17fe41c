use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use accelerator_collective::Activity;
use accelerator_manifest::{Checkpoint, FileName, Metadata, Role};

use super::position::Origin;
use super::state_file::StateFile;
use crate::core::error::{Error, Kind, Result};
use crate::model::{FileNames, ModelFile};

/// The name of a model that is a single file.
pub(super) const MODEL: &str = "model.safetensors";

/// The files of a checkpoint in memory: what rank 0 takes from its group to the next one.
#[derive(Debug)]
pub(crate) struct LiveState {
    pub(super) files: HashMap<FileName, Arc<Vec<u8>>>,
    pub(super) metadata: Metadata,
    /// The time at which the save began, from which the pause of training is measured.
    pub(super) since: Instant,
}

/// The source from which rank 0 reads the saved state.
pub(super) enum Source {
    Folder(Box<Checkpoint>),
    Memory(Arc<LiveState>),
}

impl Source {
    pub(super) fn origin(&self) -> Origin {
        match self {
            Self::Folder(checkpoint) => Origin::Checkpoint(checkpoint.number()),
            Self::Memory(_) => Origin::GroupBefore,
        }
    }

    /// Returns the path that errors show.
    pub(super) fn path(&self) -> PathBuf {
        match self {
            Self::Folder(checkpoint) => checkpoint.path().to_owned(),
            Self::Memory(_) => PathBuf::from("the group before"),
        }
    }

    pub(super) fn metadata(&self) -> Result<&Metadata> {
        match self {
            Self::Folder(checkpoint) => Ok(&checkpoint.manifest()?.metadata),
            Self::Memory(live) => Ok(&live.metadata),
        }
    }

    pub(super) fn read(&self, file: &FileName) -> Result<Vec<u8>> {
        match self {
            Self::Folder(checkpoint) => Ok(checkpoint.read(file)?),
            Self::Memory(live) => Ok(live.file(file)?.to_vec()),
        }
    }

    /// Opens a model, whose files may lie in a folder of their own.
    pub(super) fn model(&self, folder: Option<&str>, activity: Activity) -> Result<ModelFile> {
        let name = model_file(folder, MODEL)?;
        match self {
            Self::Folder(checkpoint) => listed_model(checkpoint, &name, activity),
            Self::Memory(live) => {
                let path = self.path().join(name.as_str());
                let read = |name: &str| Ok(live.files.get(&model_file(folder, name)?).cloned());
                ModelFile::in_memory(&path, activity, &read)
            }
        }
    }
}

impl LiveState {
    fn file(&self, name: &FileName) -> Result<&Arc<Vec<u8>>> {
        self.files.get(name).ok_or_else(|| {
            let message = format!("the state of the group before has no file {name}");
            Error::new(Kind::Checkpoint, message)
        })
    }
}

/// Opens the model at a path that the program names. If a checkpoint's manifest lists it, its files are those in the
/// manifest; anything else is read from the disk as it is.
pub(crate) fn open_model(path: &Path, activity: Activity) -> Result<ModelFile> {
    let Some((checkpoint, name)) = find_listed(path)? else {
        return ModelFile::open(path, activity);
    };
    let reading = activity.clone();
    let checkpoint = checkpoint.with_progress(move || reading.keep_alive());
    listed_model(&checkpoint, &name, activity)
}

/// The checkpoint whose manifest lists the model at that path, and its name there. A folder that has a checkpoint's
/// manifest holds what that lists; a file that a program names may be one that was put beside, or all that is left of a
/// checkpoint. What lies elsewhere and cannot be read as a manifest belongs to another program.
fn find_listed(path: &Path) -> Result<Option<(Checkpoint, FileName)>> {
    let is_folder = path.is_dir();
    let file = match is_folder {
        true => path.join(MODEL),
        false => path.to_owned(),
    };
    // A model may be in a folder of its own within the checkpoint.
    for root in file.ancestors().skip(1).take(2) {
        let name = file.strip_prefix(root).ok().and_then(Path::to_str);
        let Some(Ok(name)) = name.map(FileName::new) else {
            break;
        };
        let is_named = is_folder && root == path;
        match checkpoint_at(root) {
            Ok(Some(checkpoint)) if is_named || lists(&checkpoint, &name)? => {
                return Ok(Some((checkpoint, name)));
            }
            Err(error) if error.is_io() || (is_named && is_meant_as_checkpoint(root)?) => {
                return Err(error.into());
            }
            _ => {}
        }
    }
    Ok(None)
}

/// Tells if the folder is a checkpoint, or was one, whatever its manifest is.
pub(super) fn is_meant_as_checkpoint(folder: &Path) -> Result<bool> {
    let state = folder.join(StateFile::FILE);
    let has_state = state.try_exists();
    let has_state = has_state.map_err(|error| Error::io("find", &state, error))?;
    Ok(has_state || is_called_checkpoint(folder))
}

/// Tells if the path ends like that of a checkpoint, so that it is not meant as a folder of them.
pub(super) fn is_called_checkpoint(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let number = name.strip_prefix("checkpoint-").unwrap_or_default();
    !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit())
}

/// The checkpoint in that folder, if its manifest can be read.
fn checkpoint_at(folder: &Path) -> accelerator_manifest::Result<Option<Checkpoint>> {
    let is_here = folder.as_os_str().is_empty();
    let found = Checkpoint::find(if is_here { Path::new(".") } else { folder })?;
    if let Some(checkpoint) = &found {
        checkpoint.manifest()?;
    }
    Ok(found)
}

/// Returns true if the manifest lists that file of a model, or its index.
fn lists(checkpoint: &Checkpoint, name: &FileName) -> Result<bool> {
    let file = name.as_str().rsplit('/').next().unwrap_or_default();
    let index = FileNames::new(file).index();
    Ok(is_model(checkpoint, name)? || is_model(checkpoint, &model_file(name.folder(), &index)?)?)
}

fn is_model(checkpoint: &Checkpoint, name: &FileName) -> Result<bool> {
    let entry = checkpoint.manifest()?.files.get(name);
    Ok(entry.is_some_and(|entry| entry.role == Role::Model))
}

/// Opens a model of a checkpoint: only files that the manifest lists, each checked against its hash.
fn listed_model(checkpoint: &Checkpoint, name: &FileName, activity: Activity) -> Result<ModelFile> {
    if !lists(checkpoint, name)? {
        let path = checkpoint.path().display();
        let message = format!("the manifest of the checkpoint `{path}` has no model {name}");
        return Err(Error::new(Kind::Checkpoint, message));
    }
    ModelFile::in_memory(&checkpoint.path_of(name), activity, &|file| {
        let name = model_file(name.folder(), file)?;
        let is_listed = is_model(checkpoint, &name)?;
        let read = is_listed.then(|| checkpoint.read(&name).map(Arc::new));
        Ok(read.transpose()?)
    })
}

/// A file of a model that has a folder of its own, or none.
pub(super) fn model_file(folder: Option<&str>, name: &str) -> Result<FileName> {
    Ok(match folder {
        Some(folder) => FileName::new(format!("{folder}/{name}")),
        None => FileName::new(name),
    }?)
}
