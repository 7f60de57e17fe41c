//! Callbacks: code of the program that runs beside the loop.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::arguments::{BestMetric, TrainingArguments};
use super::state::{LogEntry, Metrics, TrainerControl, TrainerState};
use crate::accelerator::Accelerator;
use crate::checkpoint::Saved;
use crate::core::error::{Error, Result};

/// Hooks into the loop of a [`Trainer`](super::Trainer), by Hugging Face's names. Each is called on every rank, in
/// the order in which callbacks were added. A request in [`TrainerControl`] takes effect if any rank makes it.
///
/// ```
/// use accelerator::train::{CallbackContext, TrainerCallback, TrainerControl};
/// use accelerator::Result;
///
/// /// Stops at a loss that is good enough.
/// struct GoodEnough(f64);
///
/// impl<M> TrainerCallback<M> for GoodEnough {
///     fn on_step_end(&mut self, at: &CallbackContext<'_, M>, control: &mut TrainerControl) -> Result<()> {
///         let last = at.state.log_history.last();
///         let loss = last.and_then(|entry| entry.metrics.value("loss"));
///         control.should_training_stop |= loss.is_some_and(|loss| loss < self.0);
///         Ok(())
///     }
/// }
/// ```
#[expect(unused_variables, reason = "most callbacks use some of it")]
pub trait TrainerCallback<M> {
    /// Called before the first update, and before the first one after a resume.
    fn on_train_begin(
        &mut self,
        at: &CallbackContext<'_, M>,
        control: &mut TrainerControl,
    ) -> Result<()> {
        Ok(())
    }

    /// Called before the first batch of an epoch, or the first one after a resume.
    fn on_epoch_begin(
        &mut self,
        at: &CallbackContext<'_, M>,
        control: &mut TrainerControl,
    ) -> Result<()> {
        Ok(())
    }

    /// Called after an update, before what is due is logged, evaluated and saved.
    fn on_step_end(
        &mut self,
        at: &CallbackContext<'_, M>,
        control: &mut TrainerControl,
    ) -> Result<()> {
        Ok(())
    }

    /// Called after the last batch of an epoch.
    fn on_epoch_end(
        &mut self,
        at: &CallbackContext<'_, M>,
        control: &mut TrainerControl,
    ) -> Result<()> {
        Ok(())
    }

    /// Called after something was logged.
    fn on_log(
        &mut self,
        at: &CallbackContext<'_, M>,
        entry: &LogEntry,
        control: &mut TrainerControl,
    ) -> Result<()> {
        Ok(())
    }

    /// Called after an evaluation, before its metric is compared with the best. The metric of `eval_on_start`, at
    /// update 0, is never compared.
    fn on_evaluate(
        &mut self,
        at: &CallbackContext<'_, M>,
        metrics: &Metrics,
        control: &mut TrainerControl,
    ) -> Result<()> {
        Ok(())
    }

    /// Called after a checkpoint was saved.
    fn on_save(
        &mut self,
        at: &CallbackContext<'_, M>,
        saved: &Saved,
        control: &mut TrainerControl,
    ) -> Result<()> {
        Ok(())
    }

    /// Called after the last update.
    fn on_train_end(&mut self, at: &CallbackContext<'_, M>) -> Result<()> {
        Ok(())
    }

    /// Returns the state to save in checkpoints, with a name that no other callback has.
    fn state(&self) -> Option<(String, Value)> {
        None
    }

    /// Takes back what it remembered in the checkpoint that training continues from.
    fn restore(&mut self, state: &Value) -> Result<()> {
        Ok(())
    }
}

/// The moment at which a callback is called; see [`TrainerCallback`].
#[derive(Debug)]
#[non_exhaustive]
pub struct CallbackContext<'a, M> {
    /// The ranks.
    pub accelerator: &'a Accelerator,
    /// The arguments of the training.
    pub arguments: &'a TrainingArguments,
    /// The state of the training.
    pub state: &'a TrainerState,
    /// The model.
    pub model: &'a M,
}

/// Stops when so many evaluations in a row have not improved the metric of `metric_for_best_model`. The argument
/// `early_stopping_patience` adds one.
///
/// An improvement is more than the threshold better than the last one that counted, so that many small steps add up:
/// Hugging Face compares with the best of all, which moves without the threshold. What it remembers is saved in
/// checkpoints.
#[derive(Clone, Debug)]
pub(super) struct EarlyStopping {
    metric: BestMetric,
    patience: u64,
    threshold: f64,
    remembered: EarlyStoppingState,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
struct EarlyStoppingState {
    best: Option<f64>,
    waited: u64,
}

impl EarlyStopping {
    pub(super) fn new(metric: BestMetric, patience: u64, threshold: f64) -> Self {
        Self {
            metric,
            patience,
            threshold,
            remembered: EarlyStoppingState::default(),
        }
    }

    /// Records the value of an evaluation, and tells if the training is to stop.
    fn note(&mut self, value: f64) -> bool {
        let Self {
            metric, threshold, ..
        } = self;
        let remembered = &mut self.remembered;
        let improves = match remembered.best {
            Some(best) => metric.improves(value, best, *threshold),
            None => !value.is_nan(),
        };
        if improves {
            *remembered = EarlyStoppingState {
                best: Some(value),
                waited: 0,
            };
        } else {
            remembered.waited += 1;
        }
        remembered.waited >= self.patience
    }
}

impl<M> TrainerCallback<M> for EarlyStopping {
    /// A training that has stopped is not taken up again.
    fn on_train_begin(
        &mut self,
        _: &CallbackContext<'_, M>,
        control: &mut TrainerControl,
    ) -> Result<()> {
        control.should_training_stop |= self.remembered.waited >= self.patience;
        Ok(())
    }

    fn on_evaluate(
        &mut self,
        at: &CallbackContext<'_, M>,
        metrics: &Metrics,
        control: &mut TrainerControl,
    ) -> Result<()> {
        if let Some(value) = metrics.value(&self.metric.key)
            && at.state.has_begun()
        {
            control.should_training_stop |= self.note(value);
        }
        Ok(())
    }

    fn state(&self) -> Option<(String, Value)> {
        let remembered = serde_json::to_value(self.remembered).ok()?;
        Some(("early_stopping".to_owned(), remembered))
    }

    fn restore(&mut self, state: &Value) -> Result<()> {
        self.remembered = serde_json::from_value(state.clone()).map_err(Error::other)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stops_at(patience: u64, threshold: f64, values: &[f64]) -> Option<usize> {
        let arguments = TrainingArguments {
            metric_for_best_model: Some("accuracy".to_owned()),
            ..TrainingArguments::default()
        };
        let metric = arguments.best_metric().unwrap();
        let mut stopping = EarlyStopping::new(metric, patience, threshold);
        let stopped = values.iter().position(|&value| stopping.note(value));
        stopped.map(|at| at + 1)
    }

    #[test]
    fn it_stops_after_that_many_evaluations_without_improvement() {
        assert_eq!(
            stops_at(2, 0.0, &[0.1, 0.5, 0.5, 0.6, 0.59, 0.58, 0.57]),
            Some(6)
        );
        assert_eq!(stops_at(2, 0.0, &[0.1, f64::NAN, 0.2, 0.3]), None);
    }

    /// Hugging Face stops at 5 here.
    #[test]
    fn small_steps_add_up_to_an_improvement() {
        let values = [0.1, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8];
        assert_eq!(stops_at(3, 0.1, &values), None);
    }
}
