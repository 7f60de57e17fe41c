//! The metrics of a `Learner` of burn-train, in a run.

use core::fmt;
use std::collections::HashMap;

use burn_train::logger::MetricLogger;
use burn_train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn_train::metric::{MetricDefinition, MetricId, NumericEntry};

use super::Accelerator;

/// A metric logger for burn-train's `Learner`. It logs to the run that [`Accelerator::init_trackers`] has begun, and
/// passes everything on to another logger.
///
/// The value of each training batch is `train/Loss` by iteration, that of the epoch is `train-epoch/Loss`. Of a
/// validation or a test, the figures of the whole split count: `valid/Loss`, at the iteration of the training at which it
/// was done. Anything without a number is left to the other logger.
///
/// A logger that is registered takes the place of burn-train's own files, from which its summary, early stopping and
/// checkpoints by metric read; so this one needs the logger that keeps them:
///
/// ```
/// use accelerator::{Accelerator, RunLogger};
/// use burn_train::logger::FileMetricLogger;
///
/// # fn main() -> accelerator::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let folder = folder.path();
/// let accelerator = Accelerator::builder().runs_folder(folder).build()?;
/// accelerator.init_trackers("learner", &())?;
/// let files = FileMetricLogger::new(folder.join("artifacts"));
/// // Behind the iterations of a training that is resumed.
/// let logger = RunLogger::new(&accelerator, files).starting_behind(938);
/// // SupervisedTraining::new(artifacts, train, valid).with_metric_logger(logger)
/// # drop(logger);
/// # accelerator.finish()
/// # }
/// ```
pub struct RunLogger<L> {
    accelerator: Accelerator,
    inner: L,
    names: HashMap<MetricId, String>,
    /// The iterations of the training.
    iterations: u64,
    figures: HashMap<Split, Vec<(String, f64)>>,
}

impl<L: MetricLogger> RunLogger<L> {
    /// Makes a logger to the run of an accelerator that passes everything on to `inner`.
    pub fn new(accelerator: &Accelerator, inner: L) -> Self {
        Self {
            accelerator: accelerator.clone(),
            inner,
            names: HashMap::new(),
            iterations: 0,
            figures: HashMap::new(),
        }
    }

    /// Starts counting after `iterations` iterations, for a training that was resumed.
    #[must_use]
    pub fn starting_behind(mut self, iterations: u64) -> Self {
        self.iterations = iterations;
        self
    }

    fn log_train(&mut self, update: &MetricsUpdate, epoch: usize) {
        let (mut batch, mut whole) = (Vec::new(), Vec::new());
        for metric in &update.entries_numeric {
            let Some(name) = self.names.get(&metric.entry.metric_id) else {
                continue;
            };
            match &metric.numeric_entry {
                Some(NumericEntry::Final(value)) => whole.push((name.as_str(), *value)),
                Some(entry) => batch.push((name.as_str(), entry.current())),
                None => {}
            }
        }
        // Burn reports an epoch's totals after its last batch; they do not count as a batch.
        if whole.is_empty() {
            self.iterations += 1;
        }
        let step = self.iterations;
        for (kind, figures) in [("train", batch), ("train-epoch", whole)] {
            if !figures.is_empty() {
                self.accelerator.log(kind, figures, step, epoch as f64);
            }
        }
    }

    fn note(&mut self, update: &MetricsUpdate, split: &Split) {
        let noted = self.figures.entry(split.clone()).or_default();
        for metric in &update.entries_numeric {
            let figure = match (&metric.numeric_entry, &metric.running_entry) {
                (Some(NumericEntry::Final(value)), _) => Some(*value),
                (_, running) => running.as_ref().map(NumericEntry::current),
            };
            let name = self.names.get(&metric.entry.metric_id);
            let Some((name, figure)) = name.zip(figure) else {
                continue;
            };
            match noted.iter_mut().find(|(known, _)| known == name) {
                Some((_, known)) => *known = figure,
                None => noted.push((name.clone(), figure)),
            }
        }
    }
}

impl<L: MetricLogger> MetricLogger for RunLogger<L> {
    fn log(&mut self, update: MetricsUpdate, epoch: usize, split: &Split) {
        match split {
            Split::Train => self.log_train(&update, epoch),
            Split::Valid | Split::Test(_) => self.note(&update, split),
        }
        self.inner.log(update, epoch, split);
    }

