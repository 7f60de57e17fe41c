//! C6, C7, C8: the ends of accumulation windows, and the averages over them.

use std::sync::atomic::Ordering;

use crate::common::{
    assert_close, assert_contains, assert_error, assert_errors, child, counted, devices, distance,
    flat, learner, line, loader, of_every_rank,
};
use accelerator::prelude::*;
use accelerator::{Overlap, Weight};
use burn::module::Param;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor, TensorData};

/// C6: 80 samples in batches of 16, with windows of two micro-steps. A window ends if `(step + 1) % 2 == 0` and at the
/// last batch; only then are gradients averaged over all ranks. Nothing is sent in between.
#[test]
fn c6_windows_end_when_they_are_full_and_with_the_loader() {
    for (samples, ends) in [
        (80, vec![false, true, false, true, true]),
        (64, vec![false, true, false, true]),
    ] {
        let [one, two] = [1, 2].map(|ranks| {
            let rows = Accelerator::builder()
                .accumulation_steps(2)
                .launch(ranks, |accelerator| {
                    let train = LoaderBuilder::new(crate::common::ColumnBatcher)
                        .global_batch_size(16)
                        .build(crate::common::columns(samples));
                    let (mut model, mut optimizer, train) = learner(&accelerator, train)?;
                    let count = counted(&accelerator);
                    let mut found = Vec::new();
                    for batch in train.epoch(0) {
                        let batch = batch?;
                        let before = count.load(Ordering::Relaxed);
                        let loss = distance(&model, &batch);
                        let gradients = accelerator.backward(loss, &model, &batch)?;
                        let sent = count.load(Ordering::Relaxed) > before;
                        // A single rank has nothing to send, and its operations do nothing.
                        assert!(ranks == 1 || sent != gradients.is_accumulating());
                        found.push(!gradients.is_accumulating());
                        model = optimizer.step(0.05, model, gradients);
                    }
                    assert_eq!(found, ends);
                    Ok(flat(&model))
                });
            of_every_rank(rows.unwrap())
        });
        assert_close(&two, &one, 1e-6);
    }
}

/// Returns a line through the origin with slope 0.
fn zero(device: &Device) -> Linear {
    let mut line: Linear = LinearConfig::new(1, 1).with_bias(false).init(device);
    line.weight = Param::from_data(TensorData::from([[0.0_f32]]), device);
    line
}

/// Returns the mean squared distance from `2 x` at these places.
fn from_double(model: &Linear, places: &[f32]) -> Tensor<1> {
    let x = TensorData::new(places.to_vec(), [places.len(), 1]);
    let x = Tensor::<2>::from_data(x, &model.weight.val().device().inner());
    (model.forward(x.clone()) - x * 2.0).powi_scalar(2).mean()
}

/// C7: x = 1..8, y = 2 x, from w = 0 with a rate of 0.02: w = 2.04, accumulated or not.
#[test]
fn c7_a_window_of_four_gives_the_weight_of_one_batch() {
    let places: Vec<f32> = (1..=8).map(|x| x as f32).collect();
    for (ranks, steps) in [(1, 1), (1, 4), (2, 2), (2, 1), (4, 1)] {
        let weights =
            Accelerator::builder()
                .accumulation_steps(steps)
                .launch(ranks, |accelerator| {
                    let parts = (zero(&accelerator.device()), SgdConfig::new().init());
                    let (mut model, mut optimizer) = accelerator.prepare(parts)?;
                    let size = 8 / (ranks * steps);
                    for step in 0..steps {
                        let from = (step * ranks + accelerator.rank()) * size;
                        let loss = from_double(&model, &places[from..from + size]);
                        let gradients = accelerator.backward(loss, &model, size)?;
                        model = optimizer.step(0.02, model, gradients);
                    }
                    assert_eq!(optimizer.steps(), 1);
                    Ok(flat(&model))
                });
        assert_close(&of_every_rank(weights.unwrap()), &[2.04], 1e-5);
    }
}

