//! Parameters are frozen and unfrozen during training.

use std::path::Path;

use crate::common::{
    assert_close, assert_error, assert_errors, flat, line, line_and_sgd, linear, of_every_rank,
};
use accelerator::local::DiLoCo;
use accelerator::precision::LossScale;
use accelerator::prelude::*;
use accelerator::{Overlap, OverlapState};
use burn::module::{Module, ParamGroup};
use burn::nn::{BatchNorm, BatchNormConfig, Linear};
use burn::optim::{AdamWConfig, GradientsParams, SgdConfig};
use burn::tensor::activation::tanh;
use burn::tensor::{Device, FloatDType, Tensor, TensorData};

/// The samples of a step, over all ranks.
const SAMPLES: usize = 6;
const RATE: f64 = 0.01;
const DECAY: f64 = 0.8;
/// The steps in which the base is frozen.
const FROZEN: core::ops::Range<u64> = 4..8;
const STEPS: u64 = 12;

/// Sharding cuts `base.1` among up to three ranks.
#[derive(Debug, Module)]
struct Net {
    base: Vec<Linear>,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            base: vec![linear(4, 90, device), linear(90, 150, device)],
            head: linear(150, 2, device),
        }
    }

    /// Freezes the base or unfreezes it, as the step demands.
    fn at(self, step: u64) -> Self {
        let base = || ParamGroup::from_predicate("base");
        match FROZEN.contains(&step) {
            true => self.freeze_group(base()),
            false => self.unfreeze_group(base()),
        }
    }

    /// Returns the loss over this rank's samples of a step.
    fn loss(&self, step: u64, rank: usize, ranks: usize) -> Tensor<1> {
        let own = SAMPLES / ranks;
        let first = step as usize * SAMPLES + rank * own;
        let values = (4 * first..4 * (first + own)).map(|at| (at as f32 * 0.7).sin());
        let values = TensorData::new(values.collect::<Vec<_>>(), [own, 4]);
        let weight = self.head.weight.val();
        let input = Tensor::<2>::from_data(values, &weight.device());
        let input = input.cast(weight.dtype());
        let hidden = self
            .base
            .iter()
            .fold(input, |x, layer| tanh(layer.forward(x)));
        let output = self.head.forward(hidden).cast(FloatDType::F32);
        (output - 0.5).powi_scalar(2).mean()
    }
}

/// Returns the weights that Burn alone gives, and their average.
fn plain(kind: BackendKind) -> Vec<f32> {
    let accelerator = Accelerator::builder().device(kind).build().unwrap();
    let mut net = Net::new(&accelerator.device());
    let mut optimizer = AdamWConfig::new().init();
    let mut ema = Ema::new(&net, DECAY);
    for step in 0..STEPS {
        net = net.at(step);
        let gradients = net.loss(step, 0, 1).backward();
        let gradients = GradientsParams::from_grads(gradients, &net);
        net = optimizer.step(RATE, net, gradients);
        ema.update(&net);
    }
    [flat(&net), flat(ema.model())].concat()
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Optimizer {
    Fused,
    Plain,
    Sharded,
    ShardedFused,
}

const OPTIMIZERS: [Optimizer; 4] = [
    Optimizer::Plain,
    Optimizer::Fused,
    Optimizer::Sharded,
    Optimizer::ShardedFused,
];

impl Optimizer {
    fn prepare(
        self,
        accelerator: &Accelerator,
    ) -> Result<PreparedOptimizer<accelerator::optim::Manual>> {
        let config = AdamWConfig::new();
        match self {
            Self::Fused => accelerator.prepare(config.init_fused()),
            Self::Plain => accelerator.prepare(config.init()),
            Self::Sharded => accelerator.prepare(Sharded(config.init())),
            Self::ShardedFused => accelerator.prepare(Sharded(config.init_fused())),
        }
    }
}

/// Trains `steps`, beginning with the newest checkpoint of the folder, and saves. Returns the weights and their
/// average.
fn train(
    accelerator: &Accelerator,
    optimizer: Optimizer,
    folder: &Path,
    steps: core::ops::Range<u64>,
) -> Result<Vec<f32>> {
    let mut model = Net::new(&accelerator.device());
    if steps.start % 4 == 2 {
        // A program may also freeze before it resumes.
        model = model.at(steps.start);
    }
    let model = accelerator.prepare(model)?;
    let optimizer = optimizer.prepare(accelerator)?;
    let ema = Ema::new(&model, DECAY);
    let parts = (model, optimizer, ema);
    let ((mut model, mut optimizer, mut ema), position) = accelerator.resume(folder, parts)?;
    assert_eq!(position.step(), steps.start);
    for step in steps.clone() {
        if step == steps.start || step == FROZEN.start || step == FROZEN.end {
            model = accelerator.prepare(model.at(step))?;
        }
        let loss = model.loss(step, accelerator.rank(), accelerator.world_size());
        let samples = SAMPLES / accelerator.world_size();
        let gradients = accelerator.backward(loss, &model, samples)?;
        model = optimizer.step(RATE, model, gradients);
        ema.update(&model);
    }
    assert_eq!(optimizer.steps(), steps.end);
    accelerator.save_state(folder, (&model, &optimizer, &ema))?;
    Ok([flat(&model), flat(ema.model())].concat())
}

#[test]
fn a_part_that_is_frozen_for_a_while_is_trained_as_by_burn_alone() {
    for kind in crate::common::devices() {
        let expected = plain(kind);
        for ranks in [1, 2, 3] {
            let mut outcomes = Vec::new();
            for optimizer in OPTIMIZERS {
                let folder = tempfile::tempdir().unwrap();
                let launched = Accelerator::builder()
                    .device(kind)
                    .launch(ranks, |accelerator| {
                        train(&accelerator, optimizer, folder.path(), 0..STEPS)
                    });
                let outcome = of_every_rank(launched.unwrap());
                match ranks {
                    1 => assert_eq!(outcome, expected, "{optimizer:?}"),
                    _ => assert_close(&outcome, &expected, 1e-5),
                }
                outcomes.push(outcome);
            }
            assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]));
        }
    }
}

