//! Rounds of local training: what ranks share, what is refused, and what is saved.

use crate::common::{
    Column, ColumnBatcher, assert_error, assert_errors, columns, distance, flat, line,
    line_and_sgd, linear, of_every_rank,
};
use accelerator::Weight;
use accelerator::nn::SyncBatchNorm;
use accelerator::optim::Sharded;
use accelerator::prelude::*;
use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};

const RATE: f64 = 0.1;

#[derive(Debug, Module)]
struct Net {
    input: Linear,
    norm: BatchNorm,
    frozen: Linear,
    output: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            input: linear(1, 200, device),
            norm: BatchNormConfig::new(200).init(device),
            frozen: linear(200, 40, device).no_grad(),
            output: linear(40, 1, device),
        }
    }

    fn loss(&self, batch: &Column) -> Tensor<1> {
        let hidden = self.norm.forward(self.input.forward(batch.values.clone()));
        let output = self.output.forward(self.frozen.forward(relu(hidden)));
        (output - batch.values.clone() * 3.0).powi_scalar(2).mean()
    }
}

/// Covers several buckets, running statistics, frozen layers, clipping, a schedule and values in f32.
#[test]
fn every_rank_ends_with_the_same_bits_and_statistics() {
    let builder = Accelerator::builder().bucket_size(1024).seed(5);
    let outcomes = builder.launch(3, |accelerator| {
        let schedule = ExponentialLrSchedulerConfig::new(0.05, 0.9).init().unwrap();
        let parts = (
            accelerator.init(Net::new),
            (SgdConfig::new().init(), schedule),
            LoaderBuilder::new(ColumnBatcher)
                .batch_size(4)
                .shuffle(3)
                .build(columns(58)),
        );
        let (mut model, mut optimizer, train) = accelerator.prepare(parts)?;
        let frozen = model.frozen.weight.val().into_data();
        let before = flat(&model);
        let mut local = LocalSgdConfig::new(2).init(&accelerator, &model)?;
        let mut rates = Vec::new();
        for epoch in 0..3 {
            for batch in train.epoch(epoch) {
                let batch = batch?;
                let gradients = local.backward(model.loss(&batch), &model, &batch)?;
                model = optimizer.step(model, gradients.clip_norm(0.5));
                rates.push(optimizer.learning_rate().unwrap());
                local.step(&mut model)?;
            }
        }
        local.finish(&mut model)?;
        assert_eq!(model.frozen.weight.val().into_data(), frozen);
        assert_ne!(flat(&model), before);
        accelerator.check_replicas(&model)?;
        let valid = model.valid();
        let statistics = [&valid.norm.running_mean, &valid.norm.running_var];
        let statistics = statistics.map(|state| state.value().into_data());
        assert!(statistics[0].iter::<f32>().any(|mean| mean.abs() > 1e-3));
        Ok((flat(&model), (statistics, rates)))
    });
    let (weights, others): (Vec<_>, Vec<_>) = outcomes.unwrap().into_iter().unzip();
    of_every_rank(weights);
    assert!(others.iter().all(|of| *of == others[0]), "{others:?}");
}

#[test]
fn a_rank_whose_gradients_overflow_skips_alone_and_keeps_pace() {
    let folder = tempfile::tempdir().unwrap();
    let builder = Accelerator::builder().precision(Precision::F16);
    let outcomes = builder.launch(2, |accelerator| {
        let schedule = ExponentialLrSchedulerConfig::new(0.05, 0.9).init().unwrap();
        let parts = (
            line(&accelerator.device()),
            (SgdConfig::new().init(), schedule),
        );
        let (mut model, mut optimizer) = accelerator.prepare(parts)?;
        let mut local = LocalSgdConfig::new(3).init(&accelerator, &model)?;
        let mut skipped = Vec::new();
        for step in 0..3 {
            let input = Tensor::<2>::ones([4, 1], &accelerator.device());
            let mut loss = (model.forward(input) - 2.0).powi_scalar(2).mean();
            if step == 1 && accelerator.rank() == 1 {
                loss = loss * f64::from(f32::MAX);
            }
            let gradients = local.backward(loss, &model, 4)?;
            model = optimizer.step(model, gradients);
            let outcome = optimizer.outcome();
            skipped.push(matches!(outcome, StepOutcome::Skipped { .. }));
            local.step(&mut model)?;
        }
        accelerator.save_state(folder.path(), (&model, &optimizer, &local))?;
        Ok((skipped, (flat(&model), optimizer.learning_rate())))
    });
    let (skipped, others): (Vec<_>, Vec<_>) = outcomes.unwrap().into_iter().unzip();
    assert_eq!(skipped, [[false; 3], [false, true, false]]);
    assert_eq!(others[0], others[1]);
}

