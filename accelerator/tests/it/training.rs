//! The training loop: averages over windows, and the steps of the optimizer and its schedule.

use crate::common::{
    assert_close, assert_contains, assert_errors, columns, devices, distance, flat, learn, learner,
    line, loader, of_every_rank,
};
use accelerator::Weight;
use accelerator::prelude::*;
use burn::data::dataloader::batcher::Batcher;
use burn::lr_scheduler::step::StepLrSchedulerConfig;
use burn::module::Module;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor, TensorData};

#[test]
fn one_rank_does_what_plain_burn_does_bit_for_bit() {
    for kind in devices() {
        let accelerator = Accelerator::builder().device(kind).build().unwrap();
        let device = accelerator.device();
        let parts = (line(&device), AdamWConfig::new().init(), loader(10, 4));
        let (mut model, mut optimizer, train) = accelerator.prepare(parts).unwrap();

        let mut plain = line(&device);
        let mut plain_optimizer = AdamWConfig::new().init();
        for batch in train.epoch(0) {
            let batch = batch.unwrap();
            model = learn(&accelerator, model, &mut optimizer, 0.1, &batch).unwrap();

            let gradients = distance(&plain, &batch).backward();
            let gradients = GradientsParams::from_grads(gradients, &plain);
            plain = plain_optimizer.step(0.1, plain, gradients);
        }
        assert_eq!(flat(&model), flat(&plain));
        assert_ne!(flat(&model), flat(&line(&device)));
    }
}

/// Trains an epoch in global batches, and returns the weights. The samples need not divide: in the last step, ranks may
/// have fewer samples, or none.
fn after_one_epoch(kind: BackendKind, ranks: usize, samples: usize, global: usize) -> Vec<f32> {
    let outcomes = Accelerator::builder()
        .device(kind)
        .launch(ranks, |accelerator| {
            let train = LoaderBuilder::new(crate::common::ColumnBatcher)
                .global_batch_size(global)
                .build(columns(samples));
            let (mut model, mut optimizer, train) = learner(&accelerator, train)?;
            for batch in train.epoch(0) {
                let batch = batch?;
                let mut loss = distance(&model, &batch);
                if batch.is_idle() {
                    // The loss of an idle rank may be anything.
                    loss = loss * f32::NAN;
                }
                let gradients = accelerator.backward(loss, &model, &batch)?;
                assert!(gradients.loss().is_some_and(f64::is_finite));
                model = optimizer.step(0.05, model, gradients);
            }
            Ok(flat(&model))
        })
        .unwrap();
    of_every_rank(outcomes)
}

#[test]
fn ranks_do_what_one_does_also_where_samples_do_not_divide() {
    for kind in devices() {
        for samples in [8, 9, 11, 15, 17] {
            let one = after_one_epoch(kind, 1, samples, 4);
            for ranks in [2, 4] {
                assert_close(&after_one_epoch(kind, ranks, samples, 4), &one, 1e-6);
            }
        }
    }
}

/// Pairs near `y = 2 x + 3`, as in Accelerate's own check.
struct Pairs;

impl Batcher<usize, Tensor<2>> for Pairs {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Tensor<2> {
        let draw = |item: usize, what: usize| {
            accelerator::plan::mix(&[item as u64, what as u64]) as f64 / u64::MAX as f64 - 0.5
        };
        let pairs: Vec<f64> = items
            .iter()
            .flat_map(|&item| {
                let x = 4.0 * draw(item, 0);
                [x, 2.0 * x + 3.0 + 0.2 * draw(item, 1)]
            })
            .collect();
        Tensor::from_data(TensorData::new(pairs, [items.len(), 2]), device)
    }
}

