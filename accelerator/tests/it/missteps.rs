//! What is easily written wrong, and would go unnoticed.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::common::checkpoints::adam;
use crate::common::{Column, ColumnBatcher, columns, distance, flat, line, loader};
use accelerator::checkpoint::{Object, PerRank};
use accelerator::data::{AssumeDeterministic, Batch, Loader, StreamPart};
use accelerator::hook::PowerSgd;
use accelerator::metric::{Mean, Sum};
use accelerator::optim::{Manual, PreparedOptimizer, Sharded};
use accelerator::prelude::*;
use accelerator::{AcceleratorBuilder, Clip, Weight};
use burn::data::dataloader::DataLoaderBuilder as BurnBuilder;
use burn::data::dataset::transform::{SamplerDataset, SamplerDatasetOptions};
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Tensor};

type Count = fn(&Accelerator, &mut Linear, &Batch<Column>) -> Result<usize>;
type Load = fn() -> Loader<Column>;
type Read = fn(&PreparedLoader<Column>, &Linear) -> Result<()>;

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// What this thread logs meanwhile.
fn logged<T>(work: impl FnOnce() -> T) -> (T, String) {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_writer(move || writer.clone())
        .with_ansi(false)
        .finish();
    let value = tracing::subscriber::with_default(subscriber, work);
    let bytes = lines.0.lock().unwrap().clone();
    (value, String::from_utf8(bytes).unwrap())
}

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
        text.contains("goes on with 4 samples a step over all ranks, and it had 2 when `plan`"),
        "{text}"
    );
    for (plan, first) in [(false, false), (true, true)] {
        let text = resumed(plan, first);
        assert!(!text.contains("plan"), "{text}");
    }
}

/// Where the steps of a cosine come from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum StepsFrom {
    Plan,
    Steps,
}

/// One step of a training with a cosine that begins at that rate, over all steps of an epoch, which goes on where there
/// is a checkpoint, and what rank 0 is told.
fn cosine_step(
    ranks: usize,
    folder: &Path,
    from: StepsFrom,
    loader_first: bool,
    rate: f64,
) -> Result<String> {
    let texts = accelerator::launch(ranks, |accelerator| {
        let (done, text) = logged(|| {
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
        });
        done.map(|_| text)
    });
    texts.map(|texts| texts.into_iter().next().unwrap())
}

#[test]
fn steps_that_a_loader_told_before_resume_made_them_others_are_said() {
    for (ranks, loader_first, told) in [(1, false, true), (1, true, false), (2, false, false)] {
        let folder = tempfile::tempdir().unwrap();
        // The first rate of a cosine is the same whatever its length.
        cosine_step(2, folder.path(), StepsFrom::Steps, false, 0.1).unwrap();
        let text = cosine_step(ranks, folder.path(), StepsFrom::Steps, loader_first, 0.1).unwrap();
        let count = text.matches("goes on with 4 samples a step").count();
        assert_eq!(count, usize::from(told), "{ranks} {loader_first}: {text}");
    }
}

#[test]
fn a_rate_that_was_changed_on_purpose_is_told_where_the_plan_is_that_of_the_loader_that_goes_on() {
    for ranks in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        cosine_step(2, folder.path(), StepsFrom::Plan, true, 0.1).unwrap();
        let text = cosine_step(ranks, folder.path(), StepsFrom::Plan, true, 0.05).unwrap();
        assert_eq!(text.matches("the schedule of").count(), 1, "{text}");
    }
    // What was planned without it counts other steps.
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
    let step = |model: Linear, optimizer: &mut PreparedOptimizer<Manual>, batch: &Batch<Column>| {
        let loss = distance(&model, batch);
        let gradients = accelerator.backward(loss, &model, batch).unwrap();
        optimizer.step(0.1, model, gradients)
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
            let parts = (line(&accelerator.device()), SgdConfig::new().init());
            let (model, optimizer) = accelerator.prepare(parts)?;
            let (train, valid) = accelerator.prepare((loader(24, 2), loader(24, 2)))?;
            let parts = (model, optimizer, train, valid);
            let (resumed, text) = logged(|| accelerator.resume(folder.path(), parts));
            let ((mut model, mut optimizer, train, valid), _) = resumed?;
            let batch = train.epoch(0).next().unwrap()?;
            let gradients = accelerator.backward(distance(&model, &batch), &model, &batch)?;
            model = optimizer.step(0.1, model, gradients);
            accelerator.save_state(folder.path(), (&model, &optimizer, &train, &valid))?;
            Ok(text)
        });
        let text = &texts.unwrap()[0];
        assert_eq!(
            text.matches("samples on each rank").count(),
            usize::from(told),
            "{text}"
        );
        let wanted = "the loader at place 3 has up to 4 samples on each rank, and had up to 2";
        assert_eq!(text.contains(wanted), told, "{text}");
    }
}

#[test]
fn a_loss_of_another_model_is_refused_on_every_rank() {
    for (ranks, accumulation) in [(1, 1), (1, 2), (3, 1), (3, 2)] {
        let builder = Accelerator::builder().accumulation_steps(accumulation);
        let outcomes = builder.launch(ranks, |accelerator| {
            let device = accelerator.device();
            let parts = (line(&device), line(&device), loader(24, 2));
            let (model, other, train) = accelerator.prepare(parts)?;
            let batch = train.epoch(0).next().unwrap()?;
            // The last rank has nothing to give.
            let idle = ranks > 1 && accelerator.rank() == ranks - 1;
            let weight = || match idle {
                true => Weight::from(0),
                false => batch.weight(),
            };
            for _ in 1..accumulation {
                let open = accelerator.backward(distance(&model, &batch), &other, weight())?;
                assert!(open.is_accumulating());
            }
            let error = accelerator
                .backward(distance(&model, &batch), &other, weight())
                .unwrap_err();
            // The group lives, and so does the model that was not trained.
            let mut samples = None;
            for _ in 0..accumulation {
                let loss = distance(&other, &batch);
                samples = accelerator.backward(loss, &other, weight())?.samples();
            }
            Ok((error, samples))
        });
        for (error, samples) in outcomes.unwrap() {
            assert!(error.is_misuse(), "{error:?}");
            let text = error.to_string();
            assert!(
                text.contains("none of its 2 parameters (`weight`, …)"),
                "{text}"
            );
            let with_samples = if ranks == 3 { 2 } else { 1 };
            assert_eq!(samples, Some((2 * with_samples * accumulation) as f64));
        }
    }
}

#[test]
fn a_rank_without_gradients_is_no_mistake_where_another_has_some() {
    let present = accelerator::launch(2, |accelerator| {
        let device = accelerator.device();
        let (model, other) = accelerator.prepare((line(&device), line(&device)))?;
        let input = Tensor::<2>::ones([2, 1], &device);
        let used = if accelerator.is_main_process() {
            &other
        } else {
            &model
        };
        let loss = used.forward(input).mean();
        let mut gradients = accelerator.backward(loss, &other, 2)?;
        Ok(gradients.norm())
    });
    for norm in present.unwrap() {
        assert!(norm.is_some_and(|norm| norm > 0.0));
    }
}

#[test]
fn a_frozen_model_is_told_as_such() {
    let accelerator = Accelerator::new().unwrap();
    let device = accelerator.device();
    let parts = (line(&device), line(&device).no_grad());
    let (model, frozen): (Linear, Linear) = accelerator.prepare(parts).unwrap();
    let input = Tensor::<2>::ones([2, 1], &device);
    let loss = frozen.forward(model.forward(input)).mean();
    let error = accelerator.backward(loss, &frozen, 2).unwrap_err();
    assert!(
        error.is_misuse() && error.to_string().contains("no trainable parameter"),
        "{error}"
    );
}

#[test]
fn gradients_of_another_model_are_no_step() {
    for ranks in [1, 2] {
        let error = accelerator::launch(ranks, |accelerator| {
            let device = accelerator.device();
            let parts = (line(&device), line(&device), SgdConfig::new().init());
            let (model, other, mut optimizer) = accelerator.prepare(parts)?;
            let loss = model.forward(Tensor::<2>::ones([2, 1], &device)).mean();
            let gradients = accelerator.backward(loss, &model, 2)?;
            Ok(flat(&optimizer.step(0.1, other, gradients)))
        })
        .unwrap_err();
        assert!(error.is_panic(), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("gradients are of another model"), "{text}");
    }
}

