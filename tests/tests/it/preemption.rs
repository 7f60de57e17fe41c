//! A job whose ranks are preempted saves, ends with exit code 75, and loses no step when it is started again.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use accelerator::PREEMPTED_EXIT_CODE;
use accelerator::plan::mix;
use accelerator_tests::processes::{self, Ended, launcher, run_with, wait_until};
use accelerator_tests::resumable::{Notice, Place, StepRecord, TrainingJob, TrainingResult};

use super::restart::assert_exact;

const RANKS: usize = 2;

/// A job of twelve steps in three epochs; unless preempted, it saves after the fifth and the tenth.
fn job(folder: &Path) -> TrainingJob {
    TrainingJob {
        checkpoints: folder.join("checkpoints"),
        result: folder.join("result.json"),
        epochs: 3,
        samples: 97,
        batch_size: 8,
        save_every: 5,
        dropout: 0.2,
        ..TrainingJob::default()
    }
}

fn launched(options: &[&str], job: &TrainingJob) -> Command {
    let mut command = Command::new(launcher());
    command
        .args(["--num-processes", &RANKS.to_string()])
        .args(["--grace", "60"])
        .args(options)
        .arg(env!("CARGO_BIN_EXE_rank"))
        .args(["train-resumable", &serde_json::to_string(job).unwrap()]);
    command
}

fn run(options: &[&str], job: &TrainingJob) -> Ended {
    processes::run(launched(options, job))
}

#[track_caller]
fn assert_code(ended: &Ended, code: u8) {
    let Ended {
        status,
        stdout,
        stderr,
    } = ended;
    assert_eq!(status.code(), Some(i32::from(code)), "{stdout}\n{stderr}");
}

/// Returns the result of a job that must have succeeded.
#[track_caller]
fn result(ended: &Ended, job: &TrainingJob) -> TrainingResult {
    assert_code(ended, 0);
    serde_json::from_slice(&std::fs::read(&job.result).unwrap()).unwrap()
}

fn undisturbed() -> &'static TrainingResult {
    static RESULT: OnceLock<TrainingResult> = OnceLock::new();
    RESULT.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let job = job(folder.path());
        result(&run(&[], &job), &job)
    })
}

/// Asserts that the last attempt has succeeded, and that every step was taken exactly once: even steps without an
/// effect count.
#[track_caller]
fn assert_nothing_is_lost(folder: &Path, ended: &Ended, job: &TrainingJob) {
    let (found, expected) = (result(ended, job), undisturbed());
    assert_eq!(found.weights, expected.weights);
    assert_eq!(found.history, expected.history);
    assert_eq!(found.steps, expected.steps);
    let mut times: BTreeMap<(usize, u64), Vec<u64>> = BTreeMap::new();
    for rank in 0..RANKS {
        let text = std::fs::read_to_string(folder.join(format!("rank-{rank}.jsonl"))).unwrap();
        for line in text.lines() {
            let step: StepRecord = serde_json::from_str(line).unwrap();
            let batches = times.entry((rank, step.step)).or_default();
            batches.push(step.restart);
        }
    }
    assert_eq!(times.len() as u64, RANKS as u64 * expected.steps);
    // A step has two batches, or one at the end of an epoch.
    let is_once =
        |batches: &Vec<u64>| batches.len() <= 2 && batches.iter().all(|x| *x == batches[0]);
    assert!(times.values().all(is_once), "{times:?}");
    assert_exact(folder, job);
}

fn notice(signal: &str, rank: usize, place: Place) -> Notice {
    Notice {
        signal: signal.to_owned(),
        rank,
        place,
    }
}

/// The launcher, which received no signal, restarts the group.
#[test]
fn a_signal_to_one_rank_is_a_restart_without_a_lost_step() {
    let places = [
        // The first step; then another signal while the job saves because of the first one.
        vec![
            notice("TERM", 1, Place::Step(0)),
            notice("TERM", 1, Place::Save(0)),
        ],
        vec![notice("USR1", 0, Place::Step(2))],
        // The last step of an epoch, before its evaluation.
        vec![notice("TERM", 1, Place::Step(3))],
        vec![notice("USR2", 1, Place::Evaluation(0))],
        vec![notice("TERM", 0, Place::Evaluation(2))],
        // A save that is due anyway.
        vec![notice("TERM", 0, Place::Save(0))],
        vec![notice("TERM", 1, Place::Save(0))],
    ];
    for notices in places {
        let folder = tempfile::tempdir().unwrap();
        let job = TrainingJob {
            notices,
            ..job(folder.path())
        };
        let ended = run(&["--max-restarts", "1"], &job);
        let text = "all ranks were preempted, and have saved; restart 1 of 2, which does not count";
        assert!(ended.stderr.contains(text), "{job:?}: {}", ended.stderr);
        assert_eq!(result(&ended, &job).restarts, 1, "{job:?}");
        assert_nothing_is_lost(folder.path(), &ended, &job);
    }
}

