use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use accelerator_collective::Activity;
use accelerator_manifest::{Checkpoint, FileName, Metadata};

use super::position::Origin;
use crate::core::error::{Error, Kind, Result};
use crate::model::ModelFile;

/// The files of a checkpoint in memory: what rank 0 takes from its group to the next one.
#[derive(Debug)]
pub(crate) struct LiveState {
    pub(super) files: HashMap<FileName, Arc<Vec<u8>>>,
    pub(super) metadata: Metadata,
    /// When the group was told to end.
    pub(super) since: Instant,
}

/// Where rank 0 reads what was saved.
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

    /// What errors call it.
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
    pub(super) fn model(&self, folder: Option<String>, activity: Activity) -> Result<ModelFile> {
        let mut path = self.path();
        path.extend(&folder);
        path.push("model.safetensors");
        match self {
            Self::Folder(_) => ModelFile::open(&path, activity),
            Self::Memory(live) => {
                let file = model_file(folder.as_deref(), "model.safetensors")?;
                ModelFile::in_memory(path, live.file(&file)?.clone(), activity)
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

/// A file of a model that has a folder of its own, or none.
pub(super) fn model_file(folder: Option<&str>, name: &str) -> Result<FileName> {
    Ok(match folder {
        Some(folder) => FileName::new(format!("{folder}/{name}")),
        None => FileName::new(name),
    }?)
}