#[test]
fn half_precision_that_nothing_computes_in_is_warned_of_once_a_model() {
    let texts = Accelerator::builder()
        .device(DeviceKind::Flex)
        .precision(Precision::Bf16)
        .launch(2, |accelerator| {
            let device = accelerator.device();
            let norm: BatchNorm = BatchNormConfig::new(1).init(&device);
            let (model, good, norm) = accelerator.prepare((line(&device), line(&device), norm))?;
            let input = Tensor::<2>::ones([2, 1], &device);
            let (done, text) = logged(|| -> Result<()> {
                for _ in 0..2 {
                    let half = accelerator.to_working(input.clone());
                    let loss = accelerator.forward(&good, |model| model.forward(half).mean());
                    let _ = accelerator.backward(loss, &good, 2)?;
                    // It stays in full precision, and was asked for all the same.
                    let input = input.clone().reshape([2, 1, 1]);
                    let loss = accelerator.forward(&norm, |norm| norm.forward(input).mean());
                    let _ = accelerator.backward(loss, &norm, 2)?;
                }
                Ok(())
            });
            done?;
            assert_eq!(text, "");
            let (done, text) = logged(|| -> Result<()> {
                for _ in 0..2 {
                    let loss = model.forward(input.clone()).mean();
                    let _ = accelerator.backward(loss, &model, 2)?;
                }
                Ok(())
            });
            done?;
            Ok(text)
        })
        .unwrap();
    assert_eq!(texts[0].matches("the precision is bf16").count(), 1);
    assert!(texts[0].contains("accelerator.forward(&model"), "{texts:?}");
    assert_eq!(texts[1], "");
}

/// What is logged of a training whose input alone is in half precision, up to its panic.
fn logged_in_a_panic(precision: Precision, forward: bool) -> String {
    let train = || {
        let builder = Accelerator::builder()
            .device(DeviceKind::Flex)
            .precision(precision);
        let accelerator = builder.build().unwrap();
        let model = accelerator.prepare(line(&accelerator.device())).unwrap();
        let input = accelerator.to_working(Tensor::<2>::ones([2, 1], &accelerator.device()));
        let output = match forward {
            true => accelerator.forward(&model, |model| model.forward(input)),
            false => model.forward(input),
        };
        panic!("it is no mistake of types: {:?}", output.shape());
    };
    logged(|| catch_unwind(AssertUnwindSafe(train)).unwrap_err()).1
}

#[test]
fn inputs_in_half_precision_for_a_model_that_is_not_are_told_where_the_program_panics() {
    let text = logged_in_a_panic(Precision::Bf16, false);
    assert_eq!(
        text.matches("accelerator.forward(&model, |model| …)")
            .count(),
        1,
        "{text}"
    );
    assert!(text.contains("to_working"), "{text}");
    for (precision, forward) in [(Precision::Bf16, true), (Precision::No, false)] {
        assert_eq!(
            logged_in_a_panic(precision, forward),
            "",
            "{precision} {forward}"
        );
    }
}

/// What ranks log of steps in f16, of which those that `bad` tells have gradients that are not finite.
fn logged_in_f16(ranks: usize, steps: usize, bad: fn(usize) -> bool) -> Vec<String> {
    let train = |accelerator: Accelerator| {
        let parts = (line(&accelerator.device()), SgdConfig::new().init());
        let (mut model, mut optimizer) = accelerator.prepare(parts)?;
        let (done, text) = logged(|| -> Result<()> {
            for step in 0..steps {
                // One rank alone finds it.
                let bad = bad(step) && accelerator.rank() + 1 == ranks;
                let factor = if bad {
                    1e20
                } else {
                    0.01 * (1.0 + accelerator.rank() as f32)
                };
                let loss = accelerator.forward(&model, |model| {
                    accelerator.to_full(model.weight.val()).sum() * factor
                });
                let gradients = accelerator.backward(loss.reshape([1]), &model, 1)?;
                model = optimizer.step(0.1, model.clone(), gradients);
            }
            Ok(())
        });
        done?;
        Ok(text)
    };
    let builder = Accelerator::builder()
        .device(DeviceKind::Flex)
        .precision(Precision::F16);
    builder.launch(ranks, train).unwrap()
}

#[test]
fn steps_that_are_skipped_are_told_at_first_and_where_there_is_no_end_of_them() {
    for ranks in [1, 2] {
        let texts = logged_in_f16(ranks, 60, |step| step % 3 == 2);
        let text = &texts[0];
        assert_eq!(text.matches("is skipped").count(), 1, "{text}");
        assert!(text.contains("INFO") && text.contains("65536"), "{text}");
        let texts = logged_in_f16(ranks, 60, |step| step % 30 > 3);
        let text = &texts[0];
        assert_eq!(text.matches("is skipped").count(), 1, "{text}");
        assert_eq!(text.matches("16 steps in a row").count(), 1, "{text}");
        let texts = logged_in_f16(ranks, 4, |_| false);
        assert!(texts.iter().all(String::is_empty), "{texts:?}");
    }
}

/// What ranks log of eight micro-steps, two a step, from a checkpoint if there is one, which they save; `rate` tells
/// that of a micro-step by its number in this process and the optimizer steps that are done.
fn logged_with_rates(folder: &Path, rate: fn(u64, u64) -> f64) -> Vec<String> {
    let train = |accelerator: Accelerator| {
        let parts = (line(&accelerator.device()), SgdConfig::new().init());
        let parts = accelerator.prepare(parts)?;
        let ((mut model, mut optimizer), _) = accelerator.resume(folder, parts)?;
        let (done, text) = logged(|| -> Result<()> {
            for call in 0..8 {
                let input = Tensor::<2>::ones([2, 1], &accelerator.device());
                let loss = model.forward(input).mean() + accelerator.rank() as f64;
                let gradients = accelerator.backward(loss, &model, 2)?;
                model = optimizer.step(rate(call, optimizer.steps()), model.clone(), gradients);
            }
            Ok(())
        });
        done?;
        accelerator.save_state(folder, (&model, &optimizer))?;
        Ok(text)
    };
    let builder = Accelerator::builder().accumulation_steps(2);
    builder.launch(2, train).unwrap()
}

#[test]
fn a_schedule_by_hand_that_runs_ahead_or_begins_anew_is_told_once() {
    type Rate = fn(u64, u64) -> f64;
    let lives: [(Rate, [&str; 2]); 5] = [
        // As many times as there are micro-steps.
        (
            |call, _| 0.5_f64.powi(call as i32),
            ["in a micro-step", "in a micro-step"],
        ),
        // As many times as there are steps, from the start of each process.
        (
            |call, _| 0.5_f64.powi((call / 2) as i32),
            ["", "begins anew"],
        ),
        (|_, steps| 0.5_f64.powi(steps as i32), ["", ""]),
        (|_, _| 0.1, ["", ""]),
        // Its first change is to come.
        (|_, steps| if steps < 5 { 0.1 } else { 0.01 }, ["", ""]),
    ];
    for (number, (rate, told)) in lives.into_iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        for told in told {
            let texts = logged_with_rates(folder.path(), rate);
            let text = &texts[0];
            let count = usize::from(!told.is_empty());
            assert_eq!(text.matches("WARN").count(), count, "{number}: {text}");
            assert!(text.contains(told), "{number}: {text}");
            assert_eq!(
                text.contains("(optimizer, scheduler)"),
                count == 1,
                "{text}"
            );
            assert_eq!(texts[1], "");
        }
    }
}

#[test]
fn a_clip_of_nothing_is_warned_of_once() {
    let accelerator = Accelerator::new().unwrap();
    let device = accelerator.device();
    let model = accelerator.prepare(line(&device)).unwrap();
    let clipped = |path: &str| {
        let loss = model.forward(Tensor::<2>::ones([2, 1], &device)).mean();
        let gradients = accelerator.backward(loss, &model, 2).unwrap();
        let _ = gradients.clip(Clip::norm(0.1).only(|other| other == path));
    };
    let ((), text) = logged(|| clipped("bias"));
    assert_eq!(text, "");
    let ((), text) = logged(|| (0..2).for_each(|_| clipped("typo")));
    assert_eq!(text.matches("covers none of the 2").count(), 1, "{text}");
    assert!(text.contains("`weight`"), "{text}");
}

