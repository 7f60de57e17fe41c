use crate::data::{Batch, Mark};

/// How much one call of [`Accelerator::backward`](crate::Accelerator::backward) counts in the
/// average, and whether it ends the accumulation window.
///
/// Usually made from a batch (`&batch`). A bare number of samples or tokens works too, but does
/// not know its epoch, nor where that ends, nor of which loader it is: use
/// [`Batch::with_weight`] when you accumulate, have a schedule by epoch, or save checkpoints.
#[derive(Clone, Debug)]
pub struct Weight {
    pub(crate) count: f64,
    pub(crate) ends_epoch: bool,
    pub(crate) epoch: Option<u64>,
    /// Where its batch ends in its loader.
    pub(crate) mark: Option<Mark>,
    /// The batch is from a loader whose ranks may run different numbers of steps.
    pub(crate) uneven: bool,
}

impl<O> From<&Batch<O>> for Weight {
    /// The number of samples in the batch; none when it is padding.
    fn from(batch: &Batch<O>) -> Self {
        batch.weight()
    }
}

impl From<usize> for Weight {
    fn from(count: usize) -> Self {
        Self::from(count as f64)
    }
}

impl From<f64> for Weight {
    fn from(count: f64) -> Self {
        Self {
            count,
            ends_epoch: false,
            epoch: None,
            mark: None,
            uneven: false,
        }
    }
}
