//! The layers of `accelerator::ops` on a graphics device: they compute as Burn's there.

use accelerator::ops::nn;
use accelerator::prelude::*;
use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::harness::is_there;

#[test]
fn layers_compute_as_those_of_burn() {
    if !is_there() {
        return;
    }
    let accelerator = Accelerator::builder().device(BackendKind::Wgpu).build();
    let device = accelerator.unwrap().device().autodiff();
    let rows = numbers([6, 5]);
    let linear = nn::LinearConfig::new(5, 7).init(&device);
    let burns = burn::nn::Linear::from(linear.clone());
    compare::<2, 2>(&device, &rows, |x| linear.forward(x), |x| burns.forward(x));
    let norm = nn::LayerNormConfig::new(5).init(&device);
    let burns = burn::nn::LayerNorm::from(norm.clone());
    compare::<2, 2>(&device, &rows, |x| norm.forward(x), |x| burns.forward(x));
    let norm = nn::RmsNormConfig::new(5).init(&device);
    let burns = burn::nn::RmsNorm::from(norm.clone());
    compare::<2, 2>(&device, &rows, |x| norm.forward(x), |x| burns.forward(x));
    let (gelu, burns) = (nn::Gelu::new(), burn::nn::Gelu::new());
    compare::<2, 2>(&device, &rows, |x| gelu.forward(x), |x| burns.forward(x));
    let targets = || Tensor::<1, Int>::from_ints([0, 4, 2, 2, 1, 3], &device);
    let loss = burn::nn::loss::CrossEntropyLossConfig::new().init(&device);
    let entropy = |x| accelerator::ops::cross_entropy(x, targets());
    let burns = |x| loss.forward(x, targets());
    compare::<2, 1>(&device, &rows, entropy, burns);

    let sequences = numbers([2, 4, 8]);
    let lstm = nn::LstmConfig::new(8, 6, true).init(&device);
    let burns = burn::nn::Lstm::from(lstm.clone());
    let states = |x| lstm.forward(x, None).0;
    compare::<3, 3>(&device, &sequences, states, |x| burns.forward(x, None).0);
    let attention = nn::MultiHeadAttentionConfig::new(8, 2).with_dropout(0.0);
    let attention = attention.init(&device);
    let burns = burn::nn::attention::MultiHeadAttention::from(attention.clone());
    let own = |x| attention.context(nn::MhaInput::self_attn(x));
    let theirs = |x| {
        burns
            .forward(burn::nn::attention::MhaInput::self_attn(x))
            .context
    };
    compare::<3, 3>(&device, &sequences, own, theirs);

    let images = numbers([2, 3, 7, 6]);
    let conv = nn::Conv2dConfig::new([3, 4], [3, 3]).init(&device);
    let burns = burn::nn::conv::Conv2d::from(conv.clone());
    compare::<4, 4>(&device, &images, |x| conv.forward(x), |x| burns.forward(x));
    let pool = nn::MaxPool2dConfig::new([2, 2]).init();
    let burns = burn::nn::pool::MaxPool2d::from(pool.clone());
    compare::<4, 4>(&device, &images, |x| pool.forward(x), |x| burns.forward(x));
    let norm = nn::BatchNormConfig::new(3).init(&device);
    let burns = burn::nn::BatchNorm::from(norm.clone());
    compare::<4, 4>(&device, &images, |x| norm.forward(x), |x| burns.forward(x));
}

/// Compares outputs, and gradients by the input, of two functions.
fn compare<const D: usize, const E: usize>(
    device: &Device,
    input: &TensorData,
    own: impl Fn(Tensor<D>) -> Tensor<E>,
    burns: impl Fn(Tensor<D>) -> Tensor<E>,
) {
    let run = |function: &dyn Fn(Tensor<D>) -> Tensor<E>| {
        let x = Tensor::<D>::from_data(input.clone(), device).require_grad();
        let output = function(x.clone());
        let gradients = output.clone().powi_scalar(2).sum().backward();
        let values = [output.into_data(), x.grad(&gradients).unwrap().into_data()];
        values.map(|data| data.iter::<f32>().collect::<Vec<_>>())
    };
    for (own, burns) in run(&own).into_iter().zip(run(&burns)) {
        assert_eq!(own.len(), burns.len());
        assert!(own.iter().any(|x| *x != 0.0));
        for (own, burns) in own.into_iter().zip(burns) {
            let scale = 1.0 + burns.abs();
            assert!((own - burns).abs() < 1e-5 * scale, "{own}, {burns}");
        }
    }
}

/// Returns numbers between -1 and 1 that have no pattern.
fn numbers<const D: usize>(shape: [usize; D]) -> TensorData {
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count)
        .map(|i: usize| (i as f32 * 12.9898).sin())
        .collect();
    TensorData::new(values, shape)
}
