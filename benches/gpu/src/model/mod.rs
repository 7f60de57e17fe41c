//! The networks to train, and the samples to train them on.

use accelerator_benches::{Batch, Layers, SampleKind, Samples, Shape, Transformer};
use accelerator_examples::{Cnn, CnnConfig, cross_entropy};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Int, Tensor};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::setting::Size;

/// The transformer of 50 million parameters.
const FULL: Shape = Shape {
    tokens: 12_288,
    length: 256,
    width: 512,
    heads: 8,
    layers: 12,
};

/// A transformer to try things out.
const TINY: Shape = Shape {
    tokens: 64,
    length: 16,
    width: 32,
    heads: 4,
    layers: 2,
};

/// The number of distinct samples.
const DIFFERENT: usize = 4096;

/// The number of classes that the classifying network tells apart.
const CLASSES: usize = 10;

/// The number of pixels in an image.
const PIXELS: usize = 784;

/// The network.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// The network of the `mnist` example, 1.2 million parameters
    Cnn,
    /// A causal transformer, 50 million parameters
    Transformer,
}

/// A network of some size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Model {
    kind: Kind,
    size: Size,
}

/// One of the networks, with its weights.
#[derive(Debug, Module)]
pub(crate) struct Net {
    cnn: Option<Cnn>,
    transformer: Option<Transformer>,
}

impl Model {
    pub(crate) fn new(kind: Kind, size: Size) -> Self {
        Self { kind, size }
    }

    /// Returns the default number of samples in a batch.
    pub(crate) fn batch_size(self) -> usize {
        match (self.kind, self.size) {
            (Kind::Cnn, Size::Full) => 1024,
            (Kind::Cnn, Size::Tiny) => 16,
            (Kind::Transformer, Size::Full) => 32,
            (Kind::Transformer, Size::Tiny) => 4,
        }
    }

    /// Creates the network with new weights, without dropout.
    pub(crate) fn init(self, device: &Device) -> Net {
        let net = match self.kind {
            Kind::Cnn => Net {
                cnn: Some(CnnConfig::new().with_dropout(0.0).init(device)),
                transformer: None,
            },
            Kind::Transformer => Net {
                cnn: None,
                transformer: Some(Transformer::new(Layers::Burn, self.shape(), device)),
            },
        };
        // Without this, Burn would draw each weight on first use, in an order that depends on the loop.
        net.parameters();
        net
    }

    /// Creates samples that fit the network.
    pub(crate) fn samples(self) -> Samples {
        let kind = match self.kind {
            Kind::Cnn => SampleKind {
                values: PIXELS,
                labels: 1,
                classes: CLASSES,
            },
            Kind::Transformer => SampleKind {
                // It reads only labels; not every kernel supports a dimension of length 0.
                values: 1,
                labels: self.shape().length + 1,
                classes: self.shape().tokens,
            },
        };
        Samples::new(kind, DIFFERENT)
    }

    fn shape(self) -> Shape {
        match self.size {
            Size::Full => FULL,
            Size::Tiny => TINY,
        }
    }
}

impl Net {
    /// Returns the logits of a batch, `[predictions, classes]`. Float inputs pass through `to_working`.
    pub(crate) fn logits(
        &self,
        batch: &Batch,
        to_working: impl FnOnce(Tensor<4>) -> Tensor<4>,
    ) -> Tensor<2> {
        let [samples, count] = batch.labels.dims();
        if let Some(transformer) = &self.transformer {
            return transformer.forward(batch.labels.clone().narrow(1, 0, count - 1));
        }
        let images = batch.values.clone().reshape([samples, 1, 28, 28]);
        match &self.cnn {
            Some(cnn) => cnn.forward(to_working(images)),
            None => batch.values.clone(),
        }
    }

    /// Returns the mean cross-entropy of such logits, which are in full precision.
    pub(crate) fn loss(&self, logits: Tensor<2>, batch: &Batch) -> Tensor<1> {
        let labels = batch.labels.clone();
        let [samples, count] = labels.dims();
        let targets: Tensor<1, Int> = match &self.transformer {
            Some(_) => labels
                .narrow(1, 1, count - 1)
                .reshape([samples * (count - 1)]),
            None => labels.reshape([samples]),
        };
        cross_entropy(logits, targets)
    }

    /// Returns the number of trained parameters.
    pub(crate) fn parameters(&self) -> usize {
        struct Count(usize);
        impl ModuleVisitor for Count {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.0 += param.val().shape().num_elements();
            }
        }
        let mut count = Count(0);
        self.visit(&mut count);
        count.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_full_transformer_has_about_fifty_million_parameters() {
        let all = FULL.parameters();
        assert!((49_000_000..52_000_000).contains(&all), "{all}");
    }

    #[test]
    fn the_tiny_one_has_as_many_as_its_shape_says() {
        let net = Model::new(Kind::Transformer, Size::Tiny).init(&Device::flex());
        assert_eq!(net.parameters(), TINY.parameters());
    }
}
