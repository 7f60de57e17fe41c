//! Burn's adapters: LoRA and QLoRA train as they do with Burn alone.

use std::ops::Range;
use std::path::Path;

use crate::common::{assert_error, assert_errors, of_every_rank};
use accelerator::model::{FileLayout, LoadOptions, SaveOptions};
use accelerator::optim::Manual;
use accelerator::precision::Precision;
use accelerator::prelude::*;
use burn::module::{Lora, Module, ModuleMapper, Param, QLora, Quantizer};
use burn::nn::{BatchNorm, BatchNormConfig, Initializer, Linear, LinearConfig, LinearLayout};
use burn::optim::{AdamWConfig, GradientsParams, SgdConfig};
use burn::tensor::quantization::{Calibration, QuantValue, ScaleDtype};
use burn::tensor::{Device, Tensor, TensorData};
use safetensors::SafeTensors;

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
    // With QLoRA, the adapter has the type of the product.
    let adapter = model.weight.adapter().unwrap();
    let input = Tensor::<2>::from_data(data, &device).cast(adapter.a.val().dtype());
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

/// A function that makes the model.
type Build = fn(&Device) -> Linear;

fn train(
    accelerator: &Accelerator,
    build: Build,
    optimizer: impl FnOnce(&Accelerator) -> Result<PreparedOptimizer<Manual>>,
    checkpoints: &Checkpoints,
    until: u64,
) -> Result<Vec<f32>> {
    let model = accelerator.prepare(build(&accelerator.device()))?;
    let optimizer = optimizer(accelerator)?;
    let ema = Ema::new(&model, 0.5);
    let parts = (model, optimizer, ema);
    let ((mut model, mut optimizer, mut ema), position) = accelerator.resume(checkpoints, parts)?;
    for step in position.step()..until {
        let samples = share(accelerator);
        let count = samples.len();
        let loss = accelerator.forward(&model, |model| loss(model, step, samples));
        let gradients = accelerator.backward(loss, &model, count)?;
        model = optimizer.step(0.25, model, gradients);
        ema.update(&model);
    }
    accelerator.save_state(checkpoints, (&model, &optimizer, &ema))?;
    let mut all = values(&model);
    all.extend(&values(ema.model())[4..]);
    Ok(all)
}

/// Returns the base and the factors.
fn values(model: &Linear) -> Vec<f32> {
    let adapter = model.weight.adapter().unwrap();
    let base = match model.weight.base() {
        base if base.dtype().is_float() => base,
        base => base.dequantize(),
    };
    let parts = [base, adapter.a.val(), adapter.b.val()];
    let parts = parts.map(|part| part.into_data().try_to_vec::<f32>().unwrap());
    parts.concat()
}

#[test]
fn adapters_train_save_and_resume_on_any_number_of_ranks_to_the_bits_of_burn_alone() {
    for build in [adapted as Build, quantised_and_adapted] {
        let device = Accelerator::new().unwrap().device();
        let mut model = build(&device);
        let untrained = values(&model);
        let mut optimizer = SgdConfig::new().init();
        for step in 0..STEPS {
            let gradients = loss(&model, step, 0..SAMPLES).backward();
            let gradients = GradientsParams::from_grads(gradients, &model);
            model = optimizer.step(0.25, model, gradients);
        }
        let expected = values(&model);
        assert_eq!(expected[..4], untrained[..4], "the base is frozen");
        assert_ne!(expected[4..6], untrained[4..6]);
        assert_ne!(expected[6..], untrained[6..]);
        for ranks in [1, 2, 3] {
            let folder = tempfile::tempdir().unwrap();
            for until in [2, STEPS] {
                let outcomes = accelerator::launch(ranks, |accelerator| {
                    let sgd =
                        |accelerator: &Accelerator| accelerator.prepare(SgdConfig::new().init());
                    let checkpoints = Checkpoints::new(folder.path());
                    train(&accelerator, build, sgd, &checkpoints, until)
                });
                let outcome = of_every_rank(outcomes.unwrap());
                if until == STEPS {
                    assert_eq!(outcome[..expected.len()], expected, "{ranks} ranks");
                }
            }
        }
    }
}

#[test]
fn adapters_resume_with_a_sharded_optimizer_and_in_half_precision() {
    for build in [adapted as Build, quantised_and_adapted] {
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
                            let checkpoints = Checkpoints::new(folder.path());
                            train(&accelerator, build, sharded, &checkpoints, until)
                        });
                        outcome = of_every_rank(outcomes.unwrap());
                    }
                    outcome
                };
                let whole = run(&[STEPS]);
                assert_eq!(run(&[1, STEPS]), whole, "{precision}, {ranks} ranks");
                let untrained = values(&build(&Accelerator::new().unwrap().device()));
                assert_eq!(whole[..4], untrained[..4], "the base is frozen");
                assert_ne!(whole[4..untrained.len()], untrained[4..]);
            }
        }
    }
}

