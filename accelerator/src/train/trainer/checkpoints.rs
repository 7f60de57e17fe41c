use core::fmt;
use std::path::{Path, PathBuf};

use accelerator_manifest::Folder;
use burn::module::Module;

use super::{TrainData, Trainer};
use crate::accelerator::Tensors;
use crate::checkpoint::{Checkpoints, Object, Position, Saved};
use crate::core::error::{Error, Result};
use crate::ema::Ema;
use crate::train::arguments::ResumeFrom;
use crate::train::callback::TrainerCallback;
use crate::train::model_cell::ModelCell;

impl<M, I, O, P> Trainer<M, I, O, P>
where
    M: Module + fmt::Display + 'static,
    I: fmt::Debug + Send + Sync + 'static,
    O: Send + 'static,
    P: Tensors + Clone + 'static,
{
    /// Goes on from the checkpoint there, if one is asked for.
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
                "resume_from_checkpoint: there is no training data to go on with; pass `train_dataset`",
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

    /// What the checkpoint did not know of itself, and what callbacks remember.
    fn restore_state(&mut self, folder: &Path, position: &Position) -> Result<()> {
        let state = &mut self.state;
        if let Some(number) = position.checkpoint()
            && state.best_global_step == Some(state.global_step)
            && self.accelerator.is_main_process()
        {
            state.best_model_checkpoint = path_of(folder, number);
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

    /// Whether the best checkpoint so far is there to be loaded at the end.
    fn check_best(&self) -> Result<()> {
        let best = self.state.best_model_checkpoint.as_deref();
        let is_wanted = self.arguments.load_best_model_at_end;
        let context = &self.accelerator.shared.context;
        context.on_main("find the best checkpoint", || match best {
            Some(best) if is_wanted && !best.exists() => Err(Error::config(format!(
                "load_best_model_at_end: the best checkpoint so far, `{}`, is gone: leave the argument out, or put it \
                 back",
                best.display()
            ))),
            _ => Ok(()),
        })?;
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
        if let Some(best) = &self.state.best_model_checkpoint
            && self.state.best_global_step != Some(self.state.global_step)
        {
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
        if state.best_global_step == Some(state.global_step) {
            state.best_model_checkpoint = Some(saved.path().to_owned());
        }
        self.saved_at = Some(state.global_step);
        Ok(saved)
    }

    /// The weights of the best checkpoint, where the arguments ask for them and there is one.
    pub(super) fn load_best(&mut self) -> Result<()> {
        if !self.arguments.load_best_model_at_end {
            return Ok(());
        }
        // Rank 0 knows where it is.
        let best = self.state.best_model_checkpoint.clone();
        let Some(best) = self.accelerator.broadcast_object(&best, 0)? else {
            return Ok(());
        };
        let accelerator = &self.accelerator;
        let loaded = accelerator.load_model(self.model.get().clone(), &best)?;
        self.model = ModelCell::new(loaded);
        if let (Some(ema), Some(decay)) = (&self.ema, self.arguments.ema_decay) {
            let averaged = accelerator.load_model(ema.model().clone(), best.join("model-2"))?;
            self.ema = Some(Ema::new(&averaged, decay));
        }
        Ok(())
    }
}

/// A checkpoint of other parts, in the words of arguments.
fn unfit(error: Error) -> Error {
    match error.is_checkpoint() {
        true => {
            let message = format!(
                "resume_from_checkpoint: {error}; a training goes on with the model, `optim`, `ema_decay`, \
                 `sharded_optimizer`, `tail`, `data_seed` and batch size of its checkpoint"
            );
            Error::with_source(error.kind(), message, error)
        }
        false => error,
    }
}

/// The checkpoint of that number: `folder` itself, or one in it.
fn path_of(folder: &Path, number: u64) -> Option<PathBuf> {
    let folder = match folder.join("manifest.json").exists() {
        true => folder.parent()?,
        false => folder,
    };
    let checkpoints = Folder::open(folder).ok()?.checkpoints().ok()?;
    let found = checkpoints
        .iter()
        .find(|checkpoint| checkpoint.number() == number);
    found.map(|checkpoint| checkpoint.path().to_owned())
}
