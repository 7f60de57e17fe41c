//! Burn's adapters: LoRA trains as it does with Burn alone, and quantised parameters are refused.

use std::ops::Range;
use std::path::Path;

use crate::common::{assert_errors, flat, of_every_rank};
use accelerator::optim::Manual;
use accelerator::precision::Precision;
use accelerator::prelude::*;
use burn::module::{Lora, Module, ModuleMapper, Param, QLora, Quantizer};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, SgdConfig};
use burn::tensor::quantization::{Calibration, QuantValue};
use burn::tensor::{Device, Tensor, TensorData};

/// The samples of a step. Each rank gets a number of them that is a power of two.
const SAMPLES: usize = 8;
const STEPS: u64 = 4;

/// Returns a layer with an adapter of rank 1. All values are small dyadic fractions, so sums are exact in any order.
fn adapted(device: &Device) -> Linear {
    let mut layer: Linear = LinearConfig::new(2, 2).with_bias(false).init(device);
    let base = TensorData::from([[0.5_f32, -0.25], [0.75, 1.0]]);
    layer.weight = Param::from_data(base, device);
    let layer = layer.apply_lora(Lora::new(1, 1.0));
    layer.map(&mut Dyadic(device))
}

/// Gives the factors values that do not depend on a generator.
struct Dyadic<'a>(&'a Device);

impl ModuleMapper for Dyadic<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_require_grad() {
            return param;
        }
        let shape = param.shape();
        let values = (0..shape.num_elements()).map(|at| 0.5 - at as f32 * 0.25);
        let data = TensorData::new(values.collect::<Vec<_>>(), shape);
        Param::initialized(param.id, Tensor::from_data(data, self.0).require_grad())
    }
}

/// Returns the mean over `samples` of a step.
fn loss(model: &Linear, step: u64, samples: Range<usize>) -> Tensor<1> {
    let values = samples.clone().flat_map(|sample| {
        let at = sample + step as usize;
        [(at % 3) as f32 - 1.0, (at % 2) as f32]
    });
    let data = TensorData::new(values.collect::<Vec<_>>(), [samples.len(), 2]);
    let device = model.weight.val().device();
    let input = Tensor::<2>::from_data(data, &device).cast(model.weight.val().dtype());
    let wanted = Tensor::<1>::from_data([1.0_f32, -2.0], &device);
    let output = model.forward(input).cast(wanted.dtype());
    (output * wanted.unsqueeze()).sum_dim(1).mean()
}

/// Returns the samples of this rank.
fn share(accelerator: &Accelerator) -> Range<usize> {
    match (accelerator.world_size(), accelerator.rank()) {
        (1, _) => 0..SAMPLES,
        (2, rank) => 4 * rank..4 * rank + 4,
        (_, 0) => 0..4,
        (_, rank) => 2 + 2 * rank..4 + 2 * rank,
    }
}

fn train(
    accelerator: &Accelerator,
    optimizer: impl FnOnce(&Accelerator) -> Result<PreparedOptimizer<Manual>>,
    folder: &Path,
    until: u64,
) -> Result<Vec<f32>> {
    let model = accelerator.prepare(adapted(&accelerator.device()))?;
    let optimizer = optimizer(accelerator)?;
    let ((mut model, mut optimizer), position) = accelerator.resume(folder, (model, optimizer))?;
    for step in position.step()..until {
        let samples = share(accelerator);
        let count = samples.len();
        let loss = accelerator.forward(&model, |model| loss(model, step, samples));
        let gradients = accelerator.backward(loss, &model, count)?;
        model = optimizer.step(0.25, model, gradients);
    }
    accelerator.save_state(folder, (&model, &optimizer))?;
    Ok(flat(&model))
}

#[test]
fn lora_trains_saves_and_resumes_on_any_number_of_ranks_to_the_bits_of_burn_alone() {
    let device = Accelerator::new().unwrap().device();
    let mut model = adapted(&device);
    let untrained = flat(&model);
    let mut optimizer = SgdConfig::new().init();
    for step in 0..STEPS {
        let gradients = loss(&model, step, 0..SAMPLES).backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(0.25, model, gradients);
    }
    let expected = flat(&model);
    assert_eq!(expected[..4], untrained[..4], "the base is frozen");
    assert_ne!(expected[4..6], untrained[4..6]);
    assert_ne!(expected[6..], untrained[6..]);
    for ranks in [1, 2, 3] {
        let folder = tempfile::tempdir().unwrap();
        for until in [2, STEPS] {
            let outcomes = accelerator::launch(ranks, |accelerator| {
                let sgd = |accelerator: &Accelerator| accelerator.prepare(SgdConfig::new().init());
                train(&accelerator, sgd, folder.path(), until)
            });
            let outcome = of_every_rank(outcomes.unwrap());
            if until == STEPS {
                assert_eq!(outcome, expected, "{ranks} ranks");
            }
        }
    }
}

#[test]
fn lora_resumes_with_a_sharded_optimizer_and_in_half_precision() {
    for precision in [Precision::No, Precision::Bf16] {
        for ranks in [1, 2, 3] {
            let run = |ends: &[u64]| {
                let folder = tempfile::tempdir().unwrap();
                let mut outcome = Vec::new();
                for &until in ends {
                    let builder = Accelerator::builder().precision(precision);
                    let outcomes = builder.launch(ranks, |accelerator| {
                        let sharded = |accelerator: &Accelerator| {
                            accelerator.prepare(Sharded(AdamWConfig::new().init()))
                        };
                        train(&accelerator, sharded, folder.path(), until)
                    });
                    outcome = of_every_rank(outcomes.unwrap());
                }
                outcome
            };
            let whole = run(&[STEPS]);
            assert_eq!(run(&[1, STEPS]), whole, "{precision}, {ranks} ranks");
            let untrained = flat(&adapted(&Accelerator::new().unwrap().device()));
            assert_eq!(whole[..4], untrained[..4], "the base is frozen");
            assert_ne!(whole[4..], untrained[4..]);
        }
    }
}

fn quantised(device: &Device) -> Linear {
    let scheme = device.settings().quantization.scheme;
    let quantizer = Quantizer::new(Calibration::MinMax, scheme.with_value(QuantValue::Q8S));
    let layer: Linear = LinearConfig::new(32, 32).init(device);
    layer.apply_qlora(QLora::new(Lora::new(2, 4.0), quantizer))
}

#[test]
fn quantised_parameters_are_refused_by_prepare_on_every_rank() {
    for ranks in [1, 2] {
        let outcomes = accelerator::launch(ranks, |accelerator| {
            let model = quantised(&accelerator.device());
            Ok(accelerator.prepare(model).map(drop).unwrap_err())
        });
        assert_errors(outcomes.unwrap(), Error::is_model, &["`weight`", "QLoRA"]);
    }
}

#[test]
fn a_quantised_model_computes_in_half_precision() {
    let builder = Accelerator::builder().precision(Precision::Bf16);
    let accelerator = builder.build().unwrap();
    let model = quantised(&accelerator.device());
    let input = Tensor::<2>::ones([1, 32], &accelerator.device());
    let plain = model.forward(input.clone());
    let output = accelerator.forward(&model, |model| model.forward(accelerator.to_working(input)));
    let difference = (accelerator.to_full(output) - plain).abs().max();
    assert!(difference.into_scalar::<f32>() < 0.1);
}
