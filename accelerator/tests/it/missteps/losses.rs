//! Losses that are the same on all ranks, or not finite.

use super::{assert_told_once, log_of};
use crate::common::{assert_error, distance, learner, line_and_sgd, loader};
use accelerator::AcceleratorBuilder;
use accelerator::hook::PowerSgd;
use accelerator::prelude::*;
use burn::nn::Linear;
use burn::tensor::Tensor;

/// Returns the logs of rank 0 and rank 1 over `steps` steps, with a loss that depends on the rank and the step.
fn logged_in_steps(
    builder: AcceleratorBuilder,
    steps: usize,
    loss: fn(usize, usize) -> f32,
) -> Vec<String> {
    let train = |accelerator: Accelerator| {
        let device = accelerator.device();
        let (mut model, mut optimizer) = line_and_sgd(&accelerator)?;
        log_of(|| {
            for step in 0..steps {
                let output = model.forward(Tensor::<2>::ones([2, 1], &device)).mean();
                let wanted = loss(accelerator.rank(), step);
                let weight = usize::from(!(wanted == 0.0 && accelerator.rank() == 1));
                let gradients = accelerator.backward(output * 0.0 + wanted, &model, weight)?;
                model = optimizer.step(0.1, model, gradients);
            }
            Ok(())
        })
    };
    builder.launch(2, train).unwrap()
}

#[test]
fn ranks_that_compute_the_same_losses_are_warned_of_once() {
    let builders = [
        Accelerator::builder(),
        Accelerator::builder().accumulation_steps(2),
        Accelerator::builder().communication_hook(|| PowerSgd::new(1)),
    ];
    for builder in builders {
        let texts = logged_in_steps(builder, 40, |_, step| 1.0 + step as f32);
        let words = [
            "to the bit",
            "all 2 ranks",
            "no data loader was prepared",
            "accelerator.prepare",
        ];
        assert_told_once(&texts, &words);
    }
    let allowed = Accelerator::builder().allow_same_batches();
    assert_eq!(logged_in_steps(allowed, 40, |_, _| 1.0), ["", ""]);
}

#[test]
fn losses_that_are_the_same_for_a_reason_are_not_warned_of() {
    let losses: [fn(usize, usize) -> f32; 4] = [
        |rank, step| (rank + step) as f32,
        // The losses differ in some steps.
        |rank, step| 1.0 + if step % 6 == 5 { rank as f32 } else { 0.0 },
        // Nothing is left to learn.
        |_, step| if step % 4 == 0 { 0.5 } else { 0.0 },
        // Rank 1 is idle.
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
        let (mut model, mut optimizer, train) = learner(&accelerator, loader(64, 2))?;
        log_of(|| {
            for batch in train.epoch(0) {
                let batch = batch?;
                // The loss does not depend on the samples.
                let loss = distance(&model, &batch) * 0.0 + 0.2;
                let gradients = accelerator.backward(loss, &model, &batch)?;
                model = optimizer.step(0.1, model, gradients);
            }
            Ok(())
        })
    });
    assert_eq!(texts.unwrap(), ["", ""]);
}

/// Returns a loss that is NaN on the last rank from the second step on.
fn loss_with_nan(accelerator: &Accelerator, model: &Linear, step: u64) -> Tensor<1> {
    let input = Tensor::<2>::ones([2, 1], &accelerator.device());
    let is_last = accelerator.rank() + 1 == accelerator.world_size();
    let error = if is_last && step > 0 { f64::NAN } else { 0.0 };
    // The gradients are not affected.
    model.forward(input).mean() + error
}

#[test]
fn a_loss_that_is_not_finite_is_told_once_with_rank_and_step() {
    for (ranks, accumulation) in [(1, 1), (1, 2), (3, 1), (3, 2)] {
        let builder = Accelerator::builder().accumulation_steps(accumulation);
        let texts = builder.launch(ranks, |accelerator| {
            let (mut model, mut optimizer) = line_and_sgd(&accelerator)?;
            log_of(|| {
                for step in 0..4 {
                    for _ in 0..accumulation {
                        let loss = loss_with_nan(&accelerator, &model, step);
                        let gradients = accelerator.backward(loss, &model, 2)?;
                        model = optimizer.step(0.1, model.clone(), gradients);
                    }
                }
                Ok(())
            })
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
            let (mut model, mut optimizer) = line_and_sgd(&accelerator)?;
            for call in 0..2 * accumulation {
                let loss = loss_with_nan(&accelerator, &model, (call / accumulation) as u64);
                match accelerator.backward(loss, &model, 2) {
                    Ok(gradients) => model = optimizer.step(0.1, model, gradients),
                    Err(error) => {
                        assert_eq!(call, 2 * accumulation - 1);
                        // The group still works.
                        accelerator.wait_for_everyone()?;
                        return Ok(error);
                    }
                }
            }
            panic!("rank {} continues", accelerator.rank());
        });
        for error in errors.unwrap() {
            let words = ["step 1", &*format!("NaN on rank {}", ranks - 1)];
            assert_error(&error, Error::is_not_finite, &words);
            assert_eq!(error.to_string().matches("NaN").count(), 1, "{error}");
        }
    }
}

/// In local training, ranks exchange nothing between averages.
#[test]
fn local_training_is_stopped_on_the_rank_whose_loss_is_not_finite() {
    for accumulation in [1, 2] {
        let builder = Accelerator::builder()
            .accumulation_steps(accumulation)
            .stop_at_non_finite_loss();
        let errors = builder.launch(2, |accelerator| {
            let (mut model, mut optimizer) = line_and_sgd(&accelerator)?;
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
        assert_eq!(step, 1, "{error:?}");
        assert_error(&error, Error::is_not_finite, &["NaN on rank 1"]);
    }
}