#[test]
fn a_run_that_is_cut_before_between_and_after_is_the_undisturbed_one() {
    for (ranks, optimizer) in [
        (1, Optimizer::Plain),
        (2, Optimizer::Fused),
        (2, Optimizer::Sharded),
        (3, Optimizer::ShardedFused),
    ] {
        let run = |cuts: &[u64]| {
            let folder = tempfile::tempdir().unwrap();
            let (mut start, mut outcome) = (0, Vec::new());
            for &until in cuts {
                let launched = accelerator::launch(ranks, |accelerator| {
                    train(&accelerator, optimizer, folder.path(), start..until)
                });
                outcome = of_every_rank(launched.unwrap());
                start = until;
            }
            outcome
        };
        let whole = run(&[STEPS]);
        for cuts in [&[2, STEPS][..], &[FROZEN.start, 6, FROZEN.end, 10, STEPS]] {
            assert_eq!(run(cuts), whole, "{optimizer:?} on {ranks} ranks, {cuts:?}");
        }
    }
}

#[test]
fn gradients_of_a_frozen_part_are_not_sent_and_overlap_is_calibrated_again() {
    let train = |overlap, compression, precision| {
        let builder = Accelerator::builder()
            .bucket_size(1024)
            .precision(precision)
            .overlap(overlap)
            .compression(compression);
        let outcomes = builder.launch(2, |accelerator| {
            let parts = (Net::new(&accelerator.device()), AdamWConfig::new().init());
            let (mut model, mut optimizer) = accelerator.prepare(parts)?;
            let mut buckets = Vec::new();
            for step in 0..STEPS {
                if [FROZEN.start, FROZEN.end].contains(&step) {
                    model = accelerator.prepare(model.at(step))?;
                }
                let rank = accelerator.rank();
                let loss = accelerator.forward(&model, |model| model.loss(step, rank, 2));
                let gradients = accelerator.backward(loss, &model, SAMPLES / 2)?;
                model = optimizer.step(RATE, model, gradients);
                let report = accelerator.overlap_report(&model)?;
                let begun = step % FROZEN.start;
                match (overlap, begun) {
                    (Overlap::On, 0) => assert_eq!(report.state, OverlapState::Learning),
                    (Overlap::On, 3) => {
                        assert_eq!(report.state, OverlapState::On);
                        assert_eq!(report.repairs, 0);
                    }
                    _ => {}
                }
                if begun == 3 {
                    buckets.push(report.buckets);
                }
            }
            assert!(buckets[1] < buckets[0], "{buckets:?}");
            assert_eq!(buckets[2], buckets[0]);
            Ok(flat(&model))
        });
        of_every_rank(outcomes.unwrap())
    };
    for (compression, precision) in [
        (Compression::None, Precision::No),
        (Compression::Bf16, Precision::No),
        (Compression::None, Precision::Bf16),
    ] {
        let [on, off] = [Overlap::On, Overlap::Off].map(|way| train(way, compression, precision));
        assert_eq!(on, off, "{compression} {precision}");
    }
}

