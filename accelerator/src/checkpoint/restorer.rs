//! The checkpoint that was found, and the restoring of parts from it.

use std::collections::HashSet;
use std::path::PathBuf;

use accelerator_manifest::FileName;
use burn::module::ParamId;
use burn::tensor::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::position::{Origin, Rescale, WorldChange};
use super::saving::{CheckpointContext, bytes_from_main};
use super::settings::Checkpoints;
use super::state_file::{
    HookState, Names, PartKind, PartState, SavedHook, SavedModel, Source, StateFile, decode,
};
use crate::context::WindowSize;
use crate::core::agreement;
use crate::core::dyn_module::BoxedModule;
use crate::core::error::{self, Error, Result};
use crate::core::offload::Offload;
use crate::data::{DRAWN_HINT, LoaderResume, LoaderState, PreparedLoader};
use crate::model::restore_values;
use crate::optim::{
    PreparedOptimizer, RankRecord, ScheduleKind, WholeState, check_known, other_state,
};
use crate::reduce::hook::{HookInstance, SavedBy};

/// Restores each part, in order, from its saved state.
#[expect(missing_debug_implementations, reason = "programs never see one")]
pub struct Restorer<'a> {
    context: &'a CheckpointContext,
    at: usize,
    factor: f64,
    found: &'a FoundCheckpoint,
    ids: HashSet<u64>,
    /// `true` if the loaders that training reads continue with the batches that the rule makes of those before; `None`
    /// if there are none.
    keeps_batch: Option<bool>,
    /// `true` if `plan` got the batches with which the training loader continues.
    plan_fits: bool,
    names: Names,
    /// The messages about schedules that give the last step another rate than it had.
    other_rates: Vec<String>,
    /// The parameters of the models that were restored.
    restored: HashSet<u64>,
    source: Option<&'a Source>,
}

impl<'a> Restorer<'a> {
    pub(super) fn new(
        context: &'a CheckpointContext,
        found: &'a FoundCheckpoint,
        source: Option<&'a Source>,
    ) -> Self {
        Self {
            context,
            at: 0,
            factor: found.factor(),
            found,
            ids: found.state.ids(),
            keeps_batch: None,
            plan_fits: false,
            names: Names::default(),
            other_rates: Vec::new(),
            restored: HashSet::new(),
            source,
        }
    }

    #[track_caller]
    pub(super) fn model(&mut self, model: BoxedModule) -> Result<BoxedModule> {
        let (saved, folder) = self.next_model()?;
        let hook = self.hook(saved.hook.as_ref(), folder.as_deref())?;
        self.restored.extend(saved.layout.ids());
        crate::reduce::resume(
            self.context,
            model,
            |activity| self.source()?.model(folder.as_deref(), activity),
            &saved.layout,
            saved.steps,
            saved.scaler,
            hook,
        )
    }

    /// Restores the values of a model's companion, which is kept beside it and has its ids.
    #[track_caller]
    pub(crate) fn companion(&mut self, companion: BoxedModule) -> Result<BoxedModule> {
        let (saved, folder) = self.next_model()?;
        let open = |activity| self.source()?.model(folder.as_deref(), activity);
        restore_values(self.context, companion, open, &saved.layout)
    }

    /// The state of the next part, which is a model, and the folder of its files if it has one.
    fn next_model(&mut self) -> Result<(&'a SavedModel, Option<String>)> {
        let (name, part) = self.next()?;
        let PartState::Model(saved) = part else {
            return Err(other_kind(&name));
        };
        Ok((saved, self.names.model()))
    }

