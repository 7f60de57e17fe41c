//! Recording by a schedule: which steps are kept, what is written, and how it ends.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::common::{distance, line};
use accelerator::AcceleratorBuilder;
use accelerator::prelude::*;
use accelerator::timeline::{Cycle, Profiler, ProfilerSchedule};
use burn::nn::Linear;
use burn::optim::SgdConfig;
use serde_json::Value;

/// Trains for `steps` steps, after each of which `after` is told how many were done.
fn train(accelerator: &Accelerator, steps: usize, mut after: impl FnMut(usize)) -> Result<()> {
    let parts = (line(&accelerator.device()), SgdConfig::new().init());
    let (mut model, mut optimizer): (Linear, _) = accelerator.prepare(parts)?;
    let samples = 2 * steps * accelerator.world_size() * accelerator.accumulation_steps();
    let train = accelerator.prepare(crate::common::loader(samples, 2))?;
    let mut done = 0;
    for batch in train.epoch(0) {
        let batch = batch?;
        let gradients = accelerator.backward(distance(&model, &batch), &model, &batch)?;
        let is_step = !gradients.is_accumulating();
        model = optimizer.step(0.01, model, gradients);
        if is_step {
            done += 1;
            after(done);
        }
    }
    assert_eq!(done, steps);
    Ok(())
}

/// The files of a folder, by name, with the numbers of the steps that each rank has in them.
fn traces(folder: &Path) -> BTreeMap<String, Vec<(u64, Vec<u64>)>> {
    let files = folder.read_dir().unwrap().map(|entry| entry.unwrap());
    let read = |path: &Path| -> Vec<(u64, Vec<u64>)> {
        let trace: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let ranks = trace["otherData"]["ranks"].as_array().unwrap().iter();
        let ranks = ranks.map(|rank| rank["rank"].as_u64().unwrap());
        let events = trace["traceEvents"].as_array().unwrap();
        let steps = |rank: u64| {
            let mine = events.iter().filter(|e| e["pid"] == rank && e["ph"] == "X");
            let steps = mine.clone().filter(|e| e["name"] == "step");
            let steps: Vec<u64> = steps.map(|e| e["args"]["step"].as_u64().unwrap()).collect();
            // Nothing else is of another step.
            let all: BTreeSet<u64> = mine.map(|e| e["args"]["step"].as_u64().unwrap()).collect();
            let last = steps.last().map_or(0, |last| last + 1);
            assert!(
                all.iter().all(|step| steps.contains(step) || *step == last),
                "{all:?}"
            );
            steps
        };
        ranks.map(|rank| (rank, steps(rank))).collect()
    };
    files
        .map(|file| (file.file_name().into_string().unwrap(), read(&file.path())))
        .collect()
}

fn expected(cycles: &[(&str, &[u64], &[u64])]) -> BTreeMap<String, Vec<(u64, Vec<u64>)>> {
    let one = |(name, ranks, steps): &(&str, &[u64], &[u64])| {
        let ranks = ranks.iter().map(|rank| (*rank, steps.to_vec())).collect();
        ((*name).to_owned(), ranks)
    };
    cycles.iter().map(one).collect()
}

/// The schedule that most tests have: of ten steps, the third and fourth, and the seventh and eighth.
fn schedule() -> ProfilerSchedule {
    ProfilerSchedule::new(2)
        .with_wait(1)
        .with_warm_up(1)
        .with_repeat(2)
}

#[test]
fn c24_each_cycle_is_one_trace_of_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    // As many cycles as the schedule says, on any accumulation.
    for accumulation in [1, 2] {
        let builder = Accelerator::builder().accumulation_steps(accumulation);
        let counts = builder.launch(2, |accelerator| {
            let profiler = accelerator.profile(schedule().with_skip_first(1), &path)?;
            let mut counts = Vec::new();
            train(&accelerator, 12, |done| {
                counts.push(profiler.cycles());
                // The step after a cycle has written it.
                let is_there = folder.path().join("trace.cycle0.json").exists();
                assert!(done < 6 || accelerator.rank() > 0 || is_there);
            })?;
            assert!(accelerator.step_summary().is_none(), "nobody asked for it");
            accelerator.finish()?;
            assert_eq!(profiler.cycles(), 2);
            Ok(counts)
        });
        for counts in counts.unwrap() {
            assert_eq!(counts, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]);
        }
        let ranks = &[0, 1][..];
        let expected = expected(&[
            ("trace.cycle0.json", ranks, &[3, 4]),
            ("trace.cycle1.json", ranks, &[7, 8]),
        ]);
        assert_eq!(traces(folder.path()), expected);
    }
}

