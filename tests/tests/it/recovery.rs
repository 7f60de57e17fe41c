//! A job that loses ranks continues with the others, in the same processes.

use std::path::Path;
use std::process::Command;

use accelerator::plan::sample_rng_seed;
use accelerator::track::{RunHistory, RunStatus};
use accelerator_tests::processes::{self, Ended, launcher};
use accelerator_tests::resumable::{Notice, OptimizerKind, Place, TrainingJob, TrainingResult};

use super::restart::assert_exact;

/// The optimizer steps of a job.
const STEPS: u64 = 12;

fn job(folder: &Path, notices: Vec<Notice>) -> TrainingJob {
    TrainingJob {
        // Nothing is saved.
        checkpoints: folder.join("checkpoints"),
        save_every: 1000,
        result: folder.join("result.json"),
        epochs: 3,
        samples: 145,
        batch_size: 8,
        optimizer: OptimizerKind::Sgd,
        double: true,
        live: true,
        notices,
        run: Some("digits".to_owned()),
        ..TrainingJob::default()
    }
}

fn launch(options: &[&str], job: &TrainingJob) -> Ended {
    let mut command = Command::new(launcher());
    command
        .args(options)
        .arg(env!("CARGO_BIN_EXE_rank"))
        .args(["train-resumable", &serde_json::to_string(job).unwrap()])
        .env("ACCEL_LIVENESS_TIMEOUT", "1");
    processes::run(command)
}

fn result(job: &TrainingJob, ended: &Ended) -> TrainingResult {
    ended.succeeded();
    serde_json::from_slice(&std::fs::read(&job.result).unwrap()).unwrap()
}

fn kill(rank: usize, place: Place) -> Notice {
    signal("KILL", rank, place)
}

fn signal(signal: &str, rank: usize, place: Place) -> Notice {
    Notice {
        signal: signal.to_owned(),
        rank,
        place,
    }
}

/// Without restarts and replacements.
const ALONE: [&str; 8] = [
    "-n",
    "3",
    "--on-loss",
    "continue",
    "--max-restarts",
    "0",
    "--regrow-after",
    "600",
];

/// Returns the result of three ranks that are not disturbed.
fn undisturbed() -> TrainingResult {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), Vec::new());
    let result = result(&job, &launch(&ALONE, &job));
    assert_eq!((result.steps, result.world_size), (STEPS, 3));
    result
}

/// Runs a job with these notices, and checks that so many ranks end it with the same training.
fn recovers(options: &[&str], notices: Vec<Notice>, ranks: usize, whole: &TrainingResult) -> Ended {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), notices);
    let ended = launch(options, &job);
    let what = format!("{:?}: {}", job.notices, ended.stderr);
    let result = result(&job, &ended);
    assert_eq!((result.restarts, result.world_size), (0, ranks), "{what}");
    assert_eq!(result.steps, whole.steps, "{what}");
    assert_eq!(result.history, whole.history, "{what}");
    assert_exact(folder.path(), &job);
    assert!(!job.checkpoints.exists(), "{what}");
    assert_close(&result, whole, &what);
    check_run(folder.path(), &what);
    ended
}

/// Checks that the weights are those of an undisturbed job, up to the rounding of sums.
fn assert_close(result: &TrainingResult, whole: &TrainingResult, what: &str) {
    for (ours, other) in result.weights.iter().zip(&whole.weights) {
        let (ours, other) = (f64::from_bits(*ours), f64::from_bits(*other));
        assert!((ours - other).abs() < 1e-9, "{ours}, {other}: {what}");
    }
}

/// Checks that the job is one run with each step once, and that the run tells of the loss.
fn check_run(folder: &Path, what: &str) {
    let run = RunHistory::read(folder.join("runs/digits")).unwrap();
    assert_eq!(run.status(), RunStatus::Finished, "{what}");
    let steps = run.series("train/loss").unwrap().points.iter();
    let steps: Vec<u64> = steps.map(|point| point.step).collect();
    assert_eq!(steps, (1..=STEPS).collect::<Vec<u64>>(), "{what}");
    assert!(
        run.media.iter().any(|text| text.key == "job/recovery"),
        "{what}"
    );
}

