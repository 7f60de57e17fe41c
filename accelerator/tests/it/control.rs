//! Control of which ranks run a closure, and the flag that any rank can raise. C13 and C14 are numbers of the
//! conformance list that follows Accelerate's tests.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use crate::common::{devices, distance, line, loader};
use accelerator::collective::launcher::{GroupExt, LaunchExt, Rendezvous, StoreHost, StoreServer};
use accelerator::collective::{Launch, Topology};
use accelerator::prelude::*;
use burn::optim::SgdConfig;

/// Counts the operations of a rank from now on.
fn counted(accelerator: &Accelerator) -> Result<Arc<AtomicUsize>> {
    let count = Arc::new(AtomicUsize::new(0));
    let counter = count.clone();
    let observed = accelerator.group().observe(move |_| {
        counter.fetch_add(1, Ordering::Relaxed);
    });
    observed?;
    Ok(count)
}

#[test]
fn c13_a_flag_that_one_rank_raises_is_seen_by_all_once() {
    for ranks in 1..=3 {
        for who in 0..ranks {
            let answers = accelerator::launch(ranks, |accelerator| {
                let first = accelerator.check_trigger()?;
                accelerator.on_process(who, || accelerator.set_trigger());
                Ok([
                    first,
                    accelerator.check_trigger()?,
                    accelerator.check_trigger()?,
                ])
            })
            .unwrap();
            assert_eq!(answers, vec![[false, true, false]; ranks]);
        }
    }
}

/// Trains, checks the trigger after every step, and lets the last rank raise it once. Returns the answers of the checks
/// and the number of operations.
fn steps(
    kind: BackendKind,
    ranks: usize,
    accumulation: usize,
    overlap: Overlap,
    check: bool,
) -> Vec<(Vec<bool>, usize)> {
    Accelerator::builder()
        .device(kind)
        .accumulation_steps(accumulation)
        .overlap(overlap)
        .launch(ranks, |accelerator| {
            let parts = (
                line(&accelerator.device()),
                SgdConfig::new().init(),
                loader(48 * ranks, 4),
            );
            let (mut model, mut optimizer, train) = accelerator.prepare(parts)?;
            let count = counted(&accelerator)?;
            let mut answers = Vec::new();
            for batch in train.epoch(0) {
                let batch = batch?;
                if batch.step() == 5 && accelerator.topology().is_last() {
                    accelerator.set_trigger();
                }
                let gradients = accelerator.backward(distance(&model, &batch), &model, &batch)?;
                let is_step = gradients.loss().is_some();
                model = optimizer.step(0.01, model, gradients);
                if check && is_step {
                    answers.push(accelerator.check_trigger()?);
                }
            }
            Ok((answers, count.load(Ordering::Relaxed)))
        })
        .unwrap()
}

#[test]
fn c13_a_check_after_a_step_needs_no_operation_of_its_own() {
    for kind in devices() {
        for ranks in 1..=3 {
            for accumulation in [1, 3] {
                for overlap in [Overlap::Off, Overlap::On] {
                    let plain = steps(kind, ranks, accumulation, overlap, false);
                    let checked = steps(kind, ranks, accumulation, overlap, true);
                    // The flag is raised in the sixth of twelve micro-steps.
                    let expected: Vec<bool> = (0..12 / accumulation)
                        .map(|step| step == 5 / accumulation)
                        .collect();
                    for ((_, without), (answers, with)) in plain.iter().zip(checked) {
                        assert_eq!(
                            answers, expected,
                            "{ranks} ranks, {accumulation}, {overlap:?}"
                        );
                        assert_eq!(with, *without, "operations of a rank");
                    }
                }
            }
        }
    }
}

/// Returns a preemption notice that is due now.
fn notice() -> Preemption {
    let preemption = Preemption::new().with_signals([]);
    preemption.with_deadline(std::time::SystemTime::now())
}

