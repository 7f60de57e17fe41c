use core::fmt;
use std::path::{Path, PathBuf};

use accelerator_collective::internal::GroupExt;
use accelerator_manifest::internal::Place;
use burn::module::Module;

use super::parts::{Resumed, TrainData, folder_to_continue};
use super::{LocalRounds, Trainer};
use crate::accelerator::Accelerator;
use crate::checkpoint::{Checkpoints, DynSave, Object, Position, Saved, SavedAs};
use crate::core::error::{Error, Result};
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
    /// Begins with parts that were just prepared, resumed from there. Every rank must call it.
    pub(super) fn begin(&mut self, resumed: Option<&Resumed>) -> Result<()> {
        if let Some(Resumed { folder, position }) = resumed {
            self.find_saved(folder, position)?;
            self.restore_callbacks()?;
            self.check_best()?;
        }
        if let Some(every) = self.arguments.local_sgd_steps {
            let model = self.model.get();
            self.local = Some(LocalRounds::begin(&self.accelerator, model, every)?);
        }
        self.check_metric()
    }

    /// Restores the paths of checkpoints, which the one that was resumed did not know of itself.
    fn find_saved(&mut self, folder: &Path, position: &Position) -> Result<()> {
        self.saved = None;
        // The state of the group before is about the folder as it is.
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
        let (path, beside): BesideCheckpoint = self.accelerator.broadcast_object(&found, 0)?;
        self.saved = position.checkpoint().map(|_| SavedUpdate {
            update: state.global_step,
            path,
        });
        match &mut state.best_model_checkpoint {
            // It is this checkpoint, which could not name itself; versions before named the best one before it.
            best if state.best_global_step == Some(state.global_step) => {
                let saved = self.saved.as_ref();
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

    fn note_callbacks(&mut self) {
        let callbacks = self.callbacks.of_program.iter();
        let states = callbacks.filter_map(|callback| callback.state());
        let own = self.callbacks.early_stopping.as_ref();
        let own = own.and_then(|callback| TrainerCallback::<M>::state(callback));
        self.state.callbacks = states.chain(own).collect();
    }

    /// Passes the parts that are saved to `save`.
    fn with_parts<R>(&self, data: &TrainData<O>, save: impl FnOnce(&dyn DynSave) -> R) -> R {
        let (model, optimizer, loader) = (self.model.get(), &self.optimizer, &data.loader);
        let state = Object(&self.state);
        match &self.ema {
            Some(ema) => save(&SavedAs::new((model, optimizer, loader, state, ema))),
            None => save(&SavedAs::new((model, optimizer, loader, state))),
        }
    }

    /// Continues with the other ranks after the loss of one, if the launcher lets them; otherwise, returns the loss.
    pub(super) fn recover(&mut self, data: TrainData<O>, loss: Error) -> Result<TrainData<O>> {
        if !self.accelerator.group().continues_on_loss() {
            self.train = Some(data);
            return Err(loss);
        }
        let next = self.recovered(&data)?;
        self.join(next)
    }

    fn recovered(&mut self, data: &TrainData<O>) -> Result<Accelerator> {
        self.note_callbacks();
        self.with_parts(data, |parts| self.accelerator.recover_with(parts))
    }

    /// Joins the next group, of another number of ranks. A process that has no place in it ends.
    pub(super) fn regroup(&mut self, data: TrainData<O>) -> Result<TrainData<O>> {
        self.note_callbacks();
        match self.with_parts(&data, |parts| self.accelerator.regroup_with(parts))? {
            Some(next) => self.join(next),
            None => std::process::exit(0),
        }
    }

    /// Prepares the parts for another group of ranks, and continues from the state that the ranks bring into it. If yet
    /// another rank is lost meanwhile, joins the group after it.
    fn join(&mut self, mut next: Accelerator) -> Result<TrainData<O>> {
        loop {
            let (arguments, model) = (&self.arguments, self.model.get().clone());
            let folder = Some(folder_to_continue(arguments));
            let prepared = self
                .unprepared
                .prepare(&next, arguments, &self.collator, model, folder);
            let parts = match prepared {
                Ok(parts) => parts,
                Err(error) if error.is_peer_lost() => {
                    next = next.recover(())?;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let Some(data) = parts.train else {
                return Err(Error::config("there is no training data to continue with"));
            };
            self.accelerator = next;
            self.model = ModelCell::new(parts.model);
            self.optimizer = parts.optimizer;
            self.eval = parts.eval;
            self.ema = parts.ema;
            self.state = parts.state;
            self.broken_off = None;
            match self.begin(parts.resumed.as_ref()) {
                Ok(()) => return Ok(data),
                Err(error) if error.is_peer_lost() => next = self.recovered(&data)?,
                Err(error) => return Err(error),
            }
        }
    }

    pub(super) fn save_checkpoint(&mut self, data: &TrainData<O>) -> Result<Saved> {
        self.note_callbacks();
        let mut checkpoints = Checkpoints::new(&self.arguments.output_dir);
        if let Some(limit) = self.arguments.save_total_limit {
            checkpoints = checkpoints.with_total_limit(limit);
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
        let pending = core::mem::take(&mut self.state.pending);
        let saved = self.with_parts(data, |parts| {
            self.accelerator.save_state_with(&checkpoints, parts)
        });
        self.state.pending = pending;
        let saved = saved?;
        let state = &mut self.state;
        if state.best_global_step == Some(state.global_step)
            && state.best_model_checkpoint.is_none()
        {
            state.best_model_checkpoint = Some(saved.path().to_owned());
        }
        self.saved = Some(SavedUpdate {
            update: state.global_step,
            path: Some(saved.path().to_owned()),
        });
        Ok(saved)
    }
}

/// The paths of a checkpoint and of the best one.
type BesideCheckpoint = (Option<PathBuf>, Option<PathBuf>);

/// The checkpoint of that number at `path`, which is it or the folder that holds it; and, in that folder, the one that
/// has the name of `best`, if it is there.
fn find_beside(path: &Path, number: u64, best: Option<&Path>) -> Result<BesideCheckpoint> {
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