/// The values that share a scale.
#[derive(Clone, Copy)]
enum Scales {
    All,
    Rows(u8),
}

/// Returns the layer with its parameters quantised to 8 bits.
fn quantised(layer: Linear, adapter: Lora, scales: Scales) -> Linear {
    let device = layer.weight.device();
    let scheme = device
        .settings()
        .quantization
        .scheme
        .with_value(QuantValue::Q8S);
    let scheme = match scales {
        Scales::All => scheme,
        Scales::Rows(length) => scheme.per_block([length], ScaleDtype::F32),
    };
    let quantizer = Quantizer::new(Calibration::MinMax, scheme);
    layer.apply_qlora(QLora::new(adapter, quantizer))
}

fn quantised_and_adapted(device: &Device) -> Linear {
    let mut layer: Linear = LinearConfig::new(2, 2).with_bias(false).init(device);
    // The scale is 1 / 128.
    let base = TensorData::from([[127.0_f32 / 128.0, -0.25], [0.75, 0.5]]);
    layer.weight = Param::from_data(base, device);
    quantised(layer, Lora::new(1, 1.0), Scales::All).map(&mut Dyadic(device))
}

/// Returns the names of the tensors in a model file.
fn names(path: &Path) -> Vec<String> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut names: Vec<_> = file.names().into_iter().map(String::from).collect();
    names.sort();
    names
}

#[test]
fn checkpoints_without_frozen_parameters_continue_with_the_base_of_the_program() {
    for build in [adapted as Build, quantised_and_adapted] {
        for ranks in [1, 2, 3] {
            let run = |checkpoints: fn(&Path) -> Checkpoints| {
                let folder = tempfile::tempdir().unwrap();
                let mut outcome = Vec::new();
                for until in [2, STEPS] {
                    let outcomes = accelerator::launch(ranks, |accelerator| {
                        let checkpoints = checkpoints(folder.path());
                        let adamw = |accelerator: &Accelerator| {
                            accelerator.prepare(AdamWConfig::new().init())
                        };
                        train(&accelerator, build, adamw, &checkpoints, until)
                    });
                    outcome = of_every_rank(outcomes.unwrap());
                }
                let newest = accelerator_manifest::Folder::open(folder.path()).unwrap();
                let newest = newest.latest_good().unwrap().found.unwrap();
                (outcome, names(&newest.path().join("model.safetensors")))
            };
            let (whole, saved) = run(|path| Checkpoints::new(path));
            assert_eq!(saved, ["weight", "weight.lora.a", "weight.lora.b"]);
            let (small, saved) = run(|path| Checkpoints::new(path).without_frozen_parameters());
            assert_eq!(saved, ["weight.lora.a", "weight.lora.b"]);
            assert_eq!(small, whole, "{ranks} ranks");
        }
    }
}

#[test]
fn another_base_is_refused_on_every_rank() {
    for ranks in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path()).without_frozen_parameters();
        let outcomes = accelerator::launch(ranks, |accelerator| {
            let device = accelerator.device();
            let model = accelerator.prepare(adapted(&device))?;
            accelerator.save_state(&checkpoints, &model)?;
            let mut other = adapted(&device);
            let zeros = Tensor::zeros([2, 2], &device);
            other.weight = Param::initialized(other.weight.id, zeros)
                .set_require_grad(false)
                .apply_lora(Lora::new(1, 1.0));
            let other = accelerator.prepare(other)?;
            let error = accelerator.load_model(other.clone(), folder.path());
            assert!(error.unwrap_err().is_model());
            Ok(accelerator
                .resume(&checkpoints, other)
                .map(drop)
                .unwrap_err())
        });
        let words = [
            "without frozen parameters",
            "1 of the 1",
            "`weight`",
            "the base",
        ];
        assert_errors(outcomes.unwrap(), Error::is_model, &words);
    }
}