#[test]
fn c24_a_builders_schedule_counts_from_the_first_step() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let builder = Accelerator::builder()
        .trace(&path)
        .trace_schedule(schedule());
    let summaries = builder.step_summary().launch(2, |accelerator| {
        let error = accelerator.profile(schedule(), "other.json").unwrap_err();
        assert!(error.is_misuse(), "{error:?}");
        train(&accelerator, 9, |_| ())?;
        accelerator.finish()?;
        Ok(accelerator.step_summary().unwrap().steps)
    });
    assert_eq!(summaries.unwrap(), [9, 9], "the summary is of all steps");
    let ranks = &[0, 1][..];
    let expected = expected(&[
        ("trace.cycle0.json", ranks, &[2, 3]),
        ("trace.cycle1.json", ranks, &[6, 7]),
    ]);
    assert_eq!(traces(folder.path()), expected);
}

#[test]
fn c24_a_cycle_that_the_end_cuts_off_is_written_and_one_that_warms_up_is_not() {
    // Steps, and the steps of the last file.
    for (steps, last) in [
        (3, Some(&[2][..])),
        (2, None),
        (6, Some(&[2, 3])),
        (7, Some(&[6])),
    ] {
        for ends in ["dropped", "finished"] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("trace.json");
            let outcome = accelerator::launch(2, |accelerator| {
                let profiler = accelerator.profile(schedule(), &path)?;
                train(&accelerator, steps, |_| ())?;
                if ends == "dropped" {
                    drop(profiler);
                    accelerator.finish()
                } else {
                    accelerator.finish()
                }
            });
            outcome.unwrap();
            let traces = traces(folder.path());
            let found = traces.values().next_back().map(|ranks| ranks[1].1.clone());
            assert_eq!(found.as_deref(), last, "{steps} steps, {ends}");
        }
    }
}

#[test]
fn c24_summaries_are_handed_to_the_program() {
    for (repeat, steps, cycles) in [(2, 20, 2), (0, 20, 5), (0, 19, 5), (0, 18, 4), (1, 3, 1)] {
        let seen = accelerator::launch(2, |accelerator| {
            let seen = Arc::new(Mutex::new(Vec::new()));
            let notes = Arc::clone(&seen);
            let note = move |cycle: &Cycle| notes.lock().unwrap().push(cycle.clone());
            let profiler = accelerator.profile_with(schedule().with_repeat(repeat), note)?;
            train(&accelerator, steps, |_| ())?;
            drop(profiler);
            accelerator.finish()?;
            Ok(seen.lock().unwrap().clone())
        });
        for seen in seen.unwrap() {
            assert_eq!(seen.len(), cycles, "repeat {repeat}, {steps} steps");
            for (number, cycle) in seen.iter().enumerate() {
                let number = number as u64;
                assert_eq!((cycle.number, cycle.first_step), (number, 4 * number + 2));
                let kept = (steps as u64 - cycle.first_step).min(2);
                assert_eq!(cycle.summary.steps, kept);
                assert!(cycle.summary.backward.mean > 0.0 && cycle.summary.bytes.mean > 0.0);
            }
        }
    }
}

/// What a program promises to send nothing, sends no trace either.
#[test]
fn cycles_wait_for_a_window_of_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let builder = Accelerator::builder().accumulation_steps(2);
    let outcome = builder.launch(2, |accelerator| {
        let is_there = |name: &str| folder.path().join(name).exists();
        let is_main = accelerator.is_main_process();
        let profile = |name: &str| {
            let path = folder.path().join(name);
            accelerator.profile(ProfilerSchedule::new(1).with_repeat(1), path)
        };
        let parts = (line(&accelerator.device()), SgdConfig::new().init());
        let (mut model, mut optimizer): (Linear, _) = accelerator.prepare(parts)?;
        let train = accelerator.prepare(crate::common::loader(32, 2))?;
        let mut batches = train.epoch(0);
        let _first = profile("all.json")?;
        for micro_step in 1..=4 {
            let batch = batches.next().unwrap()?;
            let gradients = accelerator.backward(distance(&model, &batch), &model, &batch)?;
            // It is complete after the second one; the main rank writes it.
            assert!(!is_main || is_there("all.cycle0.json") == (micro_step == 4));
            model = optimizer.step(0.01, model, gradients);
        }
        let _second = profile("own.json")?;
        let mut local = LocalSgdConfig::new(8).init(&accelerator, &model)?;
        for _ in 0..4 {
            let batch = batches.next().unwrap()?;
            let gradients = local.backward(distance(&model, &batch), &model, &batch)?;
            assert!(!is_there("own.cycle0.json"));
            model = optimizer.step(0.01, model, gradients);
        }
        // The main rank writes it there, and hears that the other one is there before.
        accelerator.wait_for_everyone()?;
        local.average(&mut model)?;
        assert!(!is_main || is_there("own.cycle0.json"));
        accelerator.finish()
    });
    outcome.unwrap();
    assert_eq!(folder.path().read_dir().unwrap().count(), 2);
}

