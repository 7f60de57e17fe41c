//! Half precision with full-precision master weights (C10: steps that overflow are skipped).

use crate::common::{assert_contains, assert_error, flat, known_within, line, of_every_rank};
use crate::overlap::harness::parameters;
use accelerator::precision::{LossScale, in_full};
use accelerator::prelude::*;
use accelerator::{GradientReduction, Overlap, OverlapState};
use burn::lr_scheduler::step::StepLrSchedulerConfig;
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, SgdConfig};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, Tensor, TensorData};

#[derive(Debug, Module)]
struct Net {
    convolution: Conv2d,
    batch_norm: BatchNorm,
    hidden: Vec<Linear>,
    layer_norm: LayerNorm,
    frozen: Linear,
    last: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let hidden = |_| LinearConfig::new(32, 32).init(device);
        let net = Self {
            convolution: Conv2dConfig::new([1, 2], [3, 3]).init(device),
            batch_norm: BatchNormConfig::new(2).init(device),
            hidden: (0..4).map(hidden).collect(),
            layer_norm: LayerNormConfig::new(32).init(device),
            frozen: LinearConfig::new(32, 32).init(device).no_grad(),
            last: LinearConfig::new(32, 3).init(device),
        };
        known_within(0.2, net)
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = self.convolution.forward(x);
        let x = in_full(x, |x| self.batch_norm.forward(x));
        let x = relu(x).flatten::<2>(1, 3);
        let x = self
            .hidden
            .iter()
            .fold(x, |x, layer| relu(layer.forward(x)) + 0.1);
        self.last
            .forward(self.frozen.forward(self.layer_norm.forward(x)))
    }
}

#[derive(Clone, Copy)]
struct Setting {
    accumulation: usize,
    compression: Compression,
    overlap: Overlap,
    precision: Precision,
}

/// Returns the parameters and losses of each rank after eight steps, and whether anything was sent early.
fn train(setting: Setting, ranks: usize) -> (Vec<f32>, Vec<f64>, bool) {
    let rows = Accelerator::builder()
        .device(BackendKind::Flex)
        .bucket_size(1024)
        .accumulation_steps(setting.accumulation)
        .compression(setting.compression)
        .overlap(setting.overlap)
        .precision(setting.precision)
        .launch(ranks, |accelerator| {
            let device = accelerator.device();
            let parts = (Net::new(&device), AdamWConfig::new().init());
            let (mut model, mut optimizer) = accelerator.prepare(parts)?;
            let mut losses = Vec::new();
            for step in 0..8 * setting.accumulation {
                let rows = 3 + accelerator.rank();
                let seed = (accelerator.rank() * 31 + (step % 3) * 7) as f32;
                let values = (0..rows * 36).map(|i| (i as f32 * 0.37 + seed).sin());
                let input = TensorData::new(values.collect::<Vec<f32>>(), [rows, 1, 6, 6]);
                let input =
                    accelerator.to_working(Tensor::from_data(input, &device.clone().inner()));
                let loss = accelerator.forward(&model, |model| {
                    let output = accelerator.to_full(model.forward(input));
                    (output - 0.7).powi_scalar(2).mean()
                });
                let gradients = accelerator.backward(loss, &model, rows)?.clip_norm(0.5);
                losses.extend(gradients.loss());
                model = optimizer.step(0.01, model, gradients);
            }
            assert_eq!(optimizer.steps(), 8, "{:?}", optimizer.outcome());
            let report = accelerator.overlap_report(&model)?;
            assert_eq!(report.repairs, 0, "{report:?}");
            let early = report.state == OverlapState::On && report.early_total > 0;
            // Each rank has its own running statistics.
            let trained = [
                flat(&model.convolution),
                flat(&model.hidden),
                flat(&model.last),
            ]
            .concat();
            Ok((trained, losses, early))
        })
        .unwrap();
    let early = rows.iter().all(|row| row.2);
    let losses = rows[0].1.clone();
    (
        of_every_rank(rows.into_iter().map(|row| row.0).collect()),
        losses,
        early,
    )
}

