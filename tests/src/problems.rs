//! Small problems whose results must not depend on the world size.

use accelerator::Clip;
use accelerator::optim::Sharded;
use accelerator::prelude::*;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Dropout, DropoutConfig, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::activation::{relu, tanh};
use burn::tensor::{Device, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};

/// The network to train, its optimizer, and its data.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct Setting {
    pub net: Which,
    pub optimizer: Rule,
    pub clipping: Clipping,
    pub samples: usize,
    /// The samples of a global batch.
    pub global_batch: usize,
    pub epochs: u64,
    /// The seed of the accelerator; only dropout depends on it.
    pub seed: u64,
    /// The probability of dropout in the MLP.
    pub dropout: f64,
    pub state: State,
}

impl Setting {
    /// Returns a setting with AdamW and norm clipping. In its global batches, the last batch holds a single sample.
    pub const fn of(net: Which) -> Self {
        Self {
            net,
            optimizer: Rule::Adamw,
            clipping: Clipping::Norm,
            samples: 61,
            global_batch: 12,
            epochs: 2,
            seed: 0,
            dropout: 0.0,
            state: State::Whole,
        }
    }
}

/// The placement of the optimizer's state.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub enum State {
    /// Sharded over the ranks.
    Sharded,
    Whole,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub enum Which {
    Cnn,
    Mlp,
    /// Reads rows of pixels as tokens.
    Transformer,
    /// An MLP with a parameter that is large enough to shard.
    Wide,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub enum Rule {
    Adamw,
    Sgd,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub enum Clipping {
    /// One L2 norm.
    Norm,
    /// The third norm, the largest magnitude of one layer, and each element.
    Manifold,
}

impl Clipping {
    fn of(self, gradients: AveragedGradients) -> AveragedGradients {
        match self {
            Self::Norm => gradients.clip_norm(1.0),
            Self::Manifold => gradients
                .clip(Clip::norm(0.5).of_order(3.0))
                .clip(
                    Clip::norm(0.05)
                        .of_order(f64::INFINITY)
                        .only(|path| path.starts_with("output.")),
                )
                .clip_value(0.04),
        }
    }
}

/// The result of a run.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Outcome {
    pub losses: Vec<f64>,
    pub parameters: Vec<f64>,
    pub steps: u64,
    /// The number of idle batches of this rank.
    pub idle: usize,
}

impl Outcome {
    /// Returns the largest difference of a parameter.
    pub fn distance(&self, other: &Self) -> f64 {
        assert_eq!(self.parameters.len(), other.parameters.len());
        self.parameters
            .iter()
            .zip(&other.parameters)
            .map(|(ours, theirs)| (ours - theirs).abs())
            .fold(0.0, f64::max)
    }
}

/// Trains with shuffling and clipping, and returns the parameters.
pub fn train(accelerator: &Accelerator, setting: &Setting) -> Result<Outcome> {
    match setting.net {
        Which::Cnn => fit(
            accelerator,
            setting,
            Cnn::new(&accelerator.device()),
            Cnn::forward,
        ),
        Which::Mlp => fit(
            accelerator,
            setting,
            Mlp::new(&accelerator.device(), 16, setting.dropout),
            Mlp::forward,
        ),
        Which::Transformer => fit(
            accelerator,
            setting,
            Transformer::new(&accelerator.device()),
            Transformer::forward,
        ),
        Which::Wide => fit(
            accelerator,
            setting,
            Mlp::new(&accelerator.device(), 256, setting.dropout),
            Mlp::forward,
        ),
    }
}

fn fit<M: Module + std::fmt::Display + 'static>(
    accelerator: &Accelerator,
    setting: &Setting,
    model: M,
    forward: fn(&M, Tensor<4>) -> Tensor<2>,
) -> Result<Outcome> {
    let model = with_fixed_weights(model);
    let optimizer: ModuleOptimizer = match setting.optimizer {
        Rule::Adamw => AdamWConfig::new().with_weight_decay(0.01).init(),
        Rule::Sgd => SgdConfig::new().init(),
    };
    let train = LoaderBuilder::new(PictureBatcher)
        .global_batch_size(setting.global_batch)
        .shuffle(3)
        .build(InMemDataset::new((0..setting.samples).collect()));
    let (mut model, mut optimizer, train) = match setting.state {
        State::Sharded => accelerator.prepare((model, Sharded(optimizer), train))?,
        State::Whole => accelerator.prepare((model, optimizer, train))?,
    };
    let (mut losses, mut idle) = (Vec::new(), 0);
    for epoch in 0..setting.epochs {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            idle += usize::from(batch.is_idle());
            let loss = CrossEntropyLossConfig::new()
                .init(&accelerator.device())
                .forward(
                    forward(&model, batch.pictures.clone()),
                    batch.targets.clone(),
                );
            let gradients = accelerator.backward(loss, &model, &batch)?;
            let gradients = setting.clipping.of(gradients);
            losses.extend(gradients.loss());
            model = optimizer.step(0.02, model, gradients);
        }
    }
    accelerator.finish()?;
    let mut parameters = Vec::new();
    model.visit(&mut Flat(&mut parameters));
    Ok(Outcome {
        losses,
        parameters,
        steps: optimizer.steps(),
        idle,
    })
}