/// Loss and its samples over one epoch. Cut off after that many steps, it saves; where there is a
/// checkpoint, it goes on.
fn epoch(ranks: usize, folder: &Path, until: Option<usize>) -> Vec<(Mean, Mean)> {
    let run = |accelerator: Accelerator| {
        let model = line(&accelerator.device());
        let parts = (model, SgdConfig::new().init(), loader(22, 2));
        let parts = accelerator.prepare(parts)?;
        let (own, all) = (PerRank(Mean::new()), Object(Mean::new()));
        let (model, optimizer, train) = parts;
        let ((mut model, mut optimizer, train, PerRank(own), Object(all)), position) =
            accelerator.resume(folder, (model, optimizer, train, own, all))?;
        let mut own = own;
        // For any number of ranks.
        let mut mine = match accelerator.is_main_process() {
            true => all,
            false => Mean::new(),
        };
        for batch in train.epoch(position.epoch()).take(until.unwrap_or(100)) {
            let batch = batch?;
            let loss = distance(&model, &batch);
            for mean in [&mut own, &mut mine] {
                mean.update_with(loss.clone(), batch.real());
            }
            let gradients = accelerator.backward(loss, &model, &batch)?;
            // Nothing moves, so that the loss of a sample is always the same.
            model = optimizer.step(0.0, model, gradients);
        }
        if until.is_some() {
            let all = accelerator.reduce(mine)?;
            let parts = (&model, &optimizer, &train, PerRank(&own), Object(&all));
            accelerator.save_state(folder, parts)?;
        }
        accelerator.reduce((own, mine))
    };
    accelerator::launch(ranks, run).unwrap()
}

#[test]
fn the_mean_of_an_epoch_is_exact_after_a_resume_in_its_middle() {
    let fresh = || tempfile::tempdir().unwrap();
    let close = |mean: Mean, wanted: Mean| {
        assert_eq!(mean.samples(), 22.0);
        assert!(
            (mean.value() - wanted.value()).abs() < 1e-6,
            "{mean} {wanted}"
        );
    };
    let (wanted, _) = epoch(1, fresh().path(), None)[0];
    assert_eq!(wanted.samples(), 22.0);
    for ranks in [1, 2, 3] {
        let folder = fresh();
        let cut = epoch(2, folder.path(), Some(3));
        assert_eq!(cut[0].0.samples(), 12.0);
        for (own, all) in epoch(ranks, folder.path(), None) {
            close(all, wanted);
            if ranks > 1 {
                close(own, wanted);
            }
        }
    }
}

/// How a call of `backward` fails on one rank before the others hear of it.
#[derive(Clone, Copy, Debug)]
enum Misstep {
    /// The loss is no mean.
    Loss,
    /// The model was not prepared.
    Model,
}

/// Training in which rank 1 takes a false step, and goes on. Gives, for each rank, the step in which a call fails
/// otherwise, the errors of that call and the next one, and how many micro-steps its windows take after the
/// model was prepared again, or resumed.
fn after_a_misstep(
    builder: AcceleratorBuilder,
    misstep: Misstep,
    at: usize,
    is_sharded: bool,
) -> Vec<(usize, [Error; 2], usize)> {
    let folder = tempfile::tempdir().unwrap();
    let train = |accelerator: Accelerator| {
        let device = accelerator.device();
        let prepared = |model| -> Result<(Linear, PreparedOptimizer<Manual>)> {
            let optimizer = SgdConfig::new().init();
            match is_sharded {
                true => accelerator.prepare((model, Sharded(optimizer))),
                false => accelerator.prepare((model, optimizer)),
            }
        };
        let (mut model, mut optimizer) = prepared(line(&device))?;
        accelerator.save_state(folder.path(), &model)?;
        let stranger = line(&device);
        let input = Tensor::<2>::ones([2, 1], &device);
        let mut errors = Vec::new();
        for step in 0..20 {
            let output = model.forward(input.clone());
            if accelerator.rank() == 1 && step == at {
                let error = match misstep {
                    Misstep::Loss => accelerator.backward(output.reshape([2]), &model, 2),
                    Misstep::Model => accelerator.backward(output.mean(), &stranger, 2),
                };
                assert!(error.is_err_and(|error| error.is_misuse()));
                continue;
            }
            match accelerator.backward(output.mean(), &model, 2) {
                Ok(gradients) => model = optimizer.step(0.1, model, gradients),
                Err(error) => errors.push((step, error)),
            }
            let [(step, first), (_, second)] = &errors[..] else {
                continue;
            };
            let told = (*step, [first.clone(), second.clone()]);
            let model = match is_sharded {
                true => prepared(model)?.0,
                false => accelerator.resume(folder.path(), model)?.0,
            };
            let mut micro_steps = 1;
            while accelerator
                .backward(model.forward(input.clone()).mean(), &model, 2)?
                .is_accumulating()
            {
                micro_steps += 1;
            }
            return Ok((told.0, told.1, micro_steps));
        }
        panic!("rank {} was not told", accelerator.rank());
    };
    builder.launch(3, train).unwrap()
}

#[test]
fn a_call_that_failed_on_one_rank_alone_is_told_to_all_by_the_next() {
    let builders = || {
        let plain = Accelerator::builder;
        [
            plain().with_overlap(Overlap::Off),
            plain().with_overlap(Overlap::On),
            plain().with_compression(Compression::F16),
            plain().with_communication_hook(|| PowerSgd::new(1)),
        ]
    };
    for misstep in [Misstep::Loss, Misstep::Model] {
        for (accumulation, at) in [(1, 5), (3, 4), (3, 5)] {
            for (builder, is_sharded) in builders()
                .into_iter()
                .flat_map(|b| [(b.clone(), false), (b, true)])
            {
                let builder = builder.accumulation_steps(accumulation);
                let told = after_a_misstep(builder, misstep, at, is_sharded);
                for (rank, (step, errors, micro_steps)) in told.into_iter().enumerate() {
                    // Where the window ends that is one step longer on rank 1.
                    assert_eq!(step, 5 + usize::from(rank == 1));
                    assert_eq!(micro_steps, accumulation);
                    for error in errors {
                        assert!(error.is_misuse(), "{error:?}");
                        let text = error.to_string();
                        let cause = match misstep {
                            Misstep::Loss => "the loss has 2 elements",
                            Misstep::Model => "this model was not prepared",
                        };
                        for part in ["failed on rank 1", "went on", cause] {
                            assert_eq!(text.matches(part).count(), 1, "{part} in {text}");
                        }
                    }
                }
            }
        }
    }
}

/// The ways in which a rank may leave the others behind.
#[derive(Clone, Copy, Debug)]
enum Divergence {
    /// It leaves the first epoch early.
    Break,
    /// It is an epoch ahead.
    Epoch,
    /// It draws from another loader.
    Loader,
    /// It leaves a batch out.
    Skip,
}

/// Training in which rank 1 takes other batches than the others from step 3 on. Gives, for each rank, how many
/// calls of `backward` went well, and the error of the next one.
fn after_a_divergence(builder: AcceleratorBuilder, divergence: Divergence) -> Vec<(usize, Error)> {
    let train = |accelerator: Accelerator| {
        let parts = (line(&accelerator.device()), loader(36, 2), loader(36, 2));
        let (model, first, second) = accelerator.prepare(parts)?;
        let diverges = accelerator.rank() == 1;
        let batches = first.epoch(0).take(3);
        let batches: Box<dyn Iterator<Item = Result<_>>> = match divergence {
            _ if !diverges => Box::new(batches.chain(first.epoch(0).skip_first_batches(3))),
            Divergence::Break => Box::new(batches.chain(first.epoch(1))),
            Divergence::Epoch => Box::new(batches.chain(first.epoch(1).skip_first_batches(3))),
            Divergence::Loader => Box::new(batches.chain(second.epoch(0).skip_first_batches(3))),
            Divergence::Skip => Box::new(batches.chain(first.epoch(0).skip_first_batches(4))),
        };
        let mut done = 0;
        for batch in batches {
            let batch = batch?;
            match accelerator.backward(distance(&model, &batch), &model, &batch) {
                Ok(_) => done += 1,
                Err(error) => return Ok((done, error)),
            }
        }
        panic!("rank {} was not told", accelerator.rank());
    };
    builder.launch(3, train).unwrap()
}

