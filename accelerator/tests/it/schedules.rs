//! Schedules, groups of parameters, frozen parameters, and averages of weights.

use std::path::Path;

use crate::common::{
    ColumnBatcher, assert_close, assert_contains, assert_error, distance, flat, line, loader,
    of_every_rank,
};
use accelerator::AcceleratorBuilder;
use accelerator::optim::Scheduled;
use accelerator::prelude::*;
use burn::lr_scheduler::constant::ConstantLr;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{Module, Param, ParamGroup, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig, Linear};
use burn::optim::SgdConfig;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};

fn linear() -> ModuleLrScheduler {
    LinearLrSchedulerConfig::new(1.0, 1e-9, 20).init().unwrap()
}

/// Returns the rates of the optimizer steps.
fn rates(
    ranks: usize,
    accumulation: usize,
    prepare: impl Fn(&Accelerator, Linear) -> Result<(Linear, PreparedOptimizer<Scheduled>)> + Sync,
) -> Vec<f32> {
    let rows = Accelerator::builder()
        .accumulation_steps(accumulation)
        .launch(ranks, |accelerator| {
            let (mut model, mut optimizer) = prepare(&accelerator, line(&accelerator.device()))?;
            let mut rates = Vec::new();
            for _ in 0..10 * accumulation {
                let loss = model.weight.val().powi_scalar(2).mean();
                let gradients = accelerator.backward(loss, &model, 1)?;
                model = optimizer.step(model, gradients);
                if let StepOutcome::Stepped { rate, .. } = optimizer.outcome() {
                    rates.push(rate as f32);
                }
            }
            Ok(rates)
        });
    of_every_rank(rows.unwrap())
}

/// C9: a schedule of 20 steps on two ranks. Counted per process, each step takes two of them, so the schedule ends
/// after 10 steps with any accumulation. Counted by steps, it is half way then.
#[test]
fn c9_a_schedule_counts_steps_or_those_of_every_process() {
    for accumulation in [1, 2, 4] {
        let by_step = |accelerator: &Accelerator, model| {
            accelerator.prepare((model, (SgdConfig::new().init(), linear())))
        };
        let by_process = |accelerator: &Accelerator, model| {
            let optimizer = (SgdConfig::new().init(), PerProcess(linear()));
            accelerator.prepare((model, optimizer))
        };
        let falling = |by: f32| {
            (0..10)
                .map(|step| 1.0 - by * step as f32)
                .collect::<Vec<_>>()
        };
        for ranks in [1, 2] {
            assert_close(&rates(ranks, accumulation, by_step), &falling(0.05), 1e-6);
            let found = rates(ranks, accumulation, by_process);
            assert_close(&found, &falling(0.05 * ranks as f32), 1e-6);
        }
    }
}

#[test]
fn a_schedule_by_process_continues_where_it_was_saved() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let rates = accelerator::launch(2, |accelerator| {
        let prepared = || {
            let optimizer = (SgdConfig::new().init(), PerProcess(linear()));
            accelerator.prepare((line(&accelerator.device()), optimizer))
        };
        let step = |model: &mut Linear, optimizer: &mut PreparedOptimizer<Scheduled>| {
            let loss = model.weight.val().powi_scalar(2).mean();
            let gradients = accelerator.backward(loss, model, 1)?;
            *model = optimizer.step(model.clone(), gradients);
            Ok::<_, Error>(optimizer.learning_rate().unwrap() as f32)
        };
        let (mut model, mut optimizer) = prepared()?;
        step(&mut model, &mut optimizer)?;
        step(&mut model, &mut optimizer)?;
        accelerator.save_state(folder, (&model, &optimizer))?;
        let ((mut model, mut optimizer), _) = accelerator.resume(folder, prepared()?)?;
        let saved = optimizer.learning_rate().unwrap() as f32;
        let next = step(&mut model, &mut optimizer)?;

        let by_step = (SgdConfig::new().init(), linear());
        let other = accelerator.prepare((line(&accelerator.device()), by_step))?;
        let error = accelerator.resume(folder, other).unwrap_err();
        assert_contains(&error.to_string(), &["by process", "by step"]);
        Ok(vec![saved, next])
    });
    assert_close(&of_every_rank(rates.unwrap()), &[0.9, 0.8], 1e-6);
}

#[test]
fn a_plan_of_a_stream_does_not_make_a_number_up() {
    let accelerator = Accelerator::new().unwrap();
    let stream = LoaderBuilder::new(ColumnBatcher)
        .batch_size(4)
        .build_stream(|_| (0..9).map(std::io::Result::Ok));
    let train = accelerator.prepare(stream).unwrap();
    let plan = accelerator.plan(&train, 2);
    assert_eq!((plan.samples, plan.steps), (None, None));
    let text = plan.to_string();
    assert!(
        text.ends_with("2 epochs of an unknown number of samples"),
        "{text}"
    );
}

