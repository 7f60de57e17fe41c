use core::fmt;
use core::mem::discriminant;
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use accelerator_collective::ProcessGroup;
use accelerator_track::RunMark;
use burn::module::ParamId;
use serde::{Deserialize, Serialize};

use super::saving::CheckpointContext;
use super::settings::FrozenParameters;
use super::state_file::{HookState, PartKind, PartState, SavedModel, StateFile, encode};
use crate::core::agreement::sides;
use crate::core::dyn_module::DynModule;
use crate::core::error::{Error, Kind, Result};
use crate::core::module::visit_floats;
use crate::core::partition::is_sharded;
use crate::data::LoaderState;
use crate::model::{Layout, ModelSnapshot, running_states};
use crate::optim::{OptimizerSnapshot, PreparedOptimizer, ScheduleKind};
use crate::reduce::ModelState;
use crate::replicas;

/// Everything that goes into a checkpoint, at one moment: taken while training stands still,
/// written later and elsewhere.
#[expect(missing_debug_implementations, reason = "programs never see one")]
pub struct Snapshot<'a> {
    context: &'a CheckpointContext,
    mode: SnapshotMode,
    frozen: FrozenParameters,
    pub(super) taken: TakenSnapshot,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum SnapshotMode {
    /// Drops the gradients of an open window; its batches do not count as used.
    Emergency,
    Regular,
}

/// A snapshot without its accelerator.
#[derive(Default)]
pub(super) struct TakenSnapshot {
    /// Set if gradients of a model that is saved wait for their step.
    has_pending_step: bool,
    pub(super) parts: Vec<SnapshotPart>,
}

