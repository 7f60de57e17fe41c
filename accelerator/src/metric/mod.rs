//! Figures that are summed on each rank and reduced once.

use core::fmt;

use burn::tensor::{Int, Tensor};

/// A figure that can be put together from sums over samples, so that the sums of all ranks give
/// it over all samples. Tuples of metrics are metrics.
///
/// ```
/// use accelerator::metric::Metric;
///
/// #[derive(Default)]
/// struct Longest { sum: f64 }
/// impl Metric for Longest {
///     const SUMS: usize = 1;
///     fn write(&self, sums: &mut Vec<f64>) { sums.push(self.sum) }
///     fn read(sums: &[f64]) -> Self { Self { sum: sums[0] } }
/// }
/// # let (_, mean) = <(Longest, accelerator::metric::Mean)>::read(&[1.0, 6.0, 2.0]);
/// # assert_eq!(mean.value(), 3.0);
/// ```
pub trait Metric: Sized {
    /// How many sums it has.
    const SUMS: usize;

    /// Appends its sums.
    fn write(&self, sums: &mut Vec<f64>);

    /// Puts it together from `SUMS` sums.
    fn read(sums: &[f64]) -> Self;
}

/// A weighted mean, of a loss for example. Its value over no samples is NaN.
///
/// What each rank has added of its own, as in an evaluation, becomes the mean of all by
/// [`Accelerator::reduce`](crate::Accelerator::reduce). The training loss of
/// [`Gradients::loss`](crate::Gradients::loss) is that of all ranks already: it only needs to be added up.
///
/// ```
/// use accelerator::metric::Mean;
///
/// let mut loss = Mean::new();
/// loss.update(0.5, 30);
/// loss.update(2.0, 10);
/// assert_eq!(loss.value(), 0.875);
/// assert_eq!(loss.to_string(), "0.8750");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mean {
    sum: f64,
    samples: f64,
}

impl Mean {
    /// A mean of nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The mean `value` of `samples` samples.
    pub fn of(value: f64, samples: usize) -> Self {
        let mut mean = Self::new();
        mean.update(value, samples);
        mean
    }

    /// Adds the mean `value` of `samples` samples; none of them, none added.
    pub fn update(&mut self, value: f64, samples: usize) {
        if samples > 0 {
            self.sum += value * samples as f64;
            self.samples += samples as f64;
        }
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

    /// Over how many samples.
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
    const SUMS: usize = 2;

    fn write(&self, sums: &mut Vec<f64>) {
        sums.extend([self.sum, self.samples]);
    }

    fn read(sums: &[f64]) -> Self {
        Self {
            sum: sums[0],
            samples: sums[1],
        }
    }
}

/// The share of samples whose highest logit is that of their target. Its value over no samples
/// is NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
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
    const SUMS: usize = Mean::SUMS;

    fn write(&self, sums: &mut Vec<f64>) {
        self.0.write(sums);
    }

    fn read(sums: &[f64]) -> Self {
        Self(Mean::read(sums))
    }
}

macro_rules! tuples {
    ($($metric:ident),+) => {
        impl<$($metric: Metric),+> Metric for ($($metric,)+) {
            const SUMS: usize = 0 $(+ $metric::SUMS)+;

            #[allow(non_snake_case, reason = "the names are those of the type parameters")]
            fn write(&self, sums: &mut Vec<f64>) {
                let ($($metric,)+) = self;
                $($metric.write(sums);)+
            }

            #[allow(unused_assignments, reason = "the last one's end is not needed")]
            fn read(sums: &[f64]) -> Self {
                let mut at = 0;
                ($({
                    let metric = $metric::read(&sums[at..at + $metric::SUMS]);
                    at += $metric::SUMS;
                    metric
                },)+)
            }
        }
    };
}

tuples!(A, B);
tuples!(A, B, C);
tuples!(A, B, C, D);

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

    #[test]
    fn a_mean_of_nothing_ignores_the_value() {
        let mut mean = Mean::new();
        mean.update(f64::NAN, 0);
        mean.update(2.0, 4);
        assert_eq!(mean.value(), 2.0);
    }
}