#[test]
fn a_preemption_is_told_with_its_window_and_stays() {
    for (ranks, accumulation, overlap) in [
        (1, 1, Overlap::Off),
        (1, 3, Overlap::Off),
        (2, 1, Overlap::On),
        (3, 3, Overlap::Off),
        (2, 3, Overlap::On),
    ] {
        let plain = steps(BackendKind::Flex, ranks, accumulation, overlap, false);
        let builder = Accelerator::builder().device(BackendKind::Flex);
        let builder = builder.accumulation_steps(accumulation).overlap(overlap);
        let asked = builder.launch(ranks, |accelerator| {
            let parts = (
                line(&accelerator.device()),
                SgdConfig::new().init(),
                loader(48 * ranks, 4),
            );
            let (mut model, mut optimizer, train) = accelerator.prepare(parts)?;
            let count = counted(&accelerator)?;
            let mut answers = Vec::new();
            for batch in train.epoch(0) {
                let batch = batch?;
                if batch.step() == 4 && accelerator.topology().is_last() {
                    accelerator.on_preemption(notice())?;
                }
                let gradients = accelerator.backward(distance(&model, &batch), &model, &batch)?;
                model = optimizer.step(0.01, model, gradients);
                answers.push(accelerator.preempted()?);
            }
            Ok((answers, count.load(Ordering::Relaxed)))
        });
        // There is nothing to save within a window.
        let expected: Vec<bool> = (0..12)
            .map(|step| (step + 1) % accumulation == 0 && step >= 4)
            .collect();
        for ((_, without), (answers, with)) in plain.iter().zip(asked.unwrap()) {
            assert_eq!(
                answers, expected,
                "{ranks} ranks, {accumulation}, {overlap:?}"
            );
            assert_eq!(with, *without, "operations of a rank");
        }
    }
}

#[test]
fn a_preemption_and_the_flag_are_told_each_by_itself() {
    let answers = accelerator::launch(2, |accelerator| {
        let parts = (line(&accelerator.device()), loader(16, 4));
        let (model, train) = accelerator.prepare(parts)?;
        let mut answers = Vec::new();
        for batch in train.epoch(0) {
            let batch = batch?;
            if accelerator.is_main_process() {
                accelerator.set_trigger();
                accelerator.on_preemption(notice())?;
            }
            let _gradients = accelerator.backward(distance(&model, &batch), &model, &batch)?;
            answers.push([accelerator.preempted()?, accelerator.check_trigger()?]);
        }
        let count = counted(&accelerator)?;
        answers.push([accelerator.preempted()?, accelerator.check_trigger()?]);
        assert_eq!(
            count.load(Ordering::Relaxed),
            1,
            "the flag alone is asked for"
        );
        Ok(answers)
    });
    let expected = vec![[true, true], [true, true], [true, false]];
    assert_eq!(answers.unwrap(), vec![expected; 2]);
}

#[test]
fn a_preemption_in_local_training_is_told_with_the_average() {
    let steps = |asks: bool| {
        let outcomes = accelerator::launch(2, |accelerator| {
            let parts = (
                line(&accelerator.device()),
                SgdConfig::new().init(),
                loader(48, 4),
            );
            let (mut model, mut optimizer, train) = accelerator.prepare(parts)?;
            let mut local = LocalSgdConfig::new(3).init(&accelerator, &model)?;
            let count = counted(&accelerator)?;
            let mut answers = Vec::new();
            for batch in train.epoch(0) {
                let batch = batch?;
                if batch.step() == 1 && accelerator.topology().is_last() {
                    accelerator.on_preemption(notice())?;
                }
                let gradients = local.backward(distance(&model, &batch), &model, &batch)?;
                model = optimizer.step(0.01, model, gradients);
                local.step(&mut model)?;
                if asks {
                    answers.push(accelerator.preempted()?);
                }
            }
            let operations = count.load(Ordering::Relaxed);
            local.finish(&mut model)?;
            Ok((answers, operations))
        });
        outcomes.unwrap()
    };
    // There is nothing to save in the middle of a round.
    let expected = vec![false, false, true, false, false, true];
    for ((answers, with), (_, without)) in steps(true).into_iter().zip(steps(false)) {
        assert_eq!(answers, expected);
        assert_eq!(with, without, "operations of a rank");
    }
}

#[test]
fn c13_a_flag_that_is_raised_after_the_window_is_told_by_the_next_check() {
    for ranks in [1, 2] {
        let answers = accelerator::launch(ranks, |accelerator| {
            let parts = (line(&accelerator.device()), loader(8 * ranks, 4));
            let (model, train) = accelerator.prepare(parts)?;
            let mut answers = Vec::new();
            for batch in train.epoch(0) {
                let batch = batch?;
                let _gradients = accelerator.backward(distance(&model, &batch), &model, &batch)?;
                accelerator.on_main_process(|| accelerator.set_trigger());
                answers.push(accelerator.check_trigger()?);
            }
            let count = counted(&accelerator)?;
            // No window has ended since then, so the check asks the other ranks.
            answers.push(accelerator.check_trigger()?);
            answers.push(accelerator.check_trigger()?);
            assert_eq!(count.load(Ordering::Relaxed), 2);
            Ok(answers)
        })
        .unwrap();
        assert_eq!(answers, vec![vec![false, true, true, false]; ranks]);
    }
}