#[test]
fn ranks_at_different_places_in_the_data_are_told_in_that_step() {
    for (divergence, place) in [
        (Divergence::Break, "step 0 of epoch 1 of loader 0"),
        (Divergence::Epoch, "step 3 of epoch 1 of loader 0"),
        (Divergence::Loader, "step 3 of epoch 0 of loader 1"),
        (Divergence::Skip, "step 4 of epoch 0 of loader 0"),
    ] {
        let builder = Accelerator::builder;
        for builder in [
            builder(),
            builder().accumulation_steps(2),
            builder().with_communication_hook(|| PowerSgd::new(1)),
        ] {
            for (rank, (done, error)) in after_a_divergence(builder, divergence)
                .into_iter()
                .enumerate()
            {
                assert!(
                    error.is_misuse(),
                    "{divergence:?} on rank {rank}: {error:?}"
                );
                assert_eq!(done, 3, "{divergence:?} on rank {rank}: {error}");
                let text = error.to_string();
                for part in ["ranks 0, 2: step", "step 3 of epoch 0 of loader 0", place] {
                    assert!(text.contains(part), "{part} in {text}");
                }
            }
        }
    }
}

#[test]
fn ranks_that_differ_in_an_earlier_micro_step_are_told_all_that_is_known_of_their_windows() {
    for (two_loaders, silent, parts) in [
        (
            true,
            false,
            [
                "ranks 0, 2: step 0 of epoch 0 of loader 0, step 0 of epoch 0 of loader 1",
                "rank 1: step 1 of epoch 0 of loader 0, step 0 of epoch 0 of loader 1",
            ],
        ),
        (
            true,
            true,
            [
                "rank 0: step 0 of epoch 0 of loader 0, step 0 of epoch 0 of loader 1",
                "rank 2: not known (a weight of the program's own)",
            ],
        ),
        (
            false,
            false,
            [
                "their last batch is the same, step 1 of epoch 0 of loader 0",
                "those before it in the window are not",
            ],
        ),
    ] {
        let builder = Accelerator::builder().accumulation_steps(2);
        let errors = builder.launch(3, |accelerator| {
            let parts = (line(&accelerator.device()), loader(36, 2), loader(36, 2));
            let (model, first, second) = accelerator.prepare(parts)?;
            let batches = first.epoch(0).take(2).collect::<Result<Vec<_>>>()?;
            let early = &batches[usize::from(accelerator.rank() == 1)];
            let late = match two_loaders {
                true => &second.epoch(0).next().unwrap()?,
                false => &batches[1],
            };
            let open = accelerator.backward(distance(&model, early), &model, early)?;
            assert!(open.is_accumulating());
            let weight = match silent && accelerator.rank() == 2 {
                true => Weight::from(late.real()),
                false => late.weight(),
            };
            Ok(accelerator
                .backward(distance(&model, late), &model, weight)
                .unwrap_err())
        });
        for error in errors.unwrap() {
            assert!(error.is_misuse(), "{error:?}");
            let text = error.to_string();
            assert!(text.contains("numbered from 0"), "{text}");
            for part in parts {
                assert!(text.contains(part), "{part} in {text}");
            }
        }
    }
}

#[test]
fn the_same_batches_in_a_window_and_weights_without_a_batch_are_no_mistake() {
    let builder = Accelerator::builder().accumulation_steps(4);
    let samples = builder.launch(3, |accelerator| {
        // Ranks are idle in the last step of each epoch.
        let parts = (line(&accelerator.device()), loader(20, 2), loader(8, 2));
        let (model, first, second) = accelerator.prepare(parts)?;
        let mut samples = Vec::new();
        for epoch in 0..2 {
            for (step, batch) in first.epoch(epoch).enumerate() {
                let batch = batch?;
                let loss = || distance(&model, &batch);
                // Rank 2 says by itself what a batch counts, now and then.
                let weight = match accelerator.rank() == 2 && step % 2 == 0 {
                    true if batch.is_last() => Weight::from(batch.real()).trigger_sync(),
                    true => Weight::from(batch.real()),
                    false => batch.weight(),
                };
                samples.extend(accelerator.backward(loss(), &model, weight)?.samples());
                for other in second.epoch(epoch).take(1) {
                    let other = other?;
                    let loss = distance(&model, &other);
                    let weight = other.weight().no_sync();
                    samples.extend(accelerator.backward(loss, &model, weight)?.samples());
                }
            }
        }
        let last = second.epoch(0).next().unwrap()?;
        let weight = last.weight().trigger_sync();
        samples.extend(
            accelerator
                .backward(distance(&model, &last), &model, weight)?
                .samples(),
        );
        Ok(samples.iter().sum::<f64>())
    });
    // Four rounds of 20 samples, of which each has 6 of the other loader, and 6 more.
    assert_eq!(samples.unwrap(), [2.0 * (20.0 + 4.0 * 6.0) + 6.0; 3]);
}

/// What rank 0 and rank 1 log in so many steps, of which each has a loss that the rank and the step decide.
fn logged_in_steps(
    builder: AcceleratorBuilder,
    steps: usize,
    loss: fn(usize, usize) -> f32,
) -> Vec<String> {
    let train = |accelerator: Accelerator| {
        let device = accelerator.device();
        let parts = (line(&device), SgdConfig::new().init());
        let (mut model, mut optimizer) = accelerator.prepare(parts)?;
        let (done, text) = logged(|| -> Result<()> {
            for step in 0..steps {
                let output = model.forward(Tensor::<2>::ones([2, 1], &device)).mean();
                let wanted = loss(accelerator.rank(), step);
                let weight = usize::from(!(wanted == 0.0 && accelerator.rank() == 1));
                let gradients = accelerator.backward(output * 0.0 + wanted, &model, weight)?;
                model = optimizer.step(0.1, model, gradients);
            }
            Ok(())
        });
        done?;
        Ok(text)
    };
    builder.launch(2, train).unwrap()
}

#[test]
fn ranks_that_compute_the_same_losses_are_warned_of_once() {
    let builders = [
        Accelerator::builder(),
        Accelerator::builder().accumulation_steps(2),
        Accelerator::builder().with_communication_hook(|| PowerSgd::new(1)),
    ];
    for builder in builders {
        let texts = logged_in_steps(builder, 40, |_, step| 1.0 + step as f32);
        assert_eq!(texts[0].matches("to the bit").count(), 1, "{texts:?}");
        for part in [
            "all 2 ranks",
            "no data loader was prepared",
            "accelerator.prepare",
        ] {
            assert!(texts[0].contains(part), "{part} in {texts:?}");
        }
        assert_eq!(texts[1], "");
    }
    let allowed = Accelerator::builder().allow_same_batches();
    assert_eq!(logged_in_steps(allowed, 40, |_, _| 1.0), ["", ""]);
}

#[test]
fn losses_that_are_the_same_for_a_reason_are_not_warned_of() {
    let losses: [fn(usize, usize) -> f32; 4] = [
        |rank, step| (rank + step) as f32,
        // Now and then.
        |rank, step| 1.0 + if step % 6 == 5 { rank as f32 } else { 0.0 },
        // Nothing is left to learn.
        |_, step| if step % 4 == 0 { 0.5 } else { 0.0 },
        // Rank 1 idles.
        |rank, _| 1.0 - rank as f32,
    ];
    for (number, loss) in losses.into_iter().enumerate() {
        let texts = logged_in_steps(Accelerator::builder(), 20, loss);
        assert_eq!(texts, ["", ""], "losses {number}");
    }
    let texts = logged_in_steps(Accelerator::builder(), 20, |_, _| f32::NAN);
    assert!(
        texts.iter().all(|text| !text.contains("same loss")),
        "{texts:?}"
    );
}

#[test]
fn the_same_losses_of_batches_that_are_known_to_be_others_are_not_warned_of() {
    let texts = accelerator::launch(2, |accelerator| {
        let parts = (line(&accelerator.device()), SgdConfig::new().init());
        let (mut model, mut optimizer) = accelerator.prepare(parts)?;
        let train = accelerator.prepare(loader(64, 2))?;
        let (done, text) = logged(|| -> Result<()> {
            for batch in train.epoch(0) {
                let batch = batch?;
                // The model gives what has nothing to do with the samples.
                let loss = distance(&model, &batch) * 0.0 + 0.2;
                let gradients = accelerator.backward(loss, &model, &batch)?;
                model = optimizer.step(0.1, model, gradients);
            }
            Ok(())
        });
        done?;
        Ok(text)
    });
    assert_eq!(texts.unwrap(), ["", ""]);
}