#[test]
fn a_plan_tells_what_there_will_be() {
    let plans = Accelerator::builder()
        .accumulation_steps(3)
        .launch(2, |accelerator| {
            let optimizer = (SgdConfig::new().init(), PerProcess(linear()));
            let parts = (line(&accelerator.device()), optimizer, loader(50, 4));
            let (model, optimizer, train) = accelerator.prepare(parts)?;
            let plan = accelerator.plan(&train, 5).with_schedule(&optimizer);
            let by_epoch = (SgdConfig::new().init(), PerEpoch(linear()));
            let by_epoch = accelerator.prepare(by_epoch)?;
            assert_eq!(plan.with_schedule(&by_epoch).rate_steps, Some(5));
            // An epoch has three steps, which two ranks count twice.
            let many = |epochs| accelerator.plan(&train, epochs).with_schedule(&optimizer);
            let most = many(u64::MAX / 3);
            assert_eq!((most.steps, most.rate_steps), (Some(u64::MAX), None));
            let endless = many(u64::MAX);
            assert_eq!((endless.steps, endless.rate_steps), (None, None));
            drop(model);
            Ok(plan)
        });
    for plan in plans.unwrap() {
        // 50 samples in global batches of 8 give 7 micro-steps, in windows of 3, 3 and 1.
        assert_eq!(plan.micro_steps_per_epoch, Some(7));
        assert_eq!(plan.steps_per_epoch, Some(3));
        assert_eq!(plan.effective_batch, Some(24));
        assert_eq!((plan.steps, plan.rate_steps), (Some(15), Some(29)));
        assert_contains(&plan.to_string(), &["2 ranks", "29 steps"]);
    }
}

/// Trains on two epochs of 24 samples with a schedule over the steps of a plan, from the checkpoint if there is one,
/// until `steps` steps or the end. Returns the rate of each step.
fn life(folder: &Path, ranks: usize, steps: usize, order: PlanOrder) -> Result<Vec<f64>> {
    let rates = accelerator::launch(ranks, |accelerator| {
        let parts = (line(&accelerator.device()), loader(24, 2));
        let (model, mut train) = accelerator.prepare(parts)?;
        if order == PlanOrder::AfterTheLoader {
            train = accelerator.resume_loader(folder, train)?;
        }
        let plan = accelerator.plan(&train, 2);
        let cosine = CosineAnnealingLrSchedulerConfig::new(0.1, plan.steps.unwrap() as usize);
        let optimizer = (SgdConfig::new().init(), cosine.init().unwrap());
        let optimizer = accelerator.prepare(optimizer)?;
        let (parts, position) = accelerator.resume(folder, (model, optimizer, train))?;
        let (mut model, mut optimizer, train) = parts;
        if order == PlanOrder::AfterTheLoader {
            let now = accelerator.plan(&train, 2);
            assert_eq!(plan, now, "the plan before `resume` is the plan after it");
        }
        let mut rates = Vec::new();
        'life: for epoch in position.epoch()..2 {
            for batch in train.epoch(epoch) {
                if rates.len() == steps {
                    break 'life;
                }
                let batch = batch?;
                let gradients = accelerator.backward(distance(&model, &batch), &model, &batch)?;
                model = optimizer.step(model, gradients);
                rates.extend(optimizer.learning_rate());
            }
        }
        accelerator.save_state(folder, (&model, &optimizer, &train))?;
        Ok(rates)
    });
    rates.map(|rates| rates.into_iter().next().unwrap())
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum PlanOrder {
    BeforeResume,
    AfterTheLoader,
}

#[test]
fn a_schedule_over_the_steps_of_a_plan_continues_at_another_number_of_ranks() {
    let whole = tempfile::tempdir().unwrap();
    let whole = life(whole.path(), 2, usize::MAX, PlanOrder::AfterTheLoader).unwrap();
    assert_eq!(whole.len(), 12);
    for ranks in [1, 3] {
        let folder = tempfile::tempdir().unwrap();
        let mut rates = life(folder.path(), 2, 5, PlanOrder::AfterTheLoader).unwrap();
        rates.extend(life(folder.path(), ranks, 3, PlanOrder::AfterTheLoader).unwrap());
        rates.extend(life(folder.path(), 2, usize::MAX, PlanOrder::AfterTheLoader).unwrap());
        assert_eq!(rates, whole, "2 ranks, {ranks} and 2 again");
    }
}