/// C8: sequences of 52 tokens on rank 0 and of 84 on rank 1, in two micro-steps each, give the step of one device that
/// has all 136 in one batch.
#[test]
fn c8_tokens_weigh_as_on_one_device() {
    // By rank and micro-step.
    let tokens = [[20, 32], [51, 33]];
    let places = |rank: usize, step: usize| -> Vec<f32> {
        let count = tokens[rank][step];
        (0..count)
            .map(|i| ((i * 7 + rank * 3 + step) % 11) as f32 / 11.0)
            .collect()
    };
    let train = |ranks: usize, steps: usize| {
        let rows = Accelerator::builder()
            .accumulation_steps(steps)
            .launch(ranks, |accelerator| {
                let parts = (zero(&accelerator.device()), SgdConfig::new().init());
                let (mut model, mut optimizer) = accelerator.prepare(parts)?;
                for step in 0..steps {
                    let batch = match ranks {
                        1 => [(0, 0), (0, 1), (1, 0), (1, 1)]
                            .into_iter()
                            .flat_map(|(rank, step)| places(rank, step))
                            .collect(),
                        _ => places(accelerator.rank(), step),
                    };
                    let loss = from_double(&model, &batch);
                    let gradients = accelerator.backward(loss, &model, batch.len())?;
                    if let Some(samples) = gradients.samples() {
                        assert_eq!(samples, 136.0);
                    }
                    model = optimizer.step(0.5, model, gradients);
                }
                Ok(flat(&model))
            });
        of_every_rank(rows.unwrap())
    };
    let (one, two) = (train(1, 1), train(2, 2));
    assert_close(&two, &one, 1e-6);
    assert!(one[0] > 0.1);
}

#[test]
fn the_program_keeps_a_window_open_or_ends_it() {
    for ranks in [1, 2] {
        let rows = Accelerator::builder()
            .accumulation_steps(3)
            .launch(ranks, |accelerator| {
                let (mut model, mut optimizer, train) =
                    learner(&accelerator, loader(4 * ranks, 1))?;
                let mut sizes = Vec::new();
                for epoch in 0..2 {
                    for batch in train.epoch(epoch) {
                        let batch = batch?;
                        let weight = match (epoch, batch.step()) {
                            // A window of three takes four calls, past the end of the epoch.
                            (0, 2 | 3) => batch.weight().no_sync(),
                            (1, 1) => batch.weight().trigger_sync(),
                            _ => batch.weight(),
                        };
                        let loss = distance(&model, &batch);
                        let gradients = accelerator.backward(loss, &model, weight)?;
                        sizes.push(gradients.samples());
                        model = optimizer.step(0.05, model, gradients);
                    }
                }
                let samples = |calls: usize| Some((calls * ranks) as f64);
                assert_eq!(sizes[..4], [None; 4]);
                assert_eq!(sizes[4..], [samples(5), samples(1), None, samples(2)]);
                Ok(flat(&model))
            });
        of_every_rank(rows.unwrap());
    }
}

#[test]
fn windows_that_differ_between_ranks_are_an_error_on_all_of_them() {
    let errors = Accelerator::builder()
        .accumulation_steps(2)
        .launch(3, |accelerator| {
            let model = accelerator.prepare(line(&accelerator.device()))?;
            let loss = || model.weight.val().powi_scalar(2).mean();
            // Rank 0 closes the window at once, rank 1 after one call and rank 2 after two. The mean is that of rank 1.
            let open = accelerator.rank();
            for _ in 0..open {
                let gradients = accelerator.backward(loss(), &model, Weight::from(1).no_sync())?;
                assert!(gradients.is_accumulating());
            }
            let error = accelerator
                .backward(loss(), &model, Weight::from(1).trigger_sync())
                .unwrap_err();
            // The group still works, and the next window is a new one.
            let next = accelerator.backward(loss(), &model, Weight::from(1).trigger_sync())?;
            assert_eq!(next.samples(), Some(3.0));
            Ok(error)
        });
    let words = ["1 on rank 0, 2 on rank 1, 3 on rank 2"];
    assert_errors(errors.unwrap(), Error::is_misuse, &words);
}