#[test]
fn half_precision_learns_what_full_does_and_overlap_changes_no_bit() {
    let full = Setting {
        accumulation: 1,
        compression: Compression::None,
        overlap: Overlap::Off,
        precision: Precision::No,
    };
    let (weights, losses, _) = train(full, 2);
    for precision in [Precision::Bf16, Precision::F16] {
        let setting = Setting { precision, ..full };
        let (half, half_losses, _) = train(setting, 2);
        assert_ne!(half, weights, "it computes in another type");
        for (half, full) in half_losses.iter().zip(&losses) {
            assert!(
                (half - full).abs() < 0.05 * losses[0],
                "{half_losses:?}, {losses:?}"
            );
        }
        assert!(half_losses[7] < 0.9 * half_losses[0], "{half_losses:?}");
        for accumulation in [1, 2] {
            for compression in [Compression::None, Compression::F16, Compression::Bf16] {
                let off = Setting {
                    accumulation,
                    compression,
                    ..setting
                };
                let on = Setting {
                    overlap: Overlap::On,
                    ..off
                };
                let (off, off_losses, _) = train(off, 2);
                let (on, on_losses, early) = train(on, 2);
                assert_eq!(on, off);
                assert_eq!(on_losses, off_losses);
                // With compression, timing decides whether the weights are known early enough.
                assert!(early || compression != Compression::None, "{precision}");
            }
        }
    }
}

#[test]
fn masters_stay_full_and_copies_are_half_but_for_what_cannot_be() {
    let builder = Accelerator::builder()
        .device(BackendKind::Flex)
        .precision(Precision::Bf16);
    let accelerator = builder.build().unwrap();
    let model = accelerator
        .prepare(Net::new(&accelerator.device()))
        .unwrap();
    let copy = accelerator.working_copy(&model, |path| path.starts_with("last."));
    assert_eq!(copy.hidden[0].weight.val().dtype(), DType::BF16);
    assert_eq!(copy.frozen.weight.val().dtype(), DType::BF16);
    assert_eq!(copy.layer_norm.gamma.val().dtype(), DType::BF16);
    assert_eq!(copy.batch_norm.gamma.val().dtype(), DType::F32);
    assert_eq!(copy.last.weight.val().dtype(), DType::F32);
    assert_eq!(model.hidden[0].weight.val().dtype(), DType::F32);
    assert_eq!(model.batch_norm.running_mean.value().dtype(), DType::F32);
    // Evaluation can use half precision as well.
    let valid = accelerator.working_copy(&model.valid(), |_| false);
    assert_eq!(valid.last.weight.val().dtype(), DType::BF16);
}

/// C10: the outcome of steps that are good, bad, bad, good and good.
#[test]
fn c10_a_step_that_overflows_is_skipped_on_all_ranks_and_the_schedule_waits() {
    for ranks in [1, 2] {
        let rows = Accelerator::builder()
            .device(BackendKind::Flex)
            .precision(Precision::F16)
            .loss_scale(LossScale::new().with_growth_interval(2))
            .launch(ranks, |accelerator| {
                let halving = StepLrSchedulerConfig::new(0.1, 1)
                    .with_gamma(0.5)
                    .init()
                    .unwrap();
                let parts = (
                    line(&accelerator.device()),
                    (SgdConfig::new().init(), halving),
                );
                let (mut model, mut optimizer) = accelerator.prepare(parts)?;
                assert_eq!(accelerator.loss_scale(&model)?, Some(65536.0));
                let (mut outcomes, mut scales) = (Vec::new(), Vec::new());
                for bad in [false, true, true, false, false] {
                    // Only one rank has the bad gradient.
                    let bad = bad && accelerator.rank() + 1 == ranks;
                    let factor = if bad { f32::NAN } else { 0.01 };
                    let loss = accelerator.forward(&model, |model| {
                        accelerator.to_full(model.weight.val()).sum() * factor
                    });
                    let before = flat(&model);
                    let gradients = accelerator
                        .backward(loss.reshape([1]), &model, 1)?
                        .clip_norm(5.0);
                    model = optimizer.step(model, gradients);
                    let moved = flat(&model) != before;
                    assert_eq!(
                        moved,
                        matches!(optimizer.outcome(), StepOutcome::Stepped { .. })
                    );
                    outcomes.push(optimizer.outcome());
                    scales.push(accelerator.loss_scale(&model)?.unwrap());
                }
                assert_eq!(optimizer.steps(), 3);
                Ok((outcomes, scales, flat(&model)))
            })
            .unwrap();
        for (outcomes, scales, parameters) in &rows {
            assert_eq!(parameters, &rows[0].2);
            assert_eq!(*scales, [65536.0, 32768.0, 16384.0, 16384.0, 32768.0]);
            let told: Vec<_> = outcomes
                .iter()
                .map(|outcome| match outcome {
                    StepOutcome::Stepped { rate, norm } => {
                        let norm = norm.unwrap();
                        // The norm is unscaled, and only the weight has a gradient.
                        assert!((norm - 0.01).abs() < 1e-4, "{norm}");
                        Ok(*rate)
                    }
                    StepOutcome::Skipped { scale } => Err(*scale),
                    other => panic!("{other:?}"),
                })
                .collect();
            let expected = [Ok(0.1), Err(65536.0), Err(32768.0), Ok(0.05), Ok(0.025)];
            assert_eq!(told, expected);
        }
    }
}

