//! Fast operations of neural networks on the CPU, for Burn.
//!
//! The [`nn`] module has layers of the same names, parameters and records as Burn's. A model uses them by one changed
//! import:
//!
//! ```
//! use accelerator_ops::nn::{Linear, LinearConfig};   // was: burn::nn
//! use burn::module::Module;
//! use burn::tensor::{Device, Distribution, Tensor};
//!
//! #[derive(Module, Debug)]
//! struct Mlp {
//!     hidden: Linear,
//!     output: Linear,
//! }
//!
//! let device = Device::default().autodiff();
//! let mlp = Mlp {
//!     hidden: LinearConfig::new(8, 32).init(&device),
//!     output: LinearConfig::new(32, 1).init(&device),
//! };
//! let x = Tensor::<2>::random([4, 8], Distribution::Default, &device);
//! let y = mlp.output.forward(accelerator_ops::gelu(mlp.hidden.forward(x)));
//! assert_eq!(y.dims(), [4, 1]);
//! ```
//!
//! The functions of this module are what the layers call. Each is one operation of Burn's graph, with a backward pass
//! of its own, on the Flex backend in f32. On other backends and in other types, it is Burn's own operation, so the same
//! call works everywhere. Only [`linear`] is one operation on all backends of this crate's features.
//!
//! Results are those of Burn to rounding, and have the same bits for any number of threads. Between processors, they may
//! differ as Burn's own do, because the products of matrices depend on the instructions that a processor has.

mod linear;
pub mod nn;

#[cfg(feature = "flex")]
mod backend;
#[cfg(feature = "flex")]
mod kernel;

use burn::tensor::module::BatchNormTrainOutput;
use burn::tensor::ops::{AvgPoolOptions, ConvOptions, MaxPoolOptions};
use burn::tensor::{Bool, DType, Distribution, Int, Tensor, activation, module};

#[cfg(feature = "flex")]
use crate::backend::{one, three, two};
#[cfg(feature = "flex")]
use crate::kernel::{
    Attention, ConvShape, Divisor, Dropout, Elementwise, Mask, Norm, PoolShape, Then,
};

/// Returns `input · weight + bias`, for an input of `[…, inputs]`, a weight of `[inputs, outputs]` and a bias of
/// `[outputs]`.
///
/// # Panics
///
/// Panics if the shapes do not fit.
pub fn linear<const D: usize>(
    input: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    let [inputs, outputs] = weight.dims();
    assert!(
        D > 0 && input.dims()[D - 1] == inputs,
        "the last dimension of an input of {:?} must be {inputs}, the first of the weight",
        input.dims()
    );
    if let Some(bias) = &bias {
        assert_eq!(
            bias.dims(),
            [outputs],
            "the bias has a number for each output"
        );
    }
    if inputs == 0 || outputs == 0 {
        // A product over nothing is zero.
        let mut dims = input.dims();
        dims[D - 1] = outputs;
        let sums = Tensor::zeros(dims, (&input.device(), input.dtype()));
        return match bias {
            None => sums,
            Some(bias) => sums + bias.unsqueeze(),
        };
    }
    let is_quantized = matches!(weight.dtype(), DType::QFloat(_));
    if D == 1 || is_quantized || weight.dtype() != input.dtype() {
        return module::linear(input, weight, bias);
    }
    #[cfg(feature = "flex")]
    {
        let (x, w) = (
            input.clone().into_dispatch(),
            weight.clone().into_dispatch(),
        );
        let y = match bias.clone() {
            None => two([x, w], kernel::linear),
            Some(bias) => three([x, w, bias.into_dispatch()], kernel::linear),
        };
        if let Some(y) = y {
            return y;
        }
    }
    linear::linear(input, weight, bias)
}

