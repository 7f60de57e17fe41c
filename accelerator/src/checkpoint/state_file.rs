use core::cmp::Reverse;
use core::fmt;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use accelerator_collective::Activity;
use accelerator_manifest::{Checkpoint, FileName, Folder, Metadata, Role};
use accelerator_track::RunMark;
use burn::tensor::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::position::Origin;
use crate::core::error::{self, Error, Result};
use crate::core::offload::Scratch;
use crate::data::{EpochPosition, LoaderState};
use crate::model::{FileBytes, FileNames, Layout, ModelFile, has_adapters_alone};
use crate::optim::OptimizerState;
use crate::precision::ScalerState;

/// The content of `state.cbor`: all that is small, exactly. The manifest repeats for people what
/// they may want to know of it.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct StateFile {
    pub(super) factor: f64,
    pub(super) parts: Vec<PartState>,
    /// The place of its run, in a training that is tracked.
    #[serde(default)]
    pub(super) run: Option<RunMark>,
}

/// The kind of a part of a checkpoint.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PartKind {
    #[doc(hidden)]
    Loader,
    #[doc(hidden)]
    Model,
    #[doc(hidden)]
    Object,
    #[doc(hidden)]
    Optimizer,
    #[doc(hidden)]
    PerRank,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) enum PartState {
    Loader(LoaderState),
    Model(SavedModel),
    Object,
    Optimizer(OptimizerState),
    PerRank,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct SavedModel {
    /// The state of its communication hook, if it has one.
    #[serde(default)]
    pub(super) hook: Option<HookState>,
    pub(super) layout: Layout,
    /// The state of its loss scaler, if it has one.
    #[serde(default)]
    pub(super) scaler: Option<ScalerState>,
    /// The number of windows that an optimizer has stepped with, skipped ones included.
    pub(super) steps: u64,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct HookState {
    pub(super) name: String,
    pub(super) saved: Vec<SavedHook>,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) enum SavedHook {
    /// Nobody asked it: the rank was lost, or another one wrote alone.
    Absent,
    /// The hook kept nothing, and there is no file.
    Nothing,
    /// The state lies in the file of the rank.
    State,
}

impl HookState {
    pub(super) fn new(name: &str, states: &[Option<Vec<u8>>]) -> Self {
        Self {
            name: name.to_owned(),
            saved: states.iter().map(SavedHook::of).collect(),
        }
    }

    /// The file of a rank, beside those of a model that has a folder, or none.
    pub(super) fn file(folder: Option<&str>, rank: usize) -> Result<FileName> {
        let folder = folder.map(|folder| format!("{folder}/"));
        let folder = folder.unwrap_or_default();
        Ok(FileName::new(format!("{folder}hook-rank-{rank:05}.bin"))?)
    }
}

impl SavedHook {
    fn of(state: &Option<Vec<u8>>) -> Self {
        match state {
            None => Self::Absent,
            Some(state) if state.is_empty() => Self::Nothing,
            Some(_) => Self::State,
        }
    }
}

impl StateFile {
    pub(super) const FILE: &str = "state.cbor";

    /// The place of the loop.
    pub(super) fn position(&self) -> Option<EpochPosition> {
        self.read_on().map(|(_, position)| position)
    }

    pub(super) fn leads(&self, at: usize) -> bool {
        self.read_on().is_some_and(|(read_on, _)| read_on == at)
    }

    /// The loader that the loop reads, by its place among the parts, with where it stands: the first that an optimizer
    /// has stepped with. Where there is none, as with bare counts, the one in the latest epoch; of several, one whose
    /// batches the program is taking; of those the first. One for evaluation is at the same epoch each time, or follows.
    fn read_on(&self) -> Option<(usize, EpochPosition)> {
        let read = || {
            let parts = self.parts.iter().enumerate();
            parts.filter_map(|(at, part)| match part {
                PartState::Loader(loader) => loader.position.map(|position| (at, loader, position)),
                _ => None,
            })
        };
        let trained = read().find(|(_, loader, _)| loader.trained);
        let latest = || {
            read().min_by_key(|(_, loader, position)| (Reverse(position.epoch), !loader.is_open))
        };
        let (at, _, position) = trained.or_else(latest)?;
        Some((at, position))
    }

    /// Tells if the loader at that place continues in mid-epoch. One for evaluation starts anew, as
    /// it does each time.
    pub(super) fn continues(&self, at: usize) -> bool {
        let Some(PartState::Loader(loader)) = self.parts.get(at) else {
            return false;
        };
        if self.loaders().any(|loader| loader.trained) {
            return loader.trained;
        }
        !self.is_before_training() && self.leads(at)
    }

    /// Tells if there is something to train, and no step was taken: a batch that the loop has got is still to be
    /// trained on.
    fn is_before_training(&self) -> bool {
        let trains = |part: &PartState| matches!(part, PartState::Optimizer(_));
        let is_new = |part: &PartState| match part {
            PartState::Model(model) => model.steps == 0,
            // An optimizer that has stepped is saved beside its model.
            _ => true,
        };
        self.parts.iter().any(trains) && self.parts.iter().all(is_new)
    }

    pub(super) fn optimizer_steps(&self) -> Vec<u64> {
        let steps = self.parts.iter().filter_map(|part| match part {
            PartState::Optimizer(optimizer) => Some(optimizer.steps),
            _ => None,
        });
        steps.collect()
    }

    pub(super) fn loaders(&self) -> impl Iterator<Item = &LoaderState> {
        self.parts.iter().filter_map(|part| match part {
            PartState::Loader(loader_state) => Some(loader_state),
            _ => None,
        })
    }

    pub(super) fn ids(&self) -> HashSet<u64> {
        let layouts = self.parts.iter().filter_map(|part| match part {
            PartState::Model(model) => Some(model.layout.ids()),
            _ => None,
        });
        layouts.flatten().collect()
    }

    pub(super) fn loader(&self, number: u64) -> Option<(usize, &LoaderState)> {
        let mut parts = self.parts.iter().enumerate();
        parts.find_map(|(at, part)| match part {
            PartState::Loader(saved) if saved.number == number => Some((at, saved)),
            _ => None,
        })
    }

    pub(super) fn misfit(&self, kinds: &[PartKind]) -> Option<String> {
        let saved: Vec<_> = self.parts.iter().map(PartState::kind).collect();
        let count = saved.len().max(kinds.len());
        let at = (0..count).find(|&at| saved.get(at) != kinds.get(at))?;
        let shown = |kind: Option<&PartKind>| {
            kind.map_or_else(|| "nothing".to_owned(), PartKind::to_string)
        };
        Some(format!(
            "for part {} of the tuple, it has {}, but `resume` was given {}; pass the parts that were saved ({}), \
             in that order",
            at + 1,
            shown(saved.get(at)),
            shown(kinds.get(at)),
            list(&saved),
        ))
    }
}

pub(super) fn list(kinds: &[PartKind]) -> String {
    let kinds: Vec<_> = kinds.iter().map(PartKind::to_string).collect();
    kinds.join(", ")
}

impl PartState {
    pub(super) fn kind(&self) -> PartKind {
        match self {
            Self::Loader(_) => PartKind::Loader,
            Self::Model(_) => PartKind::Model,
            Self::Object => PartKind::Object,
            Self::Optimizer(_) => PartKind::Optimizer,
            Self::PerRank => PartKind::PerRank,
        }
    }
}

impl fmt::Display for PartKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Loader => "a loader",
            Self::Model => "a model",
            Self::Object => "an object",
            Self::Optimizer => "an optimizer",
            Self::PerRank => "a value for each rank",
        })
    }
}