pub(super) enum SnapshotPart {
    Loader(LoaderState),
    Model {
        state: SavedModel,
        /// The state of its communication hook, empty for nothing: this rank's, and then every rank's once
        /// it is written.
        hooks: Vec<Option<Vec<u8>>>,
        /// The paths of the parameters that are left out.
        left_out: HashSet<String>,
        /// The values, on the rank that writes, in the end.
        values: Option<ModelSnapshot>,
    },
    Object(Vec<u8>),
    Optimizer(OptimizerSnapshot),
    /// This rank's value, and then every rank's.
    PerRank(Vec<Option<Vec<u8>>>),
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct SnapshotReport {
    folder: String,
    parts: Vec<PartReport>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
enum PartReport {
    Loader(Box<LoaderState>),
    Model { steps: u64 },
    Object,
    Optimizer { steps: u64 },
    PerRank(Vec<u8>),
}

impl<'a> Snapshot<'a> {
    pub(super) fn new(
        context: &'a CheckpointContext,
        mode: SnapshotMode,
        frozen: FrozenParameters,
    ) -> Self {
        Self {
            context,
            mode,
            frozen,
            taken: TakenSnapshot::default(),
        }
    }

    pub(super) fn add_model(&mut self, model: &dyn DynModule) -> Result<()> {
        let model_state = self.ready(model)?;
        let mut hooks = Vec::new();
        if let Some(hook) = model_state.hook() {
            hooks = vec![None; self.context.world_size()];
            hooks[self.context.rank()] = Some(hook.save()?);
        }
        let state = SavedModel {
            hook: model_state
                .hook()
                .map(|hook| HookState::new(hook.name(), &hooks)),
            layout: Layout::of(model),
            scaler: model_state.scaler_state(),
            steps: model_state.steps(),
        };
        self.push_model(model, &model_state, state, hooks)
    }

    /// Adds what is kept beside a prepared model, under the same ids: its values, and after which step.
    /// The training state is saved with the model itself. Errors call it `what`.
    pub(crate) fn add_companion(&mut self, what: &str, companion: &dyn DynModule) -> Result<()> {
        if let Err(error) = self.context.models.find(companion) {
            let message = format!(
                "{what} cannot be saved: it does not belong to a prepared model. Begin it with the model that \
                 `prepare` gave, and not with the one that `prepare` took, whose parameter ids are others; \
                 where that was not done, `accelerator.save_model` saves the weights in a file"
            );
            return Err(Error::misuse(message).with_source(error));
        }
        let model_state = self.ready(companion)?;
        let state = SavedModel {
            hook: None,
            layout: Layout::of(companion),
            scaler: None,
            steps: model_state.steps(),
        };
        self.push_model(companion, &model_state, state, Vec::new())
    }

    fn ready(&mut self, model: &dyn DynModule) -> Result<Arc<ModelState>> {
        let model_state = self.context.models.find(model)?;
        let open = model_state.open_micro_steps();
        if open > 0 && self.mode == SnapshotMode::Regular {
            return Err(Error::misuse(format!(
                "a checkpoint is saved between optimizer steps, and {open} micro-steps of the next one are done \
                 for the model whose first parameter is `{}`: save when its optimizer's `outcome()` is `Stepped`, \
                 or at the end of an epoch; a model whose last batch was an earlier one ends its window by that \
                 batch's `weight().trigger_sync()`",
                model_state
                    .parameters()
                    .first()
                    .map_or("", |first| &first.path)
            )));
        }
        self.taken.has_pending_step |= model_state.has_pending_step();
        if self.mode == SnapshotMode::Regular {
            model_state.round().check_together("save a checkpoint")?;
        }
        Ok(model_state)
    }

    fn push_model(
        &mut self,
        model: &dyn DynModule,
        model_state: &ModelState,
        state: SavedModel,
        hooks: Vec<Option<Vec<u8>>>,
    ) -> Result<()> {
        // Several ranks bring their running statistics together before, once all are ready. An emergency is
        // collected by the rank alone that writes.
        let is_alone = self.context.world_size() == 1;
        if is_alone && self.mode == SnapshotMode::Regular {
            check_and_sync(self.context, model)?;
        }
        if self.mode == SnapshotMode::Emergency && is_sharded(model) {
            return Err(Error::misuse(
                "cannot write an emergency checkpoint: the model has sharded units, and the pieces on the lost rank cannot \
                 be recovered; resume from the last saved checkpoint",
            ));
        }
        let is_settled = self.mode == SnapshotMode::Emergency || is_alone;
        let left_out = match self.frozen {
            FrozenParameters::Saved => HashSet::new(),
            FrozenParameters::LeftOut => frozen_paths(model, model_state),
        };
        let group = self.context.group();
        let values = is_settled.then(|| ModelSnapshot::of(group, model, &left_out));
        let values = values.transpose()?;
        self.taken.parts.push(SnapshotPart::Model {
            state,
            hooks,
            values,
            left_out,
        });
        Ok(())
    }

    pub(super) fn add_optimizer<S: ScheduleKind>(
        &mut self,
        optimizer: &PreparedOptimizer<S>,
    ) -> Result<()> {
        let optimizer = optimizer.snapshot()?;
        if self.mode == SnapshotMode::Emergency && optimizer.is_sharded() {
            return Err(Error::misuse(
                "the state of a sharded optimizer lies on all ranks, and that of the rank that is lost \
                 is gone with it: leave the optimizer out of the emergency checkpoint, or continue from \
                 the last one that was saved",
            ));
        }
        self.taken.parts.push(SnapshotPart::Optimizer(optimizer));
        Ok(())
    }

    pub(super) fn add_loader(&mut self, loader_state: LoaderState) {
        self.taken.parts.push(SnapshotPart::Loader(loader_state));
    }

    pub(super) fn add_object<T: Serialize>(&mut self, value: &T) -> Result<()> {
        self.taken.parts.push(SnapshotPart::Object(encode(value)?));
        Ok(())
    }

    pub(super) fn add_per_rank<T: Serialize>(&mut self, value: &T) -> Result<()> {
        let mut values = vec![None; self.context.world_size()];
        values[self.context.rank()] = Some(encode(value)?);
        self.taken.parts.push(SnapshotPart::PerRank(values));
        Ok(())
    }
}

fn frozen_paths(model: &dyn DynModule, model_state: &ModelState) -> HashSet<String> {
    let trained = model_state.parameters().iter().map(|known| known.id);
    let trained: HashSet<ParamId> = trained.collect();
    let mut frozen = Vec::new();
    visit_floats(model, |float| {
        if !trained.contains(&float.id) {
            frozen.push((float.place, float.path.to_owned()));
        }
    });
    if frozen.is_empty() {
        return HashSet::new();
    }
    let running = running_states(model);
    let frozen = frozen.into_iter();
    let frozen = frozen.filter(|(place, _)| !running.contains(place));
    frozen.map(|(_, path)| path).collect()
}

#[track_caller]
fn check_and_sync(context: &CheckpointContext, model: &dyn DynModule) -> Result<()> {
    replicas::check_and_sync(context, &context.tracking, "save a checkpoint", model)
}

/// Completes a snapshot with all ranks, part by part.
#[expect(missing_debug_implementations, reason = "programs never see one")]
pub struct SnapshotExchange<'a> {
    context: &'a CheckpointContext,
    at: usize,
    taken: &'a mut TakenSnapshot,
}

impl<'a> SnapshotExchange<'a> {
    pub(super) fn new(context: &'a CheckpointContext, taken: &'a mut TakenSnapshot) -> Self {
        Self {
            context,
            at: 0,
            taken,
        }
    }

