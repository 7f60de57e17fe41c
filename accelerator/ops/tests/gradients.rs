//! Compares outputs and gradients with those of Burn's operations, which compute in f64 from the same numbers.
//!
//! `PROPTEST_CASES=2000` tries as many shapes of each operation.

#![cfg(feature = "flex")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use accelerator_ops::nn::{self, MhaInput};
use accelerator_ops::{self as ops, AttentionOptions};
use burn::backend::DispatchTensor;
use burn::module::{Module, Param};
use burn::nn::PaddingConfig1d;
use burn::tensor::ops::{ConvOptions, MaxPoolOptions};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData, activation, module};
use proptest::prelude::*;

/// The largest difference, relative to the largest number of the same tensor, or to the usual size of its sums.
const TOLERANCE: f64 = 2e-6;

/// Leaves of the graph.
struct Leaves(Vec<DispatchTensor>);

impl Leaves {
    fn at<const D: usize>(&self, number: usize) -> Tensor<D> {
        Tensor::from_dispatch(self.0[number].clone())
    }
}

/// Returns the output of `operation` and the gradients of its inputs, of a loss to which each number of the output
/// contributes differently.
fn run<const D: usize>(
    inputs: &[TensorData],
    dtype: DType,
    operation: impl Fn(&Leaves) -> Tensor<D>,
) -> Vec<TensorData> {
    let device = Device::flex().autodiff();
    fn of_rank<const D: usize>(input: &TensorData, of: (&Device, DType)) -> DispatchTensor {
        Tensor::<D>::from_data(input.clone(), of)
            .require_grad()
            .into_dispatch()
    }
    let leaf = |input: &TensorData| match input.shape().num_dims() {
        1 => of_rank::<1>(input, (&device, dtype)),
        2 => of_rank::<2>(input, (&device, dtype)),
        3 => of_rank::<3>(input, (&device, dtype)),
        _ => of_rank::<4>(input, (&device, dtype)),
    };
    let leaves = Leaves(inputs.iter().map(leaf).collect());
    let output = operation(&leaves);
    let weights = numbers(&output.dims(), 99);
    let weights = Tensor::<D>::from_data(weights, (&device, dtype));
    let gradients = (output.clone() * weights).sum().backward();
    let of = |leaf: &DispatchTensor| {
        let leaf = Tensor::<1>::from_dispatch(leaf.clone());
        leaf.grad(&gradients).unwrap().into_data()
    };
    let mut results = vec![output.into_data()];
    results.extend(leaves.0.iter().map(of));
    results
}

/// Asserts that results are as close to Burn's in f64 as [`TOLERANCE`] says. Where sums cancel, they may be four times as
/// far off as Burn's own in f32.
fn assert_same<const D: usize>(
    inputs: &[TensorData],
    ours: impl Fn(&Leaves) -> Tensor<D>,
    burns: impl Fn(&Leaves) -> Tensor<D>,
) {
    let ours = run(inputs, DType::F32, ours);
    let single = run(inputs, DType::F32, &burns);
    let exact = run(inputs, DType::F64, burns);
    let shape = exact[0].shape();
    let outputs = shape.num_elements();
    let rows = outputs / shape[shape.num_dims() - 1].max(1);
    for (number, exact) in exact.iter().enumerate() {
        assert_eq!(ours[number].shape(), exact.shape(), "of result {number}");
        // Gradients of weights are sums over rows, of products of numbers below one. If a sum cancels, the usual size of one
        // says how far off it may be.
        let terms = outputs / exact.shape().num_elements().max(1);
        let least = match terms {
            // A loss may be close to zero, as the difference of larger numbers.
            0 | 1 if exact.shape().num_elements() == 1 => 1.0,
            0 | 1 => 1e-30,
            terms => (terms as f64).sqrt() / 3.0,
        };
        let scale = exact.iter::<f64>().map(f64::abs).fold(least, f64::max);
        let additions = match number {
            // The output and the gradient of the first input.
            0 | 1 => terms,
            _ => rows,
        };
        // Each addition rounds by half a unit in the last place. Errors add up as a random walk, of which this is twice the
        // usual length.
        let rounding = TOLERANCE.max(f64::from(f32::EPSILON) * (additions as f64).sqrt());
        let off = |found: &TensorData| {
            let pairs = found.iter::<f64>().zip(exact.iter::<f64>());
            let off = pairs.map(|(found, exact)| (found - exact).abs() / scale);
            off.fold(0.0, f64::max)
        };
        let (off, allowed) = (off(&ours[number]), rounding.max(4.0 * off(&single[number])));
        assert!(
            off <= allowed,
            "result {number} is off by {off:e}, more than {allowed:e}"
        );
        assert!(ours[number].iter::<f64>().all(f64::is_finite));
    }
}

/// Returns numbers between -1 and 1, which f32 holds exactly.
fn numbers(shape: &[usize], seed: u64) -> TensorData {
    let count: usize = shape.iter().product();
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let values = (0..count).map(|_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 23) as f32) - 1.0
    });
    TensorData::new(values.collect::<Vec<f32>>(), shape.to_vec())
}

fn mask<const D: usize>(shape: [usize; D], seed: u64) -> Tensor<D, Bool> {
    let values = numbers(&shape, seed);
    let values: Vec<bool> = values.iter::<f32>().map(|value| value > 0.4).collect();
    Tensor::from_data(TensorData::new(values, shape), &Device::flex())
}

