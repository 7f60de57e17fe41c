use core::num::NonZeroUsize;
use std::collections::HashMap;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use accelerator_collective::Activity;
use accelerator_manifest::{
    self as manifest, CheckpointKind, FileName, Folder, Metadata, Role, VerifyLevel,
};
use accelerator_track::RunMark;

use super::saving::{CheckpointContext, Saved};
use super::settings::Checkpoints;
use super::snapshot::{SnapshotMode, SnapshotPart, TakenSnapshot};
use super::state_file::{HookState, LiveState, MODEL, Names, StateFile, encode, model_file};
use crate::core::error::{self, Error, Result};
use crate::data::LoaderState;
use crate::model::{FileNames, Layout, SaveOptions};
use crate::optim::check_known;
use crate::tracking::Tracking;

#[derive(Clone, Debug)]
pub(super) struct JobInfo {
    pub(super) activity: Activity,
    pub(super) factor: f64,
    pub(super) mode: SnapshotMode,
    pub(super) run: Option<RunMark>,
    pub(super) seed: u64,
    pub(super) tracking: Arc<Tracking>,
    pub(super) world_size: NonZeroUsize,
}

/// Opens the folder and begins a checkpoint in it. The last state, which an emergency saves, is not lost for settings
/// that do not concern it.
pub(super) fn begin(
    settings: &Checkpoints,
    context: &CheckpointContext,
    mode: SnapshotMode,
) -> Result<manifest::Draft> {
    match mode {
        SnapshotMode::Regular => {
            settings.check()?;
            settings.check_folder()?;
        }
        SnapshotMode::Emergency => {
            if let Err(error) = settings.check_folder() {
                error::warn(&error.to_string());
            }
        }
    }
    let manifest = settings.path().join("manifest.json");
    let is_checkpoint = manifest.try_exists();
    if is_checkpoint.map_err(|error| Error::io("find", &manifest, error))? {
        return Err(Error::misuse(format!(
            "`{}` is a checkpoint; expected the folder that holds checkpoints",
            settings.path().display()
        )));
    }
    let activity = context.group().activity();
    let folder = Folder::create(settings.path())?.with_progress(move || activity.keep_alive());
    let draft = folder.begin(context.rank())?;
    context.comes_next(settings.path(), draft.number())?;
    Ok(draft)
}

/// Writes everything, gives the checkpoint its name, and only then removes old ones.
pub(super) fn write(
    mut draft: manifest::Draft,
    taken: &TakenSnapshot,
    settings: &Checkpoints,
    job: JobInfo,
) -> Result<Saved> {
    let step = taken.step();
    let state = taken.state(job.factor, job.run.clone());
    let options = SaveOptions::new().with_max_shard_size(settings.max_shard_size);
    write_files(
        taken,
        &state,
        &options,
        &job.activity,
        &mut |name, role, content| {
            draft.write(name, role, |file| content(file))?;
            Ok(())
        },
    )?;
    {
        // Neither the program's hook nor the one flush of what it wrote shows that it is alive.
        let _busy = job.activity.busy();
        settings.run_before_save(&Saved {
            number: draft.number(),
            path: draft.path().to_owned(),
            step,
        })?;
        draft.adopt(Role::Other)?;
    }
    let checkpoint = draft.commit(metadata(taken, &state, &job))?;
    if let Some(mark) = &job.run {
        job.tracking.checkpoint_saved(mark);
    }
    // It may lack parts, so that training continues from one before.
    if job.mode == SnapshotMode::Regular
        && let Some(limit) = settings.limit()?
    {
        prune(settings, limit, job.activity);
    }
    Ok(Saved {
        number: checkpoint.number(),
        path: checkpoint.path().to_owned(),
        step,
    })
}

/// The same in memory.
pub(super) fn keep(taken: &TakenSnapshot, job: &JobInfo, since: Instant) -> Result<LiveState> {
    let state = taken.state(job.factor, job.run.clone());
    let mut files = HashMap::new();
    write_files(
        taken,
        &state,
        &SaveOptions::new(),
        &job.activity,
        &mut |name, _, content| {
            let mut bytes = Vec::new();
            content(&mut bytes)
                .map_err(|error| Error::io("keep the state in", Path::new("memory"), error))?;
            files.insert(name.clone(), Arc::new(bytes));
            job.activity.keep_alive();
            Ok(())
        },
    )?;
    Ok(LiveState {
        files,
        metadata: metadata(taken, &state, job),
        since,
    })
}

/// Takes the files of a checkpoint one after the other: what each is, and what writes it.
type FileSink<'a> =
    dyn FnMut(&FileName, Role, &mut dyn FnMut(&mut dyn Write) -> io::Result<()>) -> Result<()> + 'a;

