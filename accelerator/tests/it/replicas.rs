//! Ranks whose parameters drift apart are found and named.

use crate::common::{assert_error, devices, distance, learner, line, loader};
use accelerator::AcceleratorBuilder;
use accelerator::prelude::*;
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Distribution, Tensor};

/// Flips a bit of the first element of a parameter.
struct Nudge {
    name: &'static str,
    bit: u32,
}

impl ModuleMapper for Nudge {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let wanted = match D {
            1 => self.name == "bias",
            _ => self.name == "weight",
        };
        if !wanted {
            return param;
        }
        let (id, old, mapper) = param.consume();
        let (device, dtype) = (old.device(), old.dtype());
        let mut data = old.into_data();
        let first = &mut data.as_mut_slice::<f32>().unwrap()[0];
        *first = f32::from_bits(first.to_bits() ^ (1 << self.bit));
        let new = Tensor::from_data(data, (&device, dtype)).require_grad();
        Param::from_mapped_value(id, new, mapper)
    }
}

/// Trains a line, which `nudged` ranks change after `at` steps. Returns the number of steps of each rank and its error.
fn train(
    builder: AcceleratorBuilder,
    ranks: usize,
    nudged: &[usize],
    at: u64,
) -> Vec<(u64, Option<Error>)> {
    builder
        .launch(ranks, |accelerator| {
            let (mut model, mut optimizer, train) = learner(&accelerator, loader(24, 2))?;
            let mut steps = 0;
            for epoch in 0..3 {
                for batch in train.epoch(epoch) {
                    let batch = batch?;
                    let loss = distance(&model, &batch);
                    let gradients = match accelerator.backward(loss, &model, &batch) {
                        Ok(gradients) => gradients,
                        Err(error) => return Ok((steps, Some(error))),
                    };
                    model = optimizer.step(0.1, model, gradients);
                    steps += 1;
                    if steps == at && nudged.contains(&accelerator.rank()) {
                        // The change is large, since the steps before the next check would round a small one away.
                        model = model.map(&mut Nudge {
                            name: "bias",
                            bit: 21,
                        });
                    }
                }
            }
            Ok((steps, None))
        })
        .unwrap()
}

#[test]
fn identical_replicas_a_rank_that_drifts_is_named() {
    for kind in devices() {
        let builder = Accelerator::builder().device(kind).check_replicas_every(3);
        for (steps, error) in train(builder, 3, &[1], 4) {
            assert_eq!(
                steps, 6,
                "found at the next check, before the model is moved"
            );
            let error = error.unwrap();
            assert!(!error.is_collective(), "{error:?}");
            let words = ["rank 1 differs from the other 2", "1 of 2, first in `bias`"];
            assert_error(&error, Error::is_drift, &words);
        }
    }
}

#[test]
fn of_two_ranks_both_are_named() {
    let builder = Accelerator::builder().check_replicas_every(1);
    for (steps, error) in train(builder, 2, &[1], 5) {
        assert_eq!(steps, 5);
        let words = ["ranks 0 and 1 differ from each other"];
        assert_error(&error.unwrap(), Error::is_drift, &words);
    }
}

#[test]
fn ranks_that_agree_train_on_and_nothing_is_checked_unasked() {
    let asked = Accelerator::builder().check_replicas_every(2);
    let accumulating = asked.clone().accumulation_steps(2);
    let unasked = Accelerator::builder();
    // Ranks with the same change still agree.
    for (builder, nudged) in [
        (asked, &[0, 1, 2][..]),
        (accumulating, &[]),
        (unasked, &[1]),
    ] {
        for (steps, error) in train(builder, 3, nudged, 1) {
            assert_eq!((steps, error.is_none()), (12, true), "{error:?}");
        }
    }
}

