//! A job that loses ranks continues with the others, in the same processes.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use accelerator::plan::sample_rng_seed;
use accelerator::track::{RunHistory, RunStatus};
use accelerator_tests::processes::{self, Ended, launcher};
use accelerator_tests::resumable::{
    Notice, OptimizerKind, Place, StepRecord, TrainingJob, TrainingResult,
};

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
    let hangs = job.notices.iter().any(|notice| notice.signal == "STOP");
    let mut command = Command::new(launcher());
    command
        .args(options)
        .arg(env!("CARGO_BIN_EXE_rank"))
        .args(["train-resumable", &serde_json::to_string(job).unwrap()])
        .env("ACCEL_LIVENESS_TIMEOUT", if hangs { "1" } else { "5" });
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

/// Options for a job without restarts and replacements.
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

/// Returns the result of an undisturbed job of three ranks.
fn undisturbed() -> TrainingResult {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), Vec::new());
    let result = result(&job, &launch(&ALONE, &job));
    assert_eq!((result.steps, result.world_size), (STEPS, 3));
    result
}

/// Runs a job with these notices, and checks that `ranks` ranks finish it with the same training as the `whole` job.
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

/// Checks that the job is one run with each step once, and that the run records the loss.
fn check_run(folder: &Path, what: &str) {
    let run = finished_run(folder, what);
    assert!(
        run.media.iter().any(|text| text.key == "job/recovery"),
        "{what}"
    );
}

/// Returns the run of a job that has finished, with each step once.
fn finished_run(folder: &Path, what: &str) -> RunHistory {
    let run = only_finished_run(folder, what);
    let steps = run.series("train/loss").unwrap().points.iter();
    let steps: Vec<u64> = steps.map(|point| point.step).collect();
    assert_eq!(steps, (1..=STEPS).collect::<Vec<u64>>(), "{what}");
    run
}

/// Returns the run of a job that has finished. A rank that is lost while it begins a run leaves another one behind.
pub(super) fn only_finished_run(folder: &Path, what: &str) -> RunHistory {
    let runs = std::fs::read_dir(folder.join("runs")).unwrap();
    let runs = runs.filter_map(|entry| RunHistory::read(entry.unwrap().path()).ok());
    let mut runs: Vec<_> = runs
        .filter(|run| run.status() == RunStatus::Finished)
        .collect();
    assert_eq!(runs.len(), 1, "{what}");
    runs.remove(0)
}

/// Kills each rank in the first, a middle and the last step, and a drawn rank in a drawn step (`SEEDS=100` draws more).
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
        recovers(&ALONE, vec![kill(rank, Place::End)], 2, &whole);
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
            // The new process must join before the job ends.
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
    let mut lost_two = 0;
    for seed in 0..6 {
        let folder = tempfile::tempdir().unwrap();
        let job = TrainingJob {
            // The job must not end before the second loss.
            pause_ms: 20,
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
        // The job restarts if the rank is lost after the group has met and before it has begun.
        assert!(result.restarts < 2, "{what}");
        assert_exact(folder.path(), &job);
        assert_close(&result, &whole, what);
        lost_two += u32::from(result.world_size == 2);
    }
    assert!(lost_two > 0, "the second rank was never lost in a recovery");
}

/// Ranks are killed and stopped at drawn times, whatever they do then. `SCHEDULES=200` draws more.
#[test]
fn jobs_end_well_whenever_their_ranks_are_lost() {
    let whole = undisturbed();
    let schedules = std::env::var("SCHEDULES").map_or(4, |schedules| schedules.parse().unwrap());
    let (mut losses, mut restarts) = (0, 0);
    for seed in 0..schedules {
        let folder = tempfile::tempdir().unwrap();
        let job = TrainingJob {
            save_every: 4,
            pause_ms: 15,
            ..job(folder.path(), Vec::new())
        };
        let options = ["-n", "3", "--on-loss", "continue", "--max-restarts", "20"];
        let options = [&options[..], &["--restart-delay", "0", "--grace", "1"]].concat();
        let (ended, struck) = std::thread::scope(|scope| {
            let struck = scope.spawn(|| strike(folder.path(), seed));
            (launch(&options, &job), struck.join().unwrap())
        });
        let what = format!("seed {seed}, {struck:?}: {}", ended.stderr);
        let result = result(&job, &ended);
        assert_exact(folder.path(), &job);
        assert_close(&result, &whole, &what);
        finished_run(folder.path(), &what);
        assert!(ranks_of(folder.path()).is_empty(), "{what}");
        losses += struck.len();
        restarts += result.restarts;
    }
    println!("{losses} ranks were lost, with {restarts} restarts");
    assert!(losses > 0 && restarts < losses as u64);
}

/// Strikes up to three ranks of a job, one after the other; returns the signals.
fn strike(folder: &Path, seed: u64) -> Vec<&'static str> {
    let mut drawn = 0;
    let mut draw = |below: u64| {
        drawn += 1;
        sample_rng_seed(seed, 1, drawn) % below
    };
    let has_begun = || {
        let file = |rank| std::fs::metadata(folder.join(format!("rank-{rank}.jsonl")));
        (0..3).any(|rank| file(rank).is_ok_and(|file| file.len() > 0))
    };
    let until = Instant::now() + Duration::from_secs(60);
    // A job that begins with fewer ranks has smaller batches.
    while !has_begun() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(2));
    }
    let mut struck = Vec::new();
    for _ in 0..=draw(3) {
        let pause = Duration::from_millis(30 + draw(350));
        std::thread::sleep(pause);
        let ranks = ranks_of(folder);
        let Some(rank) = ranks.get(draw(ranks.len().max(1) as u64) as usize) else {
            continue;
        };
        let signal = match draw(4) {
            0 if ranks.len() > 1 => "STOP",
            _ => "KILL",
        };
        let mut kill = Command::new("kill");
        let status = kill.args(["-s", signal]).arg(rank.to_string()).status();
        if status.unwrap().success() {
            struck.push(signal);
        }
        let until = Instant::now() + Duration::from_secs(90);
        while signal == "STOP" && ranks_of(folder).contains(rank) {
            if Instant::now() > until {
                // Nobody notices that a rank is stopped if it is the only one of its group.
                assert_eq!(last_world_size(folder), 1, "a stopped rank was not noticed");
                let mut resume = Command::new("kill");
                resume.args(["-s", "CONT"]).arg(rank.to_string());
                assert!(resume.status().unwrap().success());
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    struck
}

/// Returns the number of ranks in the last step that a rank has recorded.
fn last_world_size(folder: &Path) -> usize {
    let files = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap());
    let files = files.filter(|file| file.file_name().to_string_lossy().ends_with(".jsonl"));
    let last = files.max_by_key(|file| file.metadata().unwrap().modified().unwrap());
    let text = std::fs::read_to_string(last.unwrap().path()).unwrap();
    let step: StepRecord = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    step.world_size
}

/// Returns the processes of the ranks of a job that run.
fn ranks_of(folder: &Path) -> Vec<u32> {
    let of_job = |pid: &u32| {
        let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}"));
        let words = read("cmdline").unwrap_or_default();
        // The arguments of one that has ended are gone.
        let program = words.split('\0').next().unwrap_or_default();
        program == env!("CARGO_BIN_EXE_rank") && words.contains(folder.to_str().unwrap())
    };
    let entries = std::fs::read_dir("/proc").unwrap();
    let pids = entries.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    pids.filter(of_job).collect()
}
