//! Recording by a schedule: the steps that are kept, the files, and the end of recording.

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

/// Trains for `steps` steps and calls `after` after each with the number of steps so far.
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

/// Returns the files of a folder by name, with the steps of each rank in them.
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
            // No other event belongs to another step.
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

/// Returns the traces of two ranks for cycles with these steps.
fn expected(cycles: &[(&str, &[u64])]) -> BTreeMap<String, Vec<(u64, Vec<u64>)>> {
    let files = cycles.iter().flat_map(|(name, steps)| {
        [0, 1].map(|rank| {
            let name = format!("{name}.rank{rank}.json");
            (name, vec![(rank, steps.to_vec())])
        })
    });
    files.collect()
}

/// Writes each cycle to a file beside `path`.
fn traced(path: &Path) -> impl FnMut(&Cycle) + Send + use<> {
    let path = path.to_owned();
    move |cycle| cycle.write_trace(&path).unwrap()
}

/// Returns the schedule of most tests. Of ten steps, it records the third, fourth, seventh and eighth.
fn schedule() -> ProfilerSchedule {
    ProfilerSchedule::new(2)
        .with_wait(1)
        .with_warm_up(1)
        .with_repeat(2)
}

#[test]
fn c24_each_cycle_is_one_trace_of_each_rank() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    // The schedule limits the number of cycles with any accumulation.
    for accumulation in [1, 2] {
        let builder = Accelerator::builder().accumulation_steps(accumulation);
        let outcome = builder.launch(2, |accelerator| {
            let _profiler = accelerator.profile(schedule().with_skip_first(1), traced(&path))?;
            let own = folder
                .path()
                .join(format!("trace.cycle0.rank{}.json", accelerator.rank()));
            train(&accelerator, 12, |done| {
                // The step that ends a cycle writes it.
                assert!(done < 5 || own.exists());
            })?;
            assert!(accelerator.step_summary().is_none(), "nobody asked for it");
            accelerator.finish()
        });
        outcome.unwrap();
        let expected = expected(&[("trace.cycle0", &[3, 4]), ("trace.cycle1", &[7, 8])]);
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
        let error = accelerator.profile(schedule(), |_| ()).unwrap_err();
        assert!(error.is_misuse(), "{error:?}");
        train(&accelerator, 9, |_| ())?;
        accelerator.finish()?;
        Ok(accelerator.step_summary().unwrap().steps)
    });
    assert_eq!(summaries.unwrap(), [9, 9], "the summary is of all steps");
    let expected = expected(&[("trace.cycle0", &[2, 3]), ("trace.cycle1", &[6, 7])]);
    assert_eq!(traces(folder.path()), expected);
}

#[test]
fn c24_a_cycle_that_the_end_cuts_off_is_written_and_one_that_warms_up_is_not() {
    // The number of steps, and the steps of the last file.
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
                let profiler = accelerator.profile(schedule(), traced(&path))?;
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
            let found = traces.values().next_back().map(|ranks| ranks[0].1.clone());
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
            let note = move |cycle: &Cycle| {
                let seen = (cycle.number, cycle.first_step, cycle.summary.clone());
                notes.lock().unwrap().push(seen);
            };
            let profiler = accelerator.profile(schedule().with_repeat(repeat), note)?;
            train(&accelerator, steps, |_| ())?;
            drop(profiler);
            accelerator.finish()?;
            Ok(seen.lock().unwrap().clone())
        });
        for seen in seen.unwrap() {
            assert_eq!(seen.len(), cycles, "repeat {repeat}, {steps} steps");
            for (expected, (number, first_step, summary)) in (0..).zip(seen) {
                assert_eq!((number, first_step), (expected, 4 * expected + 2));
                let kept = (steps as u64 - first_step).min(2);
                assert_eq!(summary.steps, kept);
                assert!(summary.backward.mean > 0.0 && summary.bytes.mean > 0.0);
            }
        }
    }
}

#[test]
fn one_profiler_can_follow_another() {
    let folder = tempfile::tempdir().unwrap();
    let outcome = accelerator::launch(2, |accelerator| {
        let profile =
            |name: &str| accelerator.profile(schedule(), traced(&folder.path().join(name)));
        let first = profile("a.json")?;
        assert!(profile("b.json").unwrap_err().is_misuse());
        train(&accelerator, 3, |_| ())?;
        drop(first);
        let _second: Profiler = profile("b.json")?;
        train(&accelerator, 4, |_| ())?;
        accelerator.finish()
    });
    outcome.unwrap();
    let expected = expected(&[("a.cycle0", &[2]), ("b.cycle0", &[5, 6])]);
    assert_eq!(traces(folder.path()), expected);
}

#[test]
fn what_would_fail_later_is_refused_at_once_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let outcome = accelerator::launch(2, |accelerator| {
        let refused = |schedule: ProfilerSchedule| {
            let error = accelerator.profile(schedule, |_| ()).unwrap_err();
            assert!(error.is_config(), "{error:?}");
            error.to_string()
        };
        assert!(refused(ProfilerSchedule::new(0)).contains("at least 1"));
        let other = schedule().with_wait(accelerator.rank() as u64);
        assert!(refused(other).contains("differs between ranks"));
        // The group still works.
        drop(accelerator.profile(schedule(), |_| ())?);
        accelerator.finish()
    });
    outcome.unwrap();
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
            let _profiler = accelerator.profile(schedule(), traced(&path))?;
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
    let builder = Accelerator::builder().trace(&path);
    let accelerator = builder.clone().build().unwrap();
    assert_eq!(count(), 0);
    accelerator.finish().unwrap();
    // A restarted job keeps the traces that the previous attempt could not give to rank 0, until rank 0's trace is
    // complete.
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
    let _first = accelerator
        .profile(ProfilerSchedule::new(2), |_| panic!("there is no room"))
        .unwrap();
    let training = AssertUnwindSafe(|| train(&accelerator, 4, |_| ()));
    assert!(catch_unwind(training).is_err());
    let cycles = Arc::<Mutex<Vec<u64>>>::default();
    let noted = cycles.clone();
    let _second = accelerator
        .profile(ProfilerSchedule::new(2).with_repeat(1), move |cycle| {
            noted.lock().unwrap().push(cycle.summary.steps);
        })
        .unwrap();
    train(&accelerator, 4, |_| ()).unwrap();
    assert_eq!(*cycles.lock().unwrap(), [2]);
}