    pub(super) fn pass_over(&mut self) {
        self.at += 1;
    }

    #[track_caller]
    pub(crate) fn model(&mut self, model: &dyn DynModule) -> Result<()> {
        check_and_sync(self.context, model)?;
        if let Some(SnapshotPart::Model {
            values, left_out, ..
        }) = self.taken.parts.get_mut(self.at)
        {
            *values = ModelSnapshot::gathered(self.context.group(), model, left_out)?;
        }
        self.at += 1;
        Ok(())
    }
}

impl TakenSnapshot {
    /// Refuses a moment at which some models have stepped with a batch, and others will: from no place in the data do
    /// all of them continue.
    pub(super) fn check_between_steps(&self) -> Result<()> {
        let loaders = || {
            let parts = self.parts.iter().enumerate();
            parts.filter_map(|(at, part)| match part {
                SnapshotPart::Loader(loader_state) => Some((at + 1, loader_state)),
                _ => None,
            })
        };
        let is_read = loaders().any(|(_, loader)| loader.position.is_some());
        // Where the batch is not used yet, it comes again.
        if self.has_pending_step && is_read && !loaders().any(|(_, loader)| loader.waits) {
            return Err(Error::misuse(
                "a checkpoint is saved between optimizer steps, and there are gradients that no optimizer has stepped \
                 with, from a batch that counts as used: where several models step with one batch, save behind the \
                 last step; where `backward` is given a number of samples, pass the batch, or save behind the step",
            ));
        }
        for (place, loader) in loaders() {
            let missing = loader.steppers.missing();
            let at =
                missing.and_then(|missing| self.parts.iter().position(|part| part.holds(missing)));
            if let Some(at) = at {
                return Err(Error::misuse(format!(
                    "save between optimizer steps: the model (part {} of the tuple) has not stepped with the current \
                     batch of the loader (part {place}), but another model has; save after the last model's step, or, \
                     if this model is no longer trained, after the next batch",
                    at + 1
                )));
            }
        }
        Ok(())
    }

    /// Refuses to save nothing.
    pub(super) fn check_parts(&self) -> Result<()> {
        match self.parts.is_empty() {
            true => Err(Error::misuse(
                "there is nothing to save: pass the parts of the training",
            )),
            false => Ok(()),
        }
    }

