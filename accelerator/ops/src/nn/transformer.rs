use core::fmt;
use core::ops::{Deref, DerefMut};

use burn::module::{
    Content, Devices, DisplaySettings, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper,
    ModuleVisitor,
};
use burn::nn::Initializer;
use burn::nn::activation::{Activation, ActivationConfig};
use burn::nn::attention::MhaOutput;
use burn::nn::transformer::PositionWiseFeedForward;
use burn::tensor::{Bool, Device, Tensor};
use serde::{Deserialize, Serialize};

use super::{activated, config, dropped, layer, normed, projected};
use crate::AttentionOptions;

layer! {
    /// Attention of several heads, with its projections.
    MultiHeadAttention(burn::nn::attention::MultiHeadAttention)
}

config! {
    /// The configuration of a [`MultiHeadAttention`] layer.
    MultiHeadAttentionConfig(burn::nn::attention::MultiHeadAttentionConfig) -> MultiHeadAttention,
    new(d_model: usize, n_heads: usize),
    with_dropout(f64), with_min_float(f64), with_quiet_softmax(bool), with_initializer(Initializer),
    with_query_bias(bool), with_key_bias(bool), with_value_bias(bool), with_output_bias(bool); init(device)
}

/// The input of attention: queries, keys and values, each of `[batch, length, width]`, and the keys to leave out.
#[derive(Clone, Debug)]
pub struct MhaInput {
    inputs: [Tensor<3>; 3],
    masks: Masks,
}

/// Masks of keys that are padding, `[batch, keys]`, and of pairs, `[batch, queries, keys]`.
#[derive(Clone, Debug, Default)]
struct Masks {
    padding: Option<Tensor<2, Bool>>,
    pairs: Option<Tensor<3, Bool>>,
}

macro_rules! masks {
    () => {
        /// Leaves out the keys for which the mask, of `[batch, keys]`, is `true`.
        #[must_use]
        pub fn mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
            self.masks.padding = Some(mask_pad);
            self
        }

        /// Leaves out the pairs for which the mask, of `[batch, queries, keys]`, is `true`.
        #[must_use]
        pub fn mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
            self.masks.pairs = Some(mask_attn);
            self
        }
    };
}

impl MhaInput {
    /// Takes queries, keys and values from one tensor.
    pub fn self_attn(tensor: Tensor<3>) -> Self {
        Self::new(tensor.clone(), tensor.clone(), tensor)
    }

    /// Takes queries, keys and values from different tensors.
    pub fn new(query: Tensor<3>, key: Tensor<3>, value: Tensor<3>) -> Self {
        Self {
            inputs: [query, key, value],
            masks: Masks::default(),
        }
    }

    masks!();
}

impl From<MhaInput> for burn::nn::attention::MhaInput {
    fn from(MhaInput { inputs, masks }: MhaInput) -> Self {
        let [query, key, value] = inputs;
        let mut input = Self::new(query, key, value);
        if let Some(mask) = masks.padding {
            input = input.mask_pad(mask);
        }
        if let Some(mask) = masks.pairs {
            input = input.mask_attn(mask);
        }
        input
    }
}

impl MultiHeadAttention {
    /// Returns the context of each query, `[batch, queries, width]`, and not the attention weights, which
    /// [`forward`](Self::forward) returns too.
    ///
    /// Burn's layer computes it if the softmax is quiet.
    ///
    /// # Panics
    ///
    /// Panics if the shapes do not fit.
    pub fn context(&self, input: MhaInput) -> Tensor<3> {
        context(&self.0, input)
    }

    /// Returns the context and the attention weights, as Burn's layer computes them.
    ///
    /// # Panics
    ///
    /// Panics if the shapes do not fit.
    pub fn forward(&self, input: MhaInput) -> MhaOutput {
        self.0.forward(input.into())
    }
}