/// Returns the hidden states of an LSTM, followed by its last hidden state and cell. The leaves are the input, the state,
/// and each gate's weights and optional biases.
fn states_of_lstm(leaves: &Leaves, batch_first: bool, run: RunsLstm) -> Tensor<3> {
    let [batch, steps, inputs] = leaves.at::<3>(0).dims();
    let [_, width] = leaves.at::<2>(1).dims();
    let has_bias = leaves.0.len() > 11;
    let device = leaves.at::<3>(0).device();
    let config = burn::nn::LstmConfig::new(inputs, width, has_bias).with_batch_first(batch_first);
    let mut layer = config.init(&device);
    let mut next = 3;
    let gates = [
        Some(&mut layer.input_gate),
        layer.forget_gate.as_mut(),
        Some(&mut layer.output_gate),
        Some(&mut layer.cell_gate),
    ];
    for gate in gates.into_iter().flatten() {
        for linear in [&mut gate.input_transform, &mut gate.hidden_transform] {
            linear.weight = Param::from_tensor(leaves.at(next));
            next += 1;
            if has_bias {
                linear.bias = Some(Param::from_tensor(leaves.at(next)));
                next += 1;
            }
        }
    }
    let order = |x: Tensor<3>| match batch_first {
        true => x,
        false => x.swap_dims(0, 1),
    };
    let state = burn::nn::LstmState::new(leaves.at(2), leaves.at(1));
    let (output, last) = run(layer, order(leaves.at(0)), Some(state));
    let output = order(output);
    assert_eq!(output.dims(), [batch, steps, width]);
    Tensor::cat(
        vec![
            output,
            last.hidden.unsqueeze_dim(1),
            last.cell.unsqueeze_dim(1),
        ],
        1,
    )
}

/// Does what Burn's layer does, except that Burn's layer computes in the type of the device, and this one in that of its
/// input.
fn steps_by_definition(
    layer: burn::nn::Lstm,
    x: Tensor<3>,
    state: Option<burn::nn::LstmState<2>>,
) -> (Tensor<3>, burn::nn::LstmState<2>) {
    let time = usize::from(layer.batch_first);
    let (mut cell, mut hidden) = state.unwrap().unpack();
    let mut states = Vec::new();
    for step in 0..x.dims()[time] {
        let x = x.clone().narrow(time, step, 1).squeeze_dim::<2>(time);
        let [input, forget, output] = [
            &layer.input_gate,
            layer.forget_gate.as_ref().unwrap(),
            &layer.output_gate,
        ]
        .map(|gate| activation::sigmoid(gate.gate_product(x.clone(), hidden.clone())));
        let value = layer.cell_gate.gate_product(x, hidden).tanh();
        cell = forget * cell + input * value;
        hidden = output * cell.clone().tanh();
        states.push(hidden.clone());
    }
    (
        Tensor::stack(states, time),
        burn::nn::LstmState::new(cell, hidden),
    )
}

type RunsLstm = fn(
    burn::nn::Lstm,
    Tensor<3>,
    Option<burn::nn::LstmState<2>>,
) -> (Tensor<3>, burn::nn::LstmState<2>);

fn leaves_of_lstm(
    [batch, steps, inputs, width]: [usize; 4],
    has_bias: bool,
    seed: u64,
) -> Vec<TensorData> {
    let mut shapes = vec![
        vec![batch, steps, inputs],
        vec![batch, width],
        vec![batch, width],
    ];
    for _ in 0..4 {
        for rows in [inputs, width] {
            shapes.push(vec![rows, width]);
            if has_bias {
                shapes.push(vec![width]);
            }
        }
    }
    // Scaled as a layer is initialized. With larger weights, each step would amplify the rounding errors of the one before.
    let scale = (width as f32).sqrt().recip();
    let leaves = shapes.iter().zip(seed..);
    leaves
        .map(|(shape, seed)| {
            let numbers = numbers(shape, seed);
            let scaled = numbers.iter::<f32>().map(|number| number * scale);
            TensorData::new(scaled.collect(), shape.clone())
        })
        .collect()
}