#[test]
fn a_prepared_model_without_a_backward_is_warned_of_when_the_job_ends() {
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    enum Use {
        Backward,
        Evaluated,
        Frozen,
        None,
        PastUs,
        Saved,
        /// It gives what another model is to learn.
        Target,
    }
    let folder = tempfile::tempdir().unwrap();
    for (ranks, what, told) in [
        (2, Use::PastUs, true),
        (2, Use::None, true),
        (2, Use::Backward, false),
        (2, Use::Frozen, false),
        (2, Use::Target, false),
        (2, Use::Evaluated, false),
        (2, Use::Saved, false),
        (1, Use::PastUs, false),
    ] {
        let texts = accelerator::launch(ranks, |accelerator| {
            let device = accelerator.device();
            let model = match what {
                Use::Frozen => line(&device).no_grad(),
                _ => line(&device),
            };
            let mut model = accelerator.prepare(model)?;
            let loss = |model: &Linear| model.forward(Tensor::<2>::ones([2, 1], &device)).mean();
            match what {
                Use::Backward => drop(accelerator.backward(loss(&model), &model, 2)?),
                Use::Evaluated => drop(accelerator.valid(&model)?),
                Use::Saved => {
                    accelerator.save_model(&model, folder.path().join("model.safetensors"))?;
                }
                Use::Target => {
                    let student = accelerator.prepare(line(&device))?;
                    drop(accelerator.backward(loss(&student), &student, 2)?);
                }
                Use::Frozen | Use::None => {}
                Use::PastUs => {
                    let gradients = GradientsParams::from_grads(loss(&model).backward(), &model);
                    model = SgdConfig::new().init().step(0.1, model, gradients);
                }
            }
            drop(model);
            let (done, text) = logged(|| accelerator.finish());
            done?;
            Ok(text)
        });
        let texts = texts.unwrap();
        assert_eq!(
            texts[0].matches("`backward` was never called").count(),
            usize::from(told),
            "{what:?} on {ranks}: {texts:?}"
        );
        let unused = texts[0].matches("no optimizer stepped").count();
        let is_unused = matches!(what, Use::Backward | Use::Target);
        assert_eq!(unused, usize::from(is_unused), "{texts:?}");
        let named = told || is_unused;
        assert_eq!(named, texts[0].contains("`weight`"), "{texts:?}");
        assert!(texts.iter().skip(1).all(String::is_empty), "{texts:?}");
    }
}

#[test]
fn a_model_that_goes_on_from_a_checkpoint_is_known_as_what_it_became_alone() {
    let folder = tempfile::tempdir().unwrap();
    for life in 0..2 {
        let texts = accelerator::launch(2, |accelerator| {
            let parts = (line(&accelerator.device()), SgdConfig::new().init());
            let (model, optimizer) = accelerator.prepare(parts)?;
            let before = model.clone();
            let ((mut model, mut optimizer), position) =
                accelerator.resume(folder.path(), (model, optimizer))?;
            assert_eq!(position.is_start(), life == 0);
            let input = Tensor::<2>::ones([2, 1], &accelerator.device());
            let loss = |model: &Linear| model.forward(input.clone()).mean();
            if life > 0 {
                // It was not given the values that were saved.
                let error = accelerator.backward(loss(&before), &before, 2).unwrap_err();
                assert!(error.is_misuse(), "{error:?}");
            }
            let gradients = accelerator.backward(loss(&model), &model, 2)?;
            model = optimizer.step(0.1, model, gradients);
            accelerator.save_state(folder.path(), (&model, &optimizer))?;
            let (done, text) = logged(|| accelerator.finish());
            done?;
            Ok(text)
        });
        assert_eq!(texts.unwrap(), ["", ""], "life {life}");
    }
}

#[test]
fn a_data_set_that_makes_no_step_is_refused_when_it_is_prepared() {
    for ranks in [1, 2] {
        let errors = accelerator::launch(ranks, |accelerator| {
            let empty = accelerator.prepare(loader(0, 2)).unwrap_err();
            let short = DataLoaderBuilder::new(ColumnBatcher)
                .batch_size(4)
                .tail(TailPolicy::Drop)
                .build(columns(3));
            let short = accelerator.prepare(short).unwrap_err();
            let burns = BurnBuilder::new(ColumnBatcher)
                .batch_size(2)
                .build(columns(0));
            let burns = accelerator.prepare(AssumeDeterministic(burns)).unwrap_err();
            accelerator.wait_for_everyone()?;
            Ok([empty, burns, short])
        });
        for [empty, burns, short] in errors.unwrap() {
            for error in [&empty, &burns] {
                let text = error.to_string();
                assert!(text.contains("has no samples"), "{text}");
            }
            assert!(
                [&empty, &burns, &short].iter().all(|e| e.is_config()),
                "{empty:?} {burns:?} {short:?}"
            );
            let text = short.to_string();
            assert!(
                text.contains("3 samples") && text.contains("drop"),
                "{text}"
            );
        }
    }
}

#[test]
fn an_epoch_without_batches_is_told_once() {
    for ranks in [1, 2] {
        let texts = accelerator::launch(ranks, |accelerator| {
            let builder = || DataLoaderBuilder::new(ColumnBatcher).batch_size(2);
            let empty = |_: u64| Vec::<u64>::new();
            let sampled = accelerator.prepare(builder().sampler(empty).build(columns(8)))?;
            let items = |part: StreamPart| (0..4 * part.epoch() as usize).map(std::io::Result::Ok);
            let stream = accelerator.prepare(builder().build_stream(items))?;
            let read = |loader: &PreparedLoader<Column>, skip| {
                let (counts, text) = logged(|| {
                    let epochs = (0..3).map(|epoch| loader.epoch(epoch).skip_first_batches(skip));
                    epochs.map(Iterator::count).collect::<Vec<_>>()
                });
                (counts.iter().sum::<usize>(), text)
            };
            // What the program leaves out is no surprise to it.
            Ok([read(&stream, 100), read(&stream, 0), read(&sampled, 0)])
        });
        for (rank, [skipped, stream, sampled]) in texts.unwrap().into_iter().enumerate() {
            assert_eq!(skipped, (0, String::new()));
            assert!(stream.0 > 0 && sampled.0 == 0);
            for (_, text) in [stream, sampled] {
                assert_eq!(
                    text.matches("epoch 0 of a loader had no batches").count(),
                    usize::from(rank == 0),
                    "{text}"
                );
                assert_eq!(
                    text.matches("WARN").count(),
                    usize::from(rank == 0),
                    "{text}"
                );
            }
        }
    }
}

/// A loss, which is no number on the last rank from the second step on.
fn loss_with_nan(accelerator: &Accelerator, model: &Linear, step: u64) -> Tensor<1> {
    let input = Tensor::<2>::ones([2, 1], &accelerator.device());
    let is_last = accelerator.rank() + 1 == accelerator.world_size();
    let error = if is_last && step > 0 { f64::NAN } else { 0.0 };
    // The gradients stay as they are.
    model.forward(input).mean() + error
}

#[test]
fn a_loss_that_is_not_finite_is_told_once_with_rank_and_step() {
    for (ranks, accumulation) in [(1, 1), (1, 2), (3, 1), (3, 2)] {
        let builder = Accelerator::builder().accumulation_steps(accumulation);
        let texts = builder.launch(ranks, |accelerator| {
            let parts = (line(&accelerator.device()), SgdConfig::new().init());
            let (mut model, mut optimizer) = accelerator.prepare(parts)?;
            let (done, text) = logged(|| -> Result<()> {
                for step in 0..4 {
                    for _ in 0..accumulation {
                        let loss = loss_with_nan(&accelerator, &model, step);
                        let gradients = accelerator.backward(loss, &model, 2)?;
                        model = optimizer.step(0.1, model.clone(), gradients);
                    }
                }
                Ok(())
            });
            done?;
            Ok(text)
        });
        let mut texts = texts.unwrap();
        let last = texts.pop().unwrap();
        let wanted = format!("the loss of rank {} in step 1 is NaN", ranks - 1);
        assert_eq!(last.matches("NaN").count(), 1, "{last}");
        assert!(last.contains(&wanted), "{last}");
        assert!(texts.iter().all(String::is_empty), "{texts:?}");
    }
}