/// Trains three epochs over 96 pairs with SGD at 0.1. `batch` is that of each rank, or of all ranks if `split`.
fn three_epochs(ranks: usize, kind: BackendKind, split: bool, batch: usize) -> Vec<f32> {
    let outcomes = Accelerator::builder()
        .device(kind)
        .launch(ranks, |accelerator| {
            let loader = LoaderBuilder::new(Pairs).shuffle(42);
            let loader = if split {
                loader.global_batch_size(batch)
            } else {
                loader.batch_size(batch)
            };
            let parts = (
                line(&accelerator.device()),
                SgdConfig::new().init(),
                loader.build(columns(96)),
            );
            let (mut model, mut optimizer, train) = accelerator.prepare(parts)?;
            for epoch in 0..3 {
                for batch in train.epoch(epoch) {
                    let batch = batch?;
                    let pairs = (*batch).clone();
                    let (x, y) = (pairs.clone().narrow(1, 0, 1), pairs.narrow(1, 1, 1));
                    let loss = MseLoss::new().forward(model.forward(x), y, Reduction::Mean);
                    let gradients = accelerator.backward(loss, &model, &batch)?;
                    model = optimizer.step(0.1, model, gradients);
                }
            }
            Ok(flat(&model))
        })
        .unwrap();
    of_every_rank(outcomes)
}

#[test]
fn c3_ranks_end_where_one_with_the_whole_batch_does() {
    for kind in devices() {
        for ranks in [2, 3, 4] {
            let one = three_epochs(1, kind, false, 8 * ranks);
            assert_close(&three_epochs(ranks, kind, false, 8), &one, 1e-6);
            assert_close(&three_epochs(ranks, kind, true, 8 * ranks), &one, 1e-6);
            // The line has been learnt.
            assert!(
                (one[0] - 2.0).abs() < 0.3 && (one[1] - 3.0).abs() < 0.6,
                "{one:?}"
            );
        }
    }
}

#[test]
fn a_window_averages_over_its_samples_and_ends_with_the_epoch() {
    // Micro-steps of 4, 4, 4 and 2 samples in windows of 3: the second window holds 2 samples.
    let accelerator = Accelerator::builder()
        .accumulation_steps(3)
        .build()
        .unwrap();
    let (mut model, mut optimizer, train) = learner(&accelerator, loader(14, 4)).unwrap();
    let mut outcomes = Vec::new();
    let mut samples = Vec::new();
    for batch in train.epoch(0) {
        let batch = batch.unwrap();
        let before = flat(&model);
        let gradients = accelerator
            .backward(distance(&model, &batch), &model, &batch)
            .unwrap();
        samples.extend(gradients.samples());
        model = optimizer.step(0.05, model, gradients);
        let moved = flat(&model) != before;
        assert_eq!(moved, optimizer.outcome() != StepOutcome::Accumulated);
        outcomes.push(moved);
    }
    assert_eq!(outcomes, [false, false, true, true]);
    assert_eq!(samples, [12.0, 2.0]);
    assert_eq!(optimizer.steps(), 2);

    // Training with whole windows as batches gives the same.
    let plain = Accelerator::new().unwrap();
    let (mut whole, mut optimizer, train) = learner(&plain, loader(14, 12)).unwrap();
    for batch in train.epoch(0) {
        whole = learn(&plain, whole, &mut optimizer, 0.05, &batch.unwrap()).unwrap();
    }
    assert_close(&flat(&model), &flat(&whole), 1e-6);
}

#[test]
fn a_schedule_advances_with_optimizer_steps_or_with_epochs() {
    let rates = |by_epoch: bool| {
        let accelerator = Accelerator::builder()
            .accumulation_steps(2)
            .build()
            .unwrap();
        let device = accelerator.device();
        let halving = StepLrSchedulerConfig::new(0.1, 1)
            .with_gamma(0.5)
            .init()
            .unwrap();
        let sgd = SgdConfig::new().init();
        let optimizer = match by_epoch {
            true => accelerator.prepare((sgd, PerEpoch(halving))),
            false => accelerator.prepare((sgd, halving)),
        };
        let mut optimizer = optimizer.unwrap();
        let (mut model, train) = accelerator.prepare((line(&device), loader(8, 2))).unwrap();
        assert_eq!(optimizer.learning_rate(), None);
        let mut rates = Vec::new();
        for epoch in 0..2 {
            for batch in train.epoch(epoch) {
                let batch = batch.unwrap();
                let gradients = accelerator
                    .backward(distance(&model, &batch), &model, &batch)
                    .unwrap();
                model = optimizer.step(model, gradients);
                if let StepOutcome::Stepped { rate, .. } = optimizer.outcome() {
                    rates.push(rate);
                }
            }
        }
        rates
    };
    assert_eq!(rates(false), [0.1, 0.05, 0.025, 0.0125]);
    assert_eq!(rates(true), [0.1, 0.1, 0.05, 0.05]);
}