proptest! {
    #[test]
    fn batch_norm(
        batch in 1_usize..9,
        channels in 1_usize..9,
        length in 4_usize..40,
        seed: u64,
    ) {
        assert_same(
            &[numbers(&[batch, channels, length], seed), numbers(&[channels], seed ^ 1), numbers(&[channels], seed ^ 2)],
            |leaves| ops::batch_norm_train(leaves.at::<3>(0), leaves.at(1), leaves.at(2), 1e-5).output,
            |leaves| module::batch_norm_train(leaves.at::<3>(0), leaves.at(1), leaves.at(2), 1e-5).output,
        );
    }

    #[test]
    fn lstm(
        batch in 1_usize..40,
        steps in 1_usize..12,
        inputs in 1_usize..20,
        width in 1_usize..40,
        has_bias: bool,
        batch_first: bool,
        seed in 0..u64::MAX / 2,
    ) {
        assert_same(
            &leaves_of_lstm([batch, steps, inputs, width], has_bias, seed),
            |leaves| states_of_lstm(leaves, batch_first, |layer, x, state| nn::Lstm::from(layer).forward(x, state)),
            |leaves| states_of_lstm(leaves, batch_first, steps_by_definition),
        );
    }

    #[test]
    fn linear(
        batch in 1_usize..40,
        rows in 1_usize..70,
        inputs in 1_usize..90,
        outputs in 1_usize..90,
        is_transposed: bool,
        has_bias: bool,
        seed: u64,
    ) {
        let weight = match is_transposed {
            true => [outputs, inputs],
            false => [inputs, outputs],
        };
        let mut data = vec![numbers(&[batch, rows, inputs], seed), numbers(&weight, seed + 1)];
        if has_bias {
            data.push(numbers(&[outputs], seed + 2));
        }
        let parts = |leaves: &Leaves| {
            let weight = match is_transposed {
                true => leaves.at::<2>(1).transpose(),
                false => leaves.at(1),
            };
            (leaves.at::<3>(0), weight, has_bias.then(|| leaves.at::<1>(2)))
        };
        assert_same(
            &data,
            |leaves| {
                let (x, weight, bias) = parts(leaves);
                ops::linear(x, weight, bias)
            },
            |leaves| {
                let (x, weight, bias) = parts(leaves);
                module::linear(x, weight, bias)
            },
        );
    }

    #[test]
    fn activations(rows in 1_usize..80, width in 1_usize..700, size in 0.1_f32..12.0, seed: u64) {
        let data = [numbers(&[rows, width], seed)];
        assert_same(
            &data,
            |leaves| ops::gelu(leaves.at::<2>(0) * size),
            |leaves| activation::gelu(leaves.at::<2>(0) * size),
        );
        assert_same(
            &data,
            |leaves| ops::gelu_approximate(leaves.at::<2>(0) * size),
            |leaves| activation::gelu_approximate(leaves.at::<2>(0) * size),
        );
        assert_same(
            &data,
            |leaves| ops::silu(leaves.at::<2>(0) * size),
            |leaves| activation::silu(leaves.at::<2>(0) * size),
        );
    }

    // The norm of a few numbers hardly depends on them: their gradients are rounding.
    #[test]
    fn norms(rows in 1_usize..200, width in 8_usize..400, has_shift: bool, seed: u64) {
        let mut data = vec![numbers(&[rows, width], seed), numbers(&[width], seed + 1)];
        let rms = |leaves: &Leaves| {
            let x = leaves.at::<2>(0);
            let root = (x.clone().square().mean_dim(1) + 1e-5).sqrt();
            x / root * leaves.at::<1>(1).unsqueeze()
        };
        assert_same(&data, |leaves| ops::rms_norm(leaves.at::<2>(0), leaves.at(1), 1e-5), rms);
        if has_shift {
            data.push(numbers(&[width], seed + 2));
        }
        let beta = |leaves: &Leaves| has_shift.then(|| leaves.at::<1>(2));
        assert_same(
            &data,
            |leaves| ops::layer_norm(leaves.at::<2>(0), leaves.at(1), beta(leaves), 1e-5),
            |leaves| module::layer_norm(leaves.at::<2>(0), leaves.at(1), beta(leaves), 1e-5),
        );
    }

    #[test]
    fn convolutions(
        batch in 1_usize..10,
        (groups, inputs, outputs) in (1_usize..4, 1_usize..5, 1_usize..6),
        (height, width) in (1_usize..16, 1_usize..16),
        kernel in [1_usize..5, 1..5],
        stride in [1_usize..4, 1..4],
        dilation in [1_usize..3, 1..3],
        padding in [(0_usize..3, 0_usize..3), (0..3, 0..3)],
        has_bias: bool,
        is_rectified: bool,
        seed: u64,
    ) {
        let fits = |side: usize, size: usize| {
            size + padding[side].0 + padding[side].1 > dilation[side] * (kernel[side] - 1)
        };
        prop_assume!(fits(0, height) && fits(1, width));
        let options = ConvOptions::new_with_padding(stride, padding, dilation, groups);
        let mut data = vec![
            numbers(&[batch, groups * inputs, height, width], seed),
            numbers(&[groups * outputs, inputs, kernel[0], kernel[1]], seed + 1),
        ];
        if has_bias {
            data.push(numbers(&[groups * outputs], seed + 2));
        }
        let parts = |leaves: &Leaves| {
            let bias = has_bias.then(|| leaves.at::<1>(2));
            (leaves.at::<4>(0), leaves.at::<4>(1), bias)
        };
        assert_same(
            &data,
            |leaves| {
                let (x, weight, bias) = parts(leaves);
                match is_rectified {
                    true => ops::conv2d_relu(x, weight, bias, options.clone()),
                    false => ops::conv2d(x, weight, bias, options.clone()),
                }
            },
            |leaves| {
                let (x, weight, bias) = parts(leaves);
                let y = module::conv2d(x, weight, bias, options.clone());
                match is_rectified {
                    true => activation::relu(y),
                    false => y,
                }
            },
        );
    }

    #[test]
    fn convolutions_of_sequences(
        (batch, length) in (1_usize..10, 1_usize..40),
        (groups, inputs, outputs) in (1_usize..4, 1_usize..5, 1_usize..6),
        (kernel, stride, dilation) in (1_usize..6, 1_usize..4, 1_usize..3),
        padding in (0_usize..3, 0_usize..3),
        has_bias: bool,
        seed: u64,
    ) {
        prop_assume!(length + padding.0 + padding.1 > dilation * (kernel - 1));
        let options =
            ConvOptions::new_with_padding([stride], [padding], [dilation], groups);
        let mut data = vec![
            numbers(&[batch, groups * inputs, length], seed),
            numbers(&[groups * outputs, inputs, kernel], seed + 1),
        ];
        if has_bias {
            data.push(numbers(&[groups * outputs], seed + 2));
        }
        let bias = |leaves: &Leaves| has_bias.then(|| leaves.at::<1>(2));
        assert_same(
            &data,
            |leaves| ops::conv1d(leaves.at(0), leaves.at(1), bias(leaves), options.clone()),
            // As images: in groups, Burn's gradient of the weight is wrong if the stride leaves a remainder.
            |leaves| {
                let options = ConvOptions::new_with_padding(
                    [1, stride],
                    [(0, 0), padding],
                    [1, dilation],
                    groups,
                );
                let [x, weight] = [0, 1].map(|leaf| leaves.at::<3>(leaf).unsqueeze_dim(2));
                module::conv2d(x, weight, bias(leaves), options).squeeze_dim::<3>(2)
            },
        );
    }

    #[test]
    fn losses(rows in 16_usize..200, classes in 1_usize..300, size in 0.1_f32..40.0, seed: u64) {
        let targets = (0..rows as u64).map(|row| (row.wrapping_mul(seed | 1) >> 8) % classes as u64);
        let targets: Vec<i64> = targets.map(|target| target as i64).collect();
        let targets = || {
            let data = TensorData::new(targets.clone(), [rows]);
            Tensor::<1, Int>::from_data(data, &Device::flex().autodiff())
        };
        assert_same(
            &[numbers(&[rows, classes], seed)],
            |leaves| ops::cross_entropy(leaves.at::<2>(0) * size, targets()),
            |leaves| {
                let chosen = targets().reshape([rows, 1]);
                -activation::log_softmax(leaves.at::<2>(0) * size, 1).gather(1, chosen).mean()
            },
        );
    }

    #[test]
    fn largest_of_windows(
        planes in [1_usize..6, 1..6],
        (height, width) in (1_usize..20, 1_usize..20),
        (kernel, stride) in ([1_usize..4, 1..4], [1_usize..4, 1..4]),
        padding in [(0_usize..3, 0_usize..3), (0..3, 0..3)],
        seed: u64,
    ) {
        let padding = [0, 1].map(|side| {
            let (begin, end) = padding[side];
            (begin % kernel[side], end % kernel[side])
        });
        let (height, width) = (height + kernel[0], width + kernel[1]);
        let options = MaxPoolOptions::new(kernel).with_stride(stride).with_padding_pairs(padding);
        let data = [numbers(&[planes[0], planes[1], height, width], seed)];
        assert_same(
            &data,
            |leaves| ops::max_pool2d(leaves.at(0), options.clone()),
            |leaves| module::max_pool2d(leaves.at(0), options.clone()),
        );
    }

    #[test]
    fn attention(
        batch in 1_usize..6,
        (queries, keys) in (1_usize..40, 1_usize..40),
        (heads, head) in (1_usize..5, 1_usize..20),
        (has_padding, has_pairs) in (any::<bool>(), any::<bool>()),
        seed: u64,
    ) {
        let width = heads * head;
        let data = [
            numbers(&[batch, queries, width], seed),
            numbers(&[batch, keys, width], seed + 1),
            numbers(&[batch, keys, width], seed + 2),
        ];
        let masks = || AttentionOptions {
            padding: has_padding.then(|| mask([batch, keys], seed + 3)),
            pairs: has_pairs.then(|| mask([batch, queries, keys], seed + 4)),
            ..AttentionOptions::new(heads)
        };
        let ours = |leaves: &Leaves| {
            ops::attention(leaves.at(0), leaves.at(1), leaves.at(2), masks())
        };
        let burns = |leaves: &Leaves| {
            let split = |at, rows| {
                let x = leaves.at::<3>(at).reshape([batch, rows, heads, head]);
                x.swap_dims(1, 2)
            };
            let scores = split(0, queries).matmul(split(1, keys).transpose());
            let mut scores = scores / (head as f64).sqrt();
            if let Some(mask) = masks().padding {
                scores = scores.mask_fill(mask.reshape([batch, 1, 1, keys]), -1e4);
            }
            if let Some(mask) = masks().pairs {
                scores = scores.mask_fill(mask.reshape([batch, 1, queries, keys]), -1e4);
            }
            let context = activation::softmax(scores, 3).matmul(split(2, keys));
            context.swap_dims(1, 2).reshape([batch, queries, width])
        };
        assert_same(&data, ours, burns);
    }
}