fn loss(accelerator: &Accelerator, model: &Linear) -> Tensor<1> {
    let input = Tensor::<2>::full(
        [4, 1],
        accelerator.rank() as f64 + 1.0,
        &accelerator.device(),
    );
    (model.forward(input) - 2.0).powi_scalar(2).mean()
}

#[test]
fn replicas_that_differ_are_neither_reduced_nor_saved() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    accelerator::launch(2, |accelerator| {
        let (mut model, mut optimizer) = line_and_sgd(&accelerator)?;
        let mut local = LocalSgdConfig::new(8).init(&accelerator, &model)?;
        for steps in 1..3 {
            let gradients = local.backward(loss(&accelerator, &model), &model, 4)?;
            model = optimizer.step(RATE, model, gradients);
            assert_eq!(local.step(&mut model)?, LocalOutcome::Local);
            let parts = (&model, &optimizer, &local);
            let errors = [
                accelerator
                    .backward(loss(&accelerator, &model), &model, 4)
                    .map(drop),
                accelerator.save_state(folder.path(), parts).map(drop),
                accelerator.save_model(&model, &file),
                accelerator.valid(&model).map(drop),
            ];
            for error in errors {
                let error = error.unwrap_err();
                let words = [&*format!("took {steps} steps of its own"), "`average`"];
                assert_error(&error, Error::is_misuse, &words);
            }
        }
        local.average(&mut model)?;
        accelerator.check_replicas(&model)?;
        accelerator.valid(&model)?;
        accelerator.save_model(&model, &file)?;
        accelerator.save_state(folder.path(), (&model, &optimizer, &local))?;
        let gradients = accelerator.backward(loss(&accelerator, &model), &model, 4)?;
        model = optimizer.step(RATE, model, gradients);
        accelerator.check_replicas(&model)?;
        // No round is open, so nothing changes.
        let before = flat(&model);
        local.finish(&mut model)?;
        assert_eq!(flat(&model), before);
        Ok(())
    })
    .unwrap();
}