macro_rules! activations {
    ($($(#[$doc:meta])* $name:ident = $kernel:ident, $burns:path;)+) => {$(
        $(#[$doc])*
        pub fn $name<const D: usize>(x: Tensor<D>) -> Tensor<D> {
            #[cfg(feature = "flex")]
            if let Some(y) = one(x.clone().into_dispatch(), || Elementwise::$kernel.forward()) {
                return y;
            }
            $burns(x)
        }
    )+};
}

activations! {
    /// The Gaussian error linear unit, `x · Φ(x)`.
    gelu = Gelu, activation::gelu;

    /// GELU, approximated by a hyperbolic tangent.
    gelu_approximate = GeluTanh, activation::gelu_approximate;

    /// The sigmoid linear unit, `x · σ(x)`, which is also called swish.
    silu = Silu, activation::silu;

    /// The rectified linear unit, the larger of `x` and 0.
    relu = Relu, activation::relu;
}

/// Subtracts from each row of `[…, width]` its mean, divides it by its standard deviation, multiplies it by `gamma`, and
/// adds `beta`.
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    epsilon: f64,
) -> Tensor<D> {
    if let Some(beta) = &beta {
        assert_eq!(
            beta.dims(),
            gamma.dims(),
            "`beta` must have the same shape as `gamma`"
        );
    }
    #[cfg(feature = "flex")]
    if gamma.dims()[0] == x.dims()[D - 1] && gamma.dims()[0] > 0 {
        let norm = Norm::Layer {
            epsilon: epsilon as f32,
        };
        let (of, scale) = (x.clone().into_dispatch(), gamma.clone().into_dispatch());
        let y = match beta.clone() {
            None => two([of, scale], || norm.forward()),
            Some(beta) => three([of, scale, beta.into_dispatch()], || norm.forward()),
        };
        if let Some(y) = y {
            return y;
        }
    }
    module::layer_norm(x, gamma, beta, epsilon)
}

/// Normalizes each channel of `[batch, channels, …]` by its mean and standard deviation in this batch, multiplies it by
/// `gamma`, and adds `beta`. Also returns each channel's mean and biased variance.
///
/// # Panics
///
/// Panics if the shapes do not fit.
pub fn batch_norm_train<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    epsilon: f64,
) -> BatchNormTrainOutput<D> {
    #[cfg(feature = "flex")]
    if D > 2 && gamma.dims()[0] == x.dims()[1] && !x.dims().contains(&0) {
        assert_eq!(
            beta.dims(),
            gamma.dims(),
            "`beta` must have the same shape as `gamma`"
        );
        let statistics = kernel::Statistics::default();
        let inputs = [
            x.clone().into_dispatch(),
            gamma.clone().into_dispatch(),
            beta.clone().into_dispatch(),
        ];
        let y = three(inputs, || {
            kernel::batch_norm(epsilon as f32, statistics.clone())
        });
        if let Some((output, [mean, variance])) = y.zip(statistics.get()) {
            let of =
                |values: &Vec<f32>| Tensor::from_data(values.as_slice(), (&x.device(), x.dtype()));
            return BatchNormTrainOutput {
                output,
                mean: of(mean),
                variance: of(variance),
            };
        }
    }
    module::batch_norm_train(x, gamma, beta, epsilon)
}

/// Divides each row of `[…, width]` by the root of the mean of its squares, and multiplies it by `gamma`.
pub fn rms_norm<const D: usize>(x: Tensor<D>, gamma: Tensor<1>, epsilon: f64) -> Tensor<D> {
    assert_eq!(
        gamma.dims()[0],
        x.dims()[D - 1],
        "the scale has a number for each value of a row"
    );
    #[cfg(feature = "flex")]
    if gamma.dims()[0] > 0 {
        let norm = Norm::Rms {
            epsilon: epsilon as f32,
        };
        let inputs = [x.clone().into_dispatch(), gamma.clone().into_dispatch()];
        if let Some(y) = two(inputs, || norm.forward()) {
            return y;
        }
    }
    let dtype = x.dtype();
    // Squares of half-precision values are summed in a wider type.
    let wide = match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let squares = x.clone().cast(wide).square();
    let root = (squares.mean_dim(D - 1) + epsilon).sqrt();
    (x / root.cast(dtype)) * gamma.unsqueeze()
}