#[test]
fn c14_work_runs_on_the_ranks_that_it_is_for() {
    let ran = accelerator::launch(3, |accelerator| {
        Ok([
            accelerator.on_main_process(|| 1),
            accelerator.on_local_process(0, || 1),
            accelerator.on_process(2, || 1),
            accelerator.on_process(1, || 1),
            accelerator.on_local_process(1, || 1),
            accelerator.on_process(7, || 1),
        ])
    })
    .unwrap();
    let (yes, no) = (Some(1), None);
    assert_eq!(
        ran,
        [
            [yes, yes, no, no, no, no],
            [no, no, no, yes, yes, no],
            [no, no, yes, no, no, no]
        ]
    );
}

#[test]
fn c14_a_collective_where_a_rank_is_alone_is_an_error_there_and_then() {
    accelerator::launch(3, |accelerator| {
        let meet = || accelerator.wait_for_everyone();
        let alone = [
            accelerator.on_main_process(meet),
            accelerator.on_local_process(0, meet),
            accelerator.on_process(2, meet),
            accelerator.on_process(1, meet),
            accelerator.on_local_process(1, meet),
            accelerator.on_process(0, || accelerator.check_trigger().map(drop)),
            accelerator.on_process(0, || accelerator.gather_object(&1).map(drop)),
            accelerator.on_process(0, || accelerator.finish()),
        ];
        for error in alone.into_iter().flatten().map(Result::unwrap_err) {
            assert!(error.is_misuse(), "{error:?}");
            assert!(format!("{error:?}").contains("one rank only"), "{error:?}");
        }
        // The group still works.
        accelerator.wait_for_everyone()?;
        // The others get the error while they wait for the first rank.
        for outcome in [
            accelerator.main_process_first(meet),
            accelerator.local_main_process_first(meet),
        ] {
            let error = outcome.unwrap_err();
            assert!(error.is_misuse(), "{error:?}");
            assert!(format!("{error:?}").contains("one rank only"), "{error:?}");
        }
        accelerator.wait_for_everyone()
    })
    .unwrap();
    for accumulation in [1, 2] {
        let builder = Accelerator::builder().accumulation_steps(accumulation);
        let trained = builder.launch(3, |accelerator| {
            let parts = (line(&accelerator.device()), loader(24, 2));
            let (model, train) = accelerator.prepare(parts)?;
            let mut local = LocalSgdConfig::new(4).init(&accelerator, &model)?;
            let mut batches = train.epoch(0);
            let batch = batches.next().unwrap()?;
            let loss = || distance(&model, &batch);
            let backward = || accelerator.backward(loss(), &model, &batch).map(drop);
            let alone = [
                accelerator.on_main_process(backward),
                accelerator.on_process(1, || local.backward(loss(), &model, &batch).map(drop)),
                Some(accelerator.in_rank_order(backward)?),
                Some(
                    accelerator
                        .find_executable_batch_size(2, &model, |_| backward())
                        .map(drop),
                ),
            ];
            for error in alone.into_iter().flatten().map(Result::unwrap_err) {
                assert!(error.is_misuse(), "{error:?}");
                let text = format!("{error:?}");
                assert!(
                    text.contains("where collectives are forbidden"),
                    "{error:?}"
                );
            }
            accelerator.wait_for_everyone()?;
            // The next window contains nothing of it.
            let mut last = accelerator.backward(loss(), &model, &batch)?;
            for batch in batches.by_ref().take(accumulation - 1) {
                let batch = batch?;
                last = accelerator.backward(distance(&model, &batch), &model, &batch)?;
            }
            Ok(last.samples())
        });
        let samples = Some(6.0 * accumulation as f64);
        assert_eq!(trained.unwrap(), [samples; 3]);
    }
}

