use core::fmt;

use burn::tensor::{Int, Tensor};
use serde::{Deserialize, Serialize};

use super::{Mean, Metric, Sums};

/// The share of samples whose highest logit is the one of their target. Without samples, its value is NaN.
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
    /// Makes an accuracy without samples.
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

    /// Returns the accuracy so far, from 0 to 1.
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

/// The share of samples whose target is among the `k` highest logits. Without samples, its value is NaN.
///
/// Among equal logits, that of the lower class counts as higher, as in [`Accuracy`](super::Accuracy),
/// which is the case of `k` = 1: a model that says the same of every class is not right by that.
///
/// ```
/// use accelerator::metric::TopK;
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::default();
/// let logits = Tensor::from_data([[0.1, 0.5, 0.4], [0.1, 0.5, 0.4]], &device);
/// let mut top = TopK::new(2);
/// top.update(logits, Tensor::from_data([2, 0], &device), 2);
/// assert_eq!(top.value(), 0.5);
/// ```
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct TopK {
    hits: Mean,
    k: usize,
}

impl TopK {
    /// Makes an empty count. With a `k` of 0, no sample counts as right.
    pub fn new(k: usize) -> Self {
        Self {
            hits: Mean::new(),
            k,
        }
    }

    /// Counts the first `samples` rows of `logits` (`[rows, classes]`) against `targets`
    /// (`[rows]`). Pass [`Batch::real`](crate::data::Batch::real), which leaves padding out.
    ///
    /// A target is the number of a class; what becomes of another number depends on the device.
    pub fn update(&mut self, logits: Tensor<2>, targets: Tensor<1, Int>, samples: usize) {
        if samples == 0 {
            return;
        }
        let classes = logits.dims()[1];
        if self.k == 0 {
            self.hits.samples += samples as f64;
            return;
        }
        let logits = logits.narrow(0, 0, samples);
        let targets = targets.narrow(0, 0, samples).reshape([samples, 1]);
        let shape = [samples, classes];
        let own = logits.clone().gather(1, targets.clone()).expand(shape);
        let class = Tensor::<1, Int>::arange(0..classes as i64, &targets.device());
        let is_later = class
            .reshape([1, classes])
            .expand(shape)
            .greater(targets.expand(shape));
        // Which classes are behind the target, not before it: NaN is behind nothing.
        let behind = logits
            .clone()
            .lower(own.clone())
            .bool_or(logits.equal(own).bool_and(is_later));
        let behind = behind.int().sum_dim(1);
        let enough = classes.saturating_sub(self.k) as i64;
        let hits = behind.greater_equal_elem(enough).int().sum();
        self.hits.sum += hits.into_scalar::<i64>() as f64;
        self.hits.samples += samples as f64;
    }

    /// Returns the share so far, from 0 to 1.
    pub fn value(&self) -> f64 {
        self.hits.value()
    }
}

impl fmt::Display for TopK {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let precision = f.precision().unwrap_or(2);
        write!(f, "{:.*} %", precision, 100.0 * self.value())
    }
}

impl Metric for TopK {
    fn sums(&mut self, sums: &mut Sums<'_>) {
        self.hits.sums(sums);
    }

    fn name(&self) -> String {
        format!("TopK({})", self.k)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::metric::Accuracy;

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

    fn tops(logits: &[[f32; 3]], targets: &[i64]) -> [f64; 4] {
        let device = Device::flex();
        let flat: Vec<f32> = logits.concat();
        let logits = Tensor::<1>::from_floats(flat.as_slice(), &device);
        let logits = logits.reshape([targets.len(), 3]);
        let targets = Tensor::<1, Int>::from_ints(targets, &device);
        [0, 1, 2, 3].map(|k| {
            let mut top = TopK::new(k);
            let rows = targets.dims()[0];
            top.update(logits.clone(), targets.clone(), rows);
            if k == 1 {
                let mut accuracy = Accuracy::new();
                accuracy.update(logits.clone(), targets.clone(), rows);
                assert_eq!(accuracy.value(), top.value());
            }
            top.value()
        })
    }

    #[test]
    fn the_target_is_looked_for_among_the_highest() {
        let logits = [[0.3, 0.1, 0.2]; 3];
        assert_eq!(tops(&logits[..1], &[0]), [0.0, 1.0, 1.0, 1.0]);
        assert_eq!(tops(&logits[..1], &[2]), [0.0, 0.0, 1.0, 1.0]);
        assert_eq!(tops(&logits[..1], &[1]), [0.0, 0.0, 0.0, 1.0]);
        assert_eq!(tops(&logits[..2], &[0, 1]), [0.0, 0.5, 0.5, 1.0]);
    }

    #[test]
    fn of_equal_logits_the_first_is_the_highest() {
        let equal = [[0.5; 3]];
        assert_eq!(tops(&equal, &[0]), [0.0, 1.0, 1.0, 1.0]);
        assert_eq!(tops(&equal, &[1]), [0.0, 0.0, 1.0, 1.0]);
        assert_eq!(tops(&equal, &[2]), [0.0, 0.0, 0.0, 1.0]);
    }

    #[test]
    fn padding_is_left_out_and_nan_is_no_hit() {
        let device = Device::flex();
        let logits =
            Tensor::from_floats([[0.0, 1.0, 2.0], [f32::NAN; 3], [9.0, 0.0, 0.0]], &device);
        let targets = Tensor::<1, Int>::from_ints([2, 1, 0], &device);
        let mut top = TopK::new(2);
        top.update(logits.clone(), targets.clone(), 2);
        top.update(logits, targets, 0);
        assert_eq!(top.value(), 0.5);
        assert_eq!(top.to_string(), "50.00 %");
    }
}