#[test]
fn a_gradient_that_f16_cannot_hold_survives_by_the_scale() {
    let gradient = |precision| {
        let builder = Accelerator::builder()
            .device(BackendKind::Flex)
            .precision(precision);
        let accelerator = builder.build().unwrap();
        let model: Linear = accelerator.prepare(line(&accelerator.device())).unwrap();
        let loss = accelerator.forward(&model, |model| {
            accelerator.to_full(model.weight.val()).sum() * 1e-9
        });
        accelerator
            .backward(loss.reshape([1]), &model, 1)
            .unwrap()
            .norm()
            .unwrap()
    };
    let (half, full) = (gradient(Precision::F16), gradient(Precision::No));
    assert!(
        full > 0.0 && (half - full).abs() < 1e-2 * full,
        "{half}, {full}"
    );
}

#[test]
fn the_scale_comes_back_with_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let prepared = || {
        let builder = Accelerator::builder()
            .device(BackendKind::Flex)
            .precision(Precision::F16);
        let accelerator = builder
            .loss_scale(LossScale::new().with_growth_interval(2))
            .build()
            .unwrap();
        let parts = (line(&accelerator.device()), SgdConfig::new().init());
        let parts = accelerator.prepare(parts).unwrap();
        (accelerator, parts)
    };
    let step = |accelerator: &Accelerator, model: &Linear, factor: f32| {
        let loss = accelerator
            .to_full(accelerator.working_copy(model, |_| false).weight.val())
            .sum()
            * factor;
        accelerator.backward(loss.reshape([1]), model, 1).unwrap()
    };
    let (accelerator, (mut model, mut optimizer)) = prepared();
    for factor in [f32::INFINITY, 0.1, f32::INFINITY] {
        let gradients = step(&accelerator, &model, factor);
        model = optimizer.step(0.1, model, gradients);
    }
    // After one more good step, the next one would grow the scale.
    let gradients = step(&accelerator, &model, 0.1);
    model = optimizer.step(0.1, model, gradients);
    accelerator
        .save_state(folder, (&model, &optimizer))
        .unwrap();

    let (accelerator, parts) = prepared();
    let ((mut model, mut optimizer), _) = accelerator.resume(folder, parts).unwrap();
    assert_eq!(accelerator.loss_scale(&model).unwrap(), Some(16384.0));
    let gradients = step(&accelerator, &model, 0.1);
    model = optimizer.step(0.1, model, gradients);
    assert_eq!(accelerator.loss_scale(&model).unwrap(), Some(32768.0));
}