fn write_files(
    taken: &TakenSnapshot,
    state: &StateFile,
    options: &SaveOptions,
    activity: &Activity,
    sink: &mut FileSink<'_>,
) -> Result<()> {
    let ids = state.ids();
    let mut names = Names::default();
    for (at, part) in taken.parts.iter().enumerate() {
        match part {
            SnapshotPart::Loader(_) => {}
            SnapshotPart::Model { hooks, values, .. } => {
                let folder = names.model();
                for (rank, state) in hooks.iter().enumerate() {
                    if let Some(state) = state.as_ref().filter(|state| !state.is_empty()) {
                        let name = HookState::file(folder.as_deref(), rank)?;
                        put(sink, &name, Role::Ranks, state)?;
                    }
                }
                let Some(values) = values else { continue };
                let files = FileNames::new(MODEL);
                values.write(&files, options, &mut |name, content| {
                    sink(&model_file(folder.as_deref(), name)?, Role::Model, content)
                })?;
            }
            SnapshotPart::Object(bytes) => put(sink, &names.object()?, Role::Object, bytes)?,
            SnapshotPart::Optimizer(optimizer) => {
                let bytes = {
                    let _busy = activity.busy();
                    optimizer.bytes()?
                };
                check_known(
                    &format!("the optimizer (part {} of the tuple)", at + 1),
                    &bytes,
                    &ids,
                )?;
                put(sink, &names.optimizer()?, Role::Optimizer, &bytes)?;
            }
            SnapshotPart::PerRank(values) => {
                put(sink, &names.per_rank()?, Role::Ranks, &encode(values)?)?;
            }
        }
    }
    put(
        sink,
        &StateFile::FILE.parse()?,
        Role::Other,
        &encode(state)?,
    )
}

fn put(sink: &mut FileSink<'_>, name: &FileName, role: Role, bytes: &[u8]) -> Result<()> {
    sink(name, role, &mut |file| file.write_all(bytes))
}

/// The new checkpoint is complete: that an old one stays is no failure of it.
fn prune(settings: &Checkpoints, limit: NonZeroUsize, activity: Activity) {
    let prune = || -> Result<Vec<u64>> {
        let folder = Folder::open(settings.path())?;
        let folder = folder.with_progress(move || activity.keep_alive());
        let mut protected = Vec::new();
        for checkpoint in folder.checkpoints()? {
            if settings.is_protected(checkpoint.path())? {
                protected.push(checkpoint.number());
            }
        }
        Ok(folder.prune(limit, VerifyLevel::Sizes, &protected)?)
    };
    match prune() {
        Ok(numbers) if !numbers.is_empty() => tracing::debug!(?numbers, "removed old checkpoints"),
        Ok(_) => {}
        Err(error) => tracing::warn!("old checkpoints could not be removed: {error}"),
    }
}

fn metadata(taken: &TakenSnapshot, state: &StateFile, job: &JobInfo) -> Metadata {
    let mut extra = serde_json::Map::new();
    let parts = state.parts.iter().map(|part| part.kind().to_string());
    extra.insert("parts".to_owned(), parts.collect());
    extra.insert("learning_rate_factor".to_owned(), job.factor.into());
    let layouts: Vec<&Layout> = taken
        .parts
        .iter()
        .filter_map(|part| match part {
            SnapshotPart::Model { state, .. } => Some(&state.layout),
            _ => None,
        })
        .collect();
    let mut names = Names::default();
    let parameters = layouts.into_iter().flat_map(|layout| {
        let folder = names.model();
        layout.parameters().map(move |mut parameter| {
            if let Some(folder) = &folder {
                parameter.path = format!("{folder}/{}", parameter.path);
            }
            parameter
        })
    });
    Metadata {
        kind: match job.mode {
            SnapshotMode::Emergency => CheckpointKind::Emergency,
            SnapshotMode::Regular => CheckpointKind::Full,
        },
        step: taken.step(),
        epoch: state.position().map_or(0, |position| position.next_epoch()),
        world_size: job.world_size,
        seed: Some(job.seed),
        loaders: state.loaders().map(loader).collect(),
        parameters: parameters.collect(),
        extra,
    }
}

fn loader(loader_state: &LoaderState) -> manifest::LoaderState {
    let position = loader_state.position.unwrap_or_default();
    let mut extra = serde_json::Map::new();
    extra.insert("trained".to_owned(), loader_state.trained.into());
    manifest::LoaderState {
        samples: loader_state.samples,
        order: loader_state.order.clone(),
        tail: loader_state.tail.clone(),
        global_batch: loader_state.global_batch.unwrap_or(0),
        epoch: position.epoch,
        consumed: position.consumed,
        step: position.step,
        finished: position.finished,
        extra,
    }
}
