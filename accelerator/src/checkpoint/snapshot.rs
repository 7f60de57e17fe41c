use core::fmt;
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use accelerator_collective::ProcessGroup;
use burn::module::Module;
use serde::{Deserialize, Serialize};

use super::state::{HookState, ModelState, PartState, State, encode};
use crate::accelerator::Accelerator;
use crate::agreement::sides;
use crate::data::Standing;
use crate::error::{Error, Kind, Result};
use crate::gradient::Slot;
use crate::model::{Layout, ModelSnapshot};
use crate::optim::{OptimizerSnapshot, PreparedOptimizer, Schedule};
use crate::replicas;

/// Everything that goes into a checkpoint, at one moment: taken while training stands still,
/// written later and elsewhere.
pub struct Snapshot<'a> {
    accelerator: &'a Accelerator,
    mode: Mode,
    writer: Writer,
    pub(super) taken: Taken,
}

/// Whether a window may be open.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Mode {
    /// What an open window holds is lost, and its batches are not used.
    Emergency,
    Regular,
}

/// Whether this rank writes, and so needs the values too.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Writer {
    Other,
    This,
}

/// A snapshot without its accelerator.
#[derive(Default)]
pub(super) struct Taken {
    pub(super) parts: Vec<Part>,
}

pub(super) enum Part {
    Loader(Standing),
    Model {
        state: ModelState,
        /// What its communication hook keeps, empty for nothing: this rank's, and then every rank's where
        /// it is written.
        hooks: Vec<Option<Vec<u8>>>,
        /// On the rank that writes, in the end.
        values: Option<ModelSnapshot>,
    },
    Object(Vec<u8>),
    Optimizer(OptimizerSnapshot),
    /// This rank's, and then every rank's.
    PerRank(Vec<Option<Vec<u8>>>),
}

/// What a part of a checkpoint is.
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

/// What a rank says of its snapshot before any is written.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Report {
    /// The folder that it was told to save into.
    folder: String,
    parts: Vec<PartReport>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
enum PartReport {
    Loader(Box<Standing>),
    Model { steps: u64 },
    Object,
    Optimizer { steps: u64 },
    PerRank(Vec<u8>),
}

impl<'a> Snapshot<'a> {
    pub(super) fn new(accelerator: &'a Accelerator, mode: Mode, writer: Writer) -> Self {
        Self {
            accelerator,
            mode,
            writer,
            taken: Taken::default(),
        }
    }

    pub(super) fn add_model<M: Module>(&mut self, model: &M) -> Result<()> {
        let slot = self.ready(model)?;
        let mut hooks = Vec::new();
        if let Some(hook) = slot.hook() {
            hooks = vec![None; self.accelerator.world_size()];
            hooks[self.accelerator.rank()] = Some(hook.save()?);
        }
        let state = ModelState {
            hook: slot.hook().map(|hook| HookState::new(hook.name(), &hooks)),
            layout: Layout::of(model),
            scaler: slot.scaler_state(),
            steps: slot.steps(),
        };
        self.push_model(model, state, hooks);
        Ok(())
    }

    /// Adds what is kept beside a prepared model, under the same ids: its values, and after which step.
    /// What its training goes on from is saved with the model itself. `what` it is, errors say.
    pub(super) fn add_companion<M: Module>(&mut self, what: &str, companion: &M) -> Result<()> {
        if let Err(error) = self.accelerator.shared.models.find(companion) {
            let message = format!(
                "{what} cannot be saved: it does not belong to a prepared model. Begin it with the model that \
                 `prepare` gave, and not with the one that `prepare` took, whose parameter ids are others; \
                 where that was not done, `accelerator.save_model` saves the weights in a file"
            );
            return Err(Error::with_source(Kind::Misuse, message, error));
        }
        let slot = self.ready(companion)?;
        let state = ModelState {
            hook: None,
            layout: Layout::of(companion),
            scaler: None,
            steps: slot.steps(),
        };
        self.push_model(companion, state, Vec::new());
        Ok(())
    }