/// Running statistics take no gradient, and training changes them.
#[test]
fn running_statistics_are_not_frozen() {
    #[derive(Debug, Module)]
    struct Net {
        layer: Linear,
        norm: BatchNorm,
    }
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path()).without_frozen_parameters();
    let accelerator = Accelerator::new().unwrap();
    let device = accelerator.device();
    let net = || {
        let layer = LinearConfig::new(2, 2)
            .with_initializer(Initializer::Ones)
            .init(&device);
        let norm = BatchNormConfig::new(2).init(&device);
        accelerator
            .prepare(Net { layer, norm }.apply_lora(Lora::new(1, 1.0)))
            .unwrap()
    };
    let model = net();
    let input = Tensor::<2>::from_data([[1.0, 5.0], [3.0, 9.0]], &device);
    model.norm.forward(model.layer.forward(input));
    let saved = accelerator.save_state(&checkpoints, &model).unwrap();
    let names = names(&saved.path().join("model.safetensors"));
    let expected = [
        "layer.weight.lora.a",
        "layer.weight.lora.b",
        "norm.running_mean",
        "norm.running_var",
    ];
    assert_eq!(names, expected);
    let loaded = accelerator.load_model(net(), folder.path()).unwrap();
    let mean = |model: &Net| model.valid().norm.running_mean.value().into_data();
    let (resumed, _) = accelerator.resume(&checkpoints, net()).unwrap();
    assert_eq!(mean(&loaded), mean(&model));
    assert_eq!(mean(&resumed), mean(&model));
    assert_ne!(mean(&net()), mean(&model));
}

fn random(device: &Device, layout: LinearLayout, scales: Scales) -> Linear {
    let layer = LinearConfig::new(32, 64).with_layout(layout).init(device);
    quantised(layer, Lora::new(2, 4.0), scales)
}

#[test]
fn quantised_parameters_come_back_from_files_bit_for_bit() {
    for (layout, scales) in [
        (LinearLayout::Row, Scales::All),
        (LinearLayout::Row, Scales::Rows(16)),
        (LinearLayout::Col, Scales::All),
        (LinearLayout::Col, Scales::Rows(16)),
    ] {
        for ranks in [1, 2] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("model.safetensors");
            let outcomes = accelerator::launch(ranks, |accelerator| {
                let model = || random(&accelerator.device(), layout, scales);
                let saved = accelerator.prepare(model())?;
                accelerator.save_model(&saved, &path)?;
                let loaded = accelerator.load_model(model(), &path)?;
                let base = |model: &Linear| model.weight.base().into_data();
                base(&loaded).assert_eq(&base(&saved), true);
                Ok(values(&loaded))
            });
            of_every_rank(outcomes.unwrap());
        }
    }
}

/// An element of 4 bits has no size in bytes.
#[test]
fn a_base_of_four_bits_can_be_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::new().unwrap();
    let checkpoints = Checkpoints::new(folder.path()).without_frozen_parameters();
    let device = accelerator.device();
    let scheme = device.settings().quantization.scheme;
    let scheme = scheme.with_value(QuantValue::Q4S);
    let quantizer = || Quantizer::new(Calibration::MinMax, scheme);
    let layer: Linear = LinearConfig::new(32, 64).init(&device);
    let build = || {
        let qlora = QLora::new(Lora::new(2, 4.0), quantizer());
        accelerator
            .prepare(layer.clone().apply_qlora(qlora))
            .unwrap()
    };
    let saved = build();
    accelerator.save_state(&checkpoints, &saved).unwrap();
    let (resumed, _) = accelerator.resume(&checkpoints, build()).unwrap();
    assert_eq!(values(&resumed), values(&saved));
}

#[test]
fn quantised_parameters_fit_only_the_same_quantisation() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let accelerator = Accelerator::new().unwrap();
    let device = accelerator.device();
    let model = random(&device, LinearLayout::Row, Scales::All);
    accelerator.save_model(&model, &path).unwrap();
    let dense: Linear = LinearConfig::new(32, 64).init(&device);
    let adapted = dense.apply_lora(Lora::new(2, 4.0));
    let error = accelerator.load_model(adapted.clone(), &path).unwrap_err();
    let words = ["`weight` (expected f32, found quantised by"];
    assert_error(&error, Error::is_model, &words);
    accelerator.save_model(&adapted, &path).unwrap();
    let partial = LoadOptions::new().allow_partial();
    let (_, report) = accelerator
        .load_model_with(model.clone(), &path, &partial)
        .unwrap();
    assert_eq!(report.loaded, ["weight.lora.a", "weight.lora.b"]);
    assert_eq!(report.mistyped[0].found, "f32");

    let pytorch = SaveOptions::new().with_layout(FileLayout::PyTorch);
    let error = accelerator
        .save_model_with(&model, &path, &pytorch)
        .unwrap_err();
    assert_error(
        &error,
        Error::is_model,
        &["`weight` is quantised", "materialize"],
    );
}

#[test]
fn a_quantised_model_computes_in_half_precision() {
    let builder = Accelerator::builder().precision(Precision::Bf16);
    let accelerator = builder.build().unwrap();
    let model = random(&accelerator.device(), LinearLayout::Row, Scales::All);
    let input = Tensor::<2>::ones([1, 32], &accelerator.device());
    let plain = model.forward(input.clone());
    let output = accelerator.forward(&model, |model| model.forward(accelerator.to_working(input)));
    let difference = (accelerator.to_full(output) - plain).abs().max();
    assert!(difference.into_scalar::<f32>() < 0.1);
}