#[test]
fn calls_out_of_order_are_refused() {
    accelerator::launch(2, |accelerator| {
        let (mut model, mut optimizer) = line_and_sgd(&accelerator)?;
        let mut local = LocalSgdConfig::new(1).init(&accelerator, &model)?;
        let before = flat(&model);
        let gradients = local.backward(loss(&accelerator, &model), &model, 4)?;
        if accelerator.rank() == 1 {
            // Rank 1 steps correctly, and learns that rank 0 did not.
            model = optimizer.step(RATE, model, gradients);
            let text = local.step(&mut model).unwrap_err().to_string();
            assert!(text.contains("rank 0 was not ready"), "{text}");
        } else {
            let error = local.step(&mut model).unwrap_err();
            assert_error(&error, Error::is_misuse, &["not used yet"]);
            assert_eq!(flat(&model), before);
            model = optimizer.step(RATE, model, gradients);
        }
        let error = local.backward(loss(&accelerator, &model), &model, 4);
        let text = error.unwrap_err().to_string();
        assert!(text.contains("call `local.step(&mut model)?`"), "{text}");
        local.step(&mut model)?;

        let open = Weight::from(4).no_sync();
        let gradients = local.backward(loss(&accelerator, &model), &model, open)?;
        assert!(gradients.is_accumulating());
        let error = local.average(&mut model).unwrap_err();
        assert_error(&error, Error::is_misuse, &["1 micro-steps"]);

        let (other, _) = line_and_sgd(&accelerator)?;
        let mut diloco = DiLoCoConfig::new(4).init(&accelerator, &other)?;
        let window = Weight::from(4).trigger_sync();
        let gradients = diloco.backward(loss(&accelerator, &model), &model, window)?;
        model = optimizer.step(RATE, model, gradients);
        let error = diloco.average(&mut model).unwrap_err();
        assert!(error.is_misuse(), "of another model: {error:?}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn training_that_begins_in_the_middle_of_a_round_is_refused() {
    accelerator::launch(2, |accelerator| {
        let (mut model, mut optimizer) = line_and_sgd(&accelerator)?;
        let mut local = LocalSgdConfig::new(4).init(&accelerator, &model)?;
        let gradients = local.backward(loss(&accelerator, &model), &model, 4)?;
        model = optimizer.step(RATE, model, gradients);
        let error = DiLoCoConfig::new(2).init(&accelerator, &model).unwrap_err();
        assert!(error.is_misuse(), "its replicas differ: {error:?}");
        let error = LocalSgdConfig::new(2)
            .init(&accelerator, &model)
            .unwrap_err();
        assert!(error.is_misuse(), "{error:?}");
        local.average(&mut model)?;
        DiLoCoConfig::new(2).init(&accelerator, &model).map(drop)
    })
    .unwrap();
}

#[test]
fn ranks_with_different_numbers_of_steps_are_told_so() {
    accelerator::launch(2, |accelerator| {
        let (mut model, mut optimizer) = line_and_sgd(&accelerator)?;
        let mut local = LocalSgdConfig::new(3).init(&accelerator, &model)?;
        // Rank 1 reaches the end of a round, and rank 0 the end of its samples.
        for _ in 0..1 + 2 * accelerator.rank() {
            let gradients = local.backward(loss(&accelerator, &model), &model, 4)?;
            model = optimizer.step(RATE, model, gradients);
            if accelerator.rank() == 0 {
                local.step(&mut model)?;
            }
        }
        let before = flat(&model);
        let error = match accelerator.rank() {
            0 => local.average(&mut model).unwrap_err(),
            _ => local.step(&mut model).unwrap_err(),
        };
        assert_error(&error, Error::is_misuse, &["1 on rank 0, 3 on rank 1"]);
        assert_eq!(flat(&model), before);
        Ok(())
    })
    .unwrap();
}

#[test]
fn settings_that_cannot_be_are_refused() {
    accelerator::launch(2, |accelerator| {
        let (model, _) = line_and_sgd(&accelerator)?;
        let mine = 4 + accelerator.rank() as u64;
        let sgd = |period| LocalSgdConfig::new(period).init(&accelerator, &model).err();
        let diloco = |rate, momentum| {
            let config = DiLoCoConfig::new(4).with_outer_rate(rate);
            let config = config.with_outer_momentum(momentum);
            config.init(&accelerator, &model).err()
        };
        for error in [sgd(0), sgd(mine), diloco(f64::NAN, 0.9), diloco(0.7, 1.0)] {
            assert!(error.unwrap().is_config());
        }
        // If one rank alone has a wrong setting, all ranks get an error.
        let rate = [0.7, f64::NAN][accelerator.rank()];
        for error in [sgd([4, 0][accelerator.rank()]), diloco(rate, 0.9)] {
            let error = error.unwrap();
            assert!(!error.is_collective(), "{error:?}");
            assert_error(&error, Error::is_config, &["rank 1 has"]);
        }
        let strange: Linear = LinearConfig::new(1, 1).init(&accelerator.device());
        let error = LocalSgdConfig::new(4).init(&accelerator, &strange);
        assert!(error.unwrap_err().is_misuse());
        Ok(())
    })
    .unwrap();
}

#[test]
fn loaders_that_are_uneven_are_refused() {
    accelerator::launch(2, |accelerator| {
        let uneven = LoaderBuilder::new(ColumnBatcher)
            .batch_size(2)
            .tail(TailPolicy::Uneven)
            .build(columns(7));
        let (model, train) = accelerator.prepare((line(&accelerator.device()), uneven))?;
        let mut local = LocalSgdConfig::new(2).init(&accelerator, &model)?;
        for batch in train.epoch(0) {
            let batch = batch?;
            let error = local.backward(distance(&model, &batch), &model, &batch);
            assert!(error.unwrap_err().to_string().contains("`uneven`"));
        }
        accelerator.wait_for_everyone()
    })
    .unwrap();
}

fn assert_sharded(error: &Error) {
    assert!(!error.is_collective(), "{error:?}");
    assert_error(error, Error::is_misuse, &["without `Sharded`"]);
}

#[test]
fn a_sharded_optimizer_is_refused_before_the_first_local_step() {
    accelerator::launch(2, |accelerator| {
        let sharded = Sharded(SgdConfig::new().init());
        let (model, sharded) = accelerator.prepare((line(&accelerator.device()), sharded))?;
        let mut local = LocalSgdConfig::new(2).init(&accelerator, &model)?;
        let mut backward = || local.backward(loss(&accelerator, &model), &model, 2);
        assert_sharded(&backward().unwrap_err());
        // The group still works, and another optimizer may follow.
        accelerator.wait_for_everyone()?;
        drop(sharded);
        drop(backward()?);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_sharded_optimizer_beside_another_one_steps_nothing_and_is_told() {
    accelerator::launch(2, |accelerator| {
        let (mut model, mut optimizer) = line_and_sgd(&accelerator)?;
        let mut sharded = accelerator.prepare(Sharded(SgdConfig::new().init()))?;
        let before = flat(&model);
        let mut local = LocalSgdConfig::new(2).init(&accelerator, &model)?;
        let gradients = local.backward(loss(&accelerator, &model), &model, 2)?;
        model = sharded.step(RATE, model, gradients);
        assert_eq!((sharded.outcome(), sharded.steps()), (StepOutcome::Lost, 0));
        assert_eq!(flat(&model), before);
        assert_sharded(&local.step(&mut model).unwrap_err());

        // At the end of a round, an idle rank gets the error when the ranks meet.
        let samples = [2, 0][accelerator.rank()];
        let gradients = local.backward(loss(&accelerator, &model), &model, samples)?;
        model = sharded.step(RATE, model, gradients);
        let error = local.step(&mut model).unwrap_err();
        match accelerator.rank() {
            0 => assert_sharded(&error),
            _ => assert!(
                error.to_string().contains("rank 0 was not ready"),
                "{error}"
            ),
        }

        // Training continues with the other optimizer.
        local.average(&mut model)?;
        let gradients = local.backward(loss(&accelerator, &model), &model, 2)?;
        model = optimizer.step(RATE, model, gradients);
        local.average(&mut model)?;
        assert_ne!(flat(&model), before);
        accelerator.check_replicas(&model)
    })
    .unwrap();
}

/// Returns the errors of an average in which the loss of rank 1 of 3 is multiplied by `by`.
fn spoilt<L: LocalTraining<Linear>>(
    by: f64,
    init: impl Fn(&Accelerator, &Linear) -> Result<L> + Send + Sync,
) -> Vec<Error> {
    accelerator::launch(3, |accelerator| {
        let (mut model, mut optimizer) = line_and_sgd(&accelerator)?;
        let mut local = init(&accelerator, &model)?;
        let loss = loss(&accelerator, &model);
        let loss = match accelerator.rank() {
            1 => loss * by,
            _ => loss,
        };
        let gradients = local.backward(loss, &model, 4)?;
        model = optimizer.step(RATE, model, gradients);
        let before = flat(&model);
        let error = local.step(&mut model).unwrap_err();
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(flat(&model)), bits(before));
        // The group still works.
        accelerator.wait_for_everyone()?;
        Ok(error)
    })
    .unwrap()
}

#[test]
fn the_rank_that_would_spread_what_is_not_finite_is_named_on_every_rank() {
    for by in [f64::NAN, f64::INFINITY] {
        let sgd = spoilt(by, |ours, model| LocalSgdConfig::new(1).init(ours, model));
        let diloco = spoilt(by, |ours, model| DiLoCoConfig::new(1).init(ours, model));
        for error in sgd.into_iter().chain(diloco) {
            let words = ["not finite: `weight` on rank 1;"];
            assert_error(&error, Error::is_not_finite, &words);
        }
    }
}

#[test]
fn a_sum_of_parameters_that_overflows_is_told_as_such() {
    let errors = accelerator::launch(2, |accelerator| {
        let (mut model, mut optimizer) = line_and_sgd(&accelerator)?;
        let mut local = LocalSgdConfig::new(1).init(&accelerator, &model)?;
        let gradients = local.backward(model.weight.val().sum(), &model, 4)?;
        model = optimizer.step(3e38, model, gradients);
        assert!(flat(&model).iter().all(|value| value.is_finite()));
        Ok(local.step(&mut model).unwrap_err())
    });
    let words = ["too large to be added up: the sum of `weight`"];
    assert_errors(errors.unwrap(), Error::is_not_finite, &words);
}

#[test]
fn layers_that_ask_other_ranks_in_each_forward_are_refused() {
    accelerator::launch(2, |accelerator| {
        let model = accelerator.prepare(line(&accelerator.device()))?;
        let mut local = LocalSgdConfig::new(4).init(&accelerator, &model)?;
        drop(local.backward(loss(&accelerator, &model), &model, 4)?);
        local.average(&mut model.clone())?;
        let norm = BatchNormConfig::new(3).init(&accelerator.device());
        let _norm = SyncBatchNorm::of(norm, &accelerator);
        for error in [
            local.backward(loss(&accelerator, &model), &model, 4).err(),
            LocalSgdConfig::new(4).init(&accelerator, &model).err(),
            DiLoCoConfig::new(4).init(&accelerator, &model).err(),
        ] {
            assert_error(&error.unwrap(), Error::is_misuse, &["`BatchNorm`"]);
        }
        accelerator.wait_for_everyone()
    })
    .unwrap();
    // A single rank has no other ranks to share statistics with.
    let accelerator = Accelerator::new().unwrap();
    let norm = BatchNormConfig::new(3).init(&accelerator.device());
    let _norm = SyncBatchNorm::of(norm, &accelerator);
    let model = accelerator.prepare(line(&accelerator.device())).unwrap();
    let mut local = LocalSgdConfig::new(4).init(&accelerator, &model).unwrap();
    drop(
        local
            .backward(loss(&accelerator, &model), &model, 4)
            .unwrap(),
    );
}

/// The moment at which a rank is lost.
#[derive(Clone, Copy)]
enum Leaves {
    BeforeTheAverage,
    WithinIt,
}

#[test]
fn a_rank_that_is_lost_in_an_average_is_named_and_the_model_is_as_it_was() {
    for leaves in [Leaves::BeforeTheAverage, Leaves::WithinIt] {
        accelerator::launch(3, |accelerator| {
            let (mut model, mut optimizer) = line_and_sgd(&accelerator)?;
            let mut local = DiLoCoConfig::new(2).init(&accelerator, &model)?;
            for _ in 0..2 {
                let gradients = local.backward(loss(&accelerator, &model), &model, 4)?;
                model = optimizer.step(RATE, model, gradients);
                if accelerator.rank() == 2 && optimizer.steps() == 2 {
                    if let Leaves::WithinIt = leaves {
                        // It sends the counts of the ranks, and then no bucket.
                        accelerator.group().all_gather(&[2.0_f64, 8.0, 0.0, 0.0])?;
                    }
                    return Ok(());
                }
                let before = flat(&model);
                let Err(error) = local.step(&mut model) else {
                    continue;
                };
                assert!(error.is_peer_lost(), "{error:?}");
                assert_eq!(error.culprit().unwrap().rank(), 2, "{error:?}");
                assert_eq!(flat(&model), before);
                let folder = tempfile::tempdir().unwrap();
                let parts = (&model, &optimizer, &local);
                let saved = accelerator.save_emergency(folder.path(), parts)?;
                assert_eq!(saved.is_some(), accelerator.rank() == 0);
                return Ok(());
            }
            panic!("nobody was lost");
        })
        .unwrap();
    }
}

/// Training resumes from a checkpoint between rounds, in mid-epoch, with the same bits.
#[test]
fn resumed_is_uninterrupted() {
    let folder = tempfile::tempdir().unwrap();
    let run = |stop_after: Option<u64>, resumed: bool| {
        let outcomes = Accelerator::builder().seed(5).launch(2, |accelerator| {
            let train = LoaderBuilder::new(ColumnBatcher)
                .batch_size(4)
                .shuffle(3)
                .build(columns(58));
            let parts = (accelerator.init(Net::new), SgdConfig::new().init(), train);
            let (model, optimizer, train) = accelerator.prepare(parts)?;
            let local = DiLoCoConfig::new(3).init(&accelerator, &model)?;
            let parts = (model, optimizer, train, local);
            let (parts, first) = match resumed {
                true => {
                    let (parts, position) = accelerator.resume(folder.path(), parts)?;
                    assert_eq!(position.step(), 9);
                    (parts, position.epoch())
                }
                false => (parts, 0),
            };
            let (mut model, mut optimizer, train, mut local) = parts;
            for epoch in first..3 {
                for batch in train.epoch(epoch) {
                    let batch = batch?;
                    let gradients = local.backward(model.loss(&batch), &model, &batch)?;
                    model = optimizer.step(0.02, model, gradients);
                    let outcome = local.step(&mut model)?;
                    if Some(optimizer.steps()) == stop_after {
                        assert_eq!(outcome, LocalOutcome::Averaged);
                        let parts = (&model, &optimizer, &train, &local);
                        accelerator.save_state(folder.path(), parts)?;
                        return Ok(flat(&model.valid()));
                    }
                }
            }
            local.finish(&mut model)?;
            Ok(flat(&model.valid()))
        });
        of_every_rank(outcomes.unwrap())
    };
    let whole = run(None, false);
    let halfway = run(Some(9), false);
    assert_ne!(halfway, whole);
    of_every_rank(vec![run(None, true), whole]);
}