#[test]
fn what_a_device_cannot_compute_in_is_refused() {
    if BackendKind::NdArray.is_compiled_in() {
        for precision in [Precision::F16, Precision::Bf16] {
            let builder = Accelerator::builder()
                .device(BackendKind::NdArray)
                .precision(precision);
            let words = [&*precision.to_string(), "ndarray"];
            assert_error(&builder.build().unwrap_err(), Error::is_device, &words);
        }
    }
    let rule = LossScale::new().with_backoff(2.0);
    let error = Accelerator::builder().loss_scale(rule).build().unwrap_err();
    assert_error(&error, Error::is_config, &["backoff"]);
}

#[test]
fn a_step_may_have_several_copies_and_one_that_no_backward_uses() {
    let run = |overlap: Overlap| {
        let builder = Accelerator::builder()
            .device(BackendKind::Flex)
            .bucket_size(1024)
            .overlap(overlap)
            .precision(Precision::Bf16);
        let rows = builder.launch(2, |accelerator| {
            let device = accelerator.device();
            let layers: Vec<Linear> = (0..4)
                .map(|_| LinearConfig::new(32, 32).init(&device))
                .collect();
            let parts = (known_within(0.2, Stack { layers }), SgdConfig::new().init());
            let (mut model, mut optimizer) = accelerator.prepare(parts)?;
            for step in 0..12 {
                let input = Tensor::<2>::ones([2, 32], &device) * (1.0 + accelerator.rank() as f32);
                let input = accelerator.to_working(input);
                let loss = || {
                    let output = accelerator.forward(&model, |model| model.forward(input.clone()));
                    accelerator.to_full(output).powi_scalar(2).mean()
                };
                let loss = match step {
                    // One loss is computed and dropped.
                    0 | 1 | 7 => {
                        let _ = loss();
                        loss()
                    }
                    8 | 9 => loss() + loss() * 0.5,
                    _ => loss(),
                };
                let gradients = accelerator.backward(loss, &model, 2)?;
                model = optimizer.step(0.01, model, gradients);
            }
            let report = accelerator.overlap_report(&model)?;
            assert_eq!(report.repairs, 0, "{report:?}");
            assert!(
                overlap == Overlap::Off || report.early_total > 0,
                "{report:?}"
            );
            Ok(flat(&model))
        });
        of_every_rank(rows.unwrap())
    };
    assert_eq!(run(Overlap::On), run(Overlap::Off));
}

#[derive(Debug, Module)]
struct Stack {
    layers: Vec<Linear>,
}

impl Stack {
    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        let layers = self.layers.iter();
        layers.fold(input, |x, layer| relu(layer.forward(x)) + 0.1)
    }
}

/// Returns the parameters of each rank after eight windows of training with masters of that type, its losses, and the
/// number of buckets that it sent while backward ran.
fn train_masters(
    masters: DType,
    precision: Precision,
    accumulation: usize,
    overlap: Overlap,
    reduction: GradientReduction,
) -> Vec<(Vec<TensorData>, Vec<f64>, u64)> {
    Accelerator::builder()
        .device(BackendKind::Flex)
        .bucket_size(1024)
        .accumulation_steps(accumulation)
        .overlap(overlap)
        .gradient_reduction(reduction)
        .precision(precision)
        .launch(2, |accelerator| {
            let device = accelerator.device();
            let layers = (0..4).map(|_| LinearConfig::new(32, 32).init(&device));
            let layers = layers.collect();
            let stack = known_within(0.2, Stack { layers }).map(&mut InType(masters));
            let (mut model, mut optimizer) =
                accelerator.prepare((stack, SgdConfig::new().init()))?;
            let mut losses = Vec::new();
            for step in 0..8 * accumulation {
                let rows = 3 + accelerator.rank();
                let seed = (accelerator.rank() * 31 + step * 7) as f32;
                let values = (0..rows * 32).map(|i| (i as f32 * 0.37 + seed).sin());
                let input = TensorData::new(values.collect::<Vec<f32>>(), [rows, 32]);
                let input = Tensor::from_data(input, &device.clone().inner());
                let input = accelerator.to_working(input);
                let loss = accelerator.forward(&model, |model| {
                    let output = accelerator.to_full(model.forward(input));
                    // Gradients are below 6·10⁻⁵, where bf16 has more bits than f16.
                    (output - 0.7).powi_scalar(2).mean() * 1e-4
                });
                let gradients = accelerator.backward(loss, &model, rows)?.clip_norm(5e-5);
                losses.extend(gradients.loss());
                model = optimizer.step(1e3, model, gradients);
            }
            let report = accelerator.overlap_report(&model)?;
            assert_eq!(report.repairs, 0, "{report:?}");
            Ok((parameters(&model), losses, report.early_total))
        })
        .unwrap()
}

