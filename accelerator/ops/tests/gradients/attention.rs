//! Attention, its masks and its dropout.

use accelerator_ops::nn::{self, MhaInput};
use accelerator_ops::{self as ops, AttentionOptions};
use burn::tensor::{Bool, DType, Device, Tensor, TensorData, activation};
use proptest::prelude::*;

use super::{Leaves, assert_same, drawing, mask, numbers};

proptest! {
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
fn a_mask_of_batch_size_one_applies_to_all_sequences() {
    // In f64, `attention` falls back to Burn's operations.
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
fn a_padding_mask_of_the_wrong_shape_panics() {
    let x = || Tensor::<3>::zeros([3, 5, 8], &Device::flex());
    let options = AttentionOptions {
        padding: Some(mask([3, 1], 2)),
        ..AttentionOptions::new(2)
    };
    ops::attention(x(), x(), x(), options);
}

#[test]
fn attention_dropout_uses_the_same_mask_in_backward() {
    let _drawing = drawing();
    let device = Device::flex().autodiff();
    let inputs = [7, 8, 9].map(|seed| numbers(&[2, 6, 8], seed));
    let options = AttentionOptions {
        dropout: 0.4,
        ..AttentionOptions::new(2)
    };
    // With a fixed dropout mask, attention is smooth, so finite differences approximate its gradients.
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

#[test]
fn the_context_matches_burns_attention_in_all_settings() {
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