#[test]
fn what_is_no_number_travels_as_in_burn() {
    let odd = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        -0.0,
        1e30,
        -1e30,
    ];
    let data = TensorData::new(odd.to_vec(), [1, 6]);
    for (ours, burns) in [
        (
            ops::gelu as fn(Tensor<2>) -> Tensor<2>,
            activation::gelu as fn(Tensor<2>) -> Tensor<2>,
        ),
        (ops::silu, activation::silu),
    ] {
        let input = || Tensor::<2>::from_data(data.clone(), &Device::flex());
        let pairs = ours(input()).into_data();
        let burns = burns(input()).into_data();
        for (ours, burns) in pairs.iter::<f32>().zip(burns.iter::<f32>()) {
            assert!(
                ours == burns || (ours.is_nan() && burns.is_nan()),
                "{ours}, {burns}"
            );
        }
    }
    let images = TensorData::new(vec![1.0, f32::NAN, 3.0, 4.0], [1, 1, 2, 2]);
    let images = Tensor::<4>::from_data(images, &Device::flex());
    let largest = ops::max_pool2d(images, MaxPoolOptions::new([2, 2])).into_data();
    assert!(largest.iter::<f32>().all(f32::is_nan));
}

#[test]
fn nothing_is_computed_of_nothing() {
    let device = Device::flex().autodiff();
    let weight = Tensor::<2>::ones([3, 2], &device).require_grad();
    let bias = Tensor::<1>::ones([2], &device).require_grad();
    let x = Tensor::<3>::zeros([0, 4, 3], &device);
    let y = ops::linear(x, weight.clone(), Some(bias.clone()));
    assert_eq!(y.dims(), [0, 4, 2]);
    let gradients = y.sum().backward();
    let gradient = weight.grad(&gradients).unwrap().into_data();
    assert!(gradient.iter::<f32>().all(|value| value == 0.0));
    let images = Tensor::<4>::zeros([0, 1, 5, 5], &device);
    let kernel = Tensor::<4>::ones([2, 1, 3, 3], &device).require_grad();
    let y = ops::conv2d(
        images,
        kernel.clone(),
        Some(bias),
        ConvOptions::new([1, 1], [0, 0], [1, 1], 1),
    );
    let y = ops::max_pool2d(y, MaxPoolOptions::new([3, 3]));
    assert_eq!(y.dims(), [0, 2, 1, 1]);
    assert!(kernel.grad(&y.sum().backward()).is_some());
    let y = ops::linear(
        Tensor::<2>::zeros([4, 0], &device),
        Tensor::zeros([0, 2], &device),
        None,
    );
    assert_eq!(y.into_data().try_to_vec::<f32>().unwrap(), [0.0; 8]);
}