/// Casts parameters to a type.
struct InType(DType);

impl ModuleMapper for InType {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, old, mapper) = param.consume();
        let values = old.to_data().convert_dtype(self.0);
        let new = Tensor::from_data(values, (&old.device(), self.0));
        Param::from_mapped_value(id, new.set_require_grad(old.is_require_grad()), mapper)
    }
}

#[test]
fn masters_of_every_type_get_the_same_bits_with_overlap_and_without() {
    let (auto, staged) = (GradientReduction::Auto, GradientReduction::Staged);
    for masters in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        for precision in [Precision::Bf16, Precision::F16] {
            for (accumulation, reduction) in [(1, auto), (2, auto), (1, staged), (2, staged)] {
                let run =
                    |overlap| train_masters(masters, precision, accumulation, overlap, reduction);
                let (off, on) = (run(Overlap::Off), run(Overlap::On));
                let name = format!("{masters:?} in {precision}, {reduction:?}");
                for (on, off) in on.iter().zip(&off) {
                    let (parameters, losses, early) = on;
                    assert_eq!((parameters, losses), (&off.0, &off.1), "{name}");
                    assert_eq!(parameters[0].dtype(), masters);
                    // A cast to half precision rounds, so the reduction must wait for it.
                    let in_half = format!("{masters:?}").to_lowercase() == precision.to_string();
                    let is_early = in_half || matches!(masters, DType::F64 | DType::F32);
                    assert_eq!(*early > 0, is_early, "{name}");
                }
                assert_eq!(off[0].0, off[1].0, "{name}");
                assert_ne!(off[0].0, known_in(masters), "{name}: it learns");
            }
        }
    }
}

/// Returns the initial parameters of [`train_masters`].
fn known_in(masters: DType) -> Vec<TensorData> {
    let layer = |_| LinearConfig::new(32, 32).init(&Device::flex());
    let layers = (0..4).map(layer).collect();
    parameters(&known_within(0.2, Stack { layers }).map(&mut InType(masters)))
}

#[test]
fn what_was_not_cast_is_named_with_the_call_that_casts_it() {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    let accelerator = Accelerator::builder()
        .precision(Precision::Bf16)
        .build()
        .unwrap();
    let device = accelerator.device();
    let model: Linear = accelerator
        .prepare(LinearConfig::new(2, 1).init(&device))
        .unwrap();
    let said = |forward: &dyn Fn(&Linear)| -> String {
        let outcome = catch_unwind(AssertUnwindSafe(|| accelerator.forward(&model, forward)));
        let panic = outcome.unwrap_err();
        let text = panic.downcast_ref::<String>().cloned();
        text.unwrap_or_else(|| (*panic.downcast_ref::<&str>().unwrap()).to_owned())
    };
    let text = said(&|model| drop(model.forward(Tensor::<2>::ones([4, 2], &device))));
    let words = [
        "accelerator.to_working(input)",
        "bf16",
        "f32",
        "inside the model",
    ];
    assert_contains(text.lines().next().unwrap(), &words);
    // Burn's words are kept.
    let (_, burns) = text.split_once("The panic says: ").unwrap();
    assert_contains(burns, &["dtype"]);
    // Other panics stay as they are.
    let own = "a column of this table has the dtype of another one";
    assert_eq!(said(&|_| panic!("{own}")), own);
    assert_eq!(said(&|_| panic!("no such layer")), "no such layer");
}