#[test]
fn a_schedule_that_gives_another_rate_at_another_number_of_ranks_is_refused() {
    for ranks in [1, 3] {
        let folder = tempfile::tempdir().unwrap();
        life(folder.path(), 2, 5, PlanOrder::BeforeResume).unwrap();
        let error = life(folder.path(), ranks, 1, PlanOrder::BeforeResume).unwrap_err();
        let words = ["the optimizer (part 2 of the tuple)", "resume_loader"];
        assert_error(&error, Error::is_checkpoint, &words);
        // The same number of ranks may change its schedule.
        life(folder.path(), 2, 1, PlanOrder::BeforeResume).unwrap();
    }
}

/// Makes one step at a batch size and a constant rate, from the checkpoint if there is one, and saves.
fn step_at(
    builder: AcceleratorBuilder,
    folder: &Path,
    ranks: usize,
    batch: usize,
    rate: f64,
) -> Result<()> {
    let steps = builder.launch(ranks, |accelerator| {
        let optimizer = (SgdConfig::new().init(), ConstantLr::new(rate));
        let parts = (line(&accelerator.device()), optimizer, loader(96, batch));
        let parts = accelerator.prepare(parts)?;
        let ((mut model, mut optimizer, train), _) = accelerator.resume(folder, parts)?;
        for batch in train.epoch(0) {
            let batch = batch?;
            let gradients = accelerator.backward(distance(&model, &batch), &model, &batch)?;
            model = optimizer.step(model, gradients);
            if optimizer.outcome() != StepOutcome::Accumulated {
                break;
            }
        }
        accelerator
            .save_state(folder, (&model, &optimizer, &train))
            .map(drop)
    });
    steps.map(drop)
}

#[test]
fn another_rate_is_refused_where_a_step_has_as_many_samples_at_another_number_of_ranks() {
    let plain = || Accelerator::builder();
    let by_micro_steps = || plain().global_batch(8, 2);
    for builder in [&plain as &dyn Fn() -> AcceleratorBuilder, &by_micro_steps] {
        let folder = tempfile::tempdir().unwrap();
        step_at(builder(), folder.path(), 2, 2, 0.1).unwrap();
        let error = step_at(builder(), folder.path(), 1, 2, 0.2).unwrap_err();
        let words = ["as many samples a step", "changed on purpose"];
        assert_error(&error, Error::is_checkpoint, &words);
        // The error says how: first at the old number of ranks.
        step_at(builder(), folder.path(), 2, 2, 0.2).unwrap();
        step_at(builder(), folder.path(), 1, 2, 0.2).unwrap();
    }
    // The program has changed its batch size, and the rate with it.
    let folder = tempfile::tempdir().unwrap();
    step_at(plain(), folder.path(), 2, 2, 0.1).unwrap();
    step_at(plain(), folder.path(), 1, 8, 0.2).unwrap();
}

#[derive(Debug, Module)]
struct Three {
    frozen: Linear,
    slow: Linear,
    fast: Linear,
}

impl Three {
    fn new(device: &Device) -> Self {
        Self {
            frozen: line(device),
            slow: line(device),
            fast: line(device),
        }
    }
}

#[test]
fn groups_have_rates_of_their_own_and_frozen_parameters_stay_on_any_number_of_ranks() {
    let train = |ranks: usize| {
        let rows = accelerator::launch(ranks, |accelerator| {
            let model = Three::new(&accelerator.device());
            let model = model.freeze_group(ParamGroup::from_predicate("frozen."));
            let scheduler =
                ModuleLrScheduler::new(0.01).with_group(ParamGroup::from_predicate("fast."), 0.1);
            let train = LoaderBuilder::new(crate::common::ColumnBatcher)
                .global_batch_size(4)
                .build(crate::common::columns(12));
            let parts = (model, (SgdConfig::new().init(), scheduler), train);
            let (mut model, mut optimizer, train) = accelerator.prepare(parts)?;
            for batch in train.epoch(0) {
                let batch = batch?;
                let loss = distance(&model.frozen, &batch)
                    + distance(&model.slow, &batch)
                    + distance(&model.fast, &batch);
                let gradients = accelerator.backward(loss, &model, &batch)?;
                model = optimizer.step(model, gradients);
            }
            Ok(flat(&model))
        });
        of_every_rank(rows.unwrap())
    };
    let one = train(1);
    assert_close(&train(2), &one, 1e-6);
    let start = flat(&line(&Device::default()));
    assert_eq!(one[..2], start);
    let moved = |values: &[f32]| (values[0] - start[0]).abs() + (values[1] - start[1]).abs();
    let (slow, fast) = (moved(&one[2..4]), moved(&one[4..]));
    assert!(slow > 0.0 && fast > 5.0 * slow, "{slow}, {fast}");
}