    pub(super) fn report(&self, folder: &Path, rank: usize) -> SnapshotReport {
        let parts = self.parts.iter().map(|part| match part {
            SnapshotPart::Loader(loader_state) => {
                PartReport::Loader(Box::new(loader_state.clone()))
            }
            SnapshotPart::Model { state, .. } => PartReport::Model { steps: state.steps },
            SnapshotPart::Object(_) => PartReport::Object,
            SnapshotPart::Optimizer(optimizer) => PartReport::Optimizer {
                steps: optimizer.state.steps,
            },
            SnapshotPart::PerRank(values) => {
                let mine = values.get(rank).cloned().flatten();
                PartReport::PerRank(mine.unwrap_or_default())
            }
        });
        SnapshotReport {
            folder: folder.display().to_string(),
            parts: parts.collect(),
        }
    }

    /// Assigns the own values of `rank` to rank `next` of `ranks`, and drops those of the other ranks.
    pub(super) fn renumber(&mut self, rank: usize, next: usize, ranks: usize) {
        for part in &mut self.parts {
            let values = match part {
                SnapshotPart::PerRank(values) => values,
                SnapshotPart::Model { hooks, .. } if !hooks.is_empty() => hooks,
                _ => continue,
            };
            let own = values.get_mut(rank).and_then(Option::take);
            *values = vec![None; ranks];
            values[next] = own;
        }
    }

    pub(super) fn complete(&mut self, reports: &[SnapshotReport]) {
        for (at, part) in self.parts.iter_mut().enumerate() {
            let SnapshotPart::PerRank(values) = part else {
                continue;
            };
            for (value, report) in values.iter_mut().zip(reports) {
                if let Some(PartReport::PerRank(bytes)) = report.parts.get(at) {
                    *value = Some(bytes.clone());
                }
            }
        }
    }

    /// Brings state that lies on several ranks together where it is written.
    #[track_caller]
    pub(super) fn gather(&mut self, group: &ProcessGroup) -> Result<()> {
        for part in &mut self.parts {
            match part {
                SnapshotPart::Model { state, hooks, .. } => {
                    gather_hooks(group, hooks)?;
                    if let Some(hook) = &mut state.hook {
                        *hook = HookState::new(&hook.name, hooks);
                    }
                }
                SnapshotPart::Optimizer(optimizer) => optimizer.gather(group)?,
                SnapshotPart::Loader(_) | SnapshotPart::Object(_) | SnapshotPart::PerRank(_) => {}
            }
        }
        Ok(())
    }

    /// Optimizer steps: those of the first optimizer, else of the first model.
    pub(super) fn step(&self) -> u64 {
        let optimizers = self.parts.iter().filter_map(|part| match part {
            SnapshotPart::Optimizer(optimizer) => Some(optimizer.state.steps),
            _ => None,
        });
        let models = self.parts.iter().filter_map(|part| match part {
            SnapshotPart::Model { state, .. } => Some(state.steps),
            _ => None,
        });
        optimizers.chain(models).next().unwrap_or(0)
    }