#[test]
fn a_mask_of_one_sequence_is_that_of_all() {
    // In f64, Burn computes.
    for dtype in [DType::F32, DType::F64] {
        let device = Device::flex();
        let x = || Tensor::<3>::from_data(numbers(&[3, 5, 8], 1), (&device, dtype));
        let context = |padding: Tensor<2, Bool>, pairs: Tensor<3, Bool>| {
            let options = AttentionOptions {
                padding: Some(padding),
                pairs: Some(pairs),
                ..AttentionOptions::new(2)
            };
            ops::attention(x(), x(), x(), options).into_data()
        };
        let (padding, pairs) = (mask([1, 5], 2), mask([1, 5, 5], 3));
        let all = context(
            padding.clone().expand([3, 5]),
            pairs.clone().expand([3, 5, 5]),
        );
        assert_eq!(context(padding, pairs), all);
    }
}

#[test]
#[should_panic(expected = "a mask of padding fits the keys")]
fn a_mask_that_fits_other_keys_is_refused() {
    let x = || Tensor::<3>::zeros([3, 5, 8], &Device::flex());
    let options = AttentionOptions {
        padding: Some(mask([3, 1], 2)),
        ..AttentionOptions::new(2)
    };
    ops::attention(x(), x(), x(), options);
}

#[test]
#[should_panic(expected = "the target 3 is not one of the 3 classes")]
fn a_target_that_is_no_class_is_refused() {
    let logits = Tensor::zeros([2, 3], &Device::flex());
    ops::cross_entropy(logits, Tensor::from_data([0, 3], &Device::flex()));
}

#[test]
fn layers_of_sequences_and_losses_are_burns_in_all_settings() {
    let _drawing = drawing();
    let device = Device::flex();
    let close = |ours: TensorData, burns: TensorData| {
        assert_eq!(ours.shape(), burns.shape());
        for (ours, burns) in ours.iter::<f32>().zip(burns.iter::<f32>()) {
            assert!((ours - burns).abs() < 2e-6, "{ours}, {burns}");
        }
    };
    let x = || Tensor::<3>::from_data(numbers(&[2, 4, 11], 1), &device);
    for (padding, kernel, stride) in [
        (PaddingConfig1d::Same, 4, 1),
        (PaddingConfig1d::Same, 3, 2),
        (PaddingConfig1d::Explicit(2, 0), 3, 1),
        (PaddingConfig1d::Valid, 2, 3),
    ] {
        let config = nn::Conv1dConfig::new(4, 6, kernel).with_padding(padding);
        let ours = config.with_stride(stride).with_groups(2).init(&device);
        let burns = burn::nn::conv::Conv1d::from(ours.clone());
        close(
            ours.forward(x()).into_data(),
            burns.forward(x()).into_data(),
        );
    }
    let logits = || activation::softmax(Tensor::<2>::from_data(numbers(&[6, 4], 2), &device), 1);
    let targets = || Tensor::<1, Int>::from_data([0, 3, 1, 2, 2, 0], &device);
    let config = nn::CrossEntropyLossConfig::new;
    for config in [
        config(),
        config().with_pad_tokens(Some(vec![2])),
        config().with_weights(Some(vec![0.5, 1.0, 2.0, 3.0])),
        config().with_smoothing(Some(0.1)),
        config().with_logits(false),
    ] {
        let ours = config.init(&device);
        let burns = burn::nn::loss::CrossEntropyLoss::from(ours.clone());
        let (ours, burns) = (
            ours.forward(logits(), targets()),
            burns.forward(logits(), targets()),
        );
        close(ours.into_data(), burns.into_data());
    }
    let config = nn::MultiHeadAttentionConfig::new(8, 2).with_dropout(0.0);
    let config = config.with_query_bias(false).with_key_bias(false);
    let layer = config
        .with_value_bias(false)
        .with_output_bias(false)
        .init(&device);
    let biases = [&layer.query, &layer.key, &layer.value, &layer.output];
    assert!(biases.iter().all(|linear| linear.bias.is_none()));
    let x = || MhaInput::self_attn(Tensor::from_data(numbers(&[2, 5, 8], 3), &device));
    close(
        layer.context(x()).into_data(),
        layer.forward(x()).context.into_data(),
    );
}