#[test]
fn windows_are_counted_not_calls() {
    let builder = Accelerator::builder()
        .accumulation_steps(2)
        .check_replicas_every(1);
    // The change comes after the third call, so the model goes wrong in the middle of the second window, which ends
    // with the fourth.
    for (steps, error) in train(builder, 3, &[2], 3) {
        assert_eq!(steps, 3);
        assert!(error.unwrap().to_string().contains("rank 2"));
    }
}

#[test]
fn buffers_may_differ_and_parameters_may_not() {
    #[derive(Debug, Module)]
    struct Net {
        norm: BatchNorm,
        output: Linear,
    }
    impl Net {
        fn new(device: &Device) -> Self {
            Self {
                norm: BatchNormConfig::new(2).init(device),
                output: LinearConfig::new(2, 2).init(device),
            }
        }
    }
    let outcomes = accelerator::launch(3, |accelerator| {
        let mut net = accelerator.prepare(accelerator.init(Net::new))?;
        let pictures =
            Tensor::<4>::random([4, 2, 3, 3], Distribution::Default, &accelerator.device());
        net.norm
            .forward(pictures * (accelerator.rank() as f32 + 1.0));
        let sound = accelerator.check_replicas(&net);
        if accelerator.rank() == 0 {
            net.output = net.output.map(&mut Nudge {
                name: "weight",
                bit: 0,
            });
        }
        // The check also covers the model for evaluation.
        let drifted = accelerator.check_replicas(&net.valid()).unwrap_err();
        let strange: Linear = LinearConfig::new(2, 2).init(&accelerator.device());
        let unknown = accelerator.check_replicas(&strange).unwrap_err();
        Ok((sound, drifted, unknown))
    })
    .unwrap();
    for (sound, drifted, unknown) in outcomes {
        sound.unwrap();
        let words = [
            "rank 0 differs from the other 2",
            "first in `output.weight`",
        ];
        assert_error(&drifted, Error::is_drift, &words);
        assert!(unknown.is_misuse());
    }
}

/// An action that requires all replicas to be the same.
#[derive(Clone, Copy, Debug)]
enum Act {
    Evaluate,
    SaveModel,
    SaveState,
}

#[test]
fn a_model_that_was_stepped_past_the_library_is_refused_where_it_is_saved_or_evaluated() {
    for act in [Act::Evaluate, Act::SaveModel, Act::SaveState] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("saved");
        let outcomes = accelerator::launch(3, |accelerator| {
            let device = accelerator.device();
            let mut model = accelerator.prepare(line(&device))?;
            let act = |model: &Linear| match act {
                Act::Evaluate => accelerator.valid(model).map(drop),
                Act::SaveModel => accelerator.save_model(model, &path),
                Act::SaveState => accelerator.save_state(&path, model).map(drop),
            };
            let input = Tensor::<2>::ones([2, 1], &device);
            let mut plain = SgdConfig::new().init();
            let mut step = |rate: f64| {
                let loss = model.forward(input.clone()).mean();
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                model = plain.step(rate, model.clone(), gradients);
                act(&model)
            };
            // The action succeeds while all ranks have the same model.
            let alike = step(0.1);
            let there = path.exists();
            accelerator.wait_for_everyone()?;
            if accelerator.is_main_process() && there {
                match path.is_dir() {
                    true => std::fs::remove_dir_all(&path).unwrap(),
                    false => std::fs::remove_file(&path).unwrap(),
                }
            }
            accelerator.wait_for_everyone()?;
            let apart = step([0.1, 0.2, 0.1][accelerator.rank()]);
            accelerator.wait_for_everyone()?;
            Ok((alike, apart))
        });
        for (alike, apart) in outcomes.unwrap() {
            alike.unwrap();
            let error = apart.expect_err(&format!("{act:?}"));
            let words = ["rank 1 differs from the other 2", "first in `weight`"];
            assert_error(&error, Error::is_drift, &words);
        }
        // Nothing was written.
        let checkpoints = std::fs::read_dir(&path).map_or(0, |folder| {
            let complete = |entry: &std::io::Result<std::fs::DirEntry>| {
                entry
                    .as_ref()
                    .is_ok_and(|entry| entry.path().join("manifest.json").exists())
            };
            folder.filter(complete).count()
        });
        assert!(!path.is_file() && checkpoints == 0, "{act:?}");
    }
}

