//! The state of a training, its log, and its model.

use core::fmt;
use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::accelerator::Accelerator;
use crate::core::error::Result;

/// Metrics by name (`loss`, `eval_accuracy`), in the order in which they were added.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Metrics {
    values: Vec<(String, f64)>,
    /// The number of items of each metric that is a mean over items other than the samples of the batch.
    #[serde(skip)]
    counts: Vec<(String, usize)>,
}

impl Metrics {
    /// Returns the metric with this name.
    pub fn value(&self, name: &str) -> Option<f64> {
        let found = self.values.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| *value)
    }

    /// Returns all metrics by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        let values = self.values.iter();
        values.map(|(name, value)| (name.as_str(), *value))
    }

    /// Adds a mean over items other than the samples of the batch, such as its tokens: a [`Meter`](super::Meter)
    /// weights it by their number.
    ///
    /// ```
    /// use accelerator::Accelerator;
    /// use accelerator::train::{Meter, Metrics};
    ///
    /// let mut meter = Meter::new();
    /// // Two samples each, of 10 tokens and of 30.
    /// meter.update(&Metrics::from_iter([("accuracy", 1.0)]).with_mean_over("loss", 1.0, 10), 2);
    /// meter.update(&Metrics::from_iter([("accuracy", 0.0)]).with_mean_over("loss", 2.0, 30), 2);
    /// let metrics = meter.summary(&Accelerator::new()?)?;
    /// assert_eq!((metrics.value("accuracy"), metrics.value("loss")), (Some(0.5), Some(1.75)));
    /// assert_eq!(metrics.value("num_samples"), Some(4.0));
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    #[must_use]
    pub fn with_mean_over(mut self, name: impl Into<String>, value: f64, items: usize) -> Self {
        let name = name.into();
        self.push(name.clone(), value);
        self.counts.push((name, items));
        self
    }

    pub(super) fn push(&mut self, name: impl Into<String>, value: f64) {
        self.values.push((name.into(), value));
    }

    /// Returns the number of items of that metric, unless it is a mean over the samples of the batch.
    pub(super) fn count(&self, name: &str) -> Option<usize> {
        let found = self.counts.iter().find(|(known, _)| known == name);
        found.map(|(_, count)| *count)
    }
}

impl<N: Into<String>> FromIterator<(N, f64)> for Metrics {
    fn from_iter<I: IntoIterator<Item = (N, f64)>>(metrics: I) -> Self {
        let values = metrics.into_iter();
        Self {
            values: values.map(|(name, value)| (name.into(), value)).collect(),
            counts: Vec::new(),
        }
    }
}

/// Prints them like Hugging Face: four digits each.
impl fmt::Display for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{")?;
        for (at, (name, value)) in self.iter().enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            write!(f, "{comma}'{name}': {}", four_digits(value))?;
        }
        f.write_str("}")
    }
}

/// Formats like C's `%.4g`, as far as metrics of a training need it.
fn four_digits(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    let rounded: f64 = format!("{value:.3e}").parse().unwrap_or(value);
    match rounded.abs() {
        size if !(1e-4..1e16).contains(&size) => format!("{rounded:e}"),
        _ => rounded.to_string(),
    }
}

/// The metrics that were logged or evaluated after an update.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LogEntry {
    /// The number of updates so far.
    pub step: u64,
    /// The epochs so far, with their fraction.
    pub epoch: f64,
    /// `loss`, `grad_norm` and `learning_rate` of training, `eval_loss` and so on of an evaluation.
    pub metrics: Metrics,
}

/// The progress of a training; it is saved in checkpoints.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TrainerState {
    /// The number of updates so far, including those that were skipped in half precision.
    pub global_step: u64,
    /// The epochs so far, with their fraction.
    pub epoch: f64,
    /// The entries logged and evaluated so far.
    pub log_history: Vec<LogEntry>,
    /// The best value so far of the metric that `metric_for_best_model` names. Unless `save_strategy` is `no`, an
    /// evaluation counts only once there is a checkpoint of its update.
    pub best_metric: Option<f64>,
    /// The number of updates at which the best value was found.
    pub best_global_step: Option<u64>,
    /// The checkpoint of that update, on the host of rank 0.
    pub best_model_checkpoint: Option<PathBuf>,
    /// Set if `best_model_checkpoint` is beside the checkpoint that contains this state, even after both are moved.
    #[serde(default)]
    pub(super) best_is_beside: bool,
    /// The norm of the gradients of the last update before clipping, if computed; the next field is its learning rate.
    pub(super) grad_norm: Option<f64>,
    pub(super) learning_rate: Option<f64>,
    /// The number of epochs that have been ended, with their logs and evaluations.
    pub(super) ended_epochs: u64,
    pub(super) window: LossMean,
    pub(super) whole: LossMean,
    pub(super) callbacks: BTreeMap<String, serde_json::Value>,
    /// An evaluation that is better than `best_metric`, but has no checkpoint of its update yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) candidate: Option<BestCandidate>,
    /// A logged evaluation for which not every callback's `on_evaluate` has been called.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) unreported_evaluation: Option<LogEntry>,
    /// A log entry for which not every callback's `on_log` has been called.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) unreported_log: Option<LogEntry>,
    #[serde(default, skip_serializing_if = "PendingWork::is_nothing")]
    pub(super) pending: PendingWork,
    /// The last checkpoint, or the one from which the training resumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) saved: Option<SavedUpdate>,
    /// Set once the evaluation of `eval_on_start` is complete.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub(super) is_evaluated_at_start: bool,
}

