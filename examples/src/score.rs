use accelerator::data::PreparedLoader;
use accelerator::metric::{Metric, Sums};
use burn::tensor::{Int, Tensor};

use crate::{DigitBatch, cross_entropy};

/// The score of a model on a data set: the mean loss and the share of right answers, over samples (not over batches,
/// the last of which may be smaller).
///
/// ```
/// use accelerator_examples::Score;
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::default();
/// let logits = Tensor::from_data([[9.0, 0.0], [9.0, 0.0]], &device);
/// let targets = Tensor::from_data([0, 1], &device);
/// let mut score = Score::new();
/// score.update(logits, targets, 2);
/// assert_eq!(score.accuracy(), 0.5);
/// ```
///
/// It is also a metric of the `accelerator` crate, so that the scores of several ranks can be combined.
#[derive(Clone, Copy, Debug, Default)]
pub struct Score {
    correct: f64,
    /// The sum over samples.
    loss: f64,
    samples: f64,
}

impl Score {
    /// Creates a score without samples.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the score of a model on this rank's share of a loader's digits.
    ///
    /// # Errors
    ///
    /// The errors of the loader.
    pub fn on(
        loader: &PreparedLoader<DigitBatch>,
        forward: impl Fn(Tensor<4>) -> Tensor<2>,
    ) -> accelerator::Result<Self> {
        let mut score = Self::new();
        for batch in loader.eval() {
            let batch = batch?;
            let logits = forward(batch.images.clone());
            score.update(logits, batch.targets.clone(), batch.real());
        }
        Ok(score)
    }

    /// Adds the first `samples` rows of a batch: the model's logits `[batch, classes]` and the labels `[batch]`.
    pub fn update(&mut self, logits: Tensor<2>, targets: Tensor<1, Int>, samples: usize) {
        if samples == 0 {
            return;
        }
        let (logits, targets) = (logits.narrow(0, 0, samples), targets.narrow(0, 0, samples));
        let answers = logits.clone().argmax(1).flatten::<1>(0, 1);
        let correct: i64 = answers.equal(targets.clone()).int().sum().into_scalar();
        let loss: f64 = cross_entropy(logits, targets).into_scalar();
        self.correct += correct as f64;
        self.loss += loss * samples as f64;
        self.samples += samples as f64;
    }

    /// Returns the share of right answers, from 0 to 1; NaN without samples.
    pub fn accuracy(&self) -> f64 {
        self.correct / self.samples
    }

    /// Returns the mean cross-entropy of a sample; NaN without samples.
    pub fn loss(&self) -> f64 {
        self.loss / self.samples
    }
}

impl Metric for Score {
    fn sums(&mut self, sums: &mut Sums<'_>) {
        sums.one(&mut self.correct);
        sums.one(&mut self.loss);
        sums.one(&mut self.samples);
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn batches_count_by_their_samples() {
        let device = Device::default();
        let mut score = Score::new();
        assert!(score.accuracy().is_nan());
        // Three samples with two equal logits each, of which the first counts as the answer,
        let even = Tensor::zeros([3, 2], &device);
        score.update(even, Tensor::from_data([0, 0, 0], &device), 3);
        // then one wrong answer with a loss of 20, then a row that does not count.
        let wrong = Tensor::from_data([[20.0, 0.0], [0.0, 20.0]], &device);
        score.update(wrong.clone(), Tensor::from_data([1, 1], &device), 1);
        score.update(wrong, Tensor::from_data([1, 1], &device), 0);
        assert_eq!(score.accuracy(), 0.75);
        let expected = (3.0 * 2f64.ln() + 20.0) / 4.0;
        assert!((score.loss() - expected).abs() < 1e-5, "{}", score.loss());
    }
}
