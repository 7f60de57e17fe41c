//! Losses, gradients and clones of models that were not prepared or are not trained.

use super::log_of;
use crate::common::{assert_contains, assert_error, distance, flat, line, line_and_sgd, loader};
use accelerator::Weight;
use accelerator::prelude::*;
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor};

#[test]
fn a_loss_of_another_model_is_refused_on_every_rank() {
    for (ranks, accumulation) in [(1, 1), (1, 2), (3, 1), (3, 2)] {
        let builder = Accelerator::builder().accumulation_steps(accumulation);
        let outcomes = builder.launch(ranks, |accelerator| {
            let device = accelerator.device();
            let parts = (line(&device), line(&device), loader(24, 2));
            let (model, other, train) = accelerator.prepare(parts)?;
            let batch = train.epoch(0).next().unwrap()?;
            // The last rank has no samples.
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
            // The group still works, and so does the model that was not trained.
            let mut samples = None;
            for _ in 0..accumulation {
                let loss = distance(&other, &batch);
                samples = accelerator.backward(loss, &other, weight())?.samples();
            }
            Ok((error, samples))
        });
        for (error, samples) in outcomes.unwrap() {
            let words = ["none of its 2 parameters (`weight`, …)"];
            assert_error(&error, Error::is_misuse, &words);
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
    assert_error(&error, Error::is_misuse, &["no trainable parameter"]);
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
        let words = ["gradients are of another model"];
        assert_error(&error, Error::is_panic, &words);
    }
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
        /// It computes the targets of another model.
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
            log_of(|| accelerator.finish())
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
fn a_model_that_continues_from_a_checkpoint_is_known_as_what_it_became_alone() {
    let folder = tempfile::tempdir().unwrap();
    for life in 0..2 {
        let texts = accelerator::launch(2, |accelerator| {
            let (model, optimizer) = line_and_sgd(&accelerator)?;
            let before = model.clone();
            let ((mut model, mut optimizer), position) =
                accelerator.resume(folder.path(), (model, optimizer))?;
            assert_eq!(position.is_start(), life == 0);
            let input = Tensor::<2>::ones([2, 1], &accelerator.device());
            let loss = |model: &Linear| model.forward(input.clone()).mean();
            if life > 0 {
                // The clone did not receive the saved values.
                let error = accelerator.backward(loss(&before), &before, 2).unwrap_err();
                assert!(error.is_misuse(), "{error:?}");
            }
            let gradients = accelerator.backward(loss(&model), &model, 2)?;
            model = optimizer.step(0.1, model, gradients);
            accelerator.save_state(folder.path(), (&model, &optimizer))?;
            log_of(|| accelerator.finish())
        });
        assert_eq!(texts.unwrap(), ["", ""], "life {life}");
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
            // A clone from after `prepare` is the same model.
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
            let words = ["clone from before `prepare`"];
            assert_error(&stranger, Error::is_misuse, &words);
            let words = ["does not depend on this model"];
            assert_error(&forward, Error::is_misuse, &words);
        }
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
            // Statistics are not parameters, and frozen parameters are intended.
            let norm: BatchNorm = BatchNormConfig::new(1).init(&device);
            let norm = accelerator.prepare(norm)?;
            norm.forward(Tensor::<2>::ones([2, 1], &device.clone().inner()));
            accelerator.prepare((norm, line(&device).no_grad()))?;
            let errors = errors.map(Result::unwrap_err);
            assert!(errors.iter().all(Error::is_misuse), "{errors:?}");
            Ok(errors.map(|error| error.to_string()))
        });
        for texts in texts.unwrap() {
            for (text, path) in texts
                .iter()
                .zip(["`weight`", "`weight`", "`second.weight`"])
            {
                assert_contains(text, &[path, "`accelerator.device()`"]);
            }
        }
    }
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
            // A clone from after `prepare` is the same model.
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
