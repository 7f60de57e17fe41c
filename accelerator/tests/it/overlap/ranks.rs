//! Ranks that are idle, are lost, or disagree.

use std::sync::Barrier;

use accelerator::prelude::*;
use accelerator::{Compression, Overlap, OverlapState};

use super::harness::{Place, Setting, assert_on, same_bits};
use super::models::Mlp;
use crate::common::{self, assert_contains, devices, known};

#[test]
fn ranks_that_idle_now_and_then() {
    for kind in devices() {
        let setting = Setting {
            // Ranks are idle also in the steps that teach which buckets are ready.
            idle: |place| place.step % 2 == place.rank,
            ..Setting::new(kind)
        };
        let loss = |model: &Mlp, place: &Place| {
            let loss = model.loss(place);
            if (setting.idle)(place) {
                loss * f32::NAN
            } else {
                loss
            }
        };
        for report in same_bits(setting, Mlp::four, loss) {
            assert_eq!((report.state, report.repairs), (OverlapState::On, 0));
        }
    }
}

#[test]
fn a_rank_that_is_lost_in_the_middle_of_a_step_is_named() {
    // All ranks have finished the step before.
    let trained = Barrier::new(3);
    let outcomes = Accelerator::builder()
        .bucket_size(1024)
        .overlap(Overlap::On)
        .launch(3, |accelerator| {
            let model = accelerator.prepare(known(Mlp::four(&accelerator.device())))?;
            for step in 0..4 {
                let place = Place::of(&accelerator, step);
                drop(accelerator.backward(model.loss(&place), &model, 2)?);
            }
            assert_eq!(accelerator.overlap_report(&model)?.state, OverlapState::On);
            trained.wait();
            if accelerator.rank() == 1 {
                accelerator.group().abort("its disk is full");
                return Ok(None);
            }
            let place = Place::of(&accelerator, 4);
            Ok(accelerator.backward(model.loss(&place), &model, 2).err())
        })
        .unwrap();
    for error in [&outcomes[0], &outcomes[2]] {
        let error = error.as_ref().unwrap();
        assert!(error.is_peer_lost(), "{error:?}");
        assert_eq!(error.culprit().unwrap().rank(), 1);
    }
}

#[test]
fn a_rank_that_had_no_samples_when_the_others_learnt_learns_later() {
    // The first window finds the depth of the loss, and the second which buckets are ready.
    let idle: [fn(&Place) -> bool; 6] = [
        |place| place.rank == 0 && place.step == 0,
        |place| place.rank == 0 && place.step == 1,
        |place| place.rank == 0 && place.step < 2,
        |place| place.rank == 1 && place.step == 0,
        |place| place.rank == 1 && place.step == 1,
        |place| place.rank == 1 && place.step < 2,
    ];
    for kind in devices() {
        for idle in idle {
            let setting = Setting {
                idle,
                ..Setting::new(kind)
            };
            let loss = |model: &Mlp, place: &Place| {
                if idle(place) {
                    // Without a batch, nothing passes through the network.
                    model.layers[0].weight.val().sum() * f32::NAN
                } else {
                    model.loss(place)
                }
            };
            assert_on(&same_bits(setting, Mlp::four, loss));
        }
    }
}

#[test]
fn ranks_at_odds_are_told_the_lines_of_the_program() {
    for (overlap, compression) in [
        (Overlap::Off, Compression::None),
        (Overlap::On, Compression::None),
        (Overlap::On, Compression::F16),
    ] {
        let texts = Accelerator::builder()
            .bucket_size(1024)
            .compression(compression)
            .overlap(overlap)
            .launch(2, |accelerator| {
                let model = accelerator.prepare(known(Mlp::four(&accelerator.device())))?;
                for step in 0..4 {
                    let loss = model.loss(&Place::of(&accelerator, step));
                    drop(accelerator.backward(loss, &model, 2)?);
                }
                let state = accelerator.overlap_report(&model)?.state;
                assert_eq!(state == OverlapState::On, overlap == Overlap::On);
                let (line, error) = if accelerator.is_main_process() {
                    let outcome = accelerator.wait_for_everyone();
                    (line!() - 1, outcome.unwrap_err())
                } else {
                    let loss = model.loss(&Place::of(&accelerator, 4));
                    let outcome = accelerator.backward(loss, &model, 2);
                    (line!() - 1, outcome.unwrap_err())
                };
                assert!(error.collective().unwrap().is_mismatch(), "{error:?}");
                Ok((format!("{}:{line}", file!()), format!("{error:?}")))
            })
            .unwrap();
        assert_every_place_is_told(&texts);
    }
}

/// Asserts that every rank's error names the calls of all ranks. The pairs are call and error.
#[track_caller]
fn assert_every_place_is_told(texts: &[(String, String)]) {
    for (_, text) in texts {
        for (place, _) in texts {
            assert_contains(text, &[place]);
        }
    }
}

#[test]
fn preparing_is_told_by_the_line_of_the_program_too() {
    let texts = accelerator::launch(2, |accelerator| {
        let (line, error) = if accelerator.is_main_process() {
            let parts = (
                common::loader(4, 2),
                known(Mlp::four(&accelerator.device())),
            );
            let outcome = accelerator.prepare(parts);
            (line!() - 1, outcome.map(drop).unwrap_err())
        } else {
            let outcome = accelerator.wait_for_everyone();
            (line!() - 1, outcome.unwrap_err())
        };
        Ok((format!("{}:{line}", file!()), format!("{error:?}")))
    })
    .unwrap();
    assert_every_place_is_told(&texts);
}

#[test]
fn threads_that_train_at_once_are_refused_and_every_rank_hears_of_it() {
    for (accumulation, models) in [(1, 1), (2, 1), (1, 2)] {
        let refused = Barrier::new(2);
        let errors = Accelerator::builder()
            .bucket_size(1024)
            .accumulation_steps(accumulation)
            .overlap(Overlap::On)
            .launch(2, |accelerator| {
                let device = accelerator.device();
                let model = || accelerator.prepare(known(Mlp::four(&device)));
                let models: Vec<Mlp> = (0..models).map(|_| model()).collect::<Result<_>>()?;
                let train = |model: Mlp| {
                    for step in 0..accumulation {
                        let loss = model.loss(&Place::of(&accelerator, step));
                        drop(accelerator.backward(loss, &model, 2)?);
                    }
                    Ok::<_, Error>(())
                };
                if accelerator.is_main_process() {
                    // Neither thread can finish before rank 1 arrives, and that waits for the refusal, so the second
                    // thread finds the first. Each has its own leaves, since Burn may deadlock if threads compute with
                    // the same ones.
                    let errors = std::thread::scope(|scope| {
                        let threads = [&models[0], &models[models.len() - 1]].map(|model| {
                            let model = known(model.clone());
                            scope.spawn(|| train(model))
                        });
                        threads.map(|thread| thread.join().unwrap().unwrap_err())
                    });
                    refused.wait();
                    Ok(errors.into())
                } else {
                    refused.wait();
                    Ok(vec![train(models[0].clone()).unwrap_err()])
                }
            })
            .unwrap();
        let (refused, lost): (Vec<_>, Vec<_>) =
            errors.iter().flatten().partition(|error| error.is_misuse());
        assert_eq!((refused.len(), lost.len()), (1, 2), "{errors:?}");
        for error in lost {
            assert!(error.is_peer_lost(), "{error:?}");
            assert_eq!(error.culprit().unwrap().rank(), 0);
        }
        for error in errors.iter().flatten() {
            let text = format!("{error:?}");
            assert!(text.contains("another thread"), "{text}");
        }
    }
}