fn context(layer: &burn::nn::attention::MultiHeadAttention, input: MhaInput) -> Tensor<3> {
    if layer.quiet_softmax {
        return layer.forward(input.into()).context;
    }
    let [query, key, value] = input.inputs;
    let query = projected(&layer.query, query);
    let key = projected(&layer.key, key);
    let value = projected(&layer.value, value);
    let options = AttentionOptions {
        padding: input.masks.padding,
        pairs: input.masks.pairs,
        score: layer.min_float,
        dropout: match layer.dropout.training.is_enabled() {
            true => layer.dropout.prob,
            false => 0.0,
        },
        ..AttentionOptions::new(layer.n_heads)
    };
    projected(&layer.output, crate::attention(query, key, value, options))
}

fn fed_forward(layer: &PositionWiseFeedForward, x: Tensor<3>) -> Tensor<3> {
    let x = projected(&layer.linear_inner, x);
    let x = match &layer.activation {
        Activation::Gelu(gelu) => activated(gelu, x),
        activation => activation.forward(x),
    };
    projected(&layer.linear_outer, dropped(&layer.dropout, x))
}

layer! {
    /// A layer of a transformer's encoder.
    TransformerEncoderLayer(burn::nn::transformer::TransformerEncoderLayer)
}

impl TransformerEncoderLayer {
    /// Creates a layer from the configuration of an encoder.
    pub fn new(config: &TransformerEncoderConfig, device: &Device) -> Self {
        Self(burn::nn::transformer::TransformerEncoderLayer::new(
            config, device,
        ))
    }

    /// Applies the layer to sequences of `[batch, length, width]`.
    pub fn forward(
        &self,
        input: Tensor<3>,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
    ) -> Tensor<3> {
        let masks = Masks {
            padding: mask_pad,
            pairs: mask_attn,
        };
        encoded(&self.0, input, masks)
    }
}

fn encoded(
    layer: &burn::nn::transformer::TransformerEncoderLayer,
    x: Tensor<3>,
    masks: Masks,
) -> Tensor<3> {
    let attended = match layer.norm_first {
        true => normed(&layer.norm_2, x.clone()),
        false => x.clone(),
    };
    let input = MhaInput {
        masks,
        ..MhaInput::self_attn(attended)
    };
    let attended = context(&layer.mha, input);
    let x = x + dropped(&layer.dropout, attended);
    if layer.norm_first {
        let fed = fed_forward(&layer.pwff, normed(&layer.norm_1, x.clone()));
        x + dropped(&layer.dropout, fed)
    } else {
        let x = normed(&layer.norm_1, x);
        let fed = fed_forward(&layer.pwff, x.clone());
        normed(&layer.norm_2, x + dropped(&layer.dropout, fed))
    }
}

layer! {
    /// The encoder of a transformer.
    TransformerEncoder(burn::nn::transformer::TransformerEncoder)
}

config! {
    /// The configuration of a [`TransformerEncoder`].
    TransformerEncoderConfig(burn::nn::transformer::TransformerEncoderConfig) -> TransformerEncoder,
    new(d_model: usize, d_ff: usize, n_heads: usize, n_layers: usize),
    with_dropout(f64), with_norm_first(bool), with_quiet_softmax(bool), with_initializer(Initializer),
    with_activation(ActivationConfig), with_layer_norm_eps(f64); init(device)
}

/// The input of an encoder: sequences of `[batch, length, width]`, and the keys to leave out.
#[derive(Clone, Debug)]
pub struct TransformerEncoderInput {
    tensor: Tensor<3>,
    masks: Masks,
}

impl TransformerEncoderInput {
    /// Takes the sequences.
    pub fn new(tensor: Tensor<3>) -> Self {
        Self {
            tensor,
            masks: Masks::default(),
        }
    }

    masks!();
}

impl TransformerEncoder {
    /// Applies all layers.
    pub fn forward(&self, input: TransformerEncoderInput) -> Tensor<3> {
        let layers = self.0.layers.iter();
        layers.fold(input.tensor, |x, layer| {
            encoded(layer, x, input.masks.clone())
        })
    }
}