/// The work that remains before the next update, which the next group repeats after the loss of a rank. In a checkpoint,
/// it is always `Nothing`.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(super) enum PendingWork {
    #[default]
    Nothing,
    /// The logs, evaluation and checkpoint that are due after an update.
    AfterUpdate(UpdateEnd),
    /// A checkpoint after an update, if requested.
    SaveAfterUpdate(UpdateEnd),
    /// The logs, evaluation and checkpoint that are due after an epoch.
    AfterEpoch(EpochEnd),
    /// A checkpoint after an epoch, if requested. `ended_epochs` is already up to date.
    SaveAfterEpoch(TrainerControl),
    /// Loading the best model, and calling `on_train_end`.
    TrainEnd,
}

impl PendingWork {
    fn is_nothing(&self) -> bool {
        *self == Self::Nothing
    }

    /// Returns the update whose work remains.
    pub(super) fn update(self) -> Option<UpdateEnd> {
        match self {
            Self::AfterUpdate(update) | Self::SaveAfterUpdate(update) => Some(update),
            _ => None,
        }
    }

    /// Makes the training stop after the update or the epoch whose work remains.
    pub(super) fn stop(&mut self) {
        match self {
            Self::AfterUpdate(UpdateEnd { control, .. })
            | Self::SaveAfterUpdate(UpdateEnd { control, .. })
            | Self::SaveAfterEpoch(control) => control.should_training_stop = true,
            Self::Nothing | Self::AfterEpoch(_) | Self::TrainEnd => {}
        }
    }
}

/// The end of an update.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) struct UpdateEnd {
    /// The requests of callbacks so far.
    pub(super) control: TrainerControl,
    pub(super) is_last_of_epoch: bool,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) enum EpochEnd {
    Complete,
    LastOfTraining,
    /// The training stops within the epoch; if it is resumed, it continues there.
    Interrupted,
    /// The number of ranks changes, and the epoch continues with the next group.
    Regroup,
}

impl TrainerState {
    /// Returns true if there was an update. An earlier evaluation, by `eval_on_start`, cannot be the best.
    pub(super) fn has_begun(&self) -> bool {
        self.global_step > 0
    }

    /// Records that the evaluation after this update is the best so far, with the checkpoint of the update.
    pub(super) fn set_best(&mut self, metric: f64, checkpoint: Option<PathBuf>) {
        self.best_metric = Some(metric);
        self.best_global_step = Some(self.global_step);
        self.best_model_checkpoint = checkpoint;
    }

    pub(super) fn add_losses(&mut self, loss: Option<f64>, updates: u64) {
        if let Some(loss) = loss {
            self.window.add(loss, updates);
            self.whole.add(loss, updates);
        }
    }

    pub(super) fn last_loss(&self) -> Option<f64> {
        let entries = self.log_history.iter().rev();
        entries
            .filter_map(|entry| entry.metrics.value("loss"))
            .next()
    }
}

/// The requests of a callback; see [`TrainerCallback`](super::TrainerCallback).
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TrainerControl {
    /// End the training after this update.
    pub should_training_stop: bool,
    /// End the epoch after this update.
    pub should_epoch_stop: bool,
    /// Log now.
    pub should_log: bool,
    /// Evaluate now.
    pub should_evaluate: bool,
    /// Save a checkpoint now.
    pub should_save: bool,
}

impl TrainerControl {
    pub(super) fn or(self, other: Self) -> Self {
        Self {
            should_training_stop: self.should_training_stop || other.should_training_stop,
            should_epoch_stop: self.should_epoch_stop || other.should_epoch_stop,
            should_log: self.should_log || other.should_log,
            should_evaluate: self.should_evaluate || other.should_evaluate,
            should_save: self.should_save || other.should_save,
        }
    }

    /// Joins the requests of all ranks, on every rank.
    pub(super) fn agreed(self, accelerator: &Accelerator) -> Result<Self> {
        if accelerator.world_size() == 1 {
            return Ok(self);
        }
        let all = accelerator.gather_object(&self)?;
        Ok(all.into_iter().fold(self, Self::or))
    }
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct SavedUpdate {
    pub(super) update: u64,
    /// The path on the host of rank 0.
    pub(super) path: Option<PathBuf>,
}

/// An evaluation that is better than the best so far: it counts if a checkpoint of its update is saved.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct BestCandidate {
    pub(super) update: u64,
    pub(super) metric: f64,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(super) struct LossMean {
    sum: f64,
    updates: u64,
}

impl LossMean {
    fn add(&mut self, loss: f64, updates: u64) {
        self.sum += loss * updates as f64;
        self.updates += updates;
    }

    pub(super) fn mean(self) -> Option<f64> {
        (self.updates > 0).then(|| self.sum / self.updates as f64)
    }
}

/// A model that steps replace: they take it, so that the optimizer updates it where it lies.
pub(super) struct ModelCell<M>(Option<M>);

#[expect(
    clippy::expect_used,
    reason = "`replace` alone takes it, and puts one back unless it panics"
)]
impl<M> ModelCell<M> {
    pub(super) fn new(model: M) -> Self {
        Self(Some(model))
    }

    pub(super) fn get(&self) -> &M {
        self.0.as_ref().expect("a model")
    }

    pub(super) fn get_mut(&mut self) -> &mut M {
        self.0.as_mut().expect("a model")
    }

    pub(super) fn replace(&mut self, by: impl FnOnce(M) -> M) {
        let model = self.0.take().expect("a model");
        self.0 = Some(by(model));
    }
}

#[cfg(test)]
mod tests {
    use super::four_digits;

    #[test]
    fn metrics_have_four_digits() {
        for (value, expected) in [
            (1.69837, "1.698"),
            (0.0155217, "0.01552"),
            (0.067, "0.067"),
            (1.0049e-5, "1.005e-5"),
            (4583.25, "4583"),
            (0.0, "0"),
            (1.0, "1"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(four_digits(value), expected);
        }
    }
}
