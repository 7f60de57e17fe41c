use core::fmt;

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::{Metric, Sums};

/// A weighted mean, of a loss for example. Its value over no samples is NaN.
///
/// The means of all ranks, each over its own values, as in an evaluation, are combined by
/// [`Accelerator::reduce_metric`](crate::Accelerator::reduce_metric). The training loss of
/// [`AveragedGradients::loss`](crate::AveragedGradients::loss) is that of all ranks already: it only needs to be added up.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Mean {
    pub(super) sum: f64,
    pub(super) samples: f64,
}

impl Mean {
    /// A mean of nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The mean `value` of `samples` samples.
    pub fn of(value: f64, samples: usize) -> Self {
        Self::weighted(value, samples as f64)
    }

    /// Makes a weighted mean. A value that counts for nothing may be NaN.
    pub(crate) fn weighted(value: f64, samples: f64) -> Self {
        let sum = if samples > 0.0 { value * samples } else { 0.0 };
        Self { sum, samples }
    }

    /// Adds the samples of another mean.
    pub(crate) fn merge(&mut self, other: Self) {
        self.sum += other.sum;
        self.samples += other.samples;
    }

    /// Adds the mean `value` of `samples` samples; none of them, none added.
    pub fn update(&mut self, value: f64, samples: usize) {
        self.merge(Self::of(value, samples));
    }

    /// Adds a loss, the mean over `samples` samples.
    pub fn update_with(&mut self, loss: Tensor<1>, samples: usize) {
        if samples > 0 {
            self.update(loss.into_scalar::<f64>(), samples);
        }
    }

    /// The mean so far.
    pub fn value(&self) -> f64 {
        self.sum / self.samples
    }

    /// Returns the number of samples.
    pub fn samples(&self) -> f64 {
        self.samples
    }
}

impl fmt::Display for Mean {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.*}", f.precision().unwrap_or(4), self.value())
    }
}

impl Metric for Mean {
    fn sums(&mut self, sums: &mut Sums<'_>) {
        sums.one(&mut self.sum);
        sums.one(&mut self.samples);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mean_of_nothing_ignores_the_value() {
        let mut mean = Mean::new();
        mean.update(f64::NAN, 0);
        mean.update(2.0, 4);
        assert_eq!(mean.value(), 2.0);
    }
}