/// Each rank is killed in the first, the last and a middle step, and at a drawn one. `SEEDS=100` draws more.
#[test]
fn any_of_three_ranks_may_be_killed_without_a_checkpoint() {
    let whole = undisturbed();
    for rank in 0..3 {
        for step in [0, 4, STEPS - 1] {
            recovers(&ALONE, vec![kill(rank, Place::Step(step))], 2, &whole);
        }
    }
    let seeds = std::env::var("SEEDS").map_or(3, |seeds| seeds.parse().unwrap());
    for seed in 0..seeds {
        let draw = |at, below| sample_rng_seed(seed, 0, at) % below;
        let (rank, step) = (draw(0, 3) as usize, draw(1, STEPS));
        recovers(&ALONE, vec![kill(rank, Place::Step(step))], 2, &whole);
    }
}

#[test]
fn a_rank_may_be_lost_in_a_save_or_an_evaluation() {
    let whole = undisturbed();
    for rank in 0..3 {
        recovers(&ALONE, vec![kill(rank, Place::Evaluation(1))], 2, &whole);
    }
    let folder = tempfile::tempdir().unwrap();
    let job = TrainingJob {
        save_every: 5,
        ..job(folder.path(), vec![kill(1, Place::Save(0))])
    };
    let ended = launch(&ALONE, &job);
    let result = result(&job, &ended);
    assert_eq!(
        (result.restarts, result.world_size),
        (0, 2),
        "{}",
        ended.stderr
    );
    assert_exact(folder.path(), &job);
    check_run(folder.path(), &ended.stderr);
}

#[test]
fn two_of_three_ranks_may_be_lost_at_once_or_one_after_the_other() {
    let whole = undisturbed();
    for (first, second) in [(1, 0), (1, 2), (2, 0)] {
        let at = Place::Step(5);
        recovers(&ALONE, vec![kill(first, at), kill(second, at)], 1, &whole);
    }
}

#[test]
fn a_rank_that_hangs_is_ended_and_the_others_continue() {
    let whole = undisturbed();
    let notices = vec![signal("STOP", 2, Place::Step(5))];
    recovers(&ALONE, notices, 2, &whole);
}

#[test]
fn too_few_survivors_are_restarted_as_without_recovery() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), vec![kill(1, Place::Step(5))]);
    let options = [
        "-n",
        "3",
        "--on-loss",
        "continue:3",
        "--max-restarts",
        "1",
        "--restart-delay",
        "0",
    ];
    let ended = launch(&options, &job);
    let result = result(&job, &ended);
    assert_eq!(
        (result.restarts, result.world_size),
        (1, 3),
        "{}",
        ended.stderr
    );
    assert_exact(folder.path(), &job);
}

/// The job shrinks, and grows when the new process has joined.
#[test]
fn another_process_replaces_a_lost_rank() {
    let whole = undisturbed();
    let options = ["-n", "3", "--on-loss", "continue", "--max-restarts", "0"];
    for rank in 0..3 {
        let folder = tempfile::tempdir().unwrap();
        let job = TrainingJob {
            // The process must be there before the job ends.
            pause_ms: 100,
            ..job(folder.path(), vec![kill(rank, Place::Step(1))])
        };
        let ended = launch(&options, &job);
        let result = result(&job, &ended);
        assert_eq!(
            (result.restarts, result.world_size),
            (0, 3),
            "{}",
            ended.stderr
        );
        assert_exact(folder.path(), &job);
        check_run(folder.path(), &ended.stderr);
        assert_close(&result, &whole, &ended.stderr);
    }
}

/// A rank dies while the others form the group after the first loss.
#[test]
fn a_rank_may_be_lost_while_the_others_recover() {
    let whole = undisturbed();
    for seed in 0..6 {
        let folder = tempfile::tempdir().unwrap();
        let job = TrainingJob {
            batch_size: 6,
            second_kill: Some((2, 40 + 25 * seed)),
            ..job(folder.path(), vec![kill(1, Place::Step(5))])
        };
        let options = [
            "-n",
            "4",
            "--on-loss",
            "continue",
            "--regrow-after",
            "600",
            "--restart-delay",
            "0",
        ];
        let ended = launch(&options, &job);
        let result = result(&job, &ended);
        let what = &ended.stderr;
        // In the moment in which the group has met and not begun, the job restarts.
        assert!(result.restarts < 2, "{what}");
        assert_exact(folder.path(), &job);
        assert_close(&result, &whole, what);
    }
}