    fn source(&self) -> Result<&'a Source> {
        self.source
            .ok_or_else(|| Error::misuse("rank 0 reads checkpoints, and found none"))
    }

    /// The hook of the program for a model, with what was saved of it if it is the same one.
    #[track_caller]
    fn hook(
        &self,
        saved: Option<&HookState>,
        folder: Option<&str>,
    ) -> Result<Option<HookInstance>> {
        let hook = self.context.communication_hook();
        let (Some(fresh), Some(saved)) = (&hook, saved) else {
            return Ok(hook);
        };
        if fresh.name() != saved.name {
            if self.context.is_main_process() {
                tracing::warn!(
                    "the checkpoint was saved with the communication hook `{}`, and this program has `{}`, \
                     which begins anew",
                    saved.name,
                    fresh.name()
                );
            }
            return Ok(hook);
        }
        let (rank, ranks) = (self.context.rank(), self.context.world_size());
        let Some(first) = saved
            .saved
            .iter()
            .position(|kept| *kept == SavedHook::State)
        else {
            return Ok(hook);
        };
        let (state, saved_by) =
            if saved.saved.len() == ranks && !saved.saved.contains(&SavedHook::Absent) {
                let mut mine = Vec::new();
                // Rank 0 alone reads, and each rank hears of the others' too.
                for other in (0..ranks).filter(|&other| saved.saved[other] == SavedHook::State) {
                    let state = self.read(&HookState::file(folder, other)?)?;
                    if other == rank {
                        mine = state;
                    }
                }
                (mine, SavedBy::ThisRank)
            } else {
                let state = self.read(&HookState::file(folder, first)?)?;
                (state, SavedBy::OneForAll)
            };
        agreement::together(
            self.context.group(),
            fresh.restore(&state, saved_by),
            "resume",
        )?;
        Ok(hook)
    }

    #[track_caller]
    pub(super) fn optimizer<S: ScheduleKind>(
        &mut self,
        optimizer: PreparedOptimizer<S>,
    ) -> Result<PreparedOptimizer<S>> {
        let (name, part) = self.next()?;
        let PartState::Optimizer(saved) = part else {
            return Err(other_kind(&name));
        };
        let file = self.names.optimizer()?;
        let other = |record: &Bytes| {
            let parameter = |id| self.context.models.parameter(id);
            let other = other_state(optimizer.inner(), record, parameter, &self.context.device);
            // If the record cannot be read, resuming fails.
            other.ok().flatten()
        };
        // An optimizer that is sharded by itself divides whole parameters.
        let has_pieces = self.context.models.hold_pieces() && !optimizer.is_sharded();
        let (record, other) = match has_pieces {
            true => self.divided_record(&name, &file, &other)?,
            false => {
                let record = Bytes::from_bytes_vec(self.read(&file)?).shared();
                check_known(&name, &record, &self.ids)?;
                let is_main = self.context.is_main_process();
                let other = is_main.then(|| other(&record)).flatten();
                (RankRecord::whole(record)?, other)
            }
        };
        // Each rank reads a record of its own.
        let resumed = optimizer.resume_from(&name, saved.clone(), record, self.factor);
        let optimizer = agreement::together(self.context.group(), resumed, "resume")?;
        if let Some((saved, kept)) = other {
            error::warn(&format!(
                "{name} keeps other state than was saved: {kept} of a parameter, in place of {saved}; so its kind, or \
                 a setting such as its momentum, is another one: it continues with that of this program, and what was \
                 not saved begins anew"
            ));
        }
        self.compare_rates(&name, saved.scheduled_rate(), optimizer.scheduled_rate());
        Ok(optimizer)
    }

    /// Reads the record of an optimizer, of which each rank gets its part for parameters that it holds pieces of. Returns
    /// also what `inspect` returns for the whole record, on rank 0.
    #[track_caller]
    fn divided_record<T>(
        &self,
        name: &str,
        file: &FileName,
        inspect: &dyn Fn(&Bytes) -> Option<T>,
    ) -> Result<(RankRecord, Option<T>)> {
        let _offloading = Offload::enter(self.context.offload.as_ref());
        // A model that comes later may get other ids.
        let piece = |id: ParamId| {
            let is_restored = self.restored.contains(&id.val());
            let parameter = self.context.models.parameter(id);
            parameter.filter(|_| is_restored)?.piece
        };
        let (mut whole, mut inspected) = (WholeState::default(), None);
        let rest = bytes_from_main(self.context, "read the checkpoint", || {
            let record = self.source()?.record(file)?;
            check_known(name, &record, &self.ids)?;
            inspected = inspect(&record);
            Ok(whole.take_from(record, &piece)?.to_vec())
        })?;
        let rest = Bytes::from_bytes_vec(rest).shared();
        let group = self.context.group().for_purpose("resume an optimizer");
        Ok((whole.scatter(&group, rest, &piece)?, inspected))
    }

    /// Notes whether the schedule of this program gave the last step another rate than it had.
    fn compare_rates(&mut self, name: &str, saved: Option<f64>, found: Option<f64>) {
        let (Some(saved), Some(found)) = (saved, found) else {
            return;
        };
        // `cos` may differ in its last bits between machines.
        if saved == found || (saved - found).abs() <= 1e-9 * saved.abs() {
            return;
        }
        self.other_rates.push(format!(
            "the schedule of {name} is another one, perhaps of another number of steps: its learning rate was {saved:.6e} in \
             the last step before the checkpoint was saved, and would have been {found:.6e} in that step here"
        ));
    }

    /// Refuses another rate where nothing but the number of ranks is known to have changed; elsewhere, and where the
    /// steps were planned with the batches that training continues with, a program may have meant it. Behind all parts,
    /// since a loader may stand behind its optimizer.
    pub(super) fn check_rates(&self) -> Result<()> {
        let (before, now) = (self.found.world_size, self.context.world_size());
        let keeps_samples = self.found.rescale.keeps_samples_of_step();
        for jump in &self.other_rates {
            if before != now && keeps_samples && self.keeps_batch == Some(true) && !self.plan_fits {
                return Err(Error::checkpoint(format!(
                    "{jump}; {now} ranks continue with as many samples a step as {before} had, so the schedule \
                         must count as many steps: {RESUME_LOADER_HINT}; where batches are to stay those of a rank, use \
                         `Checkpoints::with_rescale` and `Rescale::keep_batch_per_rank`; if the rate was changed on purpose, \
                         change it in a run with {before} ranks, and save there"
                )));
            }
            if self.context.is_main_process() {
                error::warn(&format!(
                    "{jump}; it continues with the rates of this program"
                ));
            }
        }
        Ok(())
    }

    pub(super) fn loader<O: Send + 'static>(
        &mut self,
        loader: PreparedLoader<O>,
    ) -> Result<PreparedLoader<O>> {
        let at = self.at;
        let (name, part) = self.next()?;
        let PartState::Loader(saved) = part else {
            return Err(other_kind(&name));
        };
        if saved.trained && loader.draws_at_each_read() {
            error::warn(&format!(
                "{name} has a data set with items that are others each time they are read, so training does not continue \
                 with the samples that it would have had; several ranks cannot share it out {DRAWN_HINT}"
            ));
        }
        let planned = loader.planned_batch();
        let world_size = self.context.world_size();
        let loader = self
            .found
            .resume_loader(world_size, at, &name, saved, loader)?;
        if self.found.state.continues(at) {
            let wanted = saved
                .global_batch
                .map(|batch| self.found.global_batch(world_size, batch));
            let is_kept = wanted.is_some() && loader.global_batch() == wanted;
            self.keeps_batch = Some(is_kept && self.keeps_batch.unwrap_or(true));
            self.plan_fits |= planned.is_some() && planned == loader.global_batch();
        }
        let before = self.found.world_size;
        if let (Some(was), Some(batch)) = (saved.global_batch, loader.global_batch())
            && before != world_size
            && saved.trained
            && self.context.is_main_process()
        {
            let most = |batch: u64, ranks: usize| batch.div_ceil(ranks as u64);
            tracing::info!(
                "a batch of {name} has up to {} samples on each rank, and had up to {} before the resume: all ranks \
                 together use {batch} at once, and used {was}",
                most(batch, world_size),
                most(was, before),
            );
        }
        let (Some(planned), Some(batch)) = (planned, loader.global_batch()) else {
            return Ok(loader);
        };
        if planned != batch && self.context.is_main_process() {
            error::warn(&format!(
                "{name} continues with {batch} samples a step over all ranks, and it had {planned} when `plan` or \
                 `steps` was called, before `resume`: what was computed from that does not hold; {RESUME_LOADER_HINT}"
            ));
        }
        Ok(loader)
    }

    #[track_caller]
    pub(super) fn object<T: DeserializeOwned>(&mut self) -> Result<T> {
        let (name, _) = self.next()?;
        let file = self.names.object()?;
        decode(&name, &self.read(&file)?)
    }

    #[track_caller]
    pub(super) fn per_rank<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        let (name, _) = self.next()?;
        let file = self.names.per_rank()?;
        let values: Vec<Option<Vec<u8>>> = decode(&name, &self.read(&file)?)?;
        let mine = values.into_iter().nth(self.context.rank()).flatten();
        let mine = mine.map(|bytes| decode(&name, &bytes)).transpose();
        agreement::together(self.context.group(), mine, "resume")
    }

    /// The next part, and what errors call it.
    fn next(&mut self) -> Result<(String, &'a PartState)> {
        let found = self.found;
        let Some(part) = found.state.parts.get(self.at) else {
            return Err(other_kind("a part"));
        };
        self.at += 1;
        let kind = match part.kind() {
            PartKind::Loader => "loader",
            PartKind::Model => "model",
            PartKind::Object => "object",
            PartKind::Optimizer => "optimizer",
            PartKind::PerRank => "value for each rank",
        };
        Ok((format!("the {kind} (part {} of the tuple)", self.at), part))
    }

    #[track_caller]
    fn read(&self, file: &FileName) -> Result<Vec<u8>> {
        bytes_from_main(self.context, "read the checkpoint", || {
            self.source()?.read(file)
        })
    }
}

