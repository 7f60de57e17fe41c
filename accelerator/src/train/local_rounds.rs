//! Local SGD within a trainer.

use burn::module::Module;

use crate::accelerator::Accelerator;
use crate::core::error::Result;
use crate::local::{LocalSgd, LocalSgdConfig};
use crate::metric::Mean;
use crate::reduce::AveragedGradients;

/// The training of a rank by itself between two averages of the weights.
pub(super) struct LocalRounds {
    pub(super) sgd: LocalSgd,
    /// The losses of this rank that were not shared yet, and how many updates they are of.
    pub(super) losses: Mean,
    pub(super) updates: u64,
}

impl LocalRounds {
    pub(super) fn begin<M: Module>(
        accelerator: &Accelerator,
        model: &M,
        every: u64,
    ) -> Result<Self> {
        Ok(Self {
            sgd: LocalSgdConfig::new(every).init(accelerator, model)?,
            losses: Mean::new(),
            updates: 0,
        })
    }

    /// Notes the loss of an update, over the samples of this rank.
    pub(super) fn note(&mut self, gradients: &AveragedGradients) {
        self.updates += 1;
        if let (Some(loss), Some(samples)) = (gradients.loss(), gradients.samples()) {
            self.losses.update(loss, samples as usize);
        }
    }
}
