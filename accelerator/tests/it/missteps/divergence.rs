//! Ranks that fail alone, read other batches, or leave their loop before the others.

use crate::common::{assert_error, distance, learner, line, loader};
use accelerator::hook::PowerSgd;
use accelerator::optim::{Manual, PreparedOptimizer, Sharded};
use accelerator::prelude::*;
use accelerator::{AcceleratorBuilder, Weight};
use burn::nn::Linear;
use burn::optim::SgdConfig;
use burn::tensor::Tensor;

/// The mistake that makes a call of `backward` fail on one rank alone.
#[derive(Clone, Copy, Debug)]
enum Misstep {
    /// The loss is not a scalar.
    Loss,
    /// The model was not prepared.
    Model,
}

/// Trains with a call of `backward` that fails on rank 1 alone and is ignored there. Returns for each rank the step in
/// which its next call fails, the errors of that call and the one after it, and the number of micro-steps in a window
/// after the model was prepared again or resumed.
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
            plain().overlap(Overlap::Off),
            plain().overlap(Overlap::On),
            plain().compression(Compression::F16),
            plain().communication_hook(|| PowerSgd::new(1)),
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
                    // The call fails at the end of the window, which is one step longer on rank 1.
                    assert_eq!(step, 5 + usize::from(rank == 1));
                    assert_eq!(micro_steps, accumulation);
                    for error in errors {
                        assert!(error.is_misuse(), "{error:?}");
                        let text = error.to_string();
                        let cause = match misstep {
                            Misstep::Loss => "the loss has 2 elements",
                            Misstep::Model => "this model was not prepared",
                        };
                        for part in ["failed on rank 1", "continued", cause] {
                            assert_eq!(text.matches(part).count(), 1, "{part} in {text}");
                        }
                    }
                }
            }
        }
    }
}

/// The ways in which a rank may diverge from the others.
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

/// Trains while rank 1 reads other batches from step 3 on. Returns for each rank the number of calls of `backward` that
/// succeeded, and the error of the next one.
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
            builder().communication_hook(|| PowerSgd::new(1)),
        ] {
            for (rank, (done, error)) in after_a_divergence(builder, divergence)
                .into_iter()
                .enumerate()
            {
                assert_eq!(done, 3, "{divergence:?} on rank {rank}: {error}");
                let words = ["ranks 0, 2: step", "step 3 of epoch 0 of loader 0", place];
                assert_error(&error, Error::is_misuse, &words);
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
            assert_error(&error, Error::is_misuse, &["numbered from 0"]);
            assert_error(&error, Error::is_misuse, &parts);
        }
    }
}

#[test]
fn the_same_batches_in_a_window_and_weights_without_a_batch_are_no_mistake() {
    let builder = Accelerator::builder().accumulation_steps(4);
    let samples = builder.launch(3, |accelerator| {
        // Some ranks are idle in the last step of each epoch.
        let parts = (line(&accelerator.device()), loader(20, 2), loader(8, 2));
        let (model, first, second) = accelerator.prepare(parts)?;
        let mut samples = Vec::new();
        for epoch in 0..2 {
            for (step, batch) in first.epoch(epoch).enumerate() {
                let batch = batch?;
                let loss = || distance(&model, &batch);
                // Rank 2 sometimes states the weight of a batch itself.
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
    // Each of two epochs has 20 samples, and 6 of the other loader in four steps. Six more follow.
    assert_eq!(samples.unwrap(), [2.0 * (20.0 + 4.0 * 6.0) + 6.0; 3]);
}

/// The call that a rank makes after it has left its loop.
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
            let (mut model, mut optimizer, train) = learner(&accelerator, loader(16, 2))?;
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