#[test]
fn inputs_without_gradient_are_those_of_burn() {
    let device = Device::flex().autodiff();
    let data = |number: u64, shape: [usize; 2]| numbers(&shape, number);
    let leaf = |number, shape, is_trained: bool| {
        let leaf = Tensor::<2>::from_data(data(number, shape), &device);
        leaf.set_require_grad(is_trained)
    };
    type Linear = fn(Tensor<2>, Tensor<2>, Option<Tensor<1>>) -> Tensor<2>;
    for trained in [[true, false], [false, true], [false, false]] {
        let run = |linear: Linear| {
            let (x, weight) = (leaf(1, [4, 6], trained[0]), leaf(2, [6, 3], trained[1]));
            let y = linear(x.clone(), weight.clone(), None);
            let gradients = trained.contains(&true).then(|| y.clone().sum().backward());
            let of = |leaf: Tensor<2>| Some(leaf.grad(gradients.as_ref()?)?.into_data());
            let results = [Some(y.into_data()), of(x), of(weight)];
            results.map(|result| Some(result?.try_to_vec::<f32>().unwrap()))
        };
        let (ours, burns) = (run(ops::linear), run(module::linear));
        for (ours, burns) in ours.iter().zip(&burns) {
            assert_eq!(ours.is_some(), burns.is_some());
            let pairs = ours.iter().flatten().zip(burns.iter().flatten());
            assert!(
                pairs
                    .into_iter()
                    .all(|(ours, burns)| (ours - burns).abs() < 1e-5)
            );
        }
    }
}

#[test]
fn products_that_are_divided_among_threads_are_burns() {
    let options = ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(4);
    pool.build().unwrap().install(|| {
        assert_same(
            &[
                numbers(&[4, 64, 16, 16], 1),
                numbers(&[64, 64, 3, 3], 2),
                numbers(&[64], 3),
            ],
            |leaves| {
                ops::conv2d(
                    leaves.at(0),
                    leaves.at(1),
                    Some(leaves.at(2)),
                    options.clone(),
                )
            },
            |leaves| {
                module::conv2d(
                    leaves.at(0),
                    leaves.at(1),
                    Some(leaves.at(2)),
                    options.clone(),
                )
            },
        )
    });
}

/// Tests share the generator of their process: one of them draws at a time.
fn drawing() -> std::sync::MutexGuard<'static, ()> {
    static DRAWING: std::sync::Mutex<()> = std::sync::Mutex::new(());
    DRAWING
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[test]
fn dropout_keeps_its_share_and_its_gradient_has_the_same_mask() {
    let _drawing = drawing();
    let device = Device::flex().autodiff();
    device.seed(7);
    let x = Tensor::<1>::ones([100_000], &device).require_grad();
    let y = ops::dropout(x.clone(), 0.25);
    let gradient = x.grad(&y.clone().sum().backward()).unwrap().into_data();
    let y = y.into_data();
    assert_eq!(y, gradient);
    let kept = y.iter::<f32>().filter(|&y| y != 0.0).count();
    assert!((74_300..75_700).contains(&kept), "{kept}");
    assert!(
        y.iter::<f32>()
            .all(|y| y == 0.0 || (y - 4.0 / 3.0).abs() < 1e-6)
    );
    // Another draw is another mask, and the same seed the same.
    let other = ops::dropout(x.clone(), 0.25).into_data();
    device.seed(7);
    assert_eq!(ops::dropout(x.clone(), 0.25).into_data(), y);
    assert_ne!(other, y);
    // No gradient, no dropout.
    assert_eq!(
        ops::dropout(x.clone().inner(), 0.25).into_data(),
        x.inner().into_data()
    );
}

#[test]
fn weights_of_attention_are_dropped_alike_in_backward() {
    let _drawing = drawing();
    let device = Device::flex().autodiff();
    let inputs = [7, 8, 9].map(|seed| numbers(&[2, 6, 8], seed));
    let options = AttentionOptions {
        dropout: 0.4,
        ..AttentionOptions::new(2)
    };
    // Of one draw, attention is a smooth function of its inputs: gradients are its slopes.
    let loss = |inputs: [Tensor<3>; 3]| {
        device.seed(3);
        let [query, key, value] = inputs;
        let y = ops::attention(query, key, value, options.clone());
        let weights = Tensor::from_data(numbers(&y.dims(), 99), &device);
        (y * weights).sum()
    };
    let leaf = |input: &TensorData| Tensor::<3>::from_data(input.clone(), &device).require_grad();
    let leaves = inputs.each_ref().map(leaf);
    let whole = loss(leaves.clone());
    let gradients = whole.clone().backward();
    let undropped = ops::attention(
        leaves[0].clone(),
        leaves[1].clone(),
        leaves[2].clone(),
        AttentionOptions::new(2),
    );
    let weights = Tensor::from_data(numbers(&undropped.dims(), 99), &device);
    let undropped = (undropped * weights).sum().into_scalar::<f32>();
    assert!((undropped - whole.into_scalar::<f32>()).abs() > 1e-3);
    for (number, leaf) in leaves.iter().enumerate() {
        let gradient = leaf.grad(&gradients).unwrap();
        let step =
            gradient.clone() * (0.01 / gradient.clone().square().sum().sqrt().into_scalar::<f32>());
        let moved = |sign: f32| {
            let mut moved = leaves.clone().map(|leaf| leaf.inner());
            moved[number] = moved[number].clone() + step.clone() * sign;
            loss(moved.map(Tensor::from_inner)).into_scalar::<f32>()
        };
        let slope = (moved(1.0) - moved(-1.0)) / 0.02;
        let expected = gradient.square().sum().sqrt().into_scalar::<f32>();
        assert!(
            (slope - expected).abs() < 2e-2 * expected,
            "{number}: {slope}, {expected}"
        );
    }
}

