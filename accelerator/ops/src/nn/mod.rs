//! Layers of the same names, parameters and records as Burn's, which compute with the operations of this crate.
//!
//! A layer holds Burn's layer of the same name, to which it dereferences, and converts from it and to it. Fields, and
//! methods that are not here, are those of Burn's layer. Records and model files of one can be loaded into the other.

mod lstm;
mod transformer;

use core::fmt;
use core::ops::{Deref, DerefMut};

use burn::module::{
    Content, Devices, DisplaySettings, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper,
    ModuleVisitor,
};
use burn::nn::{Initializer, LinearLayout, PaddingConfig1d, PaddingConfig2d};
use burn::tensor::ops::{AvgPoolOptions, ConvOptions, MaxPoolOptions};
use burn::tensor::{Device, Int, Tensor};
use serde::{Deserialize, Serialize};

pub use self::lstm::{Lstm, LstmConfig};
pub use self::transformer::{
    MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, TransformerEncoder,
    TransformerEncoderConfig, TransformerEncoderInput, TransformerEncoderLayer,
};

/// A layer that holds Burn's layer of the same name.
macro_rules! layer {
    ($(#[$doc:meta])* $name:ident($burns:path)) => {
        $(#[$doc])*
        #[derive(Clone)]
        pub struct $name($burns);

        impl From<$burns> for $name {
            fn from(layer: $burns) -> Self {
                Self(layer)
            }
        }

        impl From<$name> for $burns {
            fn from(layer: $name) -> Self {
                layer.0
            }
        }

        impl Deref for $name {
            type Target = $burns;

            fn deref(&self) -> &$burns {
                &self.0
            }
        }

        impl DerefMut for $name {
            fn deref_mut(&mut self) -> &mut $burns {
                &mut self.0
            }
        }

        impl Module for $name {
            fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
                self.0.visit(visitor);
            }

            fn map<T: ModuleMapper>(self, mapper: &mut T) -> Self {
                Self(self.0.map(mapper))
            }

            fn collect_devices(&self, devices: Devices) -> Devices {
                self.0.collect_devices(devices)
            }

            fn fork(self, device: &Device) -> Self {
                Self(self.0.fork(device))
            }

            fn to_device(self, device: &Device) -> Self {
                Self(self.0.to_device(device))
            }

            fn train(self) -> Self {
                Self(self.0.train())
            }

            fn valid(&self) -> Self {
                Self(self.0.valid())
            }

            fn materialize(self) -> Self {
                Self(self.0.materialize())
            }
        }

        impl ModuleDisplayDefault for $name {
            fn content(&self, content: Content) -> Option<Content> {
                self.0.content(content)
            }

            fn num_params(&self) -> usize {
                ModuleDisplayDefault::num_params(&self.0)
            }
        }

        impl ModuleDisplay for $name {
            fn format(&self, settings: DisplaySettings) -> String {
                self.0.format(settings)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }
    };
}

/// The configuration of a layer, which holds Burn's configuration of the same name.
macro_rules! config {
    ($(#[$doc:meta])* $name:ident($burns:path) -> $layer:ident, new($($argument:ident: $type:ty),*)
        $(, $setter:ident($value:ty))*; init($($device:ident)?)) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Deserialize, Serialize)]
        #[serde(transparent)]
        pub struct $name($burns);

        impl $name {
            /// The same as the function of this name of Burn's configuration.
            pub fn new($($argument: $type),*) -> Self {
                Self(<$burns>::new($($argument),*))
            }

            $(
                /// The same as the function of this name of Burn's configuration.
                #[must_use]
                pub fn $setter(self, value: $value) -> Self {
                    Self(self.0.$setter(value))
                }
            )*

            /// Creates the layer.
            pub fn init(&self $(, $device: &Device)?) -> $layer {
                self.0.init($($device)?).into()
            }
        }

        impl burn::config::Config for $name {}

        impl From<$burns> for $name {
            fn from(config: $burns) -> Self {
                Self(config)
            }
        }

        impl Deref for $name {
            type Target = $burns;

            fn deref(&self) -> &$burns {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

pub(crate) use {config, layer};

layer! {
    /// A linear layer, `input · weight + bias`, which is one operation of the graph on every backend of this crate's
    /// features.
    Linear(burn::nn::Linear)
}

config! {
    /// The configuration of a [`Linear`] layer.
    LinearConfig(burn::nn::LinearConfig) -> Linear, new(d_input: usize, d_output: usize),
    with_bias(bool), with_initializer(Initializer), with_layout(LinearLayout); init(device)
}

impl Linear {
    /// Computes an output of `[…, outputs]` from an input of `[…, inputs]`; see [`linear`](crate::linear).
    ///
    /// # Panics
    ///
    /// Panics if the last dimension of the input is not the number of inputs.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        projected(&self.0, input)
    }
}

fn projected<const D: usize>(layer: &burn::nn::Linear, input: Tensor<D>) -> Tensor<D> {
    let bias = layer.bias.as_ref().map(|bias| bias.val());
    crate::linear(input, layer.weight.val(), bias)
}

layer! {
    /// A convolution of two dimensions.
    Conv2d(burn::nn::conv::Conv2d)
}

config! {
    /// The configuration of a [`Conv2d`] layer.
    Conv2dConfig(burn::nn::conv::Conv2dConfig) -> Conv2d, new(channels: [usize; 2], kernel_size: [usize; 2]),
    with_stride([usize; 2]), with_dilation([usize; 2]), with_groups(usize), with_padding(PaddingConfig2d),
    with_bias(bool), with_initializer(Initializer); init(device)
}

impl Conv2d {
    /// Convolves images of `[batch, channels, height, width]`.
    pub fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        let (weight, bias, options) = self.parts(&input);
        crate::conv2d(input, weight, bias, options)
    }

    /// Convolves images and applies a rectified linear unit; see [`conv2d_relu`](crate::conv2d_relu).
    pub fn forward_relu(&self, input: Tensor<4>) -> Tensor<4> {
        let (weight, bias, options) = self.parts(&input);
        crate::conv2d_relu(input, weight, bias, options)
    }

    fn parts(&self, input: &Tensor<4>) -> (Tensor<4>, Option<Tensor<1>>, ConvOptions<2>) {
        let Self(layer) = self;
        let padding = padding(&layer.padding, input, layer.kernel_size, layer.stride);
        let options =
            ConvOptions::new_with_padding(layer.stride, padding, layer.dilation, layer.groups);
        let bias = layer.bias.as_ref().map(|bias| bias.val());
        (layer.weight.val(), bias, options)
    }
}

layer! {
    /// A convolution of one dimension.
    Conv1d(burn::nn::conv::Conv1d)
}

config! {
    /// The configuration of a [`Conv1d`] layer.
    Conv1dConfig(burn::nn::conv::Conv1dConfig) -> Conv1d,
    new(channels_in: usize, channels_out: usize, kernel_size: usize),
    with_stride(usize), with_dilation(usize), with_groups(usize), with_padding(PaddingConfig1d), with_bias(bool),
    with_initializer(Initializer); init(device)
}

impl Conv1d {
    /// Convolves sequences of `[batch, channels, length]`; see [`conv1d`](crate::conv1d).
    ///
    /// # Panics
    ///
    /// Panics if the shapes do not fit.
    pub fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        let Self(layer) = self;
        let padding = padding_1d(&layer.padding, &input, layer.kernel_size, layer.stride);
        let options = ConvOptions::new_with_padding(
            [layer.stride],
            [padding],
            [layer.dilation],
            layer.groups,
        );
        let bias = layer.bias.as_ref().map(|bias| bias.val());
        crate::conv1d(input, layer.weight.val(), bias, options)
    }
}

layer! {
    /// Max pooling over images.
    MaxPool2d(burn::nn::pool::MaxPool2d)
}

config! {
    /// The configuration of a [`MaxPool2d`] layer.
    MaxPool2dConfig(burn::nn::pool::MaxPool2dConfig) -> MaxPool2d, new(kernel_size: [usize; 2]),
    with_strides([usize; 2]), with_padding(PaddingConfig2d), with_dilation([usize; 2]), with_ceil_mode(bool); init()
}

impl MaxPool2d {
    /// Pools images of `[batch, channels, height, width]`.
    pub fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        let Self(layer) = self;
        let padding = padding(&layer.padding, &input, layer.kernel_size, layer.stride);
        let options = MaxPoolOptions::new(layer.kernel_size)
            .with_stride(layer.stride)
            .with_padding_pairs(padding)
            .with_dilation(layer.dilation)
            .with_ceil_mode(layer.ceil_mode);
        crate::max_pool2d(input, options)
    }
}