    /// The slot of a model, if it is at a place where it can be saved.
    fn ready<M: Module>(&self, model: &M) -> Result<Arc<Slot>> {
        let slot = self.accelerator.shared.models.find(model)?;
        let open = slot.open_micro_steps();
        if open > 0 && self.mode == Mode::Regular {
            return Err(Error::misuse(format!(
                "a checkpoint is saved between optimizer steps, and {open} micro-steps of the next one are done \
                 for the model whose first parameter is `{}`: save when its optimizer's `outcome()` is `Stepped`, \
                 or at the end of an epoch; a model whose last batch was an earlier one ends its window by that \
                 batch's `weight().trigger_sync()`",
                slot.parameters().first().map_or("", |first| &first.path)
            )));
        }
        if self.mode == Mode::Regular {
            slot.round().check_together("save a checkpoint")?;
        }
        Ok(slot)
    }

    fn push_model<M: Module>(&mut self, model: &M, state: ModelState, hooks: Vec<Option<Vec<u8>>>) {
        // Several ranks bring their running statistics together before, once all are ready.
        let is_settled = self.mode == Mode::Emergency || self.accelerator.world_size() == 1;
        let takes = is_settled && self.writer == Writer::This;
        self.taken.parts.push(Part::Model {
            state,
            hooks,
            values: takes.then(|| ModelSnapshot::of(model)),
        });
    }

    pub(super) fn add_optimizer<S: Schedule>(
        &mut self,
        optimizer: &PreparedOptimizer<S>,
    ) -> Result<()> {
        let optimizer = optimizer.snapshot()?;
        if self.mode == Mode::Emergency && optimizer.is_sharded() {
            return Err(Error::misuse(
                "the state of a sharded optimizer lies on all ranks, and that of the rank that is lost \
                 is gone with it: leave the optimizer out of the emergency checkpoint, or go on from \
                 the last one that was saved",
            ));
        }
        self.taken.parts.push(Part::Optimizer(optimizer));
        Ok(())
    }

    pub(super) fn add_loader(&mut self, standing: Standing) {
        self.taken.parts.push(Part::Loader(standing));
    }

    pub(super) fn add_object<T: Serialize>(&mut self, value: &T) -> Result<()> {
        self.taken.parts.push(Part::Object(encode(value)?));
        Ok(())
    }

    pub(super) fn add_per_rank<T: Serialize>(&mut self, value: &T) -> Result<()> {
        let mut values = vec![None; self.accelerator.world_size()];
        values[self.accelerator.rank()] = Some(encode(value)?);
        self.taken.parts.push(Part::PerRank(values));
        Ok(())
    }
}

/// Completes a snapshot with all ranks, part by part.
pub struct Settling<'a> {
    accelerator: &'a Accelerator,
    at: usize,
    taken: &'a mut Taken,
    writer: Writer,
}

impl<'a> Settling<'a> {
    pub(super) fn new(accelerator: &'a Accelerator, writer: Writer, taken: &'a mut Taken) -> Self {
        Self {
            accelerator,
            at: 0,
            taken,
            writer,
        }
    }

    pub(super) fn pass_over(&mut self) {
        self.at += 1;
    }

    #[track_caller]
    pub(super) fn model<M: Module>(&mut self, model: &M) -> Result<()> {
        replicas::check_and_sync(self.accelerator, "save a checkpoint", model)?;
        if self.writer == Writer::This
            && let Some(Part::Model { values, .. }) = self.taken.parts.get_mut(self.at)
        {
            *values = Some(ModelSnapshot::of(model));
        }
        self.at += 1;
        Ok(())
    }
}

impl Taken {
    pub(super) fn report(&self, folder: &Path, rank: usize) -> Report {
        let parts = self.parts.iter().map(|part| match part {
            Part::Loader(standing) => PartReport::Loader(Box::new(standing.clone())),
            Part::Model { state, .. } => PartReport::Model { steps: state.steps },
            Part::Object(_) => PartReport::Object,
            Part::Optimizer(optimizer) => PartReport::Optimizer {
                steps: optimizer.state.steps,
            },
            Part::PerRank(values) => {
                let mine = values.get(rank).cloned().flatten();
                PartReport::PerRank(mine.unwrap_or_default())
            }
        });
        Report {
            folder: folder.display().to_string(),
            parts: parts.collect(),
        }
    }

