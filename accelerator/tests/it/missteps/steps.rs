//! Half precision that no operation computes in, skipped steps, schedules by hand, and clipping without gradients.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use super::{log_of, logged};
use crate::common::{line, line_and_sgd};
use accelerator::Clip;
use accelerator::prelude::*;
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::tensor::Tensor;

#[test]
fn half_precision_that_nothing_computes_in_is_warned_of_once_a_model() {
    let texts = Accelerator::builder()
        .device(BackendKind::Flex)
        .precision(Precision::Bf16)
        .launch(2, |accelerator| {
            let device = accelerator.device();
            let norm: BatchNorm = BatchNormConfig::new(1).init(&device);
            let (model, good, norm) = accelerator.prepare((line(&device), line(&device), norm))?;
            let input = Tensor::<2>::ones([2, 1], &device);
            let text = log_of(|| {
                for _ in 0..2 {
                    let half = accelerator.to_working(input.clone());
                    let loss = accelerator.forward(&good, |model| model.forward(half).mean());
                    let _ = accelerator.backward(loss, &good, 2)?;
                    // The layer stays in full precision, although half precision was requested.
                    let input = input.clone().reshape([2, 1, 1]);
                    let loss = accelerator.forward(&norm, |norm| norm.forward(input).mean());
                    let _ = accelerator.backward(loss, &norm, 2)?;
                }
                Ok(())
            })?;
            assert_eq!(text, "");
            log_of(|| {
                for _ in 0..2 {
                    let loss = model.forward(input.clone()).mean();
                    let _ = accelerator.backward(loss, &model, 2)?;
                }
                Ok(())
            })
        })
        .unwrap();
    assert_eq!(texts[0].matches("the precision is bf16").count(), 1);
    assert!(texts[0].contains("accelerator.forward(&model"), "{texts:?}");
    assert_eq!(texts[1], "");
}

/// Returns the log of a training whose input alone is in half precision, up to its panic.
fn logged_in_a_panic(precision: Precision, forward: bool) -> String {
    let train = || {
        let builder = Accelerator::builder()
            .device(BackendKind::Flex)
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

/// Returns the logs of ranks over steps in f16. The steps that `bad` selects have gradients that are not finite.
fn logged_in_f16(ranks: usize, steps: usize, bad: fn(usize) -> bool) -> Vec<String> {
    let train = |accelerator: Accelerator| {
        let (mut model, mut optimizer) = line_and_sgd(&accelerator)?;
        log_of(|| {
            for step in 0..steps {
                // Only one rank has the bad gradient.
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
        })
    };
    let builder = Accelerator::builder()
        .device(BackendKind::Flex)
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

/// Returns the logs of ranks over eight micro-steps, two per step, that resume a checkpoint if there is one, and save.
/// `rate` gets the number of the micro-step in this process and the number of optimizer steps.
fn logged_with_rates(folder: &Path, rate: fn(u64, u64) -> f64) -> Vec<String> {
    let train = |accelerator: Accelerator| {
        let parts = line_and_sgd(&accelerator)?;
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
        // The rate falls in each micro-step.
        (
            |call, _| 0.5_f64.powi(call as i32),
            ["in a micro-step", "in a micro-step"],
        ),
        // The rate falls in each step, counted from the start of the process.
        (
            |call, _| 0.5_f64.powi((call / 2) as i32),
            ["", "begins anew here"],
        ),
        (|_, steps| 0.5_f64.powi(steps as i32), ["", ""]),
        (|_, _| 0.1, ["", ""]),
        // The rate has not changed yet.
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