layer! {
    /// Max pooling over sequences.
    MaxPool1d(burn::nn::pool::MaxPool1d)
}

config! {
    /// The configuration of a [`MaxPool1d`] layer.
    MaxPool1dConfig(burn::nn::pool::MaxPool1dConfig) -> MaxPool1d, new(kernel_size: usize),
    with_stride(usize), with_padding(PaddingConfig1d), with_dilation(usize), with_ceil_mode(bool); init()
}

impl MaxPool1d {
    /// Pools sequences of `[batch, channels, length]`.
    pub fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        let Self(layer) = self;
        let padding = padding_1d(&layer.padding, &input, layer.kernel_size, layer.stride);
        let options = MaxPoolOptions::new([layer.kernel_size])
            .with_stride([layer.stride])
            .with_padding_pairs([padding])
            .with_dilation([layer.dilation])
            .with_ceil_mode(layer.ceil_mode);
        crate::max_pool1d(input, options)
    }
}

layer! {
    /// Average pooling over images.
    AvgPool2d(burn::nn::pool::AvgPool2d)
}

config! {
    /// The configuration of an [`AvgPool2d`] layer.
    AvgPool2dConfig(burn::nn::pool::AvgPool2dConfig) -> AvgPool2d, new(kernel_size: [usize; 2]),
    with_strides([usize; 2]), with_padding(PaddingConfig2d), with_count_include_pad(bool), with_ceil_mode(bool); init()
}

