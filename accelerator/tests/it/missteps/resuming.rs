//! Trainings that resume with another plan, rate, optimizer or number of ranks, or that forget to resume.

use std::path::Path;

use super::{log_of, logged};
use crate::common::checkpoints::adam;
use crate::common::{distance, learn, line, line_and_sgd, loader};
use accelerator::prelude::*;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::Tensor;

#[test]
fn a_plan_that_resume_makes_wrong_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let saved = accelerator::launch(2, |accelerator| {
        let train = accelerator.prepare(loader(24, 2))?;
        accelerator.save_state(folder, &train).map(drop)
    });
    saved.unwrap();
    let resumed = |plan: bool, first: bool| {
        let accelerator = Accelerator::new().unwrap();
        let mut train = accelerator.prepare(loader(24, 2)).unwrap();
        if first {
            train = accelerator.resume_loader(folder, train).unwrap();
        }
        if plan {
            accelerator.plan(&train, 1);
        }
        logged(|| accelerator.resume(folder, train).unwrap()).1
    };
    let text = resumed(true, false);
    assert!(
        text.contains("continues with 4 samples a step over all ranks, and it had 2 when `plan`"),
        "{text}"
    );
    for (plan, first) in [(false, false), (true, true)] {
        let text = resumed(plan, first);
        assert!(!text.contains("plan"), "{text}");
    }
}

/// The source of the number of steps of a cosine schedule.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum StepsFrom {
    Plan,
    Steps,
}

/// Makes one step of a training with a cosine that begins at `rate` and spans all steps of an epoch, resumes it if
/// there is a checkpoint, and returns the log of rank 0.
fn cosine_step(
    ranks: usize,
    folder: &Path,
    from: StepsFrom,
    loader_first: bool,
    rate: f64,
) -> Result<String> {
    let texts = accelerator::launch(ranks, |accelerator| {
        log_of(|| {
            let device = accelerator.device();
            let (model, mut train) = accelerator.prepare((line(&device), loader(64, 2)))?;
            if loader_first {
                train = accelerator.resume_loader(folder, train)?;
            }
            let steps = match from {
                StepsFrom::Plan => accelerator.plan(&train, 1).steps,
                StepsFrom::Steps => train.steps(),
            };
            let cosine = CosineAnnealingLrSchedulerConfig::new(rate, steps.unwrap() as usize);
            let optimizer = (SgdConfig::new().init(), cosine.init().unwrap());
            let parts = (model, accelerator.prepare(optimizer)?, train);
            let ((mut model, mut optimizer, train), _) = accelerator.resume(folder, parts)?;
            for batch in train.epoch(0).take(1) {
                let batch = batch?;
                let loss = distance(&model, &batch);
                let gradients = accelerator.backward(loss, &model, &batch)?;
                model = optimizer.step(model, gradients);
            }
            accelerator.save_state(folder, (&model, &optimizer, &train))
        })
    });
    texts.map(|texts| texts.into_iter().next().unwrap())
}

#[test]
fn steps_that_a_loader_told_before_resume_made_them_others_are_said() {
    for (ranks, loader_first, told) in [(1, false, true), (1, true, false), (2, false, false)] {
        let folder = tempfile::tempdir().unwrap();
        // The first rate of a cosine does not depend on its length.
        cosine_step(2, folder.path(), StepsFrom::Steps, false, 0.1).unwrap();
        let text = cosine_step(ranks, folder.path(), StepsFrom::Steps, loader_first, 0.1).unwrap();
        let count = text.matches("continues with 4 samples a step").count();
        assert_eq!(count, usize::from(told), "{ranks} {loader_first}: {text}");
    }
}

#[test]
fn a_rate_that_was_changed_on_purpose_is_told_where_the_plan_is_that_of_the_loader_that_continues()
{
    for ranks in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        cosine_step(2, folder.path(), StepsFrom::Plan, true, 0.1).unwrap();
        let text = cosine_step(ranks, folder.path(), StepsFrom::Plan, true, 0.05).unwrap();
        assert_eq!(text.matches("the schedule of").count(), 1, "{text}");
    }
    // A schedule that was planned without the loader counts other steps.
    let folder = tempfile::tempdir().unwrap();
    cosine_step(2, folder.path(), StepsFrom::Plan, false, 0.1).unwrap();
    let error = cosine_step(1, folder.path(), StepsFrom::Plan, false, 0.05).unwrap_err();
    assert!(error.is_checkpoint(), "{error:?}");
}

#[test]
fn a_folder_of_checkpoints_that_is_not_resumed_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let run = |resumes: bool| {
        let accelerator = Accelerator::new().unwrap();
        let mut train = accelerator.prepare(loader(24, 2)).unwrap();
        if resumes {
            (train, _) = accelerator.resume(folder, train).unwrap();
        }
        let save = || accelerator.save_state(folder, &train).unwrap();
        logged(|| (save(), save())).1
    };
    assert_eq!(run(false), "");
    assert_eq!(run(true), "");
    let text = run(false);
    assert_eq!(
        text.matches("holds checkpoint 4 of an earlier run").count(),
        1,
        "{text}"
    );
}