#[test]
fn two_models_have_a_window_each() {
    let norms = Accelerator::builder()
        .accumulation_steps(2)
        .launch(2, |accelerator| {
            let device = accelerator.device();
            let parts = (
                (line(&device), SgdConfig::new().init()),
                (line(&device), AdamWConfig::new().init()),
                loader(16, 2),
            );
            let ((mut generator, mut first), (mut critic, mut second), train) =
                accelerator.prepare(parts)?;
            for batch in train.epoch(0) {
                let batch = batch?;
                generator = learn(&accelerator, generator, &mut first, 0.05, &batch)?;
                // The second model's window is out of step with the first's.
                if batch.step() > 0 {
                    critic = learn(&accelerator, critic, &mut second, 0.05, &batch)?;
                }
            }
            let differ = flat(&generator) != flat(&critic);
            Ok((first.steps(), second.steps(), differ))
        })
        .unwrap();
    // The last of the second model's three micro-steps closes its window.
    assert_eq!(norms, [(2, 2, true); 2]);
}

#[test]
fn two_models_in_another_order_on_another_rank_are_told_apart() {
    for compression in [Compression::None, Compression::F16] {
        for overlap in [Overlap::Off, Overlap::On] {
            let builder = Accelerator::builder()
                .compression(compression)
                .overlap(overlap);
            let errors = builder.launch(3, |accelerator| {
                let device = accelerator.device();
                let models = accelerator.prepare((line(&device), line(&device)))?;
                let models = [models.0, models.1];
                let train = accelerator.prepare(loader(18, 2))?;
                let mut batches = train.epoch(0);
                let mut step = |model: &Linear| {
                    let batch = batches.next().unwrap()?;
                    accelerator.backward(distance(model, &batch), model, &batch)
                };
                let first = usize::from(accelerator.rank() == 1);
                let error = step(&models[first]).unwrap_err();
                // The group still works.
                assert!(step(&models[0])?.loss().is_some());
                Ok(error)
            });
            let words = ["different models", "ranks 0, 2: ", "rank 1: "];
            assert_errors(errors.unwrap(), Error::is_misuse, &words);
        }
    }
}

#[derive(Debug, Module)]
struct Branches {
    left: Linear,
    right: Linear,
    unused: Linear,
}

#[test]
fn a_gradient_that_only_some_ranks_have_is_averaged_with_zeros() {
    let new = |device: &Device| Branches {
        left: line(device),
        right: line(device),
        unused: LinearConfig::new(3, 3).init(device),
    };
    let outcomes = accelerator::launch(2, |accelerator| {
        let device = accelerator.device();
        let (model, mut optimizer, train) =
            accelerator.prepare((new(&device), AdamWConfig::new().init(), loader(4, 2)))?;
        let unused = flat(&model.unused);
        let batch = train.epoch(0).next().unwrap()?;
        let branch = if accelerator.is_main_process() {
            &model.left
        } else {
            &model.right
        };
        let gradients = accelerator.backward(distance(branch, &batch), &model, &batch)?;
        let model = optimizer.step(0.1, model, gradients);
        // With a gradient of zeros, AdamW would move it by its weight decay.
        assert_eq!(flat(&model.unused), unused, "no rank used it");
        Ok((flat(&model.left), flat(&model.right)))
    })
    .unwrap();
    assert_eq!(outcomes[0], outcomes[1]);
    let start = flat(&line(&Device::default()));
    assert_ne!(outcomes[0].0, start);
    assert_ne!(outcomes[0].1, start);
}

#[test]
fn tokens_can_weigh_instead_of_samples() {
    // Rank 0 has the mean over 1 token, and rank 1 that over 3.
    let rates = accelerator::launch(2, |accelerator| {
        let (model, mut optimizer, train) = learner(&accelerator, loader(4, 2))?;
        let batch = train.epoch(0).next().unwrap()?;
        let slope = model.weight.val().reshape([1]);
        let tokens = 1 + 2 * accelerator.rank() as u32;
        let loss = slope * (10.0 * accelerator.rank() as f32);
        let gradients = accelerator.backward(loss, &model, batch.with_weight(tokens))?;
        assert_eq!(gradients.samples(), Some(4.0));
        let model = optimizer.step(1.0, model, gradients);
        Ok(0.5 - flat(&model)[0])
    })
    .unwrap();
    assert_eq!(rates, [7.5, 7.5]);
}