impl AvgPool2d {
    /// Pools images of `[batch, channels, height, width]`.
    pub fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        let Self(layer) = self;
        let padding = padding(&layer.padding, &input, layer.kernel_size, layer.stride);
        let options = AvgPoolOptions::new(layer.kernel_size)
            .with_stride(layer.stride)
            .with_padding_pairs(padding)
            .with_count_include_pad(layer.count_include_pad)
            .with_ceil_mode(layer.ceil_mode);
        crate::avg_pool2d(input, options)
    }
}

layer! {
    /// Average pooling over sequences.
    AvgPool1d(burn::nn::pool::AvgPool1d)
}

config! {
    /// The configuration of an [`AvgPool1d`] layer.
    AvgPool1dConfig(burn::nn::pool::AvgPool1dConfig) -> AvgPool1d, new(kernel_size: usize),
    with_stride(usize), with_padding(PaddingConfig1d), with_count_include_pad(bool), with_ceil_mode(bool); init()
}

impl AvgPool1d {
    /// Pools sequences of `[batch, channels, length]`.
    pub fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        let Self(layer) = self;
        let padding = padding_1d(&layer.padding, &input, layer.kernel_size, layer.stride);
        let options = AvgPoolOptions::new([layer.kernel_size])
            .with_stride([layer.stride])
            .with_padding_pairs([padding])
            .with_count_include_pad(layer.count_include_pad)
            .with_ceil_mode(layer.ceil_mode);
        crate::avg_pool1d(input, options)
    }
}

layer! {
    /// Adaptive average pooling over images; see [`adaptive_avg_pool2d`](crate::adaptive_avg_pool2d).
    AdaptiveAvgPool2d(burn::nn::pool::AdaptiveAvgPool2d)
}

config! {
    /// The configuration of an [`AdaptiveAvgPool2d`] layer.
    AdaptiveAvgPool2dConfig(burn::nn::pool::AdaptiveAvgPool2dConfig) -> AdaptiveAvgPool2d,
    new(output_size: [usize; 2]); init()
}

impl AdaptiveAvgPool2d {
    /// Pools images of `[batch, channels, height, width]`.
    pub fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        crate::adaptive_avg_pool2d(input, self.output_size)
    }
}

layer! {
    /// An embedding table, which maps indices to vectors; see [`embedding`](crate::embedding).
    Embedding(burn::nn::Embedding)
}

