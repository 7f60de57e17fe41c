use core::fmt;

use burn::tensor::{Int, Tensor};
use serde::{Deserialize, Serialize};

use super::{Mean, Metric, Sums};

/// The share of samples whose highest logit is that of their target. Its value over no samples
/// is NaN.
///
/// ```
/// use accelerator::metric::Accuracy;
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::default();
/// let logits = Tensor::from_data([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]], &device);
/// let targets = Tensor::from_data([0, 0, 1], &device);
/// let mut accuracy = Accuracy::new();
/// // The last row is padding: in a loop, `batch.real()` says so.
/// accuracy.update(logits, targets, 2);
/// assert_eq!(accuracy.value(), 0.5);
/// assert_eq!(accuracy.to_string(), "50.00 %");
/// ```
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Accuracy(Mean);

impl Accuracy {
    /// An accuracy over nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts the first `samples` rows of `logits` (`[rows, classes]`) against `targets`
    /// (`[rows]`). Pass [`Batch::real`](crate::data::Batch::real), which leaves padding out.
    pub fn update(&mut self, logits: Tensor<2>, targets: Tensor<1, Int>, samples: usize) {
        if samples == 0 {
            return;
        }
        let predicted = logits.narrow(0, 0, samples).argmax(1).flatten::<1>(0, 1);
        let right = predicted
            .equal(targets.narrow(0, 0, samples))
            .int()
            .sum()
            .into_scalar::<i64>();
        self.0.sum += right as f64;
        self.0.samples += samples as f64;
    }

    /// The accuracy so far, from 0 to 1.
    pub fn value(&self) -> f64 {
        self.0.value()
    }
}

impl fmt::Display for Accuracy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.*} %",
            f.precision().unwrap_or(2),
            100.0 * self.value()
        )
    }
}

impl Metric for Accuracy {
    fn sums(&mut self, sums: &mut Sums<'_>) {
        self.0.sums(sums);
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn accuracy_leaves_padding_out() {
        let device = Device::flex();
        let logits = Tensor::from_floats([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], &device);
        let targets = Tensor::<1, Int>::from_ints([0, 0, 1], &device);
        let mut accuracy = Accuracy::new();
        accuracy.update(logits.clone(), targets.clone(), 2);
        assert_eq!(accuracy.value(), 0.5);
        accuracy.update(logits, targets, 0);
        assert_eq!(accuracy.value(), 0.5);
        assert_eq!(accuracy.to_string(), "50.00 %");
    }
}