/// Sets each value to zero with this probability, and scales the others up, on a device with autodiff. On others, it
/// returns its input.
///
/// The values are chosen by a seed that is drawn from the device's generator.
///
/// # Panics
///
/// Panics if the probability is not in `0.0..1.0`.
pub fn dropout<const D: usize>(x: Tensor<D>, probability: f64) -> Tensor<D> {
    assert_probability(probability);
    if probability == 0.0 || !x.device().is_autodiff() {
        return x;
    }
    #[cfg(feature = "flex")]
    if x.shape().num_elements() <= MAX_DROPPED {
        let dropout = || Dropout {
            seed: drawn_seed(&x.device()),
            probability,
        };
        if let Some(y) = one(x.clone().into_dispatch(), || dropout().forward()) {
            return y;
        }
    }
    let kept = 1.0 - probability;
    let mask = x.random_like(Distribution::Bernoulli(kept));
    x * mask * (1.0 / kept)
}

/// The number of values that the generator of dropout can tell apart.
#[cfg(feature = "flex")]
const MAX_DROPPED: usize = u32::MAX as usize;

#[cfg(feature = "flex")]
fn product(sizes: [usize; 4]) -> usize {
    sizes.into_iter().fold(1, usize::saturating_mul)
}

fn assert_probability(probability: f64) {
    assert!(
        (0.0..1.0).contains(&probability),
        "the probability of dropout must be in 0.0..1.0, and is {probability}"
    );
}

/// Returns the mean cross-entropy of logits of `[rows, classes]` against the class of each row: one operation, which does
/// not keep the probabilities.
///
/// The loss of no rows is NaN.
///
/// # Panics
///
/// Panics if there is not one target for each row. On the Flex backend, it panics if a target is not one of the classes.
pub fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    assert_eq!(
        targets.dims(),
        [logits.dims()[0]],
        "there is a target for each row of logits"
    );
    #[cfg(feature = "flex")]
    if !logits.dims().contains(&0) {
        let classes = logits.dims()[1];
        let read = || kernel::cross_entropy(indices(targets.to_data(), classes, "class"));
        if let Some(loss) = one(logits.clone().into_dispatch(), read) {
            return loss;
        }
    }
    let loss = burn::nn::loss::CrossEntropyLossConfig::new().init(&logits.device());
    loss.forward(logits, targets)
}

/// Reads indices, and panics if one is not in `0..count`. The panic message calls the indexed item `name`.
#[cfg(feature = "flex")]
fn indices(data: burn::tensor::TensorData, count: usize, name: &str) -> Vec<usize> {
    let numbers = data.iter::<i64>().map(|number| {
        let index = usize::try_from(number).ok();
        index.filter(|index| *index < count).unwrap_or_else(|| {
            let last = count - 1;
            panic!("{name} {number} is out of range: use indices from 0 to {last}")
        })
    });
    numbers.collect()
}

/// Looks up the rows of a weight of `[embeddings, width]` at indices of `[batch, length]`: `[batch, length, width]`.
///
/// # Panics
///
/// On the Flex backend, panics if an index is negative, or not less than the number of entries.
pub fn embedding(weight: Tensor<2>, indices: Tensor<2, Int>) -> Tensor<3> {
    #[cfg(feature = "flex")]
    if !weight.dims().contains(&0) {
        let (embeddings, dims) = (weight.dims()[0], indices.dims());
        let read = || {
            let indices = self::indices(indices.to_data(), embeddings, "index");
            kernel::embedding(indices, dims)
        };
        if let Some(rows) = one(weight.clone().into_dispatch(), read) {
            return rows;
        }
    }
    module::embedding(weight, indices)
}

#[cfg(feature = "flex")]
fn drawn_seed(device: &burn::tensor::Device) -> u64 {
    let halves = Distribution::Uniform(0.0, f64::from(i32::MAX));
    let halves = Tensor::<1, Int>::random([2], halves, &device.clone().inner());
    let halves = halves.into_data();
    let mut seed = 0;
    for half in halves.iter::<i64>() {
        seed = (seed << 32) | half as u64;
    }
    seed
}