    /// Makes the content of the state file; `factor` is the one on the learning rates of the job.
    pub(super) fn state(&self, factor: f64, run: Option<RunMark>) -> StateFile {
        let parts = self.parts.iter().map(|part| match part {
            SnapshotPart::Loader(loader_state) => PartState::Loader(loader_state.clone()),
            SnapshotPart::Model { state, .. } => PartState::Model(state.clone()),
            SnapshotPart::Object(_) => PartState::Object,
            SnapshotPart::Optimizer(optimizer) => PartState::Optimizer(optimizer.state.clone()),
            SnapshotPart::PerRank(_) => PartState::PerRank,
        });
        StateFile {
            factor,
            parts: parts.collect(),
            run,
        }
    }
}

impl SnapshotPart {
    fn holds(&self, id: u64) -> bool {
        matches!(self, Self::Model { state, .. } if state.layout.ids().contains(&id))
    }
}

impl SnapshotReport {
    pub(super) fn has_parts(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Checks that `rank` can continue from the state of rank 0, whose report this is. They may be one step apart, or at the
    /// two sides of an epoch's end.
    pub(super) fn compare_survivor(&self, other: &Self, rank: usize) -> Result<()> {
        if !other.has_parts() {
            return Ok(());
        }
        if !self.has_parts() {
            return Err(Error::new(
                Kind::Collective,
                "the lowest rank that is left has not got the state of the training yet, so the others cannot continue from \
                 it: resume from the last checkpoint",
            ));
        }
        let are_alike =
            |pair: (&PartReport, &PartReport)| discriminant(pair.0) == discriminant(pair.1);
        let is_same = self.parts.len() == other.parts.len()
            && self.parts.iter().zip(&other.parts).all(are_alike);
        match is_same {
            true => Ok(()),
            false => self.compare(other, rank),
        }
    }

    /// Checks that all ranks save into one folder. Rank 0 alone writes, so the others' would stay empty.
    pub(super) fn compare_folders(reports: &[Self]) -> Result<()> {
        if reports
            .iter()
            .all(|report| report.folder == reports[0].folder)
        {
            return Ok(());
        }
        Err(Error::config(format!(
            "the folder of checkpoints differs between ranks ({}); rank 0 writes for all, into its own: pass \
             the same on every rank",
            sides(reports.iter().map(|report| &report.folder))
        )))
    }

    pub(super) fn compare(&self, other: &Self, rank: usize) -> Result<()> {
        let (mine, theirs) = (&self.parts, &other.parts);
        let count = mine.len().max(theirs.len());
        let Some(at) = (0..count).find(|&at| !same(mine.get(at), theirs.get(at))) else {
            return Ok(());
        };
        Err(Error::misuse(format!(
            "ranks save different parts: for part {} of the tuple, rank 0 has {}, but rank {rank} has {}; \
             save the same parts on every rank, after the same step",
            at + 1,
            PartName(mine.get(at)),
            PartName(theirs.get(at)),
        )))
    }
}

#[track_caller]
fn gather_hooks(group: &ProcessGroup, hooks: &mut [Option<Vec<u8>>]) -> Result<()> {
    if hooks.is_empty() {
        return Ok(());
    }
    let is_main = group.rank() == 0;
    let mine = hooks[group.rank()].take().unwrap_or_default();
    // Of a rank that keeps nothing, no piece comes.
    hooks.fill_with(|| Some(Vec::new()));
    group.all_gather_varied_with(&mine, |rank, piece: &[u8]| {
        if is_main {
            hooks[rank].get_or_insert_default().extend_from_slice(piece);
        }
    })?;
    hooks[group.rank()] = Some(mine);
    Ok(())
}

/// Tells if ranks agree on a part. A loader that gradients are made from stands at one place on
/// all of them; one for evaluation may be read by some ranks alone.
fn same(left: Option<&PartReport>, right: Option<&PartReport>) -> bool {
    match (left, right) {
        (Some(PartReport::Loader(left)), Some(PartReport::Loader(right))) => {
            left.trained == right.trained && (!left.trained || left.position == right.position)
        }
        (Some(PartReport::PerRank(_)), Some(PartReport::PerRank(_))) => true,
        (left, right) => left == right,
    }
}

struct PartName<'a>(Option<&'a PartReport>);

impl fmt::Display for PartName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str("nothing"),
            Some(PartReport::Loader(loader_state)) => match loader_state.position {
                Some(position) => write!(
                    f,
                    "a loader in epoch {} after {} samples",
                    position.epoch, position.consumed
                ),
                None => f.write_str("a loader that was not read yet"),
            },
            Some(PartReport::Model { steps }) => write!(f, "a model after {steps} steps"),
            Some(PartReport::Object) => PartKind::Object.fmt(f),
            Some(PartReport::Optimizer { steps }) => write!(f, "an optimizer after {steps} steps"),
            Some(PartReport::PerRank(_)) => PartKind::PerRank.fmt(f),
        }
    }
}