#[derive(Debug, Module)]
pub(crate) struct Cnn {
    first: Conv2d,
    second: Conv2d,
    output: Linear,
}

impl Cnn {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            first: Conv2dConfig::new([1, 3], [3, 3]).init(device),
            second: Conv2dConfig::new([3, 4], [3, 3]).init(device),
            output: LinearConfig::new(4 * 4 * 4, 5).init(device),
        }
    }

    pub(crate) fn forward(&self, pictures: Tensor<4>) -> Tensor<2> {
        let x = tanh(self.first.forward(pictures));
        let x = relu(self.second.forward(x));
        self.output.forward(x.flatten(1, 3))
    }
}

#[derive(Debug, Module)]
pub(crate) struct Mlp {
    hidden: Linear,
    dropout: Dropout,
    output: Linear,
    /// Never used: it must stay without a gradient, and unchanged.
    unused: Linear,
}

impl Mlp {
    pub(crate) fn new(device: &Device, width: usize, dropout: f64) -> Self {
        Self {
            hidden: LinearConfig::new(64, width).init(device),
            dropout: DropoutConfig::new(dropout).init(),
            output: LinearConfig::new(width, 5).init(device),
            unused: LinearConfig::new(2, 2).init(device),
        }
    }

    pub(crate) fn forward(&self, pictures: Tensor<4>) -> Tensor<2> {
        let hidden = tanh(self.hidden.forward(pictures.flatten(1, 3)));
        self.output.forward(self.dropout.forward(hidden))
    }
}

#[derive(Debug, Module)]
struct Transformer {
    places: Embedding,
    encoder: TransformerEncoder,
    output: Linear,
}

impl Transformer {
    fn new(device: &Device) -> Self {
        Self {
            places: EmbeddingConfig::new(8, 8).init(device),
            encoder: TransformerEncoderConfig::new(8, 16, 2, 2)
                .with_dropout(0.0)
                .with_norm_first(true)
                .init(device),
            output: LinearConfig::new(8, 5).init(device),
        }
    }

    fn forward(&self, pictures: Tensor<4>) -> Tensor<2> {
        let rows: Tensor<3> = pictures.squeeze_dim(1);
        let places = Tensor::<1, Int>::arange(0..8, &rows.device()).unsqueeze();
        let tokens = rows + self.places.forward(places);
        let encoded = self.encoder.forward(TransformerEncoderInput::new(tokens));
        self.output.forward(encoded.mean_dim(1).squeeze_dim(1))
    }
}

/// Pictures of 8 × 8 values and their classes, made from the numbers of the samples.
#[derive(Clone, Debug)]
pub(crate) struct Pictures {
    pub(crate) pictures: Tensor<4>,
    pub(crate) targets: Tensor<1, Int>,
}

pub(crate) struct PictureBatcher;

impl Batcher<usize, Pictures> for PictureBatcher {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Pictures {
        let pixel = |sample: usize, at: usize| noise(sample * 64 + at) + (sample % 5) as f64 * 0.1;
        let values: Vec<f64> = items
            .iter()
            .flat_map(|&sample| (0..64).map(move |at| pixel(sample, at)))
            .collect();
        let targets: Vec<i64> = items.iter().map(|sample| (sample % 5) as i64).collect();
        let shape = [items.len(), 1, 8, 8];
        Pictures {
            pictures: Tensor::from_data(TensorData::new(values, shape), device),
            targets: Tensor::from_data(TensorData::new(targets, [items.len()]), device),
        }
    }
}

/// Maps a number to a pseudorandom one from -0.5 to 0.5.
pub(crate) fn noise(number: usize) -> f64 {
    let mixed = accelerator::plan::mix(&[number as u64]);
    (mixed >> 11) as f64 / (1_u64 << 53) as f64 - 0.5
}

/// Replaces the weights by ones that do not depend on the generator of the process, which threads share.
pub(crate) fn with_fixed_weights<M: Module + 'static>(model: M) -> M {
    struct Fixed(usize);
    impl burn::module::ModuleMapper for Fixed {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let (id, old, mapper) = param.consume();
            let dims = old.dims();
            let count = dims.iter().product();
            let values: Vec<f64> = (0..count)
                .map(|at| 0.6 * noise(1_000_000 + self.0 + at))
                .collect();
            self.0 += count;
            let new =
                Tensor::from_data(TensorData::new(values, dims), (&old.device(), old.dtype()))
                    .set_require_grad(old.is_require_grad());
            Param::from_mapped_value(id, new, mapper)
        }
    }
    model.map(&mut Fixed(0))
}

/// Appends all floating-point values of a module, in the order of its fields.
pub(crate) fn flat<M: Module + 'static>(model: &M, values: &mut Vec<f64>) {
    model.visit(&mut Flat(values));
}

struct Flat<'a>(&'a mut Vec<f64>);

impl ModuleVisitor for Flat<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.extend(
            param
                .val()
                .into_data()
                .convert::<f64>()
                .try_to_vec::<f64>()
                .unwrap(),
        );
    }
}