/// Gives out the names of files, by how many parts of a kind there were before.
#[derive(Debug, Default)]
pub(super) struct Names {
    models: usize,
    objects: usize,
    optimizers: usize,
    per_rank: usize,
}

impl Names {
    /// The folder of the next model within the checkpoint: none for the first.
    pub(super) fn model(&mut self) -> Option<String> {
        self.models += 1;
        (self.models > 1).then(|| format!("model-{}", self.models))
    }

    pub(super) fn object(&mut self) -> Result<FileName> {
        numbered("object", "cbor", &mut self.objects)
    }

    pub(super) fn optimizer(&mut self) -> Result<FileName> {
        numbered("optimizer", "bpk", &mut self.optimizers)
    }

    pub(super) fn per_rank(&mut self) -> Result<FileName> {
        numbered("ranks", "cbor", &mut self.per_rank)
    }
}

fn numbered(stem: &str, extension: &str, count: &mut usize) -> Result<FileName> {
    *count += 1;
    let name = match *count {
        1 => format!("{stem}.{extension}"),
        count => format!("{stem}-{count}.{extension}"),
    };
    Ok(name.parse::<FileName>()?)
}

/// CBOR keeps what serde describes: NaN, the last bit of a float, and maps with any keys.
pub(super) fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    ciborium::into_writer(value, &mut bytes).map_err(|error| {
        Error::misuse(format!(
            "a {} cannot be written into a checkpoint",
            core::any::type_name::<T>()
        ))
        .with_source(error.to_string())
    })?;
    Ok(bytes)
}

