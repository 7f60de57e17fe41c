//! The exchange of ranks that step by themselves.

use core::fmt;

use burn::module::Module;

use super::Trainer;
use crate::accelerator::Tensors;
use crate::core::error::Result;
use crate::local::LocalTraining as _;

impl<M, I, O, P> Trainer<M, I, O, P>
where
    M: Module + fmt::Display + 'static,
    I: fmt::Debug + Send + Sync + 'static,
    O: Send + 'static,
    P: Tensors + Clone + 'static,
{
    /// Puts the mean loss over the samples of all ranks in place of those of each.
    pub(super) fn share_losses(&mut self) -> Result<()> {
        let Some(local) = &mut self.local else {
            return Ok(());
        };
        let losses = self
            .accelerator
            .reduce_metric(core::mem::take(&mut local.losses))?;
        let updates = core::mem::take(&mut local.updates);
        let mean = (losses.samples() > 0.0).then(|| losses.value());
        self.state.add_losses(mean, updates);
        Ok(())
    }

    /// Ends a round of local steps, so that ranks have the same weights.
    pub(super) fn average_weights(&mut self) -> Result<()> {
        match &mut self.local {
            Some(local) => local.sgd.average(self.model.get_mut()),
            None => Ok(()),
        }
    }
}
