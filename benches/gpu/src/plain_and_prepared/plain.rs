use std::error::Error;

use accelerator_benches::Batch;
use burn::data::dataloader::DataLoaderIterator;
use burn::module::{Module, ModuleMapper, Param};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{FloatDType, Tensor};

use super::{RATE, Side};
use crate::model::Net;

/// The loop that users of Burn write by hand.
pub(super) struct Plain<'a> {
    batches: Box<dyn DataLoaderIterator<Batch> + 'a>,
    half: Option<FloatDType>,
    /// `None` after a failed step.
    net: Option<Net>,
    optimizer: ModuleOptimizer,
}

impl<'a> Plain<'a> {
    pub(super) fn new(
        net: Net,
        half: Option<FloatDType>,
        batches: Box<dyn DataLoaderIterator<Batch> + 'a>,
    ) -> Self {
        Self {
            batches,
            half,
            net: Some(net),
            optimizer: AdamWConfig::new().init(),
        }
    }

    pub(super) fn parameters(&self) -> usize {
        self.net.as_ref().map_or(0, Net::parameters)
    }

    fn step(&mut self, seen: impl FnOnce(&Tensor<1>)) -> Result<(), Box<dyn Error>> {
        let net = self.net.take().ok_or("an earlier step failed")?;
        let batch = self.batches.next().ok_or("the data ended")??;
        let loss = match self.half {
            None => net.loss(net.logits(&batch, |images| images), &batch),
            Some(half) => {
                let copy = net.clone().map(&mut Cast(half));
                let logits = copy.logits(&batch, |images| images.cast(half));
                net.loss(logits.cast(FloatDType::F32), &batch)
            }
        };
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        self.net = Some(self.optimizer.step(RATE, net, gradients));
        seen(&loss);
        Ok(())
    }
}

impl Side for Plain<'_> {
    fn train(&mut self, steps: usize) -> Result<(), Box<dyn Error>> {
        (0..steps).try_for_each(|_| self.step(|_| {}))
    }

    fn loss(&mut self) -> Result<f64, Box<dyn Error>> {
        let mut value = f64::NAN;
        self.step(|loss| value = loss.clone().into_scalar::<f64>())?;
        Ok(value)
    }
}

/// Casts parameters within the graph, so that their gradients are in full precision.
struct Cast(FloatDType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, mapper) = param.consume();
        Param::from_mapped_value(id, value.cast(self.0), mapper)
    }
}