#[test]
fn parts_may_take_turns_and_what_is_frozen_without_prepare_stays() {
    for ranks in [1, 2] {
        let outcomes = accelerator::launch(ranks, |accelerator| {
            let mut model = accelerator.prepare(Net::new(&accelerator.device()))?;
            let mut optimizer = Optimizer::ShardedFused.prepare(&accelerator)?;
            for step in 0..6 {
                // No parameter that is trained now was trained in the step before.
                let (frozen, trained) = match step % 2 {
                    0 => ("base", "head"),
                    _ => ("head", "base"),
                };
                model = model
                    .freeze_group(ParamGroup::from_predicate(frozen))
                    .unfreeze_group(ParamGroup::from_predicate(trained));
                model = accelerator.prepare(model)?;
                let before = model.clone();
                let loss = model.loss(step, accelerator.rank(), ranks);
                let gradients = accelerator.backward(loss, &model, SAMPLES / ranks)?;
                model = optimizer.step(RATE, model, gradients);
                let moved = [
                    flat(&model.base) != flat(&before.base),
                    flat(&model.head) != flat(&before.head),
                ];
                assert_eq!(moved, [trained == "base", trained == "head"]);
            }
            // Only the missing gradients show that the base is frozen.
            let model = model.unfreeze_group(ParamGroup::from_predicate("head"));
            let mut model = accelerator.prepare(model)?;
            model.base = model.base.no_grad();
            let before = flat(&model.base);
            let loss = model.loss(6, accelerator.rank(), ranks);
            let gradients = accelerator.backward(loss, &model, SAMPLES / ranks)?;
            model = optimizer.step(RATE, model, gradients);
            assert_eq!(flat(&model.base), before);
            assert_eq!(optimizer.steps(), 7);
            Ok(flat(&model))
        });
        of_every_rank(outcomes.unwrap());
    }
}

#[test]
fn an_open_window_is_refused_on_every_rank_and_continues() {
    for ranks in [1, 2, 3] {
        let builder = Accelerator::builder().accumulation_steps(2);
        let outcomes = builder.launch(ranks, |accelerator| {
            let mut model = accelerator.prepare(Net::new(&accelerator.device()))?;
            let loss = |model: &Net| model.loss(0, accelerator.rank(), ranks);
            let open = accelerator.backward(loss(&model), &model, SAMPLES / ranks)?;
            assert!(open.is_accumulating());
            let frozen = model.clone().at(FROZEN.start);
            let error = accelerator.prepare(frozen.clone()).map(drop).unwrap_err();
            let full = accelerator.backward(loss(&model), &model, SAMPLES / ranks)?;
            assert_eq!(full.samples(), Some(2.0 * SAMPLES as f64));
            drop(full);
            model = accelerator.prepare(frozen)?;
            let open = accelerator.backward(loss(&model), &model, 1)?;
            assert!(open.is_accumulating());
            Ok(error)
        });
        let words = ["1 micro-step", "`trigger_sync`"];
        assert_errors(outcomes.unwrap(), Error::is_misuse, &words);
    }
}

#[test]
fn the_middle_of_local_training_is_refused_and_continues() {
    let outcomes = accelerator::launch(2, |accelerator| {
        let parts = (Net::new(&accelerator.device()), SgdConfig::new().init());
        let (mut model, mut optimizer) = accelerator.prepare(parts)?;
        let mut local = LocalSgdConfig::new(8).init(&accelerator, &model)?;
        for step in 0..3 {
            let loss = model.loss(step, accelerator.rank(), 2);
            let gradients = local.backward(loss, &model, SAMPLES / 2)?;
            model = optimizer.step(RATE, model, gradients);
            local.step(&mut model)?;
        }
        let frozen = model.clone().at(FROZEN.start);
        let error = accelerator.prepare(frozen).map(drop).unwrap_err();
        assert_error(&error, Error::is_misuse, &["call `average` first"]);
        local.finish(&mut model)?;
        Ok(flat(&accelerator.prepare(model.at(FROZEN.start))?))
    });
    of_every_rank(outcomes.unwrap());
}

#[test]
fn ranks_that_freeze_different_parts_are_told_and_go_on() {
    let outcomes = accelerator::launch(2, |accelerator| {
        let parts = (Net::new(&accelerator.device()), SgdConfig::new().init());
        let (model, mut optimizer) = accelerator.prepare(parts)?;
        let step = FROZEN.start * accelerator.rank() as u64;
        let error = accelerator
            .prepare(model.clone().at(step))
            .map(drop)
            .unwrap_err();
        assert_error(&error, Error::is_model, &["`base.0.weight`", "frozen"]);
        let loss = model.loss(0, accelerator.rank(), 2);
        let gradients = accelerator.backward(loss, &model, SAMPLES / 2)?;
        Ok(flat(&optimizer.step(RATE, model, gradients)))
    });
    of_every_rank(outcomes.unwrap());
}