#[test]
fn a_global_batch_is_reached_by_accumulation() {
    for (ranks, steps) in [(1, 8), (2, 4), (4, 2)] {
        let found = Accelerator::builder()
            .global_batch(64, 8)
            .launch(ranks, |accelerator| Ok(accelerator.accumulation_steps()));
        assert_eq!(found.unwrap(), vec![steps; ranks]);
    }
    let of = |samples, batch| Accelerator::builder().global_batch(samples, batch);
    let both = of(64, 8).accumulation_steps(4);
    let no_multiple = "no multiple of 1 rank times 8 samples a batch; choose 8";
    for (builder, ranks, word) in [
        (of(64, 8), 3, "48 or 72"),
        (of(4, 8), 1, no_multiple),
        (of(0, 8), 1, "choose 8"),
        (of(8, 0), 1, "batches of 0"),
        (both.clone(), 1, "comes to 8"),
    ] {
        let error = builder.launch(ranks, |_| Ok(())).unwrap_err();
        assert_error(&error, Error::is_config, &[word]);
    }
    assert!(both.launch(2, |_| Ok(())).is_ok());
}

#[test]
fn the_environment_says_how_many_steps_where_the_program_does_not() {
    let steps_with = |value| {
        child(
            "accumulation::inner_steps",
            "ACCEL_ACCUMULATION_STEPS",
            value,
        )
    };
    let (good, text) = steps_with("4");
    assert!(good, "{text}");
    assert_contains(
        &text,
        &["open: 4", "same: 4", "ACCEL_ACCUMULATION_STEPS for `4`"],
    );
    let (good, text) = steps_with("0");
    assert!(!good, "{text}");
    assert_contains(&text, &["expected a number of at least 1, found `0`"]);
}

#[test]
#[ignore = "run by another test, with the variable"]
fn inner_steps() {
    let steps = |builder: accelerator::AcceleratorBuilder| {
        builder
            .build()
            .map(|accelerator| accelerator.accumulation_steps())
    };
    println!("open: {}", steps(Accelerator::builder()).unwrap());
    println!(
        "same: {}",
        steps(Accelerator::builder().accumulation_steps(4)).unwrap()
    );
    println!(
        "{}",
        steps(Accelerator::builder().accumulation_steps(2)).unwrap_err()
    );
}

/// Gradients computed by the program, in windows of two with a shorter last one, on devices with and without overlap.
#[test]
fn finished_gradients_are_averaged_to_the_bits_of_backward() {
    for kind in devices() {
        for (ranks, overlap) in [(1, Overlap::Off), (3, Overlap::Off), (3, Overlap::On)] {
            let train = |runs_backward: bool| {
                let builder = Accelerator::builder().device(kind).overlap(overlap);
                let rows = builder.accumulation_steps(2).launch(ranks, |accelerator| {
                    let (mut model, mut optimizer, train) = learner(&accelerator, loader(41, 4))?;
                    for epoch in 0..3 {
                        for batch in train.epoch(epoch) {
                            let batch = batch?;
                            let loss = distance(&model, &batch);
                            let gradients = if runs_backward {
                                accelerator.backward(loss, &model, &batch)?
                            } else {
                                let gradients = loss.backward();
                                let gradients = GradientsParams::from_grads(gradients, &model);
                                let gradients = accelerator.average(gradients, &model, &batch)?;
                                assert_eq!(gradients.loss(), None);
                                gradients
                            };
                            model = optimizer.step(0.05, model, gradients);
                        }
                    }
                    if !runs_backward {
                        let report = accelerator.overlap_report(&model)?;
                        assert_eq!(report.early_total, 0);
                    }
                    accelerator.finish()?;
                    Ok(flat(&model))
                });
                of_every_rank(rows.unwrap())
            };
            assert_eq!(train(false), train(true), "{kind}, {ranks} ranks");
        }
    }
}

#[test]
fn finished_gradients_of_f16_are_refused() {
    let accelerator = Accelerator::builder().precision(Precision::F16).build();
    let accelerator = accelerator.unwrap();
    let model = accelerator.prepare(line(&accelerator.device())).unwrap();
    let loss = from_double(&model, &[1.0]);
    let gradients = GradientsParams::from_grads(loss.backward(), &model);
    let error = accelerator.average(gradients, &model, 1).unwrap_err();
    assert_error(&error, Error::is_misuse, &["f16"]);
}
