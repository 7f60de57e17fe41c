//! Processes write traces by a schedule from the environment.

use std::collections::BTreeSet;
use std::path::Path;

use accelerator_tests::problems::{Rule, Setting, Which};
use accelerator_tests::processes::{Ended, run_ranks};
use serde_json::Value;

/// Trains for ten steps on two ranks, with schedules from the environment.
fn train(folder: &Path, schedules: [&str; 2]) -> Vec<Ended> {
    let setting = Setting {
        optimizer: Rule::Sgd,
        samples: 40,
        global_batch: 8,
        ..Setting::of(Which::Mlp)
    };
    let setting = serde_json::to_string(&setting).unwrap();
    run_ranks(
        Path::new(env!("CARGO_BIN_EXE_rank")),
        &["train", "f32", "1", &setting],
        2,
        |rank, command| {
            command
                .env("ACCEL_TRACE", folder.join("trace.json"))
                .env("ACCEL_TRACE_SCHEDULE", schedules[rank]);
        },
    )
}

fn names(folder: &Path) -> BTreeSet<String> {
    let files = folder.read_dir().unwrap();
    files
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn each_cycle_has_the_scheduled_steps_of_every_process() {
    let folder = tempfile::tempdir().unwrap();
    for rank in train(folder.path(), ["active=2,wait=1,warm_up=1,repeat=2"; 2]) {
        rank.succeeded();
    }
    let cycles = [("trace.cycle0", vec![2, 3]), ("trace.cycle1", vec![6, 7])];
    let file = |cycle: &str, rank: usize| format!("{cycle}.rank{rank}.json");
    let expected = cycles
        .iter()
        .flat_map(|(cycle, _)| [0, 1].map(|rank| file(cycle, rank)));
    assert_eq!(names(folder.path()), expected.collect());
    for (name, scheduled) in cycles {
        for rank in 0..2 {
            let trace = std::fs::read(folder.path().join(file(name, rank))).unwrap();
            let trace: Value = serde_json::from_slice(&trace).unwrap();
            let ranks = trace["otherData"]["ranks"].as_array().unwrap();
            assert_eq!((ranks.len(), &ranks[0]["rank"]), (1, &rank.into()));
            let steps = |name: &str| -> Vec<u64> {
                let events = trace["traceEvents"].as_array().unwrap().iter();
                events
                    .filter(|e| e["ph"] == "X" && e["pid"] == rank && e["name"] == name)
                    .map(|e| e["args"]["step"].as_u64().unwrap())
                    .collect()
            };
            assert_eq!(steps("step"), scheduled, "{name}, rank {rank}");
            // The parts of a step are traced as well, and those of no other step.
            for part in ["forward", "backward", "all_reduce", "optimizer"] {
                let found: BTreeSet<u64> = steps(part).into_iter().collect();
                let all: BTreeSet<u64> = scheduled.iter().copied().collect();
                assert_eq!(found, all, "{part} in {name}, rank {rank}");
            }
        }
    }
}

#[test]
fn processes_with_other_schedules_are_told_so_and_write_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for rank in train(folder.path(), ["active=2", "active=3"]) {
        assert!(!rank.status.success(), "{}", rank.stdout);
        let text = rank.stderr;
        for part in [
            "ACCEL_TRACE_SCHEDULE",
            "rank 0 has active=2",
            "rank 1 has active=3",
        ] {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
    }
    assert!(names(folder.path()).is_empty());
}