/// The checkpoint that rank 0 found, as all ranks get it.
#[derive(Deserialize, Serialize)]
pub(super) struct FoundCheckpoint {
    pub(super) origin: Origin,
    pub(super) passed_over: Vec<String>,
    pub(super) path: PathBuf,
    pub(super) rescale: Rescale,
    pub(super) seed: Option<u64>,
    pub(super) state: StateFile,
    pub(super) step: u64,
    pub(super) world_size: usize,
}

impl FoundCheckpoint {
    pub(super) fn read(
        source: &Source,
        state: &StateFile,
        now: usize,
        window: WindowSize,
        settings: &Checkpoints,
    ) -> Result<Self> {
        let metadata = source.metadata()?;
        let before = metadata.world_size.get();
        let change = WorldChange { before, now };
        let rescale = if before == now {
            Rescale::default()
        } else {
            settings.rescale(&change)
        };
        let rescale = match window {
            WindowSize::Samples => rescale.with_steps_that_follow(),
            WindowSize::Steps => rescale,
        };
        let factor = rescale.factor();
        if !(factor > 0.0 && factor.is_finite()) {
            return Err(Error::config(format!(
                "the factor for learning rates is {factor}; expected a positive number"
            )));
        }
        Ok(Self {
            origin: source.origin(),
            passed_over: Vec::new(),
            path: source.path(),
            rescale,
            seed: metadata.seed,
            state: state.clone(),
            step: metadata.step,
            world_size: before,
        })
    }

