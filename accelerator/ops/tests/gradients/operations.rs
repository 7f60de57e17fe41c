//! Operations on rows.

use accelerator_ops as ops;
use burn::tensor::ops::{AvgPoolOptions, ConvOptions, MaxPoolOptions};
use burn::tensor::{Device, Int, Tensor, TensorData, activation, module};
use proptest::prelude::*;

use super::{Leaves, assert_same, drawing, numbers};

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
        assert_same(
            &data,
            |leaves| ops::relu(leaves.at::<2>(0) * size),
            |leaves| activation::relu(leaves.at::<2>(0) * size),
        );
    }

    // The norm of a few numbers hardly depends on them, so its gradients would be mostly rounding errors.
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
    fn embeddings(
        (entries, width) in (1_usize..60, 1_usize..40),
        (batch, length) in (1_usize..9, 1_usize..30),
        seed: u64,
    ) {
        let indices = numbers(&[batch, length], seed);
        let indices = indices.iter::<f32>().map(|x| ((x + 1.0) / 2.0 * entries as f32) as i64);
        let indices: Vec<i64> = indices.map(|index| index.min(entries as i64 - 1)).collect();
        let indices = || {
            let data = TensorData::new(indices.clone(), [batch, length]);
            Tensor::<2, Int>::from_data(data, &Device::flex().autodiff())
        };
        assert_same(
            &[numbers(&[entries, width], seed)],
            |leaves| ops::embedding(leaves.at(0), indices()),
            |leaves| module::embedding(leaves.at(0), indices()),
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
}

#[test]
fn nan_and_infinity_propagate_as_in_burn() {
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
        (ops::relu, activation::relu),
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
fn empty_inputs_give_empty_outputs_or_zeros() {
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
        Some(bias.clone()),
        ConvOptions::new([1, 1], [0, 0], [1, 1], 1),
    );
    let y = ops::max_pool2d(y, MaxPoolOptions::new([3, 3]));
    assert_eq!(y.dims(), [0, 2, 1, 1]);
    // Places that see nothing but padding.
    let images = Tensor::<4>::zeros([1, 1, 0, 5], &device);
    let pointwise = Tensor::<4>::ones([2, 1, 1, 1], &device);
    let options = ConvOptions::new([2, 2], [1, 1], [1, 1], 1);
    let padded = ops::conv2d(images, pointwise, Some(bias.clone()), options).into_data();
    assert!(padded.iter::<f32>().all(|value| value == 1.0));
    assert!(kernel.grad(&y.sum().backward()).is_some());
    let images = Tensor::<4>::zeros([2, 0, 4, 4], &device);
    let y = ops::avg_pool2d(images, AvgPoolOptions::new([2, 2]));
    assert_eq!(y.dims(), [2, 0, 2, 2]);
    let words = Tensor::<2, Int>::zeros([0, 3], &device);
    let y = ops::embedding(weight.clone(), words);
    assert_eq!(y.dims(), [0, 3, 2]);
    assert!(weight.grad(&y.sum().backward()).is_some());
    let y = ops::linear(
        Tensor::<2>::zeros([4, 0], &device),
        Tensor::zeros([0, 2], &device),
        None,
    );
    assert_eq!(y.into_data().try_to_vec::<f32>().unwrap(), [0.0; 8]);
}

#[test]
#[should_panic(expected = "class 3 is out of range: use indices from 0 to 2")]
fn a_target_out_of_range_panics() {
    let logits = Tensor::zeros([2, 3], &Device::flex());
    ops::cross_entropy(logits, Tensor::from_data([0, 3], &Device::flex()));
}

#[test]
#[should_panic(expected = "index -1 is out of range: use indices from 0 to 2")]
fn an_index_out_of_range_panics() {
    let device = Device::flex();
    ops::embedding(
        Tensor::zeros([3, 2], &device),
        Tensor::from_data([[0, -1]], &device),
    );
}

#[test]
fn results_match_burn_if_inputs_need_no_gradient() {
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
fn dropout_keeps_the_expected_share_and_its_gradient_uses_the_same_mask() {
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
    // Another draw gives another mask; the same seed gives the same mask.
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