pub(super) fn decode<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T> {
    ciborium::from_reader(bytes).map_err(|error| {
        Error::checkpoint(format!(
            "the checkpoint does not fit: {what} cannot be read as {}",
            core::any::type_name::<T>()
        ))
        .with_source(error.to_string())
    })
}

pub(super) const MODEL: &str = "model.safetensors";

/// The files of a checkpoint in memory: what rank 0 takes from its group to the next one.
#[derive(Debug)]
pub(crate) struct LiveState {
    pub(super) files: HashMap<FileName, Arc<Vec<u8>>>,
    pub(super) metadata: Metadata,
    /// The time at which the save began, from which the pause of training is measured.
    pub(super) since: Instant,
}

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

    /// Reads the record of an optimizer.
    pub(super) fn record(&self, file: &FileName) -> Result<Bytes> {
        let bytes = match self {
            Self::Folder(checkpoint) => checkpoint.read_into(file, Scratch::try_zeroed)?,
            Self::Memory(live) => Scratch::of(live.file(file)?.to_vec()),
        };
        Ok(bytes.into_bytes().shared())
    }

    /// Opens a model, whose files may lie in a folder of their own.
    pub(super) fn model(&self, folder: Option<&str>, activity: Activity) -> Result<ModelFile> {
        let name = model_file(folder, MODEL)?;
        match self {
            Self::Folder(checkpoint) => listed_model(checkpoint, &name, activity),
            Self::Memory(live) => {
                let path = self.path().join(name.as_str());
                let read = |name: &str| {
                    let file = live.files.get(&model_file(folder, name)?).cloned();
                    Ok(file.map(FileBytes::Memory))
                };
                ModelFile::in_memory(&path, activity, &read)
            }
        }
    }
}

impl LiveState {
    fn file(&self, name: &FileName) -> Result<&Arc<Vec<u8>>> {
        self.files.get(name).ok_or_else(|| {
            let message = format!("the state of the group before has no file {name}");
            Error::checkpoint(message)
        })
    }
}

/// Opens the model at a path that the program names. If a checkpoint's manifest lists it, its files are those in the
/// manifest; anything else is read from the disk as it is. In a folder of checkpoints, it is the model of the newest good
/// one.
pub(crate) fn open_model(path: &Path, activity: Activity) -> Result<ModelFile> {
    let found = match find_listed(path)? {
        Some(found) => Some(found),
        None => newest_model(path)?,
    };
    let Some((checkpoint, name)) = found else {
        return ModelFile::open(path, activity);
    };
    let reading = activity.clone();
    let checkpoint = checkpoint.with_progress(move || reading.keep_alive());
    listed_model(&checkpoint, &name, activity)
}

/// Returns the newest good checkpoint in a folder of checkpoints, and the name of its first model.
fn newest_model(path: &Path) -> Result<Option<(Checkpoint, FileName)>> {
    let index = FileNames::new(MODEL).index();
    let has_model = || [MODEL, &index].iter().any(|name| path.join(name).exists());
    if !path.is_dir() || has_model() || has_adapters_alone(path) {
        return Ok(None);
    }
    let search = Folder::open(path)?.latest_good()?;
    for defect in &search.rejected {
        error::warn(&format!("a checkpoint was passed over: {defect}"));
    }
    let Some(checkpoint) = search.found else {
        return Ok(None);
    };
    Ok(Some((checkpoint, model_file(None, MODEL)?)))
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
        return Err(Error::checkpoint(message));
    }
    ModelFile::in_memory(&checkpoint.path_of(name), activity, &|file| {
        let name = model_file(name.folder(), file)?;
        let is_listed = is_model(checkpoint, &name)?;
        let read = || checkpoint.read_into(&name, Scratch::try_zeroed);
        let bytes = is_listed.then(read).transpose()?;
        Ok(bytes.map(|bytes| FileBytes::Mapped(bytes.into_bytes())))
    })
}

/// A file of a model that has a folder of its own, or none.
pub(super) fn model_file(folder: Option<&str>, name: &str) -> Result<FileName> {
    Ok(match folder {
        Some(folder) => FileName::new(format!("{folder}/{name}")),
        None => FileName::new(name),
    }?)
}
