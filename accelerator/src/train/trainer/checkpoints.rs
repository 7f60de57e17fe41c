use core::fmt;
use std::path::{Path, PathBuf};

use accelerator_manifest::internal::Place;
use burn::module::Module;

use super::{TrainData, Trainer};
use crate::checkpoint::{Checkpoints, Object, Position, Saved};
use crate::core::error::{Error, Result};
use crate::core::tensors::Tensors;
use crate::train::arguments::{ResumeFrom, SaveStrategy};
use crate::train::callback::TrainerCallback;
use crate::train::state::{ModelCell, SavedUpdate};

impl<M, I, O, P> Trainer<M, I, O, P>
where
    M: Module + fmt::Display + 'static,
    I: fmt::Debug + Send + Sync + 'static,
    O: Send + 'static,
    P: Tensors + Clone + 'static,
{
    /// Continues from the checkpoint that the arguments name, if they name one.
    pub(super) fn resumed(self, folder: Option<PathBuf>) -> Result<Self> {
        let Some(folder) = folder else {
            return Ok(self);
        };
        let model = self.model.get().clone();
        let Self {
            accelerator,
            ema,
            optimizer,
            state,
            train,
            ..
        } = self;
        let Some(TrainData { flow, loader }) = train else {
            return Err(Error::config(
                "resume_from_checkpoint: there is no training data to continue with; pass `train_dataset`",
            ));
        };
        let parts = (model, optimizer, loader, Object(state));
        let (parts, ema, position) = match ema {
            Some(ema) => {
                let (model, optimizer, loader, state) = parts;
                let parts = (model, optimizer, loader, state, ema);
                let ((model, optimizer, loader, state, ema), position) =
                    accelerator.resume(&folder, parts).map_err(unfit)?;
                ((model, optimizer, loader, state), Some(ema), position)
            }
            None => {
                let (parts, position) = accelerator.resume(&folder, parts).map_err(unfit)?;
                (parts, None, position)
            }
        };
        let (model, optimizer, loader, Object(state)) = parts;
        let may_be_absent = matches!(
            self.arguments.resume_from_checkpoint,
            ResumeFrom::No | ResumeFrom::Auto
        );
        if position.is_start() && !may_be_absent {
            return Err(Error::config(format!(
                "resume_from_checkpoint: there is no checkpoint in `{}`; leave the argument out to begin anew",
                folder.display()
            )));
        }
        let mut trainer = Self {
            accelerator,
            ema,
            model: ModelCell::new(model),
            optimizer,
            state,
            train: Some(TrainData { flow, loader }),
            ..self
        };
        trainer.restore_state(&folder, &position)?;
        trainer.check_best()?;
        Ok(trainer)
    }

    /// Restores the state that the checkpoint did not know of itself, and that of callbacks.
    fn restore_state(&mut self, folder: &Path, position: &Position) -> Result<()> {
        let state = &mut self.state;
        let best = state.best_model_checkpoint.as_deref();
        let best = best.filter(|_| state.best_is_beside);
        let context = &self.accelerator.shared.context;
        // Rank 0 alone sees the folder.
        let found = context.on_main("find the checkpoint", || {
            let found = position.checkpoint();
            found.map_or(Ok((None, None)), |number| find_beside(folder, number, best))
        })?;
        let (path, beside) = found.unwrap_or_default();
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
        let callbacks = self
            .callbacks
            .of_program
            .iter_mut()
            .map(|callback| &mut **callback);
        let own = self.callbacks.early_stopping.as_mut();
        let own = own.map(|callback| callback as &mut dyn TrainerCallback<M>);
        for callback in callbacks.chain(own) {
            let name = callback.state().map(|(name, _)| name);
            if let Some(remembered) = name.and_then(|name| state.callbacks.get(&name)) {
                callback.restore(remembered)?;
            }
        }
        Ok(())
    }

    pub(super) fn save_checkpoint(&mut self, data: &TrainData<O>) -> Result<Saved> {
        let callbacks = self.callbacks.of_program.iter();
        let states = callbacks.filter_map(|callback| callback.state());
        let own = self.callbacks.early_stopping.as_ref();
        let own = own.and_then(|callback| TrainerCallback::<M>::state(callback));
        self.state.callbacks = states.chain(own).collect();

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
        let (model, state) = (self.model.get(), Object(&self.state));
        let saved = match &self.ema {
            Some(ema) => {
                let parts = (model, &self.optimizer, &data.loader, state, ema);
                self.accelerator.save_state(&checkpoints, parts)?
            }
            None => {
                let parts = (model, &self.optimizer, &data.loader, state);
                self.accelerator.save_state(&checkpoints, parts)?
            }
        };
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

/// A checkpoint of other parts, in the words of arguments.
fn unfit(error: Error) -> Error {
    match error.is_checkpoint() {
        true => {
            let message = format!(
                "resume_from_checkpoint: {error}; a training continues with the model, `optim`, `ema_decay`, \
                 `sharded_optimizer`, `tail`, `data_seed` and batch size of its checkpoint"
            );
            Error::new(error.kind(), message).with_source(error)
        }
        false => error,
    }
}

/// The checkpoint of that number at `path`, which is it or the folder that holds it; and, in that folder, the one that
/// has the name of `best`, if it is there.
fn find_beside(
    path: &Path,
    number: u64,
    best: Option<&Path>,
) -> Result<(Option<PathBuf>, Option<PathBuf>)> {
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
