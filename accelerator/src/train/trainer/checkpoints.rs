use core::fmt;
use std::path::{Path, PathBuf};

use accelerator_manifest::internal::Place;
use burn::module::Module;

use super::parts::{Parts, Resumed, TrainData};
use super::{LocalRounds, Trainer};
use crate::accelerator::Accelerator;
use crate::checkpoint::{Checkpoints, DynSave, Object, Position, Saved, SavedAs};
use crate::core::error::{Error, Kind, Result};
use crate::core::tensors::Tensors;
use crate::train::arguments::SaveStrategy;
use crate::train::callback::TrainerCallback;
use crate::train::state::{ModelCell, SavedUpdate};

impl<M, I, O, P> Trainer<M, I, O, P>
where
    M: Module + fmt::Display + 'static,
    I: fmt::Debug + Send + Sync + 'static,
    O: Send + 'static,
    P: Tensors + Clone + 'static,
{
    /// Begins training with newly prepared parts. If they were resumed, restores the paths of checkpoints and the state
    /// of callbacks. Every rank must call it.
    pub(super) fn begin_group(&mut self, resumed: Option<&Resumed>) -> Result<()> {
        if let Some(Resumed { folder, position }) = resumed {
            self.restore_checkpoint_paths(folder, position)?;
            self.restore_callbacks()?;
            self.check_best()?;
        }
        if let Some(every) = self.arguments.local_sgd_steps {
            let model = self.model.get();
            self.local = Some(LocalRounds::begin(&self.accelerator, model, every)?);
        }
        self.check_metric()
    }

    /// Restores the paths of the resumed checkpoint and of the best one. A checkpoint does not contain its own path.
    fn restore_checkpoint_paths(&mut self, folder: &Path, position: &Position) -> Result<()> {
        // State from the memory of the previous group already has the right paths.
        if !position.is_start() && position.checkpoint().is_none() {
            return Ok(());
        }
        let state = &mut self.state;
        let best = state.best_model_checkpoint.as_deref();
        let best = best.filter(|_| state.best_is_beside);
        let context = &self.accelerator.shared.context;
        // Rank 0 alone sees the folder.
        let found = context.on_main("find the checkpoint", || {
            let found = position.checkpoint();
            found.map_or(Ok((None, None)), |number| find_beside(folder, number, best))
        })?;
        let found = found.unwrap_or_default();
        let (path, beside): CheckpointPaths = self.accelerator.broadcast_object(&found, 0)?;
        state.saved = position.checkpoint().map(|_| SavedUpdate {
            update: state.global_step,
            path,
        });
        match &mut state.best_model_checkpoint {
            // It is this checkpoint, which could not name itself; versions before named the best one before it.
            best if state.best_global_step == Some(state.global_step) => {
                let saved = state.saved.as_ref();
                *best = saved.and_then(|saved| saved.path.clone());
            }
            Some(best) => *best = beside.unwrap_or_else(|| best.clone()),
            // No checkpoint is of that update, so none could be compared with it.
            None if self.arguments.save_strategy != SaveStrategy::No => {
                (state.best_metric, state.best_global_step) = (None, None);
            }
            None => {}
        }
        Ok(())
    }

    fn restore_callbacks(&mut self) -> Result<()> {
        let callbacks = self
            .callbacks
            .of_program
            .iter_mut()
            .map(|callback| &mut **callback);
        let own = self.callbacks.early_stopping.as_mut();
        let own = own.map(|callback| callback as &mut dyn TrainerCallback<M>);
        for callback in callbacks.chain(own) {
            let name = callback.state().map(|(name, _)| name);
            if let Some(remembered) = name.and_then(|name| self.state.callbacks.get(&name)) {
                callback.restore(remembered)?;
            }
        }
        Ok(())
    }

    fn record_callback_states(&mut self) {
        let callbacks = self.callbacks.of_program.iter();
        let states = callbacks.filter_map(|callback| callback.state());
        let own = self.callbacks.early_stopping.as_ref();
        let own = own.and_then(|callback| TrainerCallback::<M>::state(callback));
        self.state.callbacks = states.chain(own).collect();
    }

    /// Calls `save` with the parts that a checkpoint contains.
    fn with_parts<R>(&self, data: &TrainData<O>, save: impl FnOnce(&dyn DynSave) -> R) -> R {
        let (model, optimizer, loader) = (self.model.get(), &self.optimizer, &data.loader);
        let state = Object(&self.state);
        match &self.ema {
            Some(ema) => save(&SavedAs::new((model, optimizer, loader, state, ema))),
            None => save(&SavedAs::new((model, optimizer, loader, state))),
        }
    }

    /// Continues with the surviving ranks if the launcher lets them; otherwise, returns the error of the lost rank.
    pub(super) fn recover(&mut self, data: &TrainData<O>, lost: Error) -> Result<TrainData<O>> {
        let is_bound = self.is_bound_to_group();
        if is_bound || !self.accelerator.group().continues_on_loss() {
            return Err(lost);
        }
        let next = self.recover_accelerator(data)?;
        self.join(next)
    }

    /// Returns true if layers of the model communicate in their forward pass, so that a program must build the model
    /// anew for another group.
    pub(super) fn is_bound_to_group(&self) -> bool {
        let context = &self.accelerator.shared.context;
        context.forward_collectives.is_noted()
    }

    fn recover_accelerator(&mut self, data: &TrainData<O>) -> Result<Accelerator> {
        self.record_callback_states();
        self.with_parts(data, |parts| self.accelerator.recover_with(parts))
    }

    /// Joins the next group, which has more or fewer ranks. A process that has no place in it exits with code 0.
    pub(super) fn regroup(&mut self, data: &TrainData<O>) -> Result<TrainData<O>> {
        self.record_callback_states();
        match self.with_parts(data, |parts| self.accelerator.regroup_with(parts))? {
            Some(next) => self.join(next),
            None => std::process::exit(0),
        }
    }

    /// Prepares the parts for the next group, and resumes from the state that its ranks bring in memory. If another
    /// rank is lost before that is done, recovers again, and prepares the parts for the group after it.
    fn join(&mut self, mut next: Accelerator) -> Result<TrainData<O>> {
        loop {
            let parts = match self.prepare_for(&next) {
                Err(error) if error.is_peer_lost() => {
                    next = next.recover(())?;
                    continue;
                }
                parts => parts?,
            };
            let is_from_memory = |resumed: &Resumed| {
                !resumed.position.is_start() && resumed.position.checkpoint().is_none()
            };
            let (Some(data), true) = (
                parts.train,
                parts.resumed.as_ref().is_some_and(is_from_memory),
            ) else {
                return Err(Error::new(
                    Kind::Collective,
                    "the state of the training was lost with a rank: resume from the last checkpoint",
                ));
            };
            self.accelerator = next;
            self.model = ModelCell::new(parts.model);
            self.optimizer = parts.optimizer;
            self.eval = parts.eval;
            self.ema = parts.ema;
            self.state = parts.state;
            self.interrupted_epoch = None;
            match self.begin_group(parts.resumed.as_ref()) {
                Ok(()) => return Ok(data),
                Err(error) if error.is_peer_lost() => next = self.recover_accelerator(&data)?,
                Err(error) => return Err(error),
            }
        }
    }

    fn prepare_for(&self, next: &Accelerator) -> Result<Parts<M, O>> {
        let (arguments, unprepared) = (&self.arguments, &self.unprepared);
        let resume_from = unprepared.check(next, arguments)?;
        let model = self.model.get().clone();
        unprepared.prepare(next, arguments, &self.collator, model, resume_from)
    }

    pub(super) fn save_checkpoint(&mut self, data: &TrainData<O>) -> Result<Saved> {
        self.record_callback_states();
        let mut checkpoints = Checkpoints::new(&self.arguments.output_dir);
        if let Some(limit) = self.arguments.save_total_limit {
            checkpoints = checkpoints.with_total_limit(limit);
        }
        if self.arguments.save_without_frozen {
            checkpoints = checkpoints.without_frozen_parameters();
        }
        self.settle_candidate();
        let best = self.state.best_model_checkpoint.as_ref();
        let context = &self.accelerator.shared.context;
        // Rank 0 alone sees the folder.
        let is_beside = context.on_main("find the best checkpoint", || {
            best.map_or(Ok(false), |best| checkpoints.holds(best))
        })?;
        self.state.best_is_beside = is_beside.unwrap_or(false);
        if let Some(best) = best.filter(|_| self.state.best_is_beside) {
            checkpoints = checkpoints.with_protected(best);
        }
        // A checkpoint does not know itself, and nothing is pending in it.
        let pending = core::mem::take(&mut self.state.pending);
        let before = self.state.saved.take();
        let saved = self.with_parts(data, |parts| {
            self.accelerator.save_state_with(&checkpoints, parts)
        });
        (self.state.pending, self.state.saved) = (pending, before);
        let saved = saved?;
        let state = &mut self.state;
        if state.best_global_step == Some(state.global_step)
            && state.best_model_checkpoint.is_none()
        {
            state.best_model_checkpoint = Some(saved.path().to_owned());
        }
        self.state.saved = Some(SavedUpdate {
            update: state.global_step,
            path: Some(saved.path().to_owned()),
        });
        Ok(saved)
    }
}