#[test]
fn optimizers_that_are_resumed_in_another_order_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let accelerator = Accelerator::new().unwrap();
    let parts = || {
        let (first, second) = (line(&accelerator.device()), line(&accelerator.device()));
        let optimizers = (adam(), adam());
        accelerator
            .prepare((first, second, optimizers.0, optimizers.1, loader(24, 2)))
            .unwrap()
    };
    let step = |model, optimizer: &mut _, batch: &_| {
        learn(&accelerator, model, optimizer, 0.1, batch).unwrap()
    };
    let (first, second, mut a, mut b, train) = parts();
    let batch = train.epoch(0).next().unwrap().unwrap();
    let (first, second) = (step(first, &mut a, &batch), step(second, &mut b, &batch));
    accelerator
        .save_state(folder, (&first, &second, &a, &b, &train))
        .unwrap();
    for is_swapped in [false, true] {
        let (first, second, a, b, train) = parts();
        let (parts, _) = accelerator
            .resume(folder, (first, second, a, b, train))
            .unwrap();
        let (first, _, mut a, mut b, train) = parts;
        let batch = train.epoch(0).next().unwrap().unwrap();
        let optimizer = if is_swapped { &mut b } else { &mut a };
        let (_, text) = logged(|| step(first, optimizer, &batch));
        let is_told =
            text.contains("state for 2 parameters, and the model of its first step has none");
        assert_eq!(is_told, is_swapped, "{text}");
    }
}

#[test]
fn what_becomes_of_a_batch_on_fewer_ranks_is_logged() {
    let folder = tempfile::tempdir().unwrap();
    for (ranks, told) in [(2, false), (1, true), (1, false)] {
        let texts = accelerator::launch(ranks, |accelerator| {
            let (model, optimizer) = line_and_sgd(&accelerator)?;
            let (train, valid) = accelerator.prepare((loader(24, 2), loader(24, 2)))?;
            let parts = (model, optimizer, train, valid);
            let (resumed, text) = logged(|| accelerator.resume(folder.path(), parts));
            let ((mut model, mut optimizer, train, valid), _) = resumed?;
            let batch = train.epoch(0).next().unwrap()?;
            model = learn(&accelerator, model, &mut optimizer, 0.1, &batch)?;
            accelerator.save_state(folder.path(), (&model, &optimizer, &train, &valid))?;
            Ok(text)
        });
        let text = &texts.unwrap()[0];
        assert_eq!(
            text.matches("samples on each rank").count(),
            usize::from(told),
            "{text}"
        );
        let wanted =
            "the loader (part 3 of the tuple) has up to 4 samples on each rank, and had up to 2";
        assert_eq!(text.contains(wanted), told, "{text}");
    }
}

/// Returns the error and the log of resuming a checkpoint of one optimizer, after a step, with another one.
fn with_another_optimizer(
    saved: ModuleOptimizer,
    found: ModuleOptimizer,
) -> (Option<Error>, String) {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::new().unwrap();
    let device = accelerator.device();
    let (model, mut optimizer) = accelerator.prepare((line(&device), saved)).unwrap();
    let loss = model.forward(Tensor::<2>::ones([2, 1], &device)).mean();
    let gradients = accelerator.backward(loss, &model, 2).unwrap();
    let model = optimizer.step(0.1, model, gradients);
    accelerator
        .save_state(folder.path(), (&model, &optimizer))
        .unwrap();
    let parts = accelerator.prepare((line(&device), found)).unwrap();
    let (resumed, text) = logged(|| accelerator.resume(folder.path(), parts));
    (resumed.err(), text)
}

#[test]
fn an_optimizer_that_keeps_other_state_than_was_saved_is_told() {
    let sgd = || SgdConfig::new().init();
    let momentum = || {
        let config = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
        config.init()
    };
    let adam = || AdamConfig::new().init();
    let ams = || AdamConfig::new().with_amsgrad(true).init();
    for (saved, found, told) in [
        (sgd(), momentum(), true),
        (momentum(), sgd(), true),
        (adam(), ams(), true),
        (ams(), adam(), true),
        (sgd(), sgd(), false),
        (momentum(), momentum(), false),
        (adam(), adam(), false),
        (ams(), ams(), false),
        // Both keep the same state.
        (adam(), AdamWConfig::new().init(), false),
    ] {
        let (error, text) = with_another_optimizer(saved, found);
        assert!(error.is_none(), "{error:?}");
        let count = text.matches("keeps other state").count();
        assert_eq!(count, usize::from(told), "{text}");
    }
}

#[test]
fn state_of_an_optimizer_that_keeps_none_is_told_as_such() {
    let (error, _) = with_another_optimizer(SgdConfig::new().init(), AdamConfig::new().init());
    let text = error.unwrap().to_string();
    assert!(text.contains("it keeps nothing,"), "{text}");
}

/// The program decides whether to train without a checkpoint.
#[test]
fn an_absent_checkpoint_is_told_once() {
    let folder = tempfile::tempdir().unwrap();
    let absent = folder.path().join("absent");
    let (position, text) = logged(|| {
        let accelerator = Accelerator::new().unwrap();
        let train = accelerator.prepare(loader(12, 2)).unwrap();
        let train = accelerator.resume_loader(&absent, train).unwrap();
        accelerator.resume(&absent, train).unwrap().1
    });
    assert!(position.is_start());
    assert_eq!(text.matches("no checkpoint in").count(), 1, "{text}");
    assert!(!text.contains("afresh"), "{text}");
}

/// The path that `accel-launch tune best` prints holds the folder that the program has named, for example.
#[test]
fn checkpoints_one_level_below_are_pointed_at() {
    let folder = tempfile::tempdir().unwrap();
    let below = folder.path().join("epoch-59");
    let (position, text) = logged(|| {
        let accelerator = Accelerator::new().unwrap();
        let model = accelerator.prepare(line(&accelerator.device())).unwrap();
        accelerator.save_state(&below, &model).unwrap();
        accelerator.resume(folder.path(), model).unwrap().1
    });
    assert!(position.is_start());
    assert!(text.contains("epoch-59`: name that folder"), "{text}");
}