#[test]
fn misuse_is_answered_before_anything_moves() {
    let accelerator = Accelerator::new().unwrap();
    let device = accelerator.device();
    let uneven = LoaderBuilder::new(crate::common::ColumnBatcher)
        .tail(TailPolicy::Uneven)
        .build(columns(4));
    let (model, train, uneven) = accelerator
        .prepare((line(&device), loader(4, 2), uneven))
        .unwrap();
    let batch = train.epoch(0).next().unwrap().unwrap();
    let loss = || distance(&model, &batch);
    let text = |loss, model: &Linear, weight: Weight| {
        let error = accelerator.backward(loss, model, weight).unwrap_err();
        assert!(error.is_misuse(), "{error:?}");
        error.to_string()
    };
    assert!(text(loss(), &line(&device), batch.weight()).contains("not prepared"));
    for (weight, shown) in [
        (f64::NAN, "is NaN"),
        (f64::INFINITY, "is inf"),
        // Sums in f32 would be infinite or zero.
        (1e300, "is 1e300"),
        (2e12, "is 2000000000000.0"),
        (1e-300, "is 1e-300"),
        (1e-20, "is 1e-20; expected"),
    ] {
        let text = text(loss(), &model, Weight::from(weight));
        assert_contains(&text, &[shown, "range of f32", "e-13"]);
    }
    let negative = text(loss(), &model, Weight::from(-1.0));
    assert_contains(&negative, &["is -1.0; expected", "0 or more"]);
    assert!(!negative.contains("e-13"), "{negative}");
    // Weights may be many tokens, or add up to 1 over many samples.
    for weight in [1e12, 1e-12] {
        let gradients = accelerator.backward(loss(), &model, Weight::from(weight));
        assert!(gradients.unwrap().norm().unwrap() > 0.0);
    }
    assert!(text(loss(), &model, Weight::from(0)).contains("0 over all ranks"));
    let two = Tensor::cat(vec![loss(), loss()], 0);
    assert!(text(two, &model, batch.weight()).contains("2 elements"));
    let untracked = distance(&model.valid(), &batch);
    assert!(text(untracked, &model, batch.weight()).contains("does not depend"));
    let batch = uneven.epoch(0).next().unwrap().unwrap();
    assert!(text(loss(), &model, batch.weight()).contains("`exact`"));
}

#[test]
fn a_parameter_that_was_unfrozen_after_prepare_is_refused_on_any_number_of_ranks() {
    for ranks in [1, 2] {
        let errors = accelerator::launch(ranks, |accelerator| {
            let device = accelerator.device();
            let mut model = Branches {
                left: line(&device),
                right: line(&device).no_grad(),
                unused: line(&device),
            };
            let train;
            (model, train) = accelerator.prepare((model, loader(8, 2)))?;
            model.right = model.right.set_require_grad(true);
            let batch = train.epoch(0).next().unwrap()?;
            let loss = distance(&model.left, &batch) + distance(&model.right, &batch);
            Ok(accelerator.backward(loss, &model, &batch).unwrap_err())
        })
        .unwrap();
        let words = ["2 parameters", "`right.weight`", "frozen"];
        assert_errors(errors, Error::is_misuse, &words);
    }
}

#[test]
fn models_that_are_trained_one_after_the_other_need_memory_for_one() {
    accelerator::launch(2, |accelerator| {
        let train = || {
            let device = accelerator.device();
            let model: Linear = accelerator.init(|device| LinearConfig::new(300, 300).init(device));
            let (model, mut optimizer) = accelerator.prepare((model, SgdConfig::new().init()))?;
            let input = Tensor::<2>::ones([4, 300], &device.inner());
            let loss = model.forward(input).mean();
            let gradients = accelerator.backward(loss, &model, 4)?;
            drop(optimizer.step(0.1, model, gradients));
            Ok::<_, Error>(accelerator.bucket_memory())
        };
        let one = train()?;
        assert!(one >= 300 * 301 * 4);
        for _ in 0..3 {
            assert_eq!(train()?, one);
        }
        Ok(())
    })
    .unwrap();
}