/// Convolves images of `[batch, channels, height, width]` with a weight of `[outputs, channels / groups, height,
/// width]`.
///
/// # Panics
///
/// Panics if the shapes do not fit.
pub fn conv2d(
    x: Tensor<4>,
    weight: Tensor<4>,
    bias: Option<Tensor<1>>,
    options: ConvOptions<2>,
) -> Tensor<4> {
    #[cfg(feature = "flex")]
    if let Some(y) = convolved(&x, &weight, bias.as_ref(), &options, Then::Nothing) {
        return y;
    }
    module::conv2d(x, weight, bias, options)
}

/// The same as [`conv2d`], followed by a rectified linear unit: one operation, which keeps nothing in between.
///
/// # Panics
///
/// Panics if the shapes do not fit.
pub fn conv2d_relu(
    x: Tensor<4>,
    weight: Tensor<4>,
    bias: Option<Tensor<1>>,
    options: ConvOptions<2>,
) -> Tensor<4> {
    #[cfg(feature = "flex")]
    if let Some(y) = convolved(&x, &weight, bias.as_ref(), &options, Then::Relu) {
        return y;
    }
    activation::relu(module::conv2d(x, weight, bias, options))
}

#[cfg(feature = "flex")]
fn convolved<const D: usize, const SIDES: usize>(
    x: &Tensor<D>,
    weight: &Tensor<D>,
    bias: Option<&Tensor<1>>,
    options: &ConvOptions<SIDES>,
    then: Then,
) -> Option<Tensor<D>> {
    let (inputs, weights) = (x.dims(), weight.dims());
    let (channels_in, channels_out) = (inputs[1], weights[0]);
    if weights[1] * options.groups != channels_in || !channels_out.is_multiple_of(options.groups) {
        return None;
    }
    let mut shape = ConvShape {
        batch: inputs[0],
        channels_in,
        channels_out,
        input: [1; 2],
        output: [1; 2],
        kernel: [1; 2],
        stride: [1; 2],
        padding: [0; 2],
        dilation: [1; 2],
        groups: options.groups,
    };
    for side in 0..SIDES {
        let (input, kernel) = (inputs[2 + side], weights[2 + side]);
        let span = options.dilation[side] * kernel.checked_sub(1)? + 1;
        // A sequence is an image of height 1: its length is the width.
        let at = 2 - SIDES + side;
        shape.input[at] = input;
        shape.output[at] = windows(input, options.padding[side], span, options.stride[side])?;
        shape.kernel[at] = kernel;
        shape.stride[at] = options.stride[side];
        shape.padding[at] = options.padding[side].0;
        shape.dilation[at] = options.dilation[side];
    }
    let (x, weight) = (x.clone().into_dispatch(), weight.clone().into_dispatch());
    match bias {
        None => two([x, weight], || kernel::convolution(shape, then)),
        Some(bias) => {
            assert_eq!(
                bias.dims(),
                [channels_out],
                "the bias has a number for each output"
            );
            let bias = bias.clone().into_dispatch();
            three([x, weight, bias], || kernel::convolution(shape, then))
        }
    }
}

/// Returns the number of windows of this span along a side, or `None` if none fits.
#[cfg(feature = "flex")]
fn windows(size: usize, (begin, end): (usize, usize), span: usize, stride: usize) -> Option<usize> {
    Some((size + begin + end).checked_sub(span)? / stride + 1)
}

/// Convolves sequences of `[batch, channels, length]` with a weight of `[outputs, channels / groups, length]`.
///
/// # Panics
///
/// Panics if the shapes do not fit.
pub fn conv1d(
    x: Tensor<3>,
    weight: Tensor<3>,
    bias: Option<Tensor<1>>,
    options: ConvOptions<1>,
) -> Tensor<3> {
    #[cfg(feature = "flex")]
    if let Some(y) = convolved(&x, &weight, bias.as_ref(), &options, Then::Nothing) {
        return y;
    }
    module::conv1d(x, weight, bias, options)
}

