//! Figures of batches, as one of all ranks.

use serde::{Deserialize, Serialize};

use crate::accelerator::Accelerator;
use crate::core::error::Result;
use crate::metric::Mean;
use crate::train::state::Figures;

/// The figures of one batch after the other: Ray SGD's `AverageMeterCollection`, with means that are exact over all ranks.
///
/// ```
/// use accelerator::train::{Figures, Meter};
///
/// let figures = accelerator::launch(2, |accelerator| {
///     let mut meter = Meter::new();
///     // A loss of 0 over one sample on rank 0, and of 1 over three on rank 1.
///     let rank = accelerator.rank();
///     meter.update(&Figures::from_iter([("train_loss", rank as f64)]), 1 + 2 * rank);
///     meter.summary(&accelerator)
/// })?;
/// assert_eq!(
///     figures[0].to_string(),
///     "{'batch_count': 1, 'num_samples': 4, 'train_loss': 0.75, 'last_train_loss': 0.75}"
/// );
/// # Ok::<(), accelerator::Error>(())
/// ```
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Meter {
    batches: u64,
    figures: Vec<MeteredFigure>,
    samples: f64,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct MeteredFigure {
    name: String,
    all: Mean,
    last: Mean,
}

impl Meter {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the figures of a batch of this rank: means over `num_samples`, where that is one of them, else over `samples`.
    /// Without samples, as on an idle rank, they count for nothing.
    pub fn update(&mut self, figures: &Figures, samples: usize) {
        let samples = figures.value("num_samples").unwrap_or(samples as f64);
        self.batches += 1;
        self.samples += samples;
        for (name, value) in figures.iter().filter(|(name, _)| *name != "num_samples") {
            let last = Mean::weighted(value, samples);
            let figure = self.figure(name);
            figure.all.merge(last);
            figure.last = last;
        }
    }

    /// How many batches were added.
    pub fn batches(&self) -> u64 {
        self.batches
    }

    /// The figures of all ranks, the same on each: `batch_count`, the most of one rank, `num_samples` of all, and for each
    /// figure its mean over them, and that of the last batches as `last_…`. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost.
    pub fn summary(&self, accelerator: &Accelerator) -> Result<Figures> {
        let mut all = Self::new();
        for theirs in accelerator.gather_object(self)? {
            all.batches = all.batches.max(theirs.batches);
            all.samples += theirs.samples;
            for MeteredFigure {
                name,
                all: sum,
                last,
            } in theirs.figures
            {
                let figure = all.figure(&name);
                figure.all.merge(sum);
                figure.last.merge(last);
            }
        }
        let mut figures = Figures::default();
        figures.push("batch_count", all.batches as f64);
        figures.push("num_samples", all.samples);
        for MeteredFigure { name, all, last } in all.figures {
            figures.push(name.clone(), all.value());
            figures.push(format!("last_{name}"), last.value());
        }
        Ok(figures)
    }

    fn figure(&mut self, name: &str) -> &mut MeteredFigure {
        let known = self.figures.iter().position(|figure| figure.name == name);
        let at = known.unwrap_or_else(|| {
            self.figures.push(MeteredFigure {
                name: name.to_owned(),
                all: Mean::new(),
                last: Mean::new(),
            });
            self.figures.len() - 1
        });
        &mut self.figures[at]
    }
}