config! {
    /// The configuration of an [`Embedding`] layer.
    EmbeddingConfig(burn::nn::EmbeddingConfig) -> Embedding, new(n_embedding: usize, d_model: usize),
    with_initializer(Initializer); init(device)
}

impl Embedding {
    /// Returns the vectors for indices of `[batch, length]`: `[batch, length, d_model]`.
    ///
    /// # Panics
    ///
    /// On the Flex backend, panics if an index is negative, or not less than the number of vectors.
    pub fn forward(&self, input: Tensor<2, Int>) -> Tensor<3> {
        crate::embedding(self.weight.val(), input)
    }
}

fn padding_1d(
    padding: &PaddingConfig1d,
    input: &Tensor<3>,
    kernel: usize,
    stride: usize,
) -> (usize, usize) {
    match *padding {
        PaddingConfig1d::Valid => (0, 0),
        PaddingConfig1d::Explicit(left, right) => (left, right),
        PaddingConfig1d::Same => same_padding(input.dims()[2], kernel, stride),
    }
}

/// Returns the padding at the beginning and the end of each side.
fn padding(
    padding: &PaddingConfig2d,
    input: &Tensor<4>,
    kernel: [usize; 2],
    stride: [usize; 2],
) -> [(usize, usize); 2] {
    let [_, _, height, width] = input.dims();
    match *padding {
        PaddingConfig2d::Valid => [(0, 0); 2],
        PaddingConfig2d::Explicit(top, left, bottom, right) => [(top, bottom), (left, right)],
        PaddingConfig2d::Same => [
            same_padding(height, kernel[0], stride[0]),
            same_padding(width, kernel[1], stride[1]),
        ],
    }
}

/// Returns the padding at both ends of a side of this size that gives it one output for each stride.
fn same_padding(size: usize, kernel: usize, stride: usize) -> (usize, usize) {
    let Some(last) = size.div_ceil(stride).checked_sub(1) else {
        return (0, 0);
    };
    let span = last * stride + kernel;
    let total = span.saturating_sub(size);
    (total / 2, total - total / 2)
}

layer! {
    /// Dropout, whose mask is computed again in backward instead of being kept.
    Dropout(burn::nn::Dropout)
}

config! {
    /// The configuration of a [`Dropout`] layer.
    DropoutConfig(burn::nn::DropoutConfig) -> Dropout, new(prob: f64); init()
}

impl Dropout {
    /// Drops values in training; see [`dropout`](crate::dropout).
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        dropped(&self.0, input)
    }
}

fn dropped<const D: usize>(layer: &burn::nn::Dropout, input: Tensor<D>) -> Tensor<D> {
    match layer.training.is_enabled() {
        true => crate::dropout(input, layer.prob),
        false => input,
    }
}

layer! {
    /// A norm over the last dimension; see [`layer_norm`](crate::layer_norm).
    LayerNorm(burn::nn::LayerNorm)
}

config! {
    /// The configuration of a [`LayerNorm`] layer.
    LayerNormConfig(burn::nn::LayerNormConfig) -> LayerNorm, new(d_model: usize),
    with_epsilon(f64), with_bias(bool); init(device)
}

impl LayerNorm {
    /// Normalizes each row of `[…, width]`.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        normed(&self.0, input)
    }
}

fn normed<const D: usize>(layer: &burn::nn::LayerNorm, input: Tensor<D>) -> Tensor<D> {
    let is_wide = matches!(
        input.dtype(),
        burn::tensor::DType::F32 | burn::tensor::DType::F64
    );
    let Some(epsilon) = is_wide.then(|| epsilon(layer)).flatten() else {
        // Burn norms half-precision values in a wider type.
        return layer.forward(input);
    };
    let beta = layer.beta.as_ref().map(|beta| beta.val());
    crate::layer_norm(input, layer.gamma.val(), beta, epsilon)
}

/// Returns the epsilon of a norm, which is a private field: as a module shows it.
fn epsilon(layer: &burn::nn::LayerNorm) -> Option<f64> {
    let content = layer.custom_content(Content::new(DisplaySettings::new()))?;
    let mut attributes = content.attributes.iter();
    let epsilon = attributes.find(|attribute| attribute.name == "epsilon")?;
    epsilon.value.parse().ok()
}

