use std::error::Error;

use accelerator::data::{Epoch, Loader};
use accelerator::optim::Manual;
use accelerator::prelude::*;
use accelerator_benches::Batch;
use burn::optim::AdamWConfig;

use super::{RATE, Side};
use crate::model::Net;

/// The loop with prepared parts.
pub(super) struct Prepared<'a> {
    accelerator: &'a Accelerator,
    batches: Epoch<Batch>,
    /// `None` after a failed step.
    net: Option<Net>,
    optimizer: PreparedOptimizer<Manual>,
}

impl<'a> Prepared<'a> {
    pub(super) fn new(
        accelerator: &'a Accelerator,
        net: Net,
        loader: Loader<Batch>,
    ) -> Result<Self> {
        let parts = (net, AdamWConfig::new().init(), loader);
        let (net, optimizer, loader) = accelerator.prepare(parts)?;
        Ok(Self {
            accelerator,
            batches: loader.epoch(0),
            net: Some(net),
            optimizer,
        })
    }

    fn step(&mut self, seen: impl FnOnce(&AveragedGradients)) -> Result<(), Box<dyn Error>> {
        let accelerator = self.accelerator;
        let net = self.net.take().ok_or("an earlier step failed")?;
        let batch = self.batches.next().ok_or("the data ended")??;
        let loss = accelerator.forward(&net, |net| {
            let logits = net.logits(&batch, |images| accelerator.to_working(images));
            net.loss(accelerator.to_full(logits), &batch)
        });
        let gradients = accelerator.backward(loss, &net, &batch)?;
        seen(&gradients);
        self.net = Some(self.optimizer.step(RATE, net, gradients));
        Ok(())
    }
}

impl Side for Prepared<'_> {
    fn train(&mut self, steps: usize) -> Result<(), Box<dyn Error>> {
        (0..steps).try_for_each(|_| self.step(|_| {}))
    }

    fn loss(&mut self) -> Result<f64, Box<dyn Error>> {
        let mut value = None;
        self.step(|gradients| value = gradients.loss())?;
        Ok(value.ok_or("the step was skipped")?)
    }
}
