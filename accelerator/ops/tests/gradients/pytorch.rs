//! Comparison with outputs and gradients of PyTorch, which `pytorch.py` wrote in f64.

use std::collections::BTreeMap;

use accelerator_ops::{self as ops, AttentionOptions};
use burn::tensor::ops::{AvgPoolOptions, ConvOptions, MaxPoolOptions};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};

use super::{Leaves, TOLERANCE, numbers, run};

#[test]
fn results_match_pytorch() {
    let text = include_str!("pytorch.json");
    let mut expected: BTreeMap<String, Vec<Vec<f64>>> = serde_json::from_str(text).unwrap();
    let mut check =
        |name: &str, shapes: &[&[usize]], results: &dyn Fn(DType) -> Vec<TensorData>| {
            let expected = expected.remove(name).unwrap();
            assert_eq!(expected.len(), 1 + shapes.len(), "{name}");
            for (dtype, allowed) in [(DType::F32, TOLERANCE), (DType::F64, 1e-12)] {
                for (at, (found, expected)) in results(dtype).iter().zip(&expected).enumerate() {
                    let scale = expected.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
                    assert_eq!(found.iter::<f64>().count(), expected.len(), "{name}");
                    for (found, expected) in found.iter::<f64>().zip(expected) {
                        let off = (found - expected).abs() / scale;
                        assert!(
                            off <= allowed,
                            "{name}, result {at}, {dtype:?}: off by {off:e}"
                        );
                    }
                }
            }
        };
    macro_rules! cases {
        ($($name:literal ($($shape:expr),+) -> $rank:literal = $operation:expr;)+) => {$(
            let shapes: &[&[usize]] = &[$(&$shape),+];
            check($name, shapes, &|dtype| {
                let inputs: Vec<_> = shapes.iter().zip(1..).map(|(x, seed)| numbers(x, seed)).collect();
                let operation: fn(&Leaves) -> Tensor<$rank> = $operation;
                run(&inputs, dtype, operation)
            });
        )+};
    }
    cases! {
        "gelu"([5, 9]) -> 2 = |x| ops::gelu(x.at::<2>(0) * 6.0);
        "gelu_approximate"([5, 9]) -> 2 = |x| ops::gelu_approximate(x.at::<2>(0) * 6.0);
        "silu"([5, 9]) -> 2 = |x| ops::silu(x.at::<2>(0) * 6.0);
        "layer_norm"([5, 12], [12], [12]) -> 2 =
            |x| ops::layer_norm(x.at::<2>(0), x.at(1), Some(x.at(2)), 1e-5);
        "rms_norm"([5, 12], [12]) -> 2 = |x| ops::rms_norm(x.at::<2>(0), x.at(1), 1e-5);
        "batch_norm"([4, 3, 6], [3], [3]) -> 3 =
            |x| ops::batch_norm_train(x.at::<3>(0), x.at(1), x.at(2), 1e-5).output;
        "cross_entropy"([6, 5]) -> 1 = |x| {
            ops::cross_entropy(x.at::<2>(0) * 9.0, Tensor::from_data([0, 3, 1, 4, 2, 0], &device()))
        };
        "embedding"([6, 5]) -> 3 = |x| {
            ops::embedding(x.at(0), Tensor::<2, Int>::from_data([[0, 5, 4, 3], [2, 1, 0, 5]], &device()))
        };
        "avg_pool2d"([2, 3, 7, 8]) -> 4 = |x| {
            let options = AvgPoolOptions::new([3, 2]).with_stride([2, 3]).with_padding([1, 1]);
            ops::avg_pool2d(x.at(0), options)
        };
        "avg_pool2d_without_padding"([2, 3, 7, 8]) -> 4 = |x| {
            let options = AvgPoolOptions::new([3, 3]).with_stride([2, 2]).with_padding([1, 1]);
            ops::avg_pool2d(x.at(0), options.with_count_include_pad(false))
        };
        "max_pool2d"([2, 3, 7, 8]) -> 4 = |x| {
            let options = MaxPoolOptions::new([3, 2]).with_stride([2, 3]).with_padding([1, 1]);
            ops::max_pool2d(x.at(0), options)
        };
        "conv2d"([2, 4, 7, 8], [6, 2, 3, 2], [6]) -> 4 = |x| {
            let options = ConvOptions::new([2, 1], [1, 2], [1, 2], 2);
            ops::conv2d(x.at(0), x.at(1), Some(x.at(2)), options)
        };
        "attention"([2, 5, 8], [2, 7, 8], [2, 7, 8]) -> 3 = |x| attention(x, None, None);
        "attention_with_padding"([2, 5, 8], [2, 7, 8], [2, 7, 8]) -> 3 =
            |x| attention(x, Some(hidden([2, 7], 40)), None);
        "attention_with_pairs"([2, 5, 8], [2, 7, 8], [2, 7, 8]) -> 3 =
            |x| attention(x, None, Some(hidden([2, 5, 7], 41)));
    }
    assert!(expected.is_empty(), "{:?}", expected.keys());
}

fn device() -> Device {
    Device::flex().autodiff()
}

fn attention(
    leaves: &Leaves,
    padding: Option<Tensor<2, Bool>>,
    pairs: Option<Tensor<3, Bool>>,
) -> Tensor<3> {
    let options = AttentionOptions {
        padding,
        pairs,
        ..AttentionOptions::new(2)
    };
    ops::attention(leaves.at(0), leaves.at(1), leaves.at(2), options)
}

/// Returns a mask that leaves out some keys, but never the first.
fn hidden<const D: usize>(shape: [usize; D], seed: u64) -> Tensor<D, Bool> {
    let values = numbers(&shape, seed);
    let values = values.iter::<f32>().enumerate();
    let mask = values.map(|(at, value)| value > 0.4 && at % shape[D - 1] > 0);
    Tensor::from_data(
        TensorData::new(mask.collect::<Vec<_>>(), shape),
        &Device::flex(),
    )
}