/// Runs two hosts of two ranks each, in threads that are connected as processes are.
fn on_two_hosts<T: Send>(body: impl Fn(Accelerator) -> Result<T> + Send + Sync) -> Vec<Result<T>> {
    let store = StoreServer::bind(("127.0.0.1", 0), 4, None).unwrap();
    let rendezvous = Rendezvous::new("127.0.0.1", store.local_addr().port());
    let rendezvous = rendezvous.with_store(StoreHost::Launcher);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|rank| {
                let (body, rendezvous) = (&body, rendezvous.clone());
                scope.spawn(move || {
                    let topology = Topology::new(rank, 4)?.with_local(rank % 2, 2)?;
                    let builder = Accelerator::builder()
                        .launched_as(Launch::new(topology, rendezvous))
                        .transport(accelerator::collective::TransportKind::Tcp);
                    body(builder.build()?)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

#[test]
fn c14_the_first_of_each_host_goes_before_the_others() {
    let order = Mutex::new(Vec::new());
    // Both first ranks are inside at once, since hosts do not wait for each other.
    let both = Barrier::new(2);
    let outcomes = on_two_hosts(|accelerator| {
        accelerator.local_main_process_first(|| {
            if accelerator.topology().is_local_main() {
                both.wait();
            }
            order.lock().unwrap().push(accelerator.rank() % 2);
            Ok(())
        })?;
        accelerator.finish()
    });
    outcomes.into_iter().for_each(Result::unwrap);
    assert_eq!(*order.lock().unwrap(), [0, 0, 1, 1]);
}

#[test]
fn c14_what_fails_on_the_first_of_a_host_fails_everywhere() {
    let errors = on_two_hosts(|accelerator| {
        let outcome = accelerator.local_main_process_first(|| {
            assert!(
                accelerator.topology().is_local_main(),
                "the others do not run it"
            );
            if accelerator.rank() == 2 {
                Err(Error::other("no batch size"))
            } else {
                Ok(())
            }
        });
        accelerator.finish()?;
        Ok(outcome.unwrap_err())
    });
    for (rank, error) in errors.into_iter().map(Result::unwrap).enumerate() {
        assert!(error.is_other(), "{error:?}");
        let text = format!("{error:?}");
        assert!(text.contains("batch size"), "{text}");
        assert_eq!(text.contains("rank 2 failed"), rank != 2, "{text}");
    }
}

#[test]
fn who_waits_for_the_first_hears_of_its_panic() {
    let outcomes = accelerator::launch(2, |accelerator| {
        let mut texts = Vec::new();
        for local in [false, true] {
            let work = || -> Result<()> {
                assert!(accelerator.rank() != 0, "a panic that the test wants");
                unreachable!("rank 1 does not run it");
            };
            let outcome = catch_unwind(AssertUnwindSafe(|| match local {
                false => accelerator.main_process_first(work),
                true => accelerator.local_main_process_first(work),
            }));
            match (accelerator.rank(), outcome) {
                (0, outcome) => assert!(outcome.is_err(), "it goes on"),
                (_, outcome) => {
                    let error = outcome.unwrap().unwrap_err();
                    assert!(error.is_panic(), "{error:?}");
                    texts.push(error.to_string());
                }
            }
            accelerator.wait_for_everyone()?;
        }
        accelerator.finish()?;
        Ok(texts)
    })
    .unwrap();
    for text in &outcomes[1] {
        assert!(text.contains("a panic that the test wants"), "{text}");
    }
}

/// One rank may work alone for any length of time and in any of these ways.
#[test]
fn who_works_while_others_wait_is_waited_for() {
    fn long() {
        std::thread::sleep(Duration::from_secs(3));
    }
    let ways: [fn(&Accelerator) -> Result<()>; 4] = [
        |accelerator| {
            accelerator.main_process_first(|| {
                accelerator.on_main_process(long);
                Ok(())
            })
        },
        |accelerator| accelerator.in_rank_order(long).map(drop),
        |accelerator| {
            accelerator.on_process(1, long);
            Ok(())
        },
        // A plain `if` instead of a closure.
        |accelerator| {
            if accelerator.is_main_process() {
                for _ in 0..15 {
                    std::thread::sleep(Duration::from_millis(200));
                    accelerator.keep_alive();
                }
            }
            Ok(())
        },
    ];
    // They run at the same time, since they mostly sleep.
    std::thread::scope(|scope| {
        for way in ways {
            scope.spawn(move || {
                Accelerator::builder()
                    .progress_timeout(Duration::from_secs(2))
                    .launch(2, |accelerator| {
                        way(&accelerator)?;
                        accelerator.wait_for_everyone()
                    })
                    .unwrap();
            });
        }
    });
}

#[test]
fn who_hangs_while_others_wait_is_named() {
    let errors = Accelerator::builder()
        .busy_timeout(Duration::from_millis(500))
        .progress_timeout(Duration::from_secs(1))
        .launch(2, |accelerator| {
            let outcome = accelerator.main_process_first(|| {
                std::thread::sleep(Duration::from_secs(4));
                Ok(())
            });
            Ok(outcome.unwrap_err())
        })
        .unwrap();
    assert!(errors.iter().all(Error::is_collective), "{errors:?}");
    let text = errors[1].to_string();
    assert!(
        text.contains("rank 1 waited") && text.contains("for rank 0"),
        "{text}"
    );
}