/// Returns the output and all gradients of a layer by its input.
fn of_layer<M: Module>(layer: &M, run: impl Fn(&M, Tensor<3>) -> Tensor<3>) -> Vec<Vec<f32>> {
    struct Reader<'a>(&'a burn::tensor::Gradients, Vec<Vec<f32>>);
    impl burn::module::ModuleVisitor for Reader<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let gradient = param.val().grad(self.0).unwrap();
            self.1.push(gradient.into_data().try_to_vec().unwrap());
        }
    }
    let device = Device::flex().autodiff();
    let x = Tensor::<3>::from_data(numbers(&[3, 16, 24], 5), &device);
    let y = run(layer, x);
    let weights = Tensor::from_data(numbers(&y.dims(), 6), &device);
    let gradients = (y.clone() * weights).sum().backward();
    let mut reader = Reader(&gradients, vec![y.into_data().try_to_vec().unwrap()]);
    layer.visit(&mut reader);
    reader.1
}

#[test]
fn layers_of_transformers_are_burns() {
    let _drawing = drawing();
    let device = Device::flex().autodiff();
    let padding = || mask([3, 16], 8);
    let pairs = || mask([3, 16, 16], 9);
    for norm_first in [false, true] {
        let config = burn::nn::transformer::TransformerEncoderConfig::new(24, 40, 4, 2)
            .with_norm_first(norm_first)
            .with_dropout(0.0);
        let burns = config.init(&device);
        let ours = nn::TransformerEncoder::from(burns.clone());
        let ours = of_layer(&ours, |layer, x| {
            let input = nn::TransformerEncoderInput::new(x);
            layer.forward(input.mask_pad(padding()).mask_attn(pairs()))
        });
        let burns = of_layer(&burns, |layer, x| {
            let input = burn::nn::transformer::TransformerEncoderInput::new(x);
            layer.forward(input.mask_pad(padding()).mask_attn(pairs()))
        });
        assert_eq!(ours.len(), burns.len());
        for (ours, burns) in ours.iter().zip(&burns) {
            let scale = burns
                .iter()
                .fold(0.0_f32, |scale, value| scale.max(value.abs()));
            for (ours, burns) in ours.iter().zip(burns) {
                // Gradients of a key's bias are zero but for rounding.
                assert!(
                    (ours - burns).abs() <= 1e-5 * scale.max(0.1),
                    "{ours}, {burns}"
                );
            }
        }
    }
}

#[test]
fn a_context_is_that_of_burns_attention_in_all_settings() {
    let _drawing = drawing();
    let device = Device::flex().autodiff();
    for quiet in [false, true] {
        let config = nn::MultiHeadAttentionConfig::new(24, 3).with_dropout(0.0);
        let layer = config.with_quiet_softmax(quiet).init(&device);
        let burns = burn::nn::attention::MultiHeadAttention::from(layer.clone());
        let x = || Tensor::<3>::from_data(numbers(&[2, 9, 24], 3), &device);
        let ours = layer.context(MhaInput::self_attn(x())).into_data();
        let burns = burns
            .forward(burn::nn::attention::MhaInput::self_attn(x()))
            .context
            .into_data();
        for (ours, burns) in ours.iter::<f32>().zip(burns.iter::<f32>()) {
            assert!((ours - burns).abs() < 1e-6, "{ours}, {burns}");
        }
    }
}

#[test]
fn long_short_term_memories_are_burns_in_all_settings() {
    let device = Device::flex().autodiff();
    let config = || nn::LstmConfig::new(5, 7, true);
    for config in [
        config(),
        config().with_batch_first(false),
        config().with_reverse(true),
        config().with_clip(Some(0.1)),
        config().with_input_forget(true),
        config().with_hidden_activation(burn::nn::activation::ActivationConfig::Relu),
        nn::LstmConfig::new(5, 7, false),
    ] {
        let ours = config.init(&device);
        let burns = burn::nn::Lstm::from(ours.clone());
        let x = || Tensor::<3>::from_data(numbers(&[3, 4, 5], 1), &device);
        let (output, state) = ours.forward(x(), None);
        let (expected, of_burn) = burns.forward(x(), None);
        let off = [
            (output - expected).abs().max(),
            (state.hidden - of_burn.hidden).abs().max(),
            (state.cell - of_burn.cell).abs().max(),
        ];
        for off in off {
            assert!(off.into_scalar::<f32>() < 1e-6);
        }
    }
}