#[test]
fn a_model_that_is_new_on_one_rank_begins_anew_on_all() {
    let folder = tempfile::tempdir().unwrap();
    let outcomes = accelerator::launch(2, |accelerator| {
        let first = Net::new(&accelerator.device());
        let mut model = accelerator.prepare(first.clone())?;
        let mut optimizer = accelerator.prepare(SgdConfig::new().init())?;
        let loss = model.loss(0, accelerator.rank(), 2);
        let gradients = accelerator.backward(loss, &model, SAMPLES / 2)?;
        model = optimizer.step(RATE, model, gradients);
        drop(model);
        // Only rank 0 knows the ids of `first`.
        let model = accelerator.prepare(first)?;
        let optimizer = accelerator.prepare(SgdConfig::new().init())?;
        accelerator.save_state(folder.path(), (&model, &optimizer))?;
        let (_, position) = accelerator.resume(folder.path(), (model, optimizer))?;
        Ok(position.step())
    });
    assert_eq!(outcomes.unwrap(), [0, 0]);
}

#[test]
fn the_scale_of_losses_continues() {
    let builder = Accelerator::builder()
        .precision(Precision::F16)
        .loss_scale(LossScale::new().with_initial(1024.0));
    let outcomes = builder.launch(2, |accelerator| {
        let model = accelerator.prepare(Net::new(&accelerator.device()))?;
        let loss = model.loss(0, accelerator.rank(), 2) * 1e38;
        let overflowed = accelerator.backward(loss, &model, SAMPLES / 2)?;
        assert!(overflowed.overflow().is_some());
        let scale = accelerator.loss_scale(&model)?;
        let model = accelerator.prepare(model.at(FROZEN.start))?;
        Ok((scale, accelerator.loss_scale(&model)?))
    });
    for (before, after) in outcomes.unwrap() {
        assert!(before < Some(1024.0), "{before:?}");
        assert_eq!(after, before);
    }
}

#[test]
fn running_statistics_of_all_ranks_are_kept() {
    let outcomes = accelerator::launch(2, |accelerator| {
        let device = accelerator.device();
        let norm: BatchNorm = BatchNormConfig::new(1).with_momentum(1.0).init(&device);
        let norm = accelerator.prepare(norm)?;
        let own = 4.0 * accelerator.rank() as f64;
        norm.forward(Tensor::<2>::full([3, 1], own, &device));
        let mut norm = norm;
        norm.gamma = norm.gamma.set_require_grad(false);
        let norm = accelerator.prepare(norm)?;
        Ok(norm.running_mean.value().into_scalar::<f64>())
    });
    assert_eq!(outcomes.unwrap(), [2.0, 2.0]);
}

/// A model that contains another one, frozen.
#[derive(Debug, Module)]
struct Pair {
    student: Linear,
    teacher: Linear,
}

#[test]
fn a_frozen_part_may_be_a_model_of_its_own() {
    for ranks in [1, 2] {
        accelerator::launch(ranks, |accelerator| {
            let device = accelerator.device();
            let (teacher, mut optimizer) = line_and_sgd(&accelerator)?;
            let pair = Pair {
                student: line(&device),
                teacher: teacher.clone().no_grad(),
            };
            let pair = accelerator.prepare(pair)?;
            let input = || Tensor::<2>::ones([2, 1], &device);
            let loss = |pair: &Pair| {
                let goal = pair.teacher.forward(input()) + 1.0;
                (pair.student.forward(input()) - goal).powi_scalar(2).mean()
            };
            let gradients = accelerator.backward(loss(&pair), &pair, 2)?;
            assert!(gradients.loss().is_some_and(|loss| loss > 0.5));
            // Each of them can still be trained by itself.
            let loss = teacher.forward(input()).mean();
            let gradients = accelerator.backward(loss, &teacher, 2)?;
            let stepped = optimizer.step(0.1, teacher.clone(), gradients);
            assert_ne!(flat(&stepped), flat(&teacher));
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn the_outer_momentum_of_what_was_frozen_begins_at_zero() {
    let train = |frozen_first: bool| {
        let outcomes = accelerator::launch(2, |accelerator| {
            let step = if frozen_first { FROZEN.start } else { 0 };
            let model = Net::new(&accelerator.device()).at(step);
            let mut model = accelerator.prepare(model)?;
            let config = DiLoCoConfig::new(1).with_outer_momentum(0.5);
            let mut local: DiLoCo<Net> = config.init(&accelerator, &model)?;
            if frozen_first {
                model = accelerator.prepare(model.at(0))?;
            }
            let mut optimizer = accelerator.prepare(SgdConfig::new().init())?;
            for step in 0..3 {
                let loss = model.loss(step, accelerator.rank(), 2);
                let gradients = local.backward(loss, &model, SAMPLES / 2)?;
                model = optimizer.step(RATE, model, gradients);
                local.step(&mut model)?;
            }
            local.finish(&mut model)?;
            Ok(flat(&model))
        });
        of_every_rank(outcomes.unwrap())
    };
    assert_eq!(train(true), train(false));
}
