use accelerator::nn::Unit;
use accelerator::ops;
use accelerator::ops::nn::{
    Embedding, EmbeddingConfig, Linear, LinearConfig, TransformerEncoderConfig,
    TransformerEncoderLayer,
};
use burn::config::Config;
use burn::module::{Initializer, Module, Param};
use burn::nn::attention::generate_autoregressive_mask;
use burn::tensor::{Bool, Device, Int, Tensor};

/// The settings of a [`Transformer`].
#[derive(Config, Debug)]
pub struct TransformerConfig {
    /// The number of different tokens.
    pub tokens: usize,
    /// The most tokens that the model sees at once.
    pub length: usize,
    /// The width of the model, a multiple of four.
    #[config(default = 64)]
    pub width: usize,
    /// The number of attention heads.
    #[config(default = 4)]
    pub heads: usize,
    /// The number of layers.
    #[config(default = 2)]
    pub layers: usize,
    /// The probability of dropping a value.
    #[config(default = 0.0)]
    pub dropout: f64,
    /// If true, the token embedding is the output layer as well.
    #[config(default = false)]
    pub tied: bool,
}

/// A small language model: encoder layers with a causal mask, and layer normalisation before each.
#[derive(Debug, Module)]
pub struct Transformer {
    tokens: Embedding,
    places: Embedding,
    encoder: Encoder,
    head: Unit<Head>,
}

/// A `TransformerEncoder` with layers whose activations can be recomputed.
#[derive(Debug, Module)]
struct Encoder {
    layers: Vec<Unit<TransformerEncoderLayer>>,
}

/// The output layer.
#[derive(Debug, Module)]
enum Head {
    Linear(Linear),
    /// A clone of the token embedding: one parameter in two places.
    Tied(Param<Tensor<2>>),
}

impl TransformerConfig {
    /// Creates a model with random weights.
    pub fn init(&self, device: &Device) -> Transformer {
        let tokens = EmbeddingConfig::new(self.tokens, self.width);
        let (tokens, head) = if self.tied {
            // Gives logits of about 1.
            let std = 1.0 / (self.width as f64).sqrt();
            let tokens = tokens.with_initializer(Initializer::Normal { mean: 0.0, std });
            let tokens = tokens.init(device);
            let head = Head::Tied(tokens.weight.clone());
            (tokens, head)
        } else {
            let head = LinearConfig::new(self.width, self.tokens);
            (tokens.init(device), Head::Linear(head.init(device)))
        };
        let encoder =
            TransformerEncoderConfig::new(self.width, 4 * self.width, self.heads, self.layers)
                .with_dropout(self.dropout)
                .with_norm_first(true);
        let layer = || Unit::new(TransformerEncoderLayer::new(&encoder, device));
        Transformer {
            tokens,
            places: EmbeddingConfig::new(self.length, self.width).init(device),
            encoder: Encoder {
                layers: (0..self.layers).map(|_| layer()).collect(),
            },
            head: Unit::new(head),
        }
    }
}

impl Encoder {
    fn forward(&self, mut x: Tensor<3>, mask: &Tensor<3, Bool>) -> Tensor<3> {
        for layer in &self.layers {
            x = layer.run((x, mask.clone()), |layer, (x, mask)| {
                layer.forward(x, None, Some(mask))
            });
        }
        x
    }
}

impl Head {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        match self {
            Self::Linear(linear) => linear.forward(x),
            Self::Tied(tokens) => ops::linear(x, tokens.val().transpose(), None),
        }
    }
}

impl Transformer {
    /// Returns the logits of the token after each one of `[batch, length]`: `[batch · length, tokens]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let [batch, length] = tokens.dims();
        let device = tokens.device();
        let places = Tensor::arange(0..length as i64, &device).unsqueeze::<2>();
        let x = self.tokens.forward(tokens) + self.places.forward(places);
        let mask = generate_autoregressive_mask(batch, length, &device);
        let x = self.encoder.forward(x, &mask).flatten::<2>(0, 1);
        self.head.run(x, Head::forward)
    }

    /// Appends the `count` most probable tokens one by one, each from the last `length` tokens.
    pub fn continued(
        &self,
        tokens: &[usize],
        length: usize,
        count: usize,
        device: &Device,
    ) -> Vec<usize> {
        let mut tokens = tokens.to_vec();
        for _ in 0..count {
            let seen = &tokens[tokens.len().saturating_sub(length)..];
            let seen: Vec<i64> = seen.iter().map(|&token| token as i64).collect();
            let rows = seen.len();
            let seen = Tensor::<1, Int>::from_data(&seen[..], device).unsqueeze::<2>();
            let next = self.forward(seen).narrow(0, rows - 1, 1).argmax(1);
            tokens.push(next.into_scalar::<i64>() as usize);
        }
        tokens
    }
}