    fn read_numeric(
        &mut self,
        name: &str,
        epoch: usize,
        split: &Split,
    ) -> Result<Vec<NumericEntry>, String> {
        self.inner.read_numeric(name, epoch, split)
    }

    fn log_metric_definition(&mut self, definition: MetricDefinition) {
        let name = definition.name.as_ref().clone();
        self.names.insert(definition.metric_id.clone(), name);
        self.inner.log_metric_definition(definition);
    }

    fn log_epoch_summary(&mut self, summary: EpochSummary) {
        if let Some(figures) = self.figures.remove(&summary.split) {
            let kind = match &summary.split {
                Split::Test(Some(tag)) => format!("test-{tag}"),
                split => split.to_string(),
            };
            let figures = figures.iter().map(|(name, value)| (name.as_str(), *value));
            let epoch = summary.epoch_number as f64;
            self.accelerator.log(&kind, figures, self.iterations, epoch);
        }
        self.inner.log_epoch_summary(summary);
    }
}

impl<L> fmt::Debug for RunLogger<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunLogger")
            .field("iterations", &self.iterations)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use accelerator_track::RunHistory;
    use burn_train::logger::FileMetricLogger;
    use burn_train::metric::store::NumericMetricUpdate;
    use burn_train::metric::{MetricAttributes, MetricEntry, SerializedEntry};

    use super::*;

    fn id() -> MetricId {
        MetricId::new(Arc::new("loss".to_owned()))
    }

    fn update(entry: NumericEntry, running: f64) -> MetricsUpdate {
        let text = entry.serialize();
        let entry = NumericMetricUpdate::new(
            MetricEntry::new(id(), SerializedEntry::new(text.clone(), text)),
            Some(entry),
            Some(NumericEntry::Value(running)),
        );
        MetricsUpdate::new(Vec::new(), vec![entry])
    }

    #[test]
    fn the_figures_of_a_learner_are_in_the_run_and_in_its_own_files() {
        let folder = tempfile::tempdir().unwrap();
        let accelerator = Accelerator::builder().runs_folder(folder.path());
        let accelerator = accelerator.build().unwrap();
        accelerator.init_trackers("a", &()).unwrap();
        let files = FileMetricLogger::new(folder.path().join("files"));
        let mut logger = RunLogger::new(&accelerator, files);
        logger.log_metric_definition(MetricDefinition {
            metric_id: id(),
            name: Arc::new("Loss".to_owned()),
            description: None,
            attributes: MetricAttributes::None,
        });
        for epoch in 1..=2 {
            for (value, running) in [(4.0, 4.0), (2.0, 3.0)] {
                logger.log(
                    update(NumericEntry::Value(value), running),
                    epoch,
                    &Split::Train,
                );
            }
            logger.log(update(NumericEntry::Final(3.0), 3.0), epoch, &Split::Train);
            logger.log_epoch_summary(EpochSummary::new(epoch, Split::Train));
            for (value, running) in [(1.0, 1.0), (2.0, 1.5)] {
                logger.log(
                    update(NumericEntry::Value(value), running),
                    epoch,
                    &Split::Valid,
                );
            }
            logger.log_epoch_summary(EpochSummary::new(epoch, Split::Valid));
        }
        let read = logger.read_numeric("Loss", 2, &Split::Valid).unwrap();
        assert_eq!(read.iter().map(NumericEntry::current).sum::<f64>(), 3.0);
        drop(logger);
        accelerator.finish().unwrap();

        let run = RunHistory::read(folder.path().join("a")).unwrap();
        let points = |key| -> Vec<_> {
            let points = run.series(key).unwrap().points.iter();
            points.map(|point| (point.step, point.value)).collect()
        };
        assert_eq!(
            points("train/Loss"),
            [(1, 4.0), (2, 2.0), (3, 4.0), (4, 2.0)]
        );
        assert_eq!(points("train-epoch/Loss"), [(2, 3.0), (4, 3.0)]);
        assert_eq!(points("valid/Loss"), [(2, 1.5), (4, 1.5)]);
    }
}
