//! LoRA in f64 trains as it does with Burn alone.

use crate::common::known_within;
use accelerator::prelude::*;
use burn::module::{Lora, Module};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};

const SAMPLES: usize = 8;

fn adapted(device: &Device) -> Linear {
    let layer: Linear = LinearConfig::new(2, 2).with_bias(false).init(device);
    layer.apply_lora(Lora::new(1, 1.0).set_dtype(FloatDType::F64))
}

/// Returns the mean over `count` samples from `first` on. Their values are small dyadic fractions, so sums are exact in any
/// order.
fn loss(model: &Linear, first: usize, count: usize) -> Tensor<1> {
    let values = (first..first + count).flat_map(|at| [(at % 3) as f64 - 1.0, (at % 2) as f64]);
    let data = TensorData::new(values.collect::<Vec<_>>(), [count, 2]);
    let input = Tensor::<2>::from_data(data, (&model.weight.device(), DType::F64));
    model.forward(input).sum_dim(1).mean()
}

fn values(model: &Linear) -> Vec<u64> {
    let adapter = model.weight.adapter().unwrap();
    let parts = [model.weight.base(), adapter.a.val(), adapter.b.val()];
    let parts = parts.map(|part| part.into_data().try_to_vec::<f64>().unwrap());
    parts.concat().into_iter().map(f64::to_bits).collect()
}

#[test]
fn lora_in_double_precision_has_the_bits_of_burn_alone() {
    let builder = || Accelerator::builder().dtype(FloatDType::F64);
    let device = builder().build().unwrap().device();
    let start = known_within(0.2, adapted(&device));
    let mut model = start.clone();
    let mut optimizer = SgdConfig::new().init();
    for _ in 0..3 {
        let gradients = loss(&model, 0, SAMPLES).backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(0.25, model, gradients);
    }
    let expected = values(&model);
    assert_ne!(expected[4..], values(&start)[4..]);
    for ranks in [1, 2, 4] {
        let outcomes = builder().launch(ranks, |accelerator| {
            let model = known_within(0.2, adapted(&accelerator.device()));
            let (mut model, mut optimizer) =
                accelerator.prepare((model, SgdConfig::new().init()))?;
            let count = SAMPLES / ranks;
            for _ in 0..3 {
                let first = accelerator.rank() * count;
                let loss = accelerator.forward(&model, |model| loss(model, first, count));
                let gradients = accelerator.backward(loss, &model, count)?;
                model = optimizer.step(0.25, model, gradients);
            }
            Ok(values(&model))
        });
        for outcome in outcomes.unwrap() {
            assert_eq!(outcome, expected, "{ranks} ranks");
        }
    }
}
