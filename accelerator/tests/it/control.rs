//! Control of which ranks run a closure, and the flag that any rank can raise. C13 and C14 are numbers of the
//! conformance list that follows Accelerate's tests.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Barrier, Mutex};
use std::time::Duration;

use crate::common::{
    assert_chain, assert_contains, connected, counted, devices, distance, learn, learner, line,
    loader,
};
use accelerator::collective::Topology;
use accelerator::prelude::*;

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

/// The question that all ranks ask after a window. The last rank gives them a reason for a "yes".
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Question {
    None,
    /// It sets the trigger in the sixth micro-step.
    Trigger,
    /// It is preempted in the fifth micro-step.
    Preemption,
}

/// Trains for twelve micro-steps, and returns the answers of each rank and the number of operations.
fn steps(
    kind: BackendKind,
    ranks: usize,
    accumulation: usize,
    overlap: Overlap,
    question: Question,
) -> Vec<(Vec<bool>, usize)> {
    Accelerator::builder()
        .device(kind)
        .accumulation_steps(accumulation)
        .overlap(overlap)
        .launch(ranks, |accelerator| {
            let (mut model, mut optimizer, train) = learner(&accelerator, loader(48 * ranks, 4))?;
            let count = counted(&accelerator);
            let mut answers = Vec::new();
            for batch in train.epoch(0) {
                let batch = batch?;
                match (question, batch.step()) {
                    _ if !accelerator.topology().is_last() => {}
                    (Question::Trigger, 5) => accelerator.set_trigger(),
                    (Question::Preemption, 4) => accelerator.on_preemption(notice())?,
                    _ => {}
                }
                model = learn(&accelerator, model, &mut optimizer, 0.01, &batch)?;
                match question {
                    Question::Trigger if optimizer.outcome() != StepOutcome::Accumulated => {
                        answers.push(accelerator.check_trigger()?);
                    }
                    Question::Preemption => answers.push(accelerator.preempted()?),
                    _ => {}
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
                    let expected = (0..12 / accumulation).map(|step| step == 5 / accumulation);
                    let run = |question| steps(kind, ranks, accumulation, overlap, question);
                    check(run, Question::Trigger, &expected.collect::<Vec<_>>());
                }
            }
        }
    }
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
        // There is nothing to save within a window.
        let expected = (0..12).map(|step| (step + 1) % accumulation == 0 && step >= 4);
        let run = |question| steps(BackendKind::Flex, ranks, accumulation, overlap, question);
        check(run, Question::Preemption, &expected.collect::<Vec<_>>());
    }
}

/// Asserts what all ranks are told, and that no operation is made for it.
#[track_caller]
fn check(run: impl Fn(Question) -> Vec<(Vec<bool>, usize)>, question: Question, told: &[bool]) {
    for ((answers, with), (_, without)) in run(question).iter().zip(run(Question::None)) {
        assert_eq!((&**answers, *with), (told, without), "{question:?}");
    }
}

/// Returns a preemption notice that is due now.
fn notice() -> Preemption {
    let preemption = Preemption::new().with_signals([]);
    preemption.with_deadline(std::time::SystemTime::now())
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
        let count = counted(&accelerator);
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
            let (mut model, mut optimizer, train) = learner(&accelerator, loader(48, 4))?;
            let mut local = LocalSgdConfig::new(3).init(&accelerator, &model)?;
            let count = counted(&accelerator);
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
            let count = counted(&accelerator);
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
            assert_chain(&error, Error::is_misuse, &["one rank only"]);
        }
        // The group still works.
        accelerator.wait_for_everyone()?;
        // The others get the error while they wait for the first rank.
        for outcome in [
            accelerator.main_process_first(meet),
            accelerator.local_main_process_first(meet),
        ] {
            assert_chain(&outcome.unwrap_err(), Error::is_misuse, &["one rank only"]);
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
                let words = ["where collectives are forbidden"];
                assert_chain(&error, Error::is_misuse, &words);
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

/// Runs two hosts of two ranks each.
fn on_two_hosts<T: Send>(body: impl Fn(Accelerator) -> Result<T> + Sync) -> Vec<Result<T>> {
    let place = |topology: Topology| topology.with_local(topology.rank() % 2, 2).unwrap();
    connected(4, place, |_, builder| body(builder.build()?))
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
        assert_chain(&error, Error::is_other, &["batch size"]);
        let is_told = format!("{error:?}").contains("rank 2 failed");
        assert_eq!(is_told, rank != 2, "{error:?}");
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
                (0, outcome) => assert!(outcome.is_err(), "it continues"),
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
    assert_contains(&errors[1].to_string(), &["rank 1 waited", "for rank 0"]);
}