macro_rules! pools {
    ($($(#[$doc:meta])* $name:ident($sides:literal, $options:ident) -> $rank:literal = $pooled:ident;)+) => {$(
        $(#[$doc])*
        pub fn $name(x: Tensor<$rank>, options: $options<$sides>) -> Tensor<$rank> {
            #[cfg(feature = "flex")]
            if let Some(y) = $pooled(&x, &options) {
                return y;
            }
            module::$name(x, options)
        }
    )+};
}

pools! {
    /// Applies max pooling to images of `[batch, channels, height, width]`.
    max_pool2d(2, MaxPoolOptions) -> 4 = largest;

    /// Applies max pooling to sequences of `[batch, channels, length]`.
    max_pool1d(1, MaxPoolOptions) -> 3 = largest;

    /// Applies average pooling to images of `[batch, channels, height, width]`.
    avg_pool2d(2, AvgPoolOptions) -> 4 = mean;

    /// Applies average pooling to sequences of `[batch, channels, length]`.
    avg_pool1d(1, AvgPoolOptions) -> 3 = mean;
}

/// Applies adaptive average pooling to images of `[batch, channels, height, width]`: divides each image into a grid of
/// `output` parts, `[height, width]`, and returns the mean of each part.
pub fn adaptive_avg_pool2d(x: Tensor<4>, output: [usize; 2]) -> Tensor<4> {
    #[cfg(feature = "flex")]
    {
        let [_, _, height, width] = x.dims();
        let divides = |size: usize, parts: usize| parts > 0 && size.is_multiple_of(parts);
        if divides(height, output[0]) && divides(width, output[1]) && height * width > 0 {
            let part = [height / output[0], width / output[1]];
            if let Some(y) = mean(&x, &AvgPoolOptions::new(part)) {
                return y;
            }
        }
    }
    module::adaptive_avg_pool2d(x, output)
}

#[cfg(feature = "flex")]
fn largest<const D: usize, const SIDES: usize>(
    x: &Tensor<D>,
    options: &MaxPoolOptions<SIDES>,
) -> Option<Tensor<D>> {
    let values = options.kernel_size.into_iter().product::<usize>();
    if options.dilation != [1; SIDES] || options.ceil_mode || values > 255 {
        return None;
    }
    let shape = pool(x, options.kernel_size, options.stride, options.padding)?;
    one(x.clone().into_dispatch(), || kernel::max_pool(shape))
}

#[cfg(feature = "flex")]
fn mean<const D: usize, const SIDES: usize>(
    x: &Tensor<D>,
    options: &AvgPoolOptions<SIDES>,
) -> Option<Tensor<D>> {
    if options.ceil_mode {
        return None;
    }
    let shape = pool(x, options.kernel_size, options.stride, options.padding)?;
    let divisor = match options.count_include_pad {
        true => Divisor::Window,
        false => Divisor::Values,
    };
    one(x.clone().into_dispatch(), || {
        kernel::avg_pool(shape, divisor)
    })
}

#[cfg(feature = "flex")]
fn pool<const D: usize, const SIDES: usize>(
    x: &Tensor<D>,
    kernel: [usize; SIDES],
    stride: [usize; SIDES],
    padding: [(usize, usize); SIDES],
) -> Option<PoolShape> {
    let inputs = x.dims();
    let mut shape = PoolShape {
        planes: [inputs[0], inputs[1]],
        input: [1; 2],
        output: [1; 2],
        kernel: [1; 2],
        stride: [1; 2],
        padding: [0; 2],
    };
    for side in 0..SIDES {
        let (begin, end) = padding[side];
        // Burn handles windows that contain only padding.
        if begin.max(end) >= kernel[side] || inputs[2 + side] == 0 {
            return None;
        }
        // A sequence is an image of height 1: its length is the width.
        let at = 2 - SIDES + side;
        shape.input[at] = inputs[2 + side];
        shape.output[at] = windows(inputs[2 + side], (begin, end), kernel[side], stride[side])?;
        shape.kernel[at] = kernel[side];
        shape.stride[at] = stride[side];
        shape.padding[at] = begin;
    }
    Some(shape)
}

/// The number of heads of [`attention`], the pairs of queries and keys that it leaves out, and its dropout.
#[derive(Clone, Debug)]
pub struct AttentionOptions {
    /// The number of heads, among which the width is divided.
    pub heads: usize,
    /// The keys that are padding, `[batch, keys]`, or `[1, keys]` for all sequences.
    pub padding: Option<Tensor<2, Bool>>,
    /// The keys that a query does not see, `[batch, queries, keys]`, or `[1, queries, keys]` for all sequences.
    pub pairs: Option<Tensor<3, Bool>>,
    /// The score of a pair that is left out.
    pub score: f64,
    /// The probability of a weight to become zero; see [`dropout`].
    pub dropout: f64,
}

impl AttentionOptions {
    /// Leaves out nothing, with this many heads.
    pub fn new(heads: usize) -> Self {
        Self {
            heads,
            padding: None,
            pairs: None,
            score: -1.0e4,
            dropout: 0.0,
        }
    }
}

/// Scaled dot-product attention: queries of `[batch, queries, width]`, keys and values of `[batch, keys, width]`.
///
/// # Panics
///
/// Panics if the shapes do not fit, if the width is not a multiple of the number of heads, or if the probability of
/// dropout is not in `0.0..1.0`.
pub fn attention(
    query: Tensor<3>,
    key: Tensor<3>,
    value: Tensor<3>,
    options: AttentionOptions,
) -> Tensor<3> {
    let heads = options.heads;
    let [batch, queries, width] = query.dims();
    let [_, keys, _] = key.dims();
    assert_probability(options.dropout);
    assert!(
        heads > 0 && width.is_multiple_of(heads),
        "a width of {width} cannot be divided among {heads} heads"
    );
    assert_eq!(key.dims(), [batch, keys, width], "keys fit the queries");
    assert_eq!(value.dims(), key.dims(), "there is a value for each key");
    if let Some(mask) = &options.padding {
        let fits = |batch| mask.dims() == [batch, keys];
        assert!(fits(batch) || fits(1), "a mask of padding fits the keys");
    }
    if let Some(mask) = &options.pairs {
        let fits = |batch| mask.dims() == [batch, queries, keys];
        assert!(fits(batch) || fits(1), "a mask fits queries and keys");
    }
    #[cfg(feature = "flex")]
    if ![batch, queries, keys, width].contains(&0)
        && (options.dropout == 0.0 || product([batch, heads, queries, keys]) <= MAX_DROPPED)
    {
        let inputs = [&query, &key, &value].map(|input| input.clone().into_dispatch());
        let operation = || {
            let is_training = query.device().is_autodiff() || key.device().is_autodiff();
            let drops = options.dropout > 0.0 && is_training;
            let operation = Attention {
                heads,
                mask: Mask::read(&options),
                dropout: drops.then(|| Dropout {
                    seed: drawn_seed(&query.device()),
                    probability: options.dropout,
                }),
                most_kept: kernel::MOST_KEPT,
            };
            operation.forward()
        };
        if let Some(y) = three(inputs, operation) {
            return y;
        }
    }
    let head = width / heads;
    let split = |x: Tensor<3>, rows| x.reshape([batch, rows, heads, head]).swap_dims(1, 2);
    let scores = split(query, queries).matmul(split(key, keys).transpose());
    let mut scores = scores.div_scalar((head as f32).sqrt());
    if let Some(padding) = options.padding {
        let padding = padding.unsqueeze_dim::<3>(1).unsqueeze_dim::<4>(1);
        scores = scores.mask_fill(padding, options.score);
    }
    if let Some(pairs) = options.pairs {
        scores = scores.mask_fill(pairs.unsqueeze_dim::<4>(1), options.score);
    }
    let weights = dropout(activation::softmax(scores, 3), options.dropout);
    let context = weights.matmul(split(value, keys));
    context.swap_dims(1, 2).reshape([batch, queries, width])
}

#[cfg(feature = "flex")]
impl Mask {
    fn read(mask: &AttentionOptions) -> Option<Self> {
        let of_keys = mask
            .padding
            .clone()
            .map(|padding| bits(padding.into_data()));
        let of_pairs = mask.pairs.clone().map(|pairs| bits(pairs.into_data()));
        (of_keys.is_some() || of_pairs.is_some()).then_some(Self {
            number: mask.score as f32,
            of_keys,
            of_pairs,
        })
    }
}

#[cfg(feature = "flex")]
fn bits(mask: burn::tensor::TensorData) -> Vec<bool> {
    mask.iter::<bool>().collect()
}