/// The deviation of rank 1 in one step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Apart {
    Clip,
    NoStep,
    Nothing,
    Rate,
}

/// Trains for four steps, in one of which rank 1 updates its replica differently. Returns the number of steps of each
/// rank and its error.
fn updated_apart(apart: Apart, at: u64) -> Vec<(u64, Option<Error>)> {
    let outcomes = accelerator::launch(3, |accelerator| {
        let (mut model, mut optimizer, train) = learner(&accelerator, loader(24, 2))?;
        for batch in train.epoch(0) {
            let batch = batch?;
            let loss = distance(&model, &batch);
            let gradients = match accelerator.backward(loss, &model, &batch) {
                Ok(gradients) => gradients,
                Err(error) => return Ok((optimizer.steps(), Some(error))),
            };
            let apart = match accelerator.rank() == 1 && batch.step() == at {
                true => apart,
                false => Apart::Nothing,
            };
            let (rate, limit) = match apart {
                Apart::Nothing => (0.1, 0.5),
                Apart::Clip => (0.1, 0.25),
                Apart::Rate => (0.2, 0.5),
                Apart::NoStep => continue,
            };
            model = optimizer.step(rate, model, gradients.clip_norm(limit));
        }
        Ok((optimizer.steps(), accelerator.finish().err()))
    });
    outcomes.unwrap()
}

#[test]
fn ranks_that_update_a_model_otherwise_are_told_in_the_next_step_or_when_they_finish() {
    for (apart, told) in [
        (Apart::Clip, "clipped at 0.25"),
        (Apart::NoStep, "rank 1: "),
        (Apart::Rate, "learning rate 0.2"),
    ] {
        // The second and the last of four steps.
        for (at, done) in [(1, 2), (3, 4)] {
            for (rank, (steps, error)) in updated_apart(apart, at).into_iter().enumerate() {
                let missed = u64::from(rank == 1 && apart == Apart::NoStep);
                assert_eq!(steps, done - missed, "{apart:?} at {at}: {error:?}");
                let error = error.unwrap_or_else(|| panic!("{apart:?} at {at}: rank {rank}"));
                assert_error(&error, Error::is_drift, &["ranks 0, 2: ", told]);
            }
        }
    }
    for (steps, error) in updated_apart(Apart::Nothing, 0) {
        assert!(steps == 4 && error.is_none(), "{error:?}");
    }
}

#[test]
fn a_frozen_parameter_that_one_rank_changed_is_found_by_a_check() {
    #[derive(Debug, Module)]
    struct Net {
        norm: BatchNorm,
        frozen: Linear,
        output: Linear,
    }
    let outcomes = accelerator::launch(3, |accelerator| {
        let device = accelerator.device();
        let mut net = accelerator.prepare(Net {
            norm: BatchNormConfig::new(1).init(&device),
            frozen: line(&device).no_grad(),
            output: line(&device),
        })?;
        // Each rank has its own running statistics.
        let input = Tensor::<2>::full([3, 1], accelerator.rank() as f64, &device);
        net.norm.forward(input);
        let alike = accelerator.check_replicas(&net);
        if accelerator.rank() == 2 {
            net.frozen.weight = net.frozen.weight.map(|weight| weight + 1.0);
        }
        Ok((alike, accelerator.check_replicas(&net)))
    });
    for (alike, apart) in outcomes.unwrap() {
        alike.unwrap();
        let words = ["rank 2 differs", "`frozen.weight`"];
        assert_error(&apart.unwrap_err(), Error::is_drift, &words);
    }
}