#[test]
fn a_training_can_be_stopped_where_a_loss_is_not_finite() {
    for (ranks, accumulation) in [(1, 1), (1, 2), (3, 1), (3, 2)] {
        let builder = Accelerator::builder()
            .accumulation_steps(accumulation)
            .stop_at_non_finite_loss();
        let errors = builder.launch(ranks, |accelerator| {
            let parts = (line(&accelerator.device()), SgdConfig::new().init());
            let (mut model, mut optimizer) = accelerator.prepare(parts)?;
            for call in 0..2 * accumulation {
                let loss = loss_with_nan(&accelerator, &model, (call / accumulation) as u64);
                match accelerator.backward(loss, &model, 2) {
                    Ok(gradients) => model = optimizer.step(0.1, model, gradients),
                    Err(error) => {
                        assert_eq!(call, 2 * accumulation - 1);
                        // The group lives.
                        accelerator.wait_for_everyone()?;
                        return Ok(error);
                    }
                }
            }
            panic!("rank {} goes on", accelerator.rank());
        });
        for error in errors.unwrap() {
            assert!(error.is_not_finite(), "{error:?}");
            let text = error.to_string();
            assert!(text.contains("step 1"), "{text}");
            let wanted = format!("NaN on rank {}", ranks - 1);
            assert!(
                text.contains(&wanted) && text.matches("NaN").count() == 1,
                "{text}"
            );
        }
    }
}

/// In local training ranks hear nothing of each other between averages.
#[test]
fn local_training_is_stopped_on_the_rank_whose_loss_is_not_finite() {
    for accumulation in [1, 2] {
        let builder = Accelerator::builder()
            .accumulation_steps(accumulation)
            .stop_at_non_finite_loss();
        let errors = builder.launch(2, |accelerator| {
            let parts = (line(&accelerator.device()), SgdConfig::new().init());
            let (mut model, mut optimizer) = accelerator.prepare(parts)?;
            let mut local = LocalSgdConfig::new(4).init(&accelerator, &model)?;
            for step in 0..3 {
                for _ in 0..accumulation {
                    let loss = loss_with_nan(&accelerator, &model, step);
                    match local.backward(loss, &model, 2) {
                        Ok(gradients) => model = optimizer.step(0.1, model, gradients),
                        Err(error) => return Ok(Some((step, error))),
                    }
                }
                local.step(&mut model)?;
            }
            Ok(None)
        });
        let [first, last] = errors.unwrap().try_into().unwrap();
        assert!(first.is_none(), "{first:?}");
        let (step, error) = last.unwrap();
        assert!(step == 1 && error.is_not_finite(), "{step} {error:?}");
        let text = error.to_string();
        assert!(text.contains("NaN on rank 1"), "{text}");
    }
}

#[test]
fn a_clone_from_before_prepare_is_refused_on_any_number_of_ranks() {
    for ranks in [1, 2] {
        let errors = accelerator::launch(ranks, |accelerator| {
            let device = accelerator.device();
            let model = line(&device);
            let clone = model.clone();
            let model = accelerator.prepare(model)?;
            let loss = |model: &Linear| model.forward(Tensor::<2>::ones([2, 1], &device)).mean();
            let stranger = accelerator.backward(loss(&clone), &clone, 2).unwrap_err();
            let forward = accelerator.backward(loss(&clone), &model, 2).unwrap_err();
            // What is cloned behind it is the same model.
            let again = accelerator.prepare(model.clone())?;
            for model in [&model, &model.clone(), &again] {
                assert!(
                    !accelerator
                        .backward(loss(model), model, 2)?
                        .is_accumulating()
                );
            }
            Ok([stranger, forward])
        });
        for [stranger, forward] in errors.unwrap() {
            assert!(stranger.is_misuse() && forward.is_misuse());
            let text = stranger.to_string();
            assert!(text.contains("clone from before `prepare`"), "{text}");
            let text = forward.to_string();
            assert!(text.contains("does not depend on this model"), "{text}");
        }
    }
}

/// What is said of windows in a training of two epochs, three micro-steps a step, whose first epoch is left after so many
/// batches, and whose second one after so many.
fn warnings_after_breaks(
    ranks: usize,
    batches: [usize; 2],
    weight: fn(&Batch<Column>) -> Weight,
) -> Vec<String> {
    let builder = Accelerator::builder().accumulation_steps(3);
    let texts = builder.launch(ranks, |accelerator| {
        let parts = (line(&accelerator.device()), SgdConfig::new().init());
        let (mut model, mut optimizer) = accelerator.prepare(parts)?;
        let train = accelerator.prepare(loader(4 * ranks, 1))?;
        let (done, text) = logged(|| -> Result<()> {
            for (epoch, batches) in batches.into_iter().enumerate() {
                for batch in train.epoch(epoch as u64).take(batches) {
                    let batch = batch?;
                    let loss = distance(&model, &batch);
                    let weight = weight(&batch);
                    let gradients = accelerator.backward(loss, &model, weight)?;
                    model = optimizer.step(0.1, model.clone(), gradients);
                }
            }
            accelerator.finish()
        });
        done?;
        Ok(text)
    });
    texts.unwrap()
}

#[test]
fn an_epoch_that_is_left_in_mid_window_is_told_once() {
    for ranks in [1, 2] {
        for (left, told) in [([2, 4], true), ([4, 4], false), ([3, 3], false)] {
            let texts = warnings_after_breaks(ranks, left, Batch::weight);
            let wanted = usize::from(told);
            let text = &texts[0];
            assert_eq!(text.matches("epoch 0 was left").count(), wanted, "{text}");
            assert!(!told || text.contains("2 micro-steps"), "{text}");
            assert_eq!(text.matches("WARN").count(), wanted, "{text}");
            assert!(texts[1..].iter().all(String::is_empty), "{texts:?}");
        }
        // The program keeps it open.
        let texts = warnings_after_breaks(ranks, [4, 1], |batch| batch.weight().no_sync());
        assert!(!texts[0].contains("was left"), "{texts:?}");
    }
}

/// What ranks log of a training of two epochs behind a checkpoint, which was saved after so many batches of the epochs
/// before; `first` tells the epoch with which they go on.
fn logged_after_resume(
    ranks: usize,
    saved_after: [usize; 2],
    first: fn(u64) -> u64,
) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let life = |accelerator: Accelerator, batches: Option<[usize; 2]>| {
        let parts = (line(&accelerator.device()), SgdConfig::new().init());
        let (model, optimizer) = accelerator.prepare(parts)?;
        let (train, valid) = accelerator.prepare((loader(4 * ranks, 1), loader(4 * ranks, 1)))?;
        let parts = (model, optimizer, train, valid);
        let ((mut model, mut optimizer, train, valid), position) =
            accelerator.resume(folder.path(), parts)?;
        let start = batches.map_or_else(|| first(position.epoch()), |_| 0);
        let (done, text) = logged(|| -> Result<()> {
            // A look at the data is no training.
            let _ = train.epoch(0).next().unwrap()?;
            for epoch in start..start + 2 {
                let most = batches.map_or(usize::MAX, |batches| batches[epoch as usize]);
                for batch in train.epoch(epoch).take(most) {
                    let batch = batch?;
                    let gradients =
                        accelerator.backward(distance(&model, &batch), &model, &batch)?;
                    model = optimizer.step(0.1, model.clone(), gradients);
                }
                for batch in valid.epoch(0).take(most) {
                    let _ = batch?.real();
                }
            }
            Ok(())
        });
        done?;
        if batches.is_some() {
            accelerator.save_state(folder.path(), (&model, &optimizer, &train, &valid))?;
        }
        Ok(text)
    };
    accelerator::launch(ranks, |accelerator| life(accelerator, Some(saved_after))).unwrap();
    accelerator::launch(ranks, |accelerator| life(accelerator, None)).unwrap()
}