    pub(super) fn resume_loader<O: Send + 'static>(
        &self,
        world_size: usize,
        at: usize,
        name: &str,
        saved: &LoaderState,
        loader: PreparedLoader<O>,
    ) -> Result<PreparedLoader<O>> {
        let how = LoaderResume {
            global_batch: &|global_batch| self.global_batch(world_size, global_batch),
            continues: self.state.continues(at),
            leads: self.state.leads(at),
            same_world: self.world_size == world_size,
        };
        loader.resume_from(name, saved, &how)
    }

    pub(super) fn factor(&self) -> f64 {
        self.state.factor * self.rescale.factor()
    }

    fn global_batch(&self, world_size: usize, saved: u64) -> u64 {
        self.rescale
            .global_batch(self.world_size, world_size, saved)
    }

    pub(super) fn unfit(&self, misfit: &str) -> Error {
        let path = self.path.display();
        let message = format!("the checkpoint `{path}` does not fit: {misfit}");
        Error::checkpoint(message)
    }
}

const RESUME_LOADER_HINT: &str =
    "pass the loader to `Accelerator::resume_loader` before `plan` or `steps`";

/// Kinds were compared before.
fn other_kind(name: &str) -> Error {
    Error::checkpoint(format!(
        "the checkpoint has something else in the place of {name}"
    ))
}
