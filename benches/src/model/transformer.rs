use burn::module::Module;
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};

/// How many different tokens there are.
pub(super) const TOKENS: usize = 256;
/// Tokens of one sample, without the last one, which is only predicted.
pub(super) const LENGTH: usize = 64;
const LAYERS: usize = 4;
const WIDTH: usize = 256;

/// A language model over bytes: four encoder layers of width 256 under a causal mask.
#[derive(Debug, Module)]
pub(super) struct Transformer {
    tokens: Embedding,
    places: Embedding,
    encoder: TransformerEncoder,
    head: Linear,
}

impl Transformer {
    pub(super) fn new(device: &Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(TOKENS, WIDTH).init(device),
            places: EmbeddingConfig::new(LENGTH, WIDTH).init(device),
            encoder: TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 4, LAYERS)
                .with_dropout(0.0)
                .with_norm_first(true)
                .init(device),
            head: LinearConfig::new(WIDTH, TOKENS).init(device),
        }
    }

    /// The logits of the token that follows each one, `[batch · length, tokens]`.
    pub(super) fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let [batch, length] = tokens.dims();
        let device = tokens.device();
        let places = Tensor::arange(0..length as i64, &device).unsqueeze::<2>();
        let x = self.tokens.forward(tokens) + self.places.forward(places);
        let mask = generate_autoregressive_mask(batch, length, &device);
        let x = self
            .encoder
            .forward(TransformerEncoderInput::new(x).mask_attn(mask));
        self.head.forward(x).reshape([batch * length, TOKENS])
    }
}
