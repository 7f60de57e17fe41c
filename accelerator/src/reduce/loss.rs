//! The loss of a window, and what happens if it is not finite.

use burn::tensor::Tensor;

use super::device_bucket;
use crate::core::error::{Error, Kind};

#[derive(Debug)]
pub(super) enum MicroLoss {
    Read(f64),
    /// One element, which lies on the device: reading it waits.
    OnDevice(Tensor<1>),
    /// The program ran its backward itself.
    Unknown,
}

/// Σ weight · loss: what was read of it, and what lies on the device.
#[derive(Clone, Debug, Default)]
pub(super) struct LossSum {
    pub(super) read: f64,
    /// Losses of one element, with their weights.
    pub(super) unread: Vec<(f64, Tensor<1>)>,
    /// Set if the loss of a micro-step is not known, so that the sum is not known either.
    pub(super) is_unknown: bool,
}

impl LossSum {
    /// Adds the loss of a micro-step. What an idle rank computed may be anything.
    pub(super) fn add(&mut self, weight: f64, loss: MicroLoss) {
        match loss {
            MicroLoss::Unknown => self.is_unknown = true,
            _ if weight <= 0.0 => {}
            MicroLoss::Read(loss) => self.read += weight * loss,
            MicroLoss::OnDevice(loss) => self.unread.push((weight, loss)),
        }
    }

    /// Returns the sum of what lies on the device, in a new tensor of one element there.
    pub(super) fn sum_on(&self, device: &burn::tensor::Device) -> Tensor<1> {
        let dtype = burn::tensor::DType::F32;
        let zero = Tensor::zeros([1], (device, dtype));
        let weighed =
            |(weight, loss): &(f64, Tensor<1>)| loss.clone().cast(dtype).mul_scalar(*weight);
        self.unread.iter().map(weighed).fold(zero, Tensor::add)
    }

    pub(super) fn read_all(&mut self) {
        self.read = self.value();
        self.unread.clear();
    }

    /// Returns the mean over this many samples, read from the device; `None` if it is not known.
    pub(super) fn mean(&self, samples: f64) -> Option<f64> {
        (!self.is_unknown).then(|| self.value() / samples)
    }

    /// Returns all of it, read from the device at once.
    pub(super) fn value(&self) -> f64 {
        let losses = self.unread.iter().map(|(_, loss)| loss.clone()).collect();
        let losses = device_bucket::numbers(losses);
        let unread = self.unread.iter().zip(losses);
        unread.fold(self.read, |sum, ((weight, _), loss)| sum + weight * loss)
    }
}

/// The fate of a step whose loss is not finite.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum OnNonFiniteLoss {
    /// It takes place, and is told once.
    #[default]
    Warn,
    /// It fails, on all ranks; in local training on the rank whose loss it is.
    Fail,
}

impl OnNonFiniteLoss {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Warn => "told once",
            Self::Fail => "an error",
        }
    }
}

/// Returns the error for a loss that is not finite, of ranks with their losses.
pub(super) fn error(step: u64, losses: impl IntoIterator<Item = (usize, f64)>) -> Error {
    let bad = losses.into_iter().filter(|(_, loss)| !loss.is_finite());
    let bad: Vec<_> = bad
        .map(|(rank, loss)| format!("{loss} on rank {rank}"))
        .collect();
    let message = format!(
        "the loss of step {} is not finite: {}; the model is as it was before this step: lower the learning rate, \
         clip gradients, or look at the samples, and continue from a checkpoint",
        step,
        bad.join(", ")
    );
    Error::new(Kind::NotFinite, message)
}
