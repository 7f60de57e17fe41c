use core::fmt;

use burn::module::Module;

use super::Trainer;
use crate::accelerator::Tensors;
use crate::core::error::{Error, Result};
use crate::core::user_message;
use crate::ema::Ema;
use crate::train::arguments::SaveStrategy;
use crate::train::model_cell::ModelCell;
use crate::train::state::{BestCandidate, Metrics};

impl<M, I, O, P> Trainer<M, I, O, P>
where
    M: Module + fmt::Display + 'static,
    I: fmt::Debug + Send + Sync + 'static,
    O: Send + 'static,
    P: Tensors + Clone + 'static,
{
    /// Returns true if there is a checkpoint of this update.
    pub(super) fn is_saved(&self) -> bool {
        let saved = self.saved.as_ref();
        saved.is_some_and(|saved| saved.update == self.state.global_step)
    }

    /// Compares an evaluation with the best so far, and returns whether `save_strategy` asks for a checkpoint of it.
    pub(super) fn compare_with_best(&mut self, metrics: &Metrics) -> bool {
        let state = &mut self.state;
        let Some(best) = self.arguments.best_metric() else {
            return false;
        };
        let value = metrics.value(&best.key).filter(|value| !value.is_nan());
        let improves = |value| {
            let before = state.best_metric;
            before.is_none_or(|before| best.improves(value, before, 0.0))
        };
        let Some(metric) = value.filter(|value| state.has_begun() && improves(*value)) else {
            return false;
        };
        let update = state.global_step;
        let strategy = self.arguments.save_strategy;
        match &self.saved {
            Some(saved) if saved.update == update => state.set_best(metric, saved.path.clone()),
            _ if strategy == SaveStrategy::No => state.set_best(metric, None),
            _ => {
                self.candidate = Some(BestCandidate { update, metric });
                return strategy == SaveStrategy::Best;
            }
        }
        false
    }

    /// Makes the last evaluation the best, if it was the better one, before a checkpoint of this update is saved.
    pub(super) fn settle_candidate(&mut self) {
        let update = self.state.global_step;
        if let Some(candidate) = self.candidate.take_if(|x| x.update == update) {
            self.state.set_best(candidate.metric, None);
        }
    }

    /// Fails if the best checkpoint so far is needed at the end and does not exist.
    pub(super) fn check_best(&self) -> Result<()> {
        let best = self.state.best_model_checkpoint.as_deref();
        let best = best.filter(|_| self.arguments.load_best_model_at_end);
        let context = &self.accelerator.shared.context;
        context.on_main("find the best checkpoint", || {
            let Some(best) = best else {
                return Ok(());
            };
            match best.try_exists() {
                Ok(true) => Ok(()),
                Ok(false) => Err(Error::config(format!(
                    "load_best_model_at_end: the best checkpoint so far, `{}`, is gone: leave the argument out, or \
                     put it back",
                    best.display()
                ))),
                Err(error) => Err(Error::io("find the best checkpoint", best, error)),
            }
        })?;
        Ok(())
    }

    /// Loads the weights of the best checkpoint, if the arguments ask for them and there is one.
    pub(super) fn load_best(&mut self) -> Result<()> {
        if !self.arguments.load_best_model_at_end {
            return Ok(());
        }
        // Rank 0 knows where it is.
        let best = self.state.best_model_checkpoint.clone();
        let Some(best) = self.accelerator.broadcast_object(&best, 0)? else {
            if self.accelerator.is_main_process() {
                user_message::warn(
                    "load_best_model_at_end: no checkpoint was saved at an evaluation, so the last weights stay",
                );
            }
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