#[test]
fn an_epoch_that_is_trained_again_after_a_resume_is_told_once() {
    const ALL: usize = usize::MAX;
    for ranks in [1, 2] {
        for saved_after in [[ALL, 2], [ALL, 0], [ALL, ALL]] {
            let texts = logged_after_resume(ranks, saved_after, |_| 0);
            let text = &texts[0];
            assert_eq!(text.matches("WARN").count(), 1, "{text}");
            assert!(text.contains("epoch 0 is trained again"), "{text}");
            assert!(text.contains("position.epoch().."), "{text}");
            assert!(texts[1..].iter().all(String::is_empty), "{texts:?}");
        }
        for (saved_after, first) in [
            ([ALL, 2], (|epoch| epoch) as fn(u64) -> u64),
            ([ALL, ALL], |epoch| epoch),
            // Further on, as where a broken batch is passed over.
            ([ALL, 2], |epoch| epoch + 1),
            ([2, 0], |_| 0),
        ] {
            let texts = logged_after_resume(ranks, saved_after, first);
            assert!(texts.iter().all(String::is_empty), "{texts:?}");
        }
    }
}

#[test]
fn a_data_set_that_draws_at_each_read_is_told_where_one_rank_resumes() {
    fn drawn(check: bool) -> Loader<Column> {
        let options = SamplerDatasetOptions::default().with_fixed_size(8);
        let dataset = SamplerDataset::new(columns(1 << 20), options.with_seed(7));
        let builder = DataLoaderBuilder::new(ColumnBatcher).batch_size(2);
        match check {
            true => builder.build(dataset),
            false => builder.without_item_check().build(dataset),
        }
    }
    let trains: [(Load, bool); 3] = [
        (|| drawn(true), true),
        (|| drawn(false), false),
        (|| loader(8, 2), false),
    ];
    for (train, told) in trains {
        let folder = tempfile::tempdir().unwrap();
        let life = || -> Result<String> {
            let accelerator = Accelerator::new()?;
            let model = line(&accelerator.device());
            let parts = (model, SgdConfig::new().init(), train(), drawn(true));
            let parts = accelerator.prepare(parts)?;
            let (resumed, text) = logged(|| accelerator.resume(folder.path(), parts));
            let ((mut model, mut optimizer, train, valid), _) = resumed?;
            let batch = train.epoch(0).next().unwrap()?;
            let gradients = accelerator.backward(distance(&model, &batch), &model, &batch)?;
            model = optimizer.step(0.1, model, gradients);
            let _ = valid.epoch(0).next().unwrap()?;
            accelerator.save_state(folder.path(), (&model, &optimizer, &train, &valid))?;
            Ok(text)
        };
        assert!(!life().unwrap().contains("WARN"));
        let text = life().unwrap();
        assert_eq!(text.matches("WARN").count(), usize::from(told), "{text}");
        assert_eq!(text.contains("the loader at place 3"), told, "{text}");
        assert_eq!(text.contains("`SamplerDataset`"), told, "{text}");
    }
}

#[test]
fn an_epoch_that_goes_on_in_a_second_pass_is_not_taken_for_one_that_was_left() {
    let ((), text) = logged(|| {
        let accelerator = Accelerator::builder()
            .accumulation_steps(2)
            .build()
            .unwrap();
        let parts = (
            line(&accelerator.device()),
            SgdConfig::new().init(),
            loader(24, 2),
        );
        let (mut model, mut optimizer, train) = accelerator.prepare(parts).unwrap();
        let rest = train.epoch(0).skip_first_batches(3);
        for batch in train.epoch(0).take(3).chain(rest) {
            let batch = batch.unwrap();
            let loss = distance(&model, &batch);
            let gradients = accelerator.backward(loss, &model, &batch).unwrap();
            model = optimizer.step(0.1, model, gradients);
        }
        accelerator.finish().unwrap();
    });
    assert!(text.is_empty(), "{text}");
}

/// As a program does that finds its place itself.
#[test]
fn batches_that_are_left_out_of_an_epoch_that_goes_on_are_told_once() {
    let folder = tempfile::tempdir().unwrap();
    let steps = |resume: bool, skip: u64| {
        logged(|| {
            let accelerator = Accelerator::new().unwrap();
            let parts = (
                line(&accelerator.device()),
                SgdConfig::new().init(),
                loader(24, 2),
            );
            let mut parts = accelerator.prepare(parts).unwrap();
            if resume {
                parts = accelerator.resume(folder.path(), parts).unwrap().0;
            }
            let (mut model, mut optimizer, train) = parts;
            for epoch in 0..2 {
                for batch in train.epoch(epoch).skip_first_batches(skip) {
                    let batch = batch.unwrap();
                    let loss = distance(&model, &batch);
                    let gradients = accelerator.backward(loss, &model, &batch).unwrap();
                    model = optimizer.step(0.1, model, gradients);
                    if !resume && batch.step() == 3 {
                        let parts = (&model, &optimizer, &train);
                        accelerator.save_state(folder.path(), parts).unwrap();
                        return optimizer.steps();
                    }
                }
            }
            optimizer.steps()
        })
    };
    let (saved, text) = steps(false, 1);
    assert!(
        saved == 3 && text.is_empty(),
        "an epoch that is whole: {text}"
    );
    let (_, text) = steps(true, 0);
    assert!(!text.contains("WARN"), "nothing is left out: {text}");
    let (_, text) = steps(true, 4);
    assert_eq!(text.matches("WARN").count(), 1, "{text}");
    assert!(text.contains("goes on behind step 4 of epoch 0"), "{text}");
    assert!(text.contains("4 more"), "{text}");
}

#[test]
fn micro_steps_that_no_step_came_of_are_told_at_the_end() {
    for ranks in [1, 2] {
        let texts = warnings_after_breaks(ranks, [4, 2], Batch::weight);
        let text = &texts[0];
        assert_eq!(text.matches("2 micro-steps").count(), 1, "{text}");
        assert!(text.contains("no optimizer step"), "{text}");
        assert!(text.contains("run the epoch to its end"), "{text}");
        assert!(texts[1..].iter().all(String::is_empty), "{texts:?}");
        // Nobody can tell where its epochs end.
        let texts = warnings_after_breaks(ranks, [4, 4], |batch| Weight::from(batch.len()));
        let text = &texts[0];
        assert_eq!(text.matches("2 micro-steps").count(), 1, "{text}");
        assert!(text.contains("`backward` was given a number"), "{text}");
        assert!(text.contains("pass `&batch`"), "{text}");
        assert!(!text.contains("run the epoch to its end"), "{text}");
    }
}

/// What each rank counts in two epochs of five samples, and what it logs until the count is reduced.
fn counted(
    tail: TailPolicy,
    count: fn(&Accelerator, &mut Linear, &Batch<Column>) -> Result<usize>,
) -> Vec<(f64, String)> {
    let counts = accelerator::launch(2, |accelerator| {
        let mut model = accelerator.prepare(line(&accelerator.device()))?;
        let valid = DataLoaderBuilder::new(ColumnBatcher)
            .batch_size(2)
            .tail(tail)
            .build(columns(5));
        let valid = accelerator.prepare(valid)?;
        let (total, text) = logged(|| -> Result<f64> {
            let mut total = 0.0;
            for epoch in 0..2 {
                let mut sum = Sum::new();
                for batch in valid.epoch(epoch) {
                    sum.count(count(&accelerator, &mut model, &batch?)?);
                }
                total += accelerator.reduce(sum)?.value();
            }
            Ok(total)
        });
        Ok((total?, text))
    });
    counts.unwrap()
}