#[test]
fn an_average_of_weights_is_that_of_every_step_and_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let rows = accelerator::launch(2, |accelerator| {
        let device = accelerator.device();
        let prepared = || {
            let model = Three::new(&device).freeze_group(ParamGroup::from_predicate("frozen."));
            accelerator.prepare((model, SgdConfig::new().init(), loader(12, 2)))
        };
        let (mut model, mut optimizer, train) = prepared()?;
        let mut ema = Ema::new(&model, 0.75);
        let mut expected = flat(&model);
        for batch in train.epoch(0) {
            let batch = batch?;
            let loss = distance(&model.slow, &batch) + distance(&model.fast, &batch);
            let gradients = accelerator.backward(loss, &model, &batch)?;
            model = optimizer.step(0.05, model, gradients);
            ema.update(&model);
            for (mean, weight) in expected.iter_mut().zip(flat(&model)) {
                *mean = 0.75 * *mean + 0.25 * weight;
            }
        }
        let averaged = flat(ema.model());
        assert_close(&averaged, &expected, 1e-6);
        assert_ne!(averaged, flat(&model));
        accelerator.save_state(folder, (&model, &ema, &optimizer))?;

        let (fresh, optimizer, _) = prepared()?;
        let ema = Ema::new(&fresh, 0.75);
        let ((back, mut ema, _), _) = accelerator.resume(folder, (fresh, ema, optimizer))?;
        assert_eq!(flat(ema.model()), averaged);
        assert_eq!(flat(&back), flat(&model));
        // The model is still the one that is trained.
        let gradients = accelerator.backward(back.slow.weight.val().mean(), &back, 1)?;
        assert_eq!(gradients.samples(), Some(2.0));
        ema.update(&back);
        assert_ne!(flat(ema.model()), averaged);
        Ok(averaged)
    });
    of_every_rank(rows.unwrap());
}

#[derive(Debug, Module)]
struct Mixed {
    line: Linear,
    frozen: Linear,
    norm: BatchNorm,
    count: Param<Tensor<1, Int>>,
    mask: Param<Tensor<1, Bool>>,
}

impl Mixed {
    fn new(device: &Device) -> Self {
        Self {
            line: line(device),
            frozen: line(device).no_grad(),
            norm: BatchNormConfig::new(1).with_momentum(1.0).init(device),
            count: Param::initialized(ParamId::new(), Tensor::from_ints([1, 2], device)),
            mask: Param::initialized(ParamId::new(), Tensor::from_bool([true, false], device)),
        }
    }

    /// Returns the tensors that are not averaged.
    fn rest(&self) -> [TensorData; 3] {
        [
            self.frozen.weight.val().into_data(),
            self.count.val().into_data(),
            self.mask.val().into_data(),
        ]
    }

    fn mean(&self) -> f32 {
        self.norm.running_mean.value().into_scalar()
    }
}

#[test]
fn what_is_not_trained_is_taken_over_as_it_is_and_saved_for_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    accelerator::launch(2, |accelerator| {
        let device = accelerator.device();
        let mut model = accelerator.prepare(accelerator.init(Mixed::new))?;
        let mut ema = Ema::new(&model, 0.5);
        let before = model.rest();
        model.frozen.weight = model.frozen.weight.map(|weight| weight + 1.0);
        model.count = model.count.map(|count| count + 6);
        model.mask = model.mask.map(Tensor::bool_not);
        let own = 4.0 * accelerator.rank() as f32;
        model.norm.forward(Tensor::<2>::full([3, 1], own, &device));
        ema.update(&model);
        assert_eq!(ema.model().rest(), model.rest());
        for (after, before) in model.rest().iter().zip(before) {
            assert_ne!(*after, before);
        }
        // Burn updates a running statistic lazily, so the average takes this rank's own until the save.
        assert_eq!(ema.model().mean(), own);
        accelerator.save_state(folder.path(), (&model, &ema))?;
        assert_eq!(ema.model().mean(), 2.0);

        let fresh = accelerator.prepare(accelerator.init(Mixed::new))?;
        let ema = Ema::new(&fresh, 0.5);
        let ((_, ema), _) = accelerator.resume(folder.path(), (fresh, ema))?;
        assert_eq!(ema.model().rest(), model.rest());
        assert_eq!(ema.model().mean(), 2.0);
        Ok(())
    })
    .unwrap();
}