#[test]
fn a_signal_to_the_launcher_ends_the_job_with_the_code() {
    for signal in ["TERM", "USR1", "USR2"] {
        let folder = tempfile::tempdir().unwrap();
        let job = TrainingJob {
            pause_ms: 50,
            ..job(folder.path())
        };
        let first = launched(&["--max-restarts", "3"], &job);
        let ended = run_with(first, |launcher| {
            // Any time will do, once all ranks have begun.
            wait_until("steps of both ranks", || {
                let ranks = ["rank-0.jsonl", "rank-1.jsonl"];
                let has_begun = |rank: &&str| {
                    let path = folder.path().join(rank);
                    path.metadata().is_ok_and(|metadata| metadata.len() > 0)
                };
                ranks.iter().all(has_begun).then_some(())
            });
            let mut kill = Command::new("kill");
            kill.args([&format!("-{signal}"), &launcher.to_string()]);
            assert!(kill.status().unwrap().success());
        });
        assert_code(&ended, PREEMPTED_EXIT_CODE);
        let text = "preempted: all ranks have saved";
        assert!(ended.stderr.contains(text), "{signal}: {}", ended.stderr);
        assert!(!ended.stderr.contains("restart 1"), "{}", ended.stderr);
        assert_nothing_is_lost(folder.path(), &run(&[], &job), &job);
    }
}

/// Each attempt takes one step. The launcher restarts such a job once, and then gives up because that does not help.
#[test]
fn a_deadline_and_a_file_end_the_job_until_they_are_gone() {
    let folder = tempfile::tempdir().unwrap();
    let leave = folder.path().join("leave");
    std::fs::write(&leave, "").unwrap();
    let job = job(folder.path());
    let by_file = TrainingJob {
        leave: Some(leave.clone()),
        ..job.clone()
    };
    let by_deadline = TrainingJob {
        seconds: Some(0),
        ..job.clone()
    };
    assert_code(&run(&[], &by_deadline), PREEMPTED_EXIT_CODE);
    assert_code(&run(&[], &by_file), PREEMPTED_EXIT_CODE);
    let ended = run(&["--max-restarts", "3"], &by_file);
    assert_code(&ended, PREEMPTED_EXIT_CODE);
    let text = "it was preempted again within 10 minutes of its restart";
    assert!(ended.stderr.contains(text), "{}", ended.stderr);
    let log = std::fs::read_to_string(folder.path().join("rank-1.jsonl")).unwrap();
    let steps = log.lines().map(|line| {
        let step: StepRecord = serde_json::from_str(line).unwrap();
        step.step
    });
    let steps: BTreeSet<u64> = steps.collect();
    assert_eq!(steps.len(), 4);
    std::fs::remove_file(leave).unwrap();
    assert_nothing_is_lost(folder.path(), &run(&[], &by_file), &job);
}

/// Draws places, ranks and signals from a seed.
#[test]
fn a_hundred_notices_lose_nothing() {
    let mut notices = 0;
    for seed in 0.. {
        let folder = tempfile::tempdir().unwrap();
        for life in 0_u64.. {
            let draw = |what: u64, below: u64| mix(&[seed, life, what]) % below;
            let signal = ["TERM", "USR1", "USR2"][draw(0, 3) as usize];
            let place = match draw(1, 6) {
                0 => Place::Step(0),
                1 => Place::Step(1 + draw(2, 4)),
                2 | 3 => Place::Evaluation(draw(2, 2)),
                _ => Place::Save(0),
            };
            let mut due = vec![notice(signal, draw(3, 2) as usize, place)];
            if draw(4, 2) == 0 {
                due.push(notice("TERM", draw(5, 2) as usize, Place::Save(0)));
            }
            let job = TrainingJob {
                notices: due,
                save_every: 2 + mix(&[seed]) % 4,
                ..job(folder.path())
            };
            let ended = run(&[], &job);
            if ended.status.success() {
                assert_nothing_is_lost(folder.path(), &ended, &job);
                break;
            }
            assert_code(&ended, PREEMPTED_EXIT_CODE);
            notices += 1;
        }
        println!("seed {seed}: {notices} notices so far");
        if notices >= 100 {
            return;
        }
    }
}