    /// Takes every rank's own values in.
    pub(super) fn complete(&mut self, reports: &[Report]) {
        for (at, part) in self.parts.iter_mut().enumerate() {
            let Part::PerRank(values) = part else {
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
                Part::Model { state, hooks, .. } => {
                    gather_hooks(group, hooks)?;
                    if let Some(hook) = &mut state.hook {
                        hook.note(hooks);
                    }
                }
                Part::Optimizer(optimizer) => optimizer.gather(group)?,
                Part::Loader(_) | Part::Object(_) | Part::PerRank(_) => {}
            }
        }
        Ok(())
    }

    /// Optimizer steps: those of the first optimizer, else of the first model.
    pub(super) fn step(&self) -> u64 {
        let optimizers = self.parts.iter().filter_map(|part| match part {
            Part::Optimizer(optimizer) => Some(optimizer.state.steps),
            _ => None,
        });
        let models = self.parts.iter().filter_map(|part| match part {
            Part::Model { state, .. } => Some(state.steps),
            _ => None,
        });
        optimizers.chain(models).next().unwrap_or(0)
    }

    /// What the learning rates of the job are multiplied by.
    pub(super) fn state(&self, factor: f64) -> State {
        let parts = self.parts.iter().map(|part| match part {
            Part::Loader(standing) => PartState::Loader(standing.clone()),
            Part::Model { state, .. } => PartState::Model(state.clone()),
            Part::Object(_) => PartState::Object,
            Part::Optimizer(optimizer) => PartState::Optimizer(optimizer.state.clone()),
            Part::PerRank(_) => PartState::PerRank,
        });
        State {
            factor,
            parts: parts.collect(),
        }
    }

    /// The ids of every parameter that is saved.
    pub(super) fn ids(&self) -> HashSet<u64> {
        let layouts = self.parts.iter().filter_map(|part| match part {
            Part::Model { state, .. } => Some(state.layout.ids()),
            _ => None,
        });
        layouts.flatten().collect()
    }
}

impl Report {
    /// Whether all ranks save into one folder. Rank 0 alone writes, so the others' would stay empty.
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

    /// Compares rank 0's report with that of `rank`.
    pub(super) fn compare(&self, other: &Self, rank: usize) -> Result<()> {
        let (mine, theirs) = (&self.parts, &other.parts);
        let count = mine.len().max(theirs.len());
        let Some(at) = (0..count).find(|&at| !same(mine.get(at), theirs.get(at))) else {
            return Ok(());
        };
        Err(Error::new(
            Kind::Misuse,
            format!(
                "ranks do not agree on what they save: at place {} of the tuple, rank 0 has {}, and \
                 rank {rank} has {}; every rank saves the same parts, after the same step",
                at + 1,
                Shown(mine.get(at)),
                Shown(theirs.get(at)),
            ),
        ))
    }
}

/// Brings what each rank's hook keeps to rank 0, which writes.
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

/// Whether ranks agree on a part. A loader that gradients are made from stands at one place on
/// all of them; one for evaluation may be read by some ranks alone.
fn same(left: Option<&PartReport>, right: Option<&PartReport>) -> bool {
    match (left, right) {
        (Some(PartReport::Loader(left)), Some(PartReport::Loader(right))) => {
            left.trained == right.trained && (!left.trained || left.spot == right.spot)
        }
        (Some(PartReport::PerRank(_)), Some(PartReport::PerRank(_))) => true,
        (left, right) => left == right,
    }
}

struct Shown<'a>(Option<&'a PartReport>);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str("nothing"),
            Some(PartReport::Loader(standing)) => match standing.spot {
                Some(spot) => write!(
                    f,
                    "a loader in epoch {} after {} samples",
                    spot.epoch, spot.consumed
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

impl fmt::Debug for Settling<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settling")
            .field("at", &self.at)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Snapshot<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot")
            .field("parts", &self.taken.parts.len())
            .finish_non_exhaustive()
    }
}
