use accelerator::nn::Unit;
use accelerator::ops;
use burn::module::Module;
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderLayer};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Bool, Device, Int, Tensor};

/// The sizes of a [`Transformer`].
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// The number of different tokens.
    pub tokens: usize,
    /// The tokens of a sample, without the last one, which is only predicted.
    pub length: usize,
    /// The width of the model.
    pub width: usize,
    /// The attention heads of each layer.
    pub heads: usize,
    /// The number of encoder layers.
    pub layers: usize,
}

/// A language model without dropout: encoder layers with a causal mask, normalised first, with GELU.
#[derive(Debug, Module)]
pub struct Transformer {
    tokens: Embedding,
    places: Embedding,
    layers: Vec<Unit<Layer>>,
    head: Unit<Head>,
}

/// The crate of the layers of a [`Transformer`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Layers {
    /// Burn's layers.
    Burn,
    /// The layers of `accelerator::ops`.
    Ops,
}

#[derive(Debug, Module)]
enum Layer {
    Burn(TransformerEncoderLayer),
    Ops(ops::nn::TransformerEncoderLayer),
}

#[derive(Debug, Module)]
enum Head {
    Burn(Linear),
    Ops(ops::nn::Linear),
}

impl Shape {
    /// 3.3 million parameters, over bytes.
    pub const SMALL: Self = Self {
        tokens: 256,
        length: 64,
        width: 256,
        heads: 4,
        layers: 4,
    };

    /// Returns the number of trained parameters.
    pub const fn parameters(&self) -> usize {
        let Self {
            tokens,
            length,
            width,
            layers,
            ..
        } = *self;
        // Attention has four matrices, feed-forward two of four times the width, all with biases; a layer has two
        // norms.
        let layer =
            4 * (width + 1) * width + (width + 1) * 4 * width + (4 * width + 1) * width + 4 * width;
        tokens * width + length * width + layers * layer + (width + 1) * tokens
    }
}

impl Transformer {
    /// Creates a model with new weights.
    pub fn new(of: Layers, shape: Shape, device: &Device) -> Self {
        let Shape {
            tokens,
            length,
            width,
            heads,
            layers,
        } = shape;
        let config = TransformerEncoderConfig::new(width, 4 * width, heads, layers)
            .with_dropout(0.0)
            .with_norm_first(true);
        let layer = || {
            let layer = TransformerEncoderLayer::new(&config, device);
            Unit::new(match of {
                Layers::Burn => Layer::Burn(layer),
                Layers::Ops => Layer::Ops(layer.into()),
            })
        };
        let head = LinearConfig::new(width, tokens).init(device);
        Self {
            tokens: EmbeddingConfig::new(tokens, width).init(device),
            places: EmbeddingConfig::new(length, width).init(device),
            layers: (0..layers).map(|_| layer()).collect(),
            head: Unit::new(match of {
                Layers::Burn => Head::Burn(head),
                Layers::Ops => Head::Ops(head.into()),
            }),
        }
    }

    /// Returns the logits of the token after each one of `[batch, length]`: `[batch · length, tokens]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        self.head.run(self.features(tokens), Head::forward)
    }

    /// Returns the mean cross-entropy of the predictions for `next`, the token after each one of `[batch, length]`.
    /// Computes it in `parts` chunks of rows, one after another. If units are recomputed, only one chunk's logits are
    /// in memory at a time.
    pub fn loss(&self, tokens: Tensor<2, Int>, next: Tensor<1, Int>, parts: usize) -> Tensor<1> {
        let x = self.features(tokens);
        let rows = x.dims()[0];
        let sums = x
            .chunk(parts, 0)
            .into_iter()
            .zip(next.chunk(parts, 0))
            .map(|part| {
                self.head.run(part, |head, (x, next)| {
                    let rows = x.dims()[0];
                    head.loss(x, next) * rows as f64
                })
            });
        let sum = sums.reduce(|sum, part| sum + part);
        sum.unwrap_or_else(|| Tensor::zeros([1], &self.places.weight.device())) / rows as f64
    }

    /// Returns the input of the head: `[batch · length, width]`.
    fn features(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let [batch, length] = tokens.dims();
        let device = tokens.device();
        let places = Tensor::arange(0..length as i64, &device).unsqueeze::<2>();
        let x = self.tokens.forward(tokens) + self.places.forward(places);
        let mask = generate_autoregressive_mask(batch, length, &device);
        let x = self.layers.iter().fold(x, |x, layer| {
            layer.run((x, mask.clone()), |layer, (x, mask)| layer.forward(x, mask))
        });
        x.flatten::<2>(0, 1)
    }
}

impl Head {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        match self {
            Self::Burn(head) => head.forward(x),
            Self::Ops(head) => head.forward(x),
        }
    }

    fn loss(&self, x: Tensor<2>, next: Tensor<1, Int>) -> Tensor<1> {
        let logits = self.forward(x);
        match self {
            Self::Burn(_) => CrossEntropyLossConfig::new()
                .init(&logits.device())
                .forward(logits, next),
            Self::Ops(_) => ops::cross_entropy(logits, next),
        }
    }
}

impl Layer {
    fn forward(&self, x: Tensor<3>, mask: Tensor<3, Bool>) -> Tensor<3> {
        match self {
            Self::Burn(layer) => layer.forward(x, None, Some(mask)),
            Self::Ops(layer) => layer.forward(x, None, Some(mask)),
        }
    }
}