#[test]
fn one_profiler_can_follow_another() {
    let folder = tempfile::tempdir().unwrap();
    let outcome = accelerator::launch(2, |accelerator| {
        let profile = |name: &str| accelerator.profile(schedule(), folder.path().join(name));
        let first = profile("a.json")?;
        assert!(profile("b.json").unwrap_err().is_misuse());
        train(&accelerator, 3, |_| ())?;
        drop(first);
        // The rest of the first one is written before.
        let second: Profiler = profile("b.json")?;
        assert!(accelerator.rank() > 0 || folder.path().join("a.cycle0.json").exists());
        train(&accelerator, 4, |_| ())?;
        assert_eq!(second.cycles(), 1);
        accelerator.finish()
    });
    outcome.unwrap();
    let ranks = &[0, 1][..];
    let expected = expected(&[
        ("a.cycle0.json", ranks, &[2]),
        ("b.cycle0.json", ranks, &[5, 6]),
    ]);
    assert_eq!(traces(folder.path()), expected);
}

#[test]
fn what_would_fail_later_is_refused_at_once_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let outcome = accelerator::launch(2, |accelerator| {
        let path = |name: &str| folder.join(name);
        let refused = |schedule: ProfilerSchedule, name: &str| {
            let error = accelerator.profile(schedule, path(name)).unwrap_err();
            assert!(error.is_config(), "{error:?}");
            error.to_string()
        };
        assert!(refused(schedule(), "missing/trace.json").contains("missing"));
        assert!(refused(schedule(), "").contains("folder"));
        assert!(refused(ProfilerSchedule::new(0), "trace.json").contains("at least 1"));
        let other = schedule().with_wait(accelerator.rank() as u64);
        assert!(refused(other, "trace.json").contains("differs between ranks"));
        // The group is as good as before.
        drop(accelerator.profile(schedule(), path("trace.json"))?);
        accelerator.finish()
    });
    outcome.unwrap();
    assert_eq!(folder.read_dir().unwrap().count(), 0);
    let refused = |builder: AcceleratorBuilder| {
        let error = builder.build().unwrap_err();
        assert!(error.is_config(), "{error:?}");
    };
    let traced = |name: &str| Accelerator::builder().trace(folder.join(name));
    refused(Accelerator::builder().trace_schedule(schedule()));
    refused(traced("missing/trace.json").trace_schedule(schedule()));
    refused(traced("trace.json").trace_schedule(ProfilerSchedule::new(0)));
}

#[test]
fn ranks_that_are_left_write_their_own() {
    for steps in [3, 4] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let outcome = accelerator::launch(3, |accelerator| {
            let _profiler = accelerator.profile(schedule(), &path)?;
            train(&accelerator, steps, |_| ())?;
            if accelerator.rank() == 2 {
                accelerator.group().abort("its disk is full");
                return Ok(());
            }
            train(&accelerator, 1, |_| ())
        });
        assert!(outcome.unwrap_err().is_peer_lost());
        let kept = (2..steps as u64).collect::<Vec<_>>();
        let name = |rank| format!("trace.cycle0.rank{rank}.json");
        let all = (0..3).map(|rank| (name(rank), vec![(rank, kept.clone())]));
        assert_eq!(traces(folder.path()), all.collect(), "{steps} steps");
    }
}

#[test]
fn traces_of_an_earlier_run_do_not_stay() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let put = || {
        for name in [
            "trace.rank1.json",
            "trace.cycle9.json",
            "trace.cycle0.rank7.json",
        ] {
            std::fs::write(folder.path().join(name), "old").unwrap();
        }
    };
    let count = || folder.path().read_dir().unwrap().count();
    put();
    let accelerator = Accelerator::new().unwrap();
    let profiler = accelerator.profile(schedule(), &path).unwrap();
    assert_eq!(count(), 0);
    drop(profiler);
    put();
    let builder = Accelerator::builder().trace(&path);
    let accelerator = builder.clone().build().unwrap();
    assert_eq!(count(), 0);
    accelerator.finish().unwrap();
    // A life of the same job keeps what the one before could not give to rank 0, until it is whole.
    put();
    let again = accelerator::collective::Launch::from_vars(|name| {
        (name == "ACCEL_RESTART").then(|| "1".to_owned())
    });
    let accelerator = builder.launched_as(again.unwrap()).build().unwrap();
    assert_eq!(count(), 4);
    accelerator.finish().unwrap();
    assert!(!folder.path().join("trace.rank1.json").exists());
}

#[test]
fn c24_a_closure_that_panics_ends_recording_and_the_next_profiler_begins() {
    let accelerator = Accelerator::new().unwrap();
    let first = accelerator
        .profile_with(ProfilerSchedule::new(2), |_| panic!("there is no room"))
        .unwrap();
    let training = AssertUnwindSafe(|| train(&accelerator, 4, |_| ()));
    assert!(catch_unwind(training).is_err());
    assert_eq!(first.cycles(), 0);
    let cycles = Arc::<Mutex<Vec<u64>>>::default();
    let noted = cycles.clone();
    let second = accelerator
        .profile_with(ProfilerSchedule::new(2).with_repeat(1), move |cycle| {
            noted.lock().unwrap().push(cycle.summary.steps);
        })
        .unwrap();
    train(&accelerator, 4, |_| ()).unwrap();
    assert_eq!((&*cycles.lock().unwrap(), second.cycles()), (&vec![2], 1));
}