#[test]
fn rows_of_padding_that_go_into_a_metric_are_told_once() {
    // Nothing is left for rank 1 in the last step, and with padding there are samples again.
    for (tail, told) in [
        (TailPolicy::Exact, "an idle batch"),
        (TailPolicy::Pad, "samples that others have"),
    ] {
        let rows: [Count; 3] = [
            |_, _, batch| Ok(batch.values.dims()[0]),
            |_, _, batch| Ok(batch.len()),
            |_, _, batch| Ok(batch.indices().len()),
        ];
        for count in rows {
            let ranks = counted(tail, count);
            let padded = ranks.iter().filter(|(_, text)| !text.is_empty());
            assert_eq!(padded.count(), if told.contains("idle") { 1 } else { 2 });
            let (total, text) = &ranks[1];
            assert!(*total > 10.0, "rows of padding are there");
            assert_eq!(text.matches(told).count(), 1, "{text}");
            assert!(text.contains("`batch.real()`"), "{text}");
        }
        let known: [Count; 3] = [
            |_, _, batch| Ok(batch.real()),
            |_, _, batch| match batch.is_idle() {
                true => Ok(0),
                false => Ok(batch.values.dims()[0] - (batch.len() - batch.real())),
            },
            |_, _, batch| Ok(batch.real_indices().len()),
        ];
        for count in known {
            for (total, text) in counted(tail, count) {
                assert_eq!((total, text.as_str()), (10.0, ""));
            }
        }
        // In training, what was passed to `backward` is known.
        let trained = counted(tail, |accelerator, model, batch| {
            let gradients = accelerator.backward(distance(model, batch), model, batch)?;
            drop(gradients);
            Ok(0)
        });
        assert!(
            trained.iter().all(|(_, text)| text.is_empty()),
            "{trained:?}"
        );
    }
}

#[test]
fn padding_of_which_nothing_is_counted_is_not_warned_of() {
    let reads: [Read; 6] = [
        |valid, _| {
            assert_eq!(valid.epoch(0).count(), 3);
            Ok(())
        },
        |valid, _| {
            let last = valid.epoch(0).last().unwrap()?;
            assert_eq!(last.step(), 2);
            Ok(())
        },
        // A warm-up.
        |valid, model| {
            for batch in valid.epoch(0) {
                model.forward(batch?.values.clone());
            }
            Ok(())
        },
        |valid, _| {
            for batch in valid.epoch(0) {
                if batch?.is_last() {
                    break;
                }
            }
            Ok(())
        },
        // Another error.
        |valid, model| {
            for batch in valid.epoch(0) {
                let batch = batch?;
                model.forward(batch.values.clone());
                if batch.is_last() {
                    return Ok(());
                }
            }
            Ok(())
        },
        |valid, _| {
            for batch in valid.epoch(0) {
                assert!(batch?.len() <= 2);
            }
            Ok(())
        },
    ];
    for (number, read) in reads.into_iter().enumerate() {
        let texts = accelerator::launch(3, |accelerator| {
            let model = line(&accelerator.device());
            let valid = accelerator.prepare(loader(13, 2))?;
            let (done, text) = logged(|| -> Result<()> {
                read(&valid, &model)?;
                // What is counted behind it is counted well.
                let mut sum = Sum::new();
                for batch in valid.epoch(1) {
                    sum.count(batch?.real());
                }
                assert_eq!(accelerator.reduce(sum)?.value(), 13.0);
                accelerator.finish()
            });
            done?;
            Ok(text)
        });
        assert_eq!(texts.unwrap(), [""; 3], "read {number}");
    }
}

#[derive(Debug, Module)]
struct Pair {
    first: Linear,
    second: Linear,
}

#[test]
fn a_model_on_a_device_that_records_no_gradients_is_refused_when_it_is_prepared() {
    for ranks in [1, 2] {
        let texts = accelerator::launch(ranks, |accelerator| {
            let device = accelerator.device();
            let (plain, default) = (device.clone().inner(), Device::default());
            let half = Pair {
                first: line(&device),
                second: line(&plain),
            };
            let errors = [
                accelerator.prepare(line(&plain)).map(drop),
                accelerator.prepare(line(&default)).map(drop),
                accelerator.prepare(half).map(drop),
            ];
            // Statistics are no parameters, and frozen parameters are on purpose.
            let norm: BatchNorm = BatchNormConfig::new(1).init(&device);
            let norm = accelerator.prepare(norm)?;
            norm.forward(Tensor::<2>::ones([2, 1], &device.clone().inner()));
            accelerator.prepare((norm, line(&device).no_grad()))?;
            let errors = errors.map(Result::unwrap_err);
            assert!(errors.iter().all(Error::is_misuse), "{errors:?}");
            Ok(errors.map(|error| error.to_string()))
        });
        for texts in texts.unwrap() {
            for (text, path) in texts.iter().zip(["weight", "weight", "second.weight"]) {
                assert!(text.contains(&format!("`{path}`")), "{text}");
                assert!(text.contains("`accelerator.device()`"), "{text}");
            }
        }
    }
}

#[test]
fn a_weight_below_zero_is_shown_as_it_was_written() {
    let accelerator = Accelerator::new().unwrap();
    let device = accelerator.device();
    let model: Linear = accelerator
        .prepare(LinearConfig::new(2, 1).init(&device))
        .unwrap();
    let loss = || model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
    let text = |weight: f64| {
        let error = accelerator.backward(loss(), &model, weight).unwrap_err();
        assert!(error.is_misuse(), "{error:?}");
        error.to_string()
    };
    let negative = text(-3.0);
    assert!(negative.contains("is -3.0; expected"), "{negative}");
    assert!(!negative.contains("e-13"), "{negative}");
    let tiny = text(1e-20);
    assert!(
        tiny.contains("is 1e-20; expected") && tiny.contains("e-13"),
        "{tiny}"
    );
}

#[test]
fn a_clone_from_before_prepare_is_not_stepped_on_any_number_of_ranks() {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    for ranks in [1, 2] {
        let said = accelerator::launch(ranks, |accelerator| {
            let device = accelerator.device();
            let model = line(&device);
            let clone = model.clone();
            let (model, mut optimizer) = accelerator.prepare((model, SgdConfig::new().init()))?;
            let loss = model.forward(Tensor::<2>::ones([2, 1], &device)).mean();
            let gradients = accelerator.backward(loss, &model, 2)?;
            let step = AssertUnwindSafe(|| drop(optimizer.step(0.1, clone, gradients)));
            let panic = catch_unwind(step).unwrap_err();
            accelerator.wait_for_everyone()?;
            // What is cloned behind `prepare` is the same model.
            let loss = model.forward(Tensor::<2>::ones([2, 1], &device)).mean();
            let gradients = accelerator.backward(loss, &model, 2)?;
            drop(optimizer.step(0.1, model.clone(), gradients));
            Ok(panic.downcast_ref::<String>().cloned().unwrap())
        });
        for said in said.unwrap() {
            assert!(said.contains("clone from before `prepare`"), "{said}");
        }
    }
}

/// What a rank does that has left its loop.
#[derive(Clone, Copy, Debug)]
enum Behind {
    Evaluate,
    Finish,
    SaveModel,
    SaveState,
}

#[test]
fn a_rank_that_left_its_loop_early_is_told_as_such_whatever_it_does_then() {
    for (behind, words) in [
        (Behind::Evaluate, "evaluate the model ("),
        (Behind::Finish, "finish ("),
        (Behind::SaveModel, "save the model ("),
        (Behind::SaveState, "save a checkpoint ("),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("saved");
        let errors = accelerator::launch(2, |accelerator| {
            let parts = (
                line(&accelerator.device()),
                SgdConfig::new().init(),
                loader(16, 2),
            );
            let (mut model, mut optimizer, train) = accelerator.prepare(parts)?;
            for batch in train.epoch(0) {
                let batch = batch?;
                if accelerator.rank() == 1 && batch.is_last() {
                    break;
                }
                match accelerator.backward(distance(&model, &batch), &model, &batch) {
                    Ok(gradients) => model = optimizer.step(0.1, model, gradients),
                    Err(error) => return Ok(error),
                }
            }
            let done = match behind {
                Behind::Evaluate => accelerator.valid(&model).map(drop),
                Behind::Finish => accelerator.finish(),
                Behind::SaveModel => accelerator.save_model(&model, &path),
                Behind::SaveState => accelerator.save_state(&path, &model).map(drop),
            };
            Ok(done.unwrap_err())
        });
        let errors = errors.unwrap();
        for error in &errors {
            let text = error.to_string();
            assert!(error.is_collective(), "{error:?}");
            assert!(text.contains("left its loop"), "{behind:?}: {text}");
            assert!(text.contains(words), "{behind:?}: {text}");
        }
        let text = errors[0].to_string();
        assert!(
            text.contains("step 3 of epoch 0") || text.contains("step 3 in epoch 0"),
            "{text}"
        );
    }
}

/// What is said where a checkpoint of one optimizer, after a step, is resumed with another one.
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
        // They keep the same.
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