#[test]
fn running_statistics_are_those_of_burns_batch_norm() {
    let device = Device::flex().autodiff();
    let config = nn::BatchNormConfig::new(3).with_momentum(0.3);
    let ours = config.init(&device);
    let burns: burn::nn::BatchNorm = config.init(&device).into();
    for seed in 0..3 {
        let x = || Tensor::<4>::from_data(numbers(&[4, 3, 5, 6], seed), &device);
        let (ours, burns) = (ours.forward(x()), burns.forward(x()));
        assert!((ours - burns).abs().max().into_scalar::<f32>() < 2e-6);
    }
    for (ours, burns) in [
        (&ours.running_mean, &burns.running_mean),
        (&ours.running_var, &burns.running_var),
    ] {
        let (ours, burns) = (ours.value_sync(), burns.value_sync());
        let first = burns.clone().into_data().iter::<f32>().next().unwrap();
        assert!(first != 0.0 && first != 1.0, "it has moved");
        assert!((ours - burns).abs().max().into_scalar::<f32>() < 2e-6);
    }
    let x = || Tensor::<4>::from_data(numbers(&[4, 3, 5, 6], 9), &Device::flex());
    let (ours, burns) = (ours.valid(), burns.valid());
    let off = (ours.forward(x()) - burns.forward(x())).abs().max();
    assert!(off.into_scalar::<f32>() < 2e-6);
}

#[test]
fn records_and_epsilons_are_burns() {
    let _drawing = drawing();
    let device = Device::flex();
    let config = nn::LayerNormConfig::new(4).with_epsilon(0.5);
    let (ours, burns) = (config.init(&device), (*config).init(&device));
    let x = || Tensor::<2>::from_data(numbers(&[3, 4], 1), &device);
    let (ours, burns) = (
        ours.forward(x()).into_data(),
        burns.forward(x()).into_data(),
    );
    for (ours, burns) in ours.iter::<f32>().zip(burns.iter::<f32>()) {
        assert!((ours - burns).abs() < 1e-6, "{ours}, {burns}");
    }
    let burns = burn::nn::LinearConfig::new(3, 2).init(&device);
    let ours = nn::LinearConfig::new(3, 2).init(&device);
    let ours = ours.load_record(burns.clone().into_record());
    assert_eq!(
        ours.weight.val().into_data(),
        burns.weight.val().into_data()
    );
    assert_eq!(format!("{ours}"), format!("{burns}"));
    let back = burn::nn::LinearConfig::new(3, 2).init(&device);
    let back = back.load_record(ours.into_record());
    assert_eq!(
        back.weight.val().into_data(),
        burns.weight.val().into_data()
    );
}

#[test]
fn results_have_the_same_bits_on_any_number_of_threads() {
    let _drawing = drawing();
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| {
            let convolution = run(
                &[
                    numbers(&[9, 8, 40, 40], 1),
                    numbers(&[16, 8, 3, 3], 2),
                    numbers(&[16], 3),
                ],
                DType::F32,
                |leaves| {
                    let options = ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
                    let y =
                        ops::conv2d_relu(leaves.at(0), leaves.at(1), Some(leaves.at(2)), options);
                    ops::max_pool2d(y, MaxPoolOptions::new([2, 2]))
                },
            );
            let attention = run(
                &[7, 8, 9].map(|seed| numbers(&[6, 150, 96], seed)),
                DType::F32,
                |leaves| {
                    let options = AttentionOptions::new(4);
                    ops::attention(leaves.at(0), leaves.at(1), leaves.at(2), options)
                },
            );
            let norm = run(
                &[numbers(&[800, 96], 4), numbers(&[96], 5), numbers(&[96], 6)],
                DType::F32,
                |leaves| {
                    let y =
                        ops::layer_norm(leaves.at::<2>(0), leaves.at(1), Some(leaves.at(2)), 1e-5);
                    ops::gelu(y)
                },
            );
            let linear = run(
                &[
                    numbers(&[700, 130], 7),
                    numbers(&[130, 90], 8),
                    numbers(&[90], 9),
                ],
                DType::F32,
                |leaves| {
                    let y = ops::linear(leaves.at::<2>(0), leaves.at(1), Some(leaves.at(2)));
                    ops::rms_norm(y, leaves.at(2), 1e-5)
                },
            );
            let dropped = run(&[numbers(&[900, 130], 7)], DType::F32, |leaves| {
                leaves.at::<2>(0).device().seed(5);
                ops::dropout(leaves.at::<2>(0), 0.3)
            });
            let loss = run(&[numbers(&[300, 500], 7)], DType::F32, |leaves| {
                let targets = (0..300).collect::<Vec<i64>>();
                let targets = TensorData::new(targets, [300]);
                let device = leaves.at::<2>(0).device();
                ops::cross_entropy(leaves.at(0), Tensor::from_data(targets, &device))
            });
            let lstm = run(
                &leaves_of_lstm([70, 9, 30, 50], true, 3),
                DType::F32,
                |leaves| {
                    states_of_lstm(leaves, true, |layer, x, state| {
                        nn::Lstm::from(layer).forward(x, state)
                    })
                },
            );
            let small = run(
                &[
                    numbers(&[90, 8, 6, 6], 1),
                    numbers(&[16, 8, 3, 3], 2),
                    numbers(&[16], 3),
                    numbers(&[16], 4),
                ],
                DType::F32,
                |leaves| {
                    let options = ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
                    let y = ops::conv2d(leaves.at(0), leaves.at(1), None, options);
                    ops::batch_norm_train(y, leaves.at(2), leaves.at(3), 1e-5).output
                },
            );
            [
                convolution,
                attention,
                norm,
                linear,
                dropped,
                loss,
                lstm,
                small,
            ]
            .concat()
        })
    };
    let one = run(1);
    assert_eq!(run(2), one);
    assert_eq!(run(7), one);
}
