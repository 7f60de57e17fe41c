use burn::module::Module;
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};

/// The sizes of a [`Transformer`].
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// How many different tokens there are.
    pub tokens: usize,
    /// Tokens of one sample, without the last one, which is only predicted.
    pub length: usize,
    /// Numbers that stand for a token.
    pub width: usize,
    /// Attention heads of a layer.
    pub heads: usize,
    /// Encoder layers.
    pub layers: usize,
}

/// A language model of encoder layers under a causal mask, normalised first, GELU, without dropout.
#[derive(Debug, Module)]
pub struct Transformer {
    tokens: Embedding,
    places: Embedding,
    encoder: TransformerEncoder,
    head: Linear,
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

    /// How many numbers are trained.
    pub const fn parameters(&self) -> usize {
        let Self {
            tokens,
            length,
            width,
            layers,
            ..
        } = *self;
        // Attention: four matrices; feed-forward: two of four times the width; each with biases; two norms.
        let layer =
            4 * (width + 1) * width + (width + 1) * 4 * width + (4 * width + 1) * width + 4 * width;
        tokens * width + length * width + layers * layer + (width + 1) * tokens
    }
}

impl Transformer {
    /// One with new weights.
    pub fn new(shape: Shape, device: &Device) -> Self {
        let Shape {
            tokens,
            length,
            width,
            heads,
            layers,
        } = shape;
        Self {
            tokens: EmbeddingConfig::new(tokens, width).init(device),
            places: EmbeddingConfig::new(length, width).init(device),
            encoder: TransformerEncoderConfig::new(width, 4 * width, heads, layers)
                .with_dropout(0.0)
                .with_norm_first(true)
                .init(device),
            head: LinearConfig::new(width, tokens).init(device),
        }
    }

    /// The logits of what follows each token of `[batch, length]`: `[batch · length, tokens]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let [batch, length] = tokens.dims();
        let device = tokens.device();
        let places = Tensor::arange(0..length as i64, &device).unsqueeze::<2>();
        let x = self.tokens.forward(tokens) + self.places.forward(places);
        let mask = generate_autoregressive_mask(batch, length, &device);
        let input = TransformerEncoderInput::new(x).mask_attn(mask);
        let logits = self.head.forward(self.encoder.forward(input));
        let [_, _, known] = logits.dims();
        logits.reshape([batch * length, known])
    }
}