/// The paths of a checkpoint and of the best one.
type CheckpointPaths = (Option<PathBuf>, Option<PathBuf>);

/// The checkpoint of that number at `path`, which is it or the folder that holds it; and, in that folder, the one that
/// has the name of `best`, if it is there.
fn find_beside(path: &Path, number: u64, best: Option<&Path>) -> Result<CheckpointPaths> {
    let (folder, found) = match Place::open(path)? {
        Place::Checkpoint(checkpoint) => {
            let path = checkpoint.path();
            let path = path
                .canonicalize()
                .map_err(|error| Error::io("find the checkpoint", path, error))?;
            (path.parent().unwrap_or(&path).to_owned(), Some(path))
        }
        Place::Folder(folder) => {
            let checkpoints = folder.checkpoints()?;
            let mut checkpoints = checkpoints.iter();
            let found = checkpoints.find(|checkpoint| checkpoint.number() == number);
            let found = found.map(|checkpoint| checkpoint.path().to_owned());
            (path.to_owned(), found)
        }
    };
    let Some(beside) = best.and_then(Path::file_name).map(|name| folder.join(name)) else {
        return Ok((found, None));
    };
    let is_there = beside.try_exists();
    let is_there =
        is_there.map_err(|error| Error::io("find the best checkpoint", &beside, error))?;
    Ok((found, is_there.then_some(beside)))
}
