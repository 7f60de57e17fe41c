//! Metrics of batches, as one of all ranks.

use serde::{Deserialize, Serialize};

use crate::accelerator::Accelerator;
use crate::core::error::Result;
use crate::metric::Mean;
use crate::train::state::Metrics;

/// The metrics of one batch after the other: Ray SGD's `AverageMeterCollection`, with means that are exact over all ranks.
///
/// ```
/// use accelerator::train::{Metrics, Meter};
///
/// let metrics = accelerator::launch(2, |accelerator| {
///     let mut meter = Meter::new();
///     // A loss of 0 over one sample on rank 0, and of 1 over three on rank 1.
///     let rank = accelerator.rank();
///     meter.update(&Metrics::from_iter([("train_loss", rank as f64)]), 1 + 2 * rank);
///     meter.summary(&accelerator)
/// })?;
/// assert_eq!(
///     metrics[0].to_string(),
///     "{'batch_count': 1, 'num_samples': 4, 'train_loss': 0.75, 'last_train_loss': 0.75}"
/// );
/// # Ok::<(), accelerator::Error>(())
/// ```
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Meter {
    batches: u64,
    entries: Vec<MeterEntry>,
    samples: f64,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct MeterEntry {
    name: String,
    all: Mean,
    last: Mean,
}

impl Meter {
    /// Makes an empty meter.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the metrics of a batch of this rank: means over `num_samples` if that is one of the metrics, else over
    /// `samples`, or over [items of their own](Metrics::with_mean_over). Without samples, as on an idle rank, they have
    /// no weight.
    pub fn update(&mut self, metrics: &Metrics, samples: usize) {
        let samples = metrics.value("num_samples").unwrap_or(samples as f64);
        self.batches += 1;
        self.samples += samples;
        for (name, value) in metrics.iter().filter(|(name, _)| *name != "num_samples") {
            let count = metrics.count(name).map(|items| items as f64);
            let last = Mean::weighted(value, count.unwrap_or(samples));
            let entry = self.entry(name);
            entry.all.merge(last);
            entry.last = last;
        }
    }

    /// Returns the number of batches added.
    pub fn batches(&self) -> u64 {
        self.batches
    }

    /// The metrics of all ranks, the same on each: `batch_count`, the most of one rank, `num_samples` of all, and for each
    /// metric its mean over them, and that of the last batches as `last_…`. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost.
    pub fn summary(&self, accelerator: &Accelerator) -> Result<Metrics> {
        let mut all = Self::new();
        for theirs in accelerator.gather_object(self)? {
            all.batches = all.batches.max(theirs.batches);
            all.samples += theirs.samples;
            for MeterEntry {
                name,
                all: sum,
                last,
            } in theirs.entries
            {
                let entry = all.entry(&name);
                entry.all.merge(sum);
                entry.last.merge(last);
            }
        }
        let mut metrics = Metrics::default();
        metrics.push("batch_count", all.batches as f64);
        metrics.push("num_samples", all.samples);
        for MeterEntry { name, all, last } in all.entries {
            metrics.push(name.clone(), all.value());
            metrics.push(format!("last_{name}"), last.value());
        }
        Ok(metrics)
    }

    fn entry(&mut self, name: &str) -> &mut MeterEntry {
        let known = self.entries.iter().position(|entry| entry.name == name);
        let at = known.unwrap_or_else(|| {
            self.entries.push(MeterEntry {
                name: name.to_owned(),
                all: Mean::new(),
                last: Mean::new(),
            });
            self.entries.len() - 1
        });
        &mut self.entries[at]
    }
}
