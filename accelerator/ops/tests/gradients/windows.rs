//! Operations on windows of images and sequences.

use accelerator_ops as ops;
use burn::tensor::ops::{AvgPoolOptions, ConvOptions, MaxPoolOptions};
use burn::tensor::{activation, module};
use proptest::prelude::*;

use super::{Leaves, assert_same, numbers};

proptest! {
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
            // As images: the weight gradient of Burn's grouped `conv1d` is wrong if the stride leaves a remainder.
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
    fn pools(
        planes in [1_usize..6, 1..6],
        (height, width) in (1_usize..20, 1_usize..20),
        (kernel, stride) in ([1_usize..4, 1..4], [1_usize..4, 1..4]),
        padding in [(0_usize..3, 0_usize..3), (0..3, 0..3)],
        counts_padding: bool,
        seed: u64,
    ) {
        let padding = [0, 1].map(|side| {
            let (begin, end) = padding[side];
            (begin % kernel[side], end % kernel[side])
        });
        let (height, width) = (height + kernel[0], width + kernel[1]);
        let images = [numbers(&[planes[0], planes[1], height, width], seed)];
        let options = MaxPoolOptions::new(kernel).with_stride(stride).with_padding_pairs(padding);
        assert_same(
            &images,
            |leaves| ops::max_pool2d(leaves.at(0), options.clone()),
            |leaves| module::max_pool2d(leaves.at(0), options.clone()),
        );
        let options = AvgPoolOptions::new(kernel)
            .with_stride(stride)
            .with_padding_pairs(padding)
            .with_count_include_pad(counts_padding);
        assert_same(
            &images,
            |leaves| ops::avg_pool2d(leaves.at(0), options.clone()),
            |leaves| module::avg_pool2d(leaves.at(0), options.clone()),
        );
        let sequences = [numbers(&[planes[0], planes[1], width], seed)];
        let (kernel, stride, padding) = ([kernel[1]], [stride[1]], [padding[1]]);
        let options = MaxPoolOptions::new(kernel).with_stride(stride).with_padding_pairs(padding);
        assert_same(
            &sequences,
            |leaves| ops::max_pool1d(leaves.at(0), options.clone()),
            |leaves| module::max_pool1d(leaves.at(0), options.clone()),
        );
        let options = AvgPoolOptions::new(kernel)
            .with_stride(stride)
            .with_padding_pairs(padding)
            .with_count_include_pad(counts_padding);
        assert_same(
            &sequences,
            |leaves| ops::avg_pool1d(leaves.at(0), options.clone()),
            |leaves| module::avg_pool1d(leaves.at(0), options.clone()),
        );
    }

    #[test]
    fn adaptive_average_pooling(
        planes in [1_usize..6, 1..6],
        size in [1_usize..20, 1..20],
        output in [1_usize..5, 1..5],
        seed: u64,
    ) {
        let size = [0, 1].map(|side| size[side].max(output[side]));
        assert_same(
            &[numbers(&[planes[0], planes[1], size[0], size[1]], seed)],
            |leaves| ops::adaptive_avg_pool2d(leaves.at(0), output),
            |leaves| module::adaptive_avg_pool2d(leaves.at(0), output),
        );
    }
}

#[test]
fn matrix_products_split_among_threads_match_burn() {
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
