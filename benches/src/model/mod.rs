//! The networks to train, and the samples to train them on.

mod mlp;
mod samples;
mod transformer;

use accelerator_examples::{Cnn, CnnConfig, cross_entropy};
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use mlp::Mlp;
pub use samples::{Batch, Numbers, SampleBatcher, SampleKind, Samples};
pub use transformer::{Layers, Shape, Transformer};

/// The classes of the networks that classify.
const CLASSES: usize = 10;

/// The number of distinct samples.
const DIFFERENT: usize = 1024;

/// A network to train.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Model {
    /// The network of the `mnist` example, 1.2 million parameters
    Cnn,
    /// Dense layers 784-1024-1024-10, 1.9 million parameters
    Mlp,
    /// Dense layers 256-256-256-10, with a step of about a millisecond
    SmallMlp,
    /// A causal transformer of 4 layers of width 256 over 64 tokens, 3.3 million parameters
    Transformer,
    /// The same transformer of the layers of `accelerator::ops`
    OpsTransformer,
}

/// One of the networks, with its weights.
#[derive(Debug, Module)]
pub struct Net {
    cnn: Option<Cnn>,
    mlp: Option<Mlp>,
    transformer: Option<Transformer>,
}

impl Model {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cnn => "cnn",
            Self::Mlp => "mlp",
            Self::SmallMlp => "small-mlp",
            Self::Transformer => "transformer",
            Self::OpsTransformer => "ops-transformer",
        }
    }

    /// Returns the default number of samples in a batch.
    pub fn batch_size(self) -> usize {
        match self {
            Self::Cnn | Self::SmallMlp => 64,
            Self::Mlp => 128,
            Self::Transformer | Self::OpsTransformer => 16,
        }
    }

    /// Creates the network with new weights.
    pub fn init(self, device: &Device) -> Net {
        let mut net = Net {
            cnn: None,
            mlp: None,
            transformer: None,
        };
        match self {
            Self::Cnn => net.cnn = Some(CnnConfig::new().init(device)),
            Self::Mlp => net.mlp = Some(Mlp::new(self.inputs(), 1024, CLASSES, device)),
            Self::SmallMlp => net.mlp = Some(Mlp::new(self.inputs(), 256, CLASSES, device)),
            Self::Transformer => {
                net.transformer = Some(Transformer::new(Layers::Burn, Shape::SMALL, device))
            }
            Self::OpsTransformer => {
                net.transformer = Some(Transformer::new(Layers::Ops, Shape::SMALL, device));
            }
        }
        net
    }

    /// Returns the number of values in a sample.
    fn inputs(self) -> usize {
        match self {
            Self::Cnn | Self::Mlp => 784,
            Self::SmallMlp => 256,
            // It reads only labels; not every kernel supports a dimension of length 0.
            Self::Transformer | Self::OpsTransformer => 1,
        }
    }

    /// Creates samples that fit the network.
    pub fn samples(self) -> Samples {
        self.samples_of(Shape::SMALL.length)
    }

    /// Creates batches of this many rows for a transformer, or of the default size: the number of samples, and samples.
    pub fn batches(self, rows: Option<usize>) -> (usize, Samples) {
        let Some(rows) = rows else {
            return (self.batch_size(), self.samples());
        };
        let length = rows.clamp(1, Shape::SMALL.length);
        (rows.div_ceil(length), self.samples_of(length))
    }

    /// Creates samples that fit the network, for a transformer of this many tokens.
    fn samples_of(self, length: usize) -> Samples {
        let (labels, classes) = match self {
            Self::Cnn | Self::Mlp | Self::SmallMlp => (1, CLASSES),
            Self::Transformer | Self::OpsTransformer => (length + 1, Shape::SMALL.tokens),
        };
        let values = self.inputs();
        let kind = SampleKind {
            values,
            labels,
            classes,
        };
        Samples::new(kind, DIFFERENT)
    }
}

impl Net {
    /// Returns the mean cross-entropy over a batch.
    pub fn loss(&self, batch: &Batch) -> Tensor<1> {
        let labels = batch.labels.clone();
        let [samples, count] = labels.dims();
        if let Some(transformer) = &self.transformer {
            let length = count - 1;
            let targets = labels.clone().narrow(1, 1, length);
            let tokens = labels.narrow(1, 0, length);
            return transformer.loss(tokens, targets.reshape([samples * length]), 1);
        }
        let values = batch.values.clone();
        let targets: Tensor<1, Int> = labels.reshape([samples]);
        let logits = match (&self.cnn, &self.mlp) {
            (Some(cnn), _) => cnn.forward(values.reshape([samples, 1, 28, 28])),
            (None, Some(mlp)) => mlp.forward(values),
            (None, None) => values,
        };
        cross_entropy(logits, targets)
    }
}