layer! {
    /// Batch normalization; see [`batch_norm_train`](crate::batch_norm_train).
    BatchNorm(burn::nn::BatchNorm)
}

config! {
    /// The configuration of a [`BatchNorm`] layer.
    BatchNormConfig(burn::nn::BatchNormConfig) -> BatchNorm, new(num_features: usize),
    with_epsilon(f64), with_momentum(f64); init(device)
}

impl BatchNorm {
    /// Normalizes each channel of `[batch, channels, …]`. In training, it uses the statistics of the batch and updates the
    /// running statistics; otherwise, it uses the running statistics.
    ///
    /// # Panics
    ///
    /// Panics if the shapes do not fit.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let Self(layer) = self;
        let device = input.device();
        if !device.is_autodiff() || !layer.training.is_enabled() {
            return layer.forward(input);
        }
        let (gamma, beta) = (layer.gamma.val(), layer.beta.val());
        let result = crate::batch_norm_train(input, gamma, beta, layer.epsilon);
        let averages = [
            (&layer.running_mean, result.mean),
            (&layer.running_var, result.variance),
        ];
        for (running, of_batch) in averages {
            let value = running.value_sync().to_device(&device) * (1.0 - layer.momentum);
            running.update((value + of_batch.detach() * layer.momentum).detach());
        }
        result.output
    }
}

layer! {
    /// A norm by the root of the mean of squares; see [`rms_norm`](crate::rms_norm).
    RmsNorm(burn::nn::RmsNorm)
}

config! {
    /// The configuration of an [`RmsNorm`] layer.
    RmsNormConfig(burn::nn::RmsNormConfig) -> RmsNorm, new(d_model: usize), with_epsilon(f64); init(device)
}

impl RmsNorm {
    /// Normalizes each row of `[…, width]`.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        crate::rms_norm(input, self.0.gamma.val(), self.0.epsilon)
    }
}

layer! {
    /// The mean cross-entropy of logits; see [`cross_entropy`](crate::cross_entropy).
    CrossEntropyLoss(burn::nn::loss::CrossEntropyLoss)
}

config! {
    /// The configuration of a [`CrossEntropyLoss`].
    CrossEntropyLossConfig(burn::nn::loss::CrossEntropyLossConfig) -> CrossEntropyLoss, new(),
    with_pad_tokens(Option<Vec<usize>>), with_weights(Option<Vec<f32>>), with_smoothing(Option<f32>), with_logits(bool);
    init(device)
}

impl Default for CrossEntropyLossConfig {
    fn default() -> Self {
        Self::new()
    }
}

impl CrossEntropyLoss {
    /// Returns the loss of logits of `[rows, classes]` against the class of each row.
    ///
    /// With padding, weights, smoothing, or probabilities in place of logits, Burn's layer computes it.
    ///
    /// # Panics
    ///
    /// Panics as [`cross_entropy`](crate::cross_entropy) does.
    pub fn forward(&self, logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
        let Self(layer) = self;
        let is_plain = layer.logits
            && layer.pad_tokens.is_none()
            && layer.weights.is_none()
            && layer.smoothing.is_none();
        match is_plain {
            true => crate::cross_entropy(logits, targets),
            false => layer.forward(logits, targets),
        }
    }
}

layer! {
    /// The Gaussian error linear unit.
    Gelu(burn::nn::Gelu)
}

impl Gelu {
    /// Creates the layer.
    pub fn new() -> Self {
        Self(burn::nn::Gelu::new())
    }

    /// Creates the layer that approximates by a hyperbolic tangent.
    pub fn new_approximate() -> Self {
        Self(burn::nn::Gelu::new_approximate())
    }

    /// Applies the activation to each value; see [`gelu`](crate::gelu).
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        activated(&self.0, input)
    }
}

fn activated<const D: usize>(layer: &burn::nn::Gelu, input: Tensor<D>) -> Tensor<D> {
    match layer.approximate {
        true => crate::gelu_approximate(input),
        false => crate::gelu(input),
    }
}

impl Default for Gelu {
    fn default() -> Self {
        Self::new()
    }
}
