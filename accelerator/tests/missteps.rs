//! What is easily written wrong, and would go unnoticed.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod common;

use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};

use accelerator::checkpoint::{Object, PerRank};
use accelerator::hook::PowerSgd;
use accelerator::optim::{Manual, Sharded};
use accelerator::prelude::*;
use accelerator::{AcceleratorBuilder, Clip, Weight};
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear};
use burn::optim::SgdConfig;
use burn::tensor::Tensor;
use common::{distance, flat, line, loader};

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
        text.contains("goes on with 4 samples a step over all ranks, and `plan` was told 2"),
        "{text}"
    );
    for (plan, first) in [(false, false), (true, true)] {
        let text = resumed(plan, first);
        assert!(!text.contains("plan"), "{text}");
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
