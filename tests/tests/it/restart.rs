//! A job that is killed again and again ends like one that was never disturbed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use accelerator::nn::Units;
use accelerator::plan::sample_rng_seed;
use accelerator::track::{RunHistory, RunStatus};
use accelerator_tests::processes::{self, Ended, launcher};
use accelerator_tests::resumable::{OptimizerKind, StepRecord, TrainingJob, TrainingResult};

fn job(folder: &Path, dropout: f64, optimizer: OptimizerKind) -> TrainingJob {
    TrainingJob {
        checkpoints: folder.join("checkpoints"),
        result: folder.join("result.json"),
        epochs: 3,
        // Five batches for each of two ranks and a ragged rest, in windows of two.
        samples: 97,
        batch_size: 8,
        save_every: 2,
        dropout,
        optimizer,
        pause_ms: 0,
        run: Some("digits".to_owned()),
        ..TrainingJob::default()
    }
}

fn launch(options: &[&str], job: &TrainingJob, faults: &str) -> Ended {
    launch_with(Units::Plain, options, job, faults)
}

fn launch_with(units: Units, options: &[&str], job: &TrainingJob, faults: &str) -> Ended {
    let mut command = Command::new(launcher());
    command
        .args(options)
        .arg(env!("CARGO_BIN_EXE_rank"))
        .args(["train-resumable", &serde_json::to_string(job).unwrap()])
        .env("ACCEL_FAULTS", faults)
        .env("ACCEL_UNITS", units.to_string())
        .env("ACCEL_LIVENESS_TIMEOUT", "2");
    processes::run(command)
}

fn result(job: &TrainingJob, ended: &Ended) -> TrainingResult {
    ended.succeeded();
    serde_json::from_slice(&std::fs::read(&job.result).unwrap()).unwrap()
}

/// Returns the records of each step, from the last group of ranks that ran it.
fn history(folder: &Path) -> BTreeMap<u64, Vec<StepRecord>> {
    let mut steps: BTreeMap<u64, Vec<StepRecord>> = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|extension| extension == "jsonl")
        {
            // The last line of a killed rank may be torn.
            let text = std::fs::read_to_string(path).unwrap();
            let lines = text
                .lines()
                .filter_map(|line| serde_json::from_str::<StepRecord>(line).ok());
            lines.for_each(|step| steps.entry(step.step).or_default().push(step));
        }
    }
    for parts in steps.values_mut() {
        let last = parts.iter().map(|step| (step.restart, step.group)).max();
        parts.retain(|step| Some((step.restart, step.group)) == last);
        let ranks: BTreeSet<usize> = parts.iter().map(|step| step.rank).collect();
        assert_eq!(ranks.len(), parts[0].world_size, "{parts:?}");
    }
    steps
}

/// Asserts that each epoch has each sample once.
pub(super) fn assert_exact(folder: &Path, job: &TrainingJob) {
    let mut epochs: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for step in history(folder).into_values().flatten() {
        epochs.entry(step.epoch).or_default().extend(step.samples);
    }
    assert_eq!(epochs.len() as u64, job.epochs);
    for (epoch, samples) in epochs {
        let unique: BTreeSet<u64> = samples.iter().copied().collect();
        assert_eq!(
            unique.len(),
            samples.len(),
            "epoch {epoch} repeats a sample"
        );
        assert_eq!(unique, (0..job.samples as u64).collect(), "epoch {epoch}");
    }
}

/// Ten attempts end in ten ways, three of them within a save.
#[test]
fn a_job_killed_ten_times_ends_bit_equal_to_one_never_disturbed() {
    let reference = tempfile::tempdir().unwrap();
    let reference_job = job(reference.path(), 0.2, OptimizerKind::AdamW);
    let undisturbed = result(&reference_job, &launch(&["-n", "2"], &reference_job, ""));
    assert_eq!(undisturbed.restarts, 0);

    let killed = tempfile::tempdir().unwrap();
    let killed_job = job(killed.path(), 0.2, OptimizerKind::AdamW);
    let faults = "rank=1 step=1 kill; rank=0 restart=1 step=3 kill; \
                  rank=0 restart=2 save=2 written kill; rank=1 restart=3 rendezvous exit 9; \
                  rank=1 restart=4 step=6 panic; rank=0 restart=5 save=4 data kill; \
                  rank=1 restart=6 step=8 segv; rank=0 restart=7 save=5 renamed kill; \
                  rank=1 restart=8 op=14 drop-connection; rank=0 restart=9 step=11 exit 4";
    let options = ["-n", "2", "--max-restarts", "20", "--restart-delay", "0"];
    let ended = launch(&options, &killed_job, faults);
    let disturbed = result(&killed_job, &ended);
    assert_eq!(disturbed.restarts, 10, "{}", ended.stderr);
    assert_eq!(disturbed.parameters, undisturbed.parameters);
    assert_eq!(disturbed.history, undisturbed.history);
    assert_eq!(disturbed.steps, undisturbed.steps);
    assert_exact(killed.path(), &killed_job);
    assert_only_checkpoints(&killed_job.checkpoints);

    let (whole, run) = (run(reference.path()), run(killed.path()));
    assert_eq!(points(&run), points(&whole));
    assert_eq!(table(killed.path()), table(reference.path()));
    assert_eq!(run.status(), RunStatus::Finished);
    // One attempt ended before there was an accelerator.
    assert_eq!((whole.attempts.len(), run.attempts.len()), (1, 10));
    let launches: BTreeSet<_> = run.attempts.iter().map(|attempt| &attempt.launch).collect();
    assert_eq!(launches.len(), 1);
    assert_eq!(run.checkpoints.last(), whole.checkpoints.last());
}

/// Draws up to three faults, one per attempt. A job has 12 steps; a fault before the step with which an attempt begins
/// does not strike.
fn draw_faults(seed: u64) -> String {
    let mut drawn = 0;
    let mut draw = |below: u64| {
        drawn += 1;
        sample_rng_seed(seed, 0, drawn) % below
    };
    let faults = (0..=draw(3)).map(|restart| {
        let (rank, step) = (draw(2), draw(5) + restart * 3);
        let save = step / 2 + 1;
        let (rank, place) = match draw(8) {
            0 => (rank, format!("step={step} kill")),
            1 => (rank, format!("step={step} panic")),
            2 => (rank, format!("step={step} segv")),
            3 => (rank, format!("step={step} exit 4")),
            4 => (rank, format!("op={} drop-connection", 20 + draw(200))),
            5 => (0, format!("save={save} written kill")),
            6 => (0, format!("save={save} data kill")),
            _ => (0, format!("save={save} renamed kill")),
        };
        format!("rank={rank} restart={restart} {place}")
    });
    faults.collect::<Vec<_>>().join("; ")
}

/// `SCHEDULES=50` runs more of them.
#[test]
fn jobs_with_sharded_units_end_bit_equal_whatever_kills_their_ranks() {
    let schedules = std::env::var("SCHEDULES").map_or(3, |schedules| schedules.parse().unwrap());
    let reference = tempfile::tempdir().unwrap();
    let reference_job = job(reference.path(), 0.2, OptimizerKind::AdamW);
    let launch = |options: &[&str], job: &TrainingJob, faults: &str| {
        launch_with(Units::Shard, options, job, faults)
    };
    let undisturbed = result(&reference_job, &launch(&["-n", "2"], &reference_job, ""));
    assert!(undisturbed.held < undisturbed.weights.len());
    let mut restarts = 0;
    for seed in 0..schedules {
        let folder = tempfile::tempdir().unwrap();
        let job = job(folder.path(), 0.2, OptimizerKind::AdamW);
        let faults = draw_faults(seed);
        let options = ["-n", "2", "--max-restarts", "20", "--restart-delay", "0"];
        let ended = launch(&options, &job, &faults);
        let disturbed = result(&job, &ended);
        restarts += disturbed.restarts;
        let stderr = &ended.stderr;
        assert!(
            disturbed.parameters == undisturbed.parameters,
            "{faults}: {stderr}"
        );
        assert_eq!(disturbed.history, undisturbed.history, "{faults}: {stderr}");
        assert_exact(folder.path(), &job);
        assert_only_checkpoints(&job.checkpoints);
    }
    assert!(restarts > 0);
}

/// All attempts but the last end before the first checkpoint.
#[test]
fn a_job_that_is_restarted_without_a_checkpoint_is_one_run() {
    let reference = tempfile::tempdir().unwrap();
    let reference_job = TrainingJob {
        save_every: 100,
        ..job(reference.path(), 0.2, OptimizerKind::AdamW)
    };
    result(&reference_job, &launch(&["-n", "2"], &reference_job, ""));
    let killed = tempfile::tempdir().unwrap();
    let killed_job = TrainingJob {
        save_every: 100,
        ..job(killed.path(), 0.2, OptimizerKind::AdamW)
    };
    let faults = "rank=0 step=5 kill; rank=1 restart=1 step=3 kill; rank=1 restart=2 step=0 kill";
    let options = ["-n", "2", "--max-restarts", "3", "--restart-delay", "0"];
    result(&killed_job, &launch(&options, &killed_job, faults));
    let (whole, disturbed) = (run(reference.path()), run(killed.path()));
    assert_eq!(points(&disturbed), points(&whole));
    assert_eq!(table(killed.path()), table(reference.path()));
    assert_eq!(disturbed.attempts.len(), 4);
    assert!(disturbed.attempts[3].resumed == Some(None));

    // Another launch is another run, with another name.
    result(&killed_job, &launch(&["-n", "1"], &killed_job, ""));
    let runs = std::fs::read_dir(killed.path().join("runs")).unwrap();
    assert_eq!(runs.count(), 2);
}

/// Returns the run of a job, which has only one.
fn run(folder: &Path) -> RunHistory {
    let runs = folder.join("runs");
    assert_eq!(std::fs::read_dir(&runs).unwrap().count(), 1);
    RunHistory::read(runs.join("digits")).unwrap()
}

/// Returns what was logged, in order, with its bits.
fn points(run: &RunHistory) -> Vec<(&str, u64, u64, Option<u64>)> {
    let series = run.series.iter().flat_map(|series| {
        let points = series.points.iter();
        points.map(|point| (&*series.key, point.step, point.value.to_bits(), point.count))
    });
    let points: Vec<_> = series.collect();
    assert!(points.len() > 10);
    points
}

/// Returns the table of the run, without entry numbers and times.
fn table(folder: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(folder.join("runs/digits/metrics.csv")).unwrap();
    let rows = text.lines().map(|row| row.splitn(3, ',').skip(2).collect());
    rows.collect()
}

/// Rank 2 fails in two attempts: the job continues from the checkpoint with two ranks.
#[test]
fn a_job_that_loses_a_slot_continues_with_fewer_ranks_and_misses_no_sample() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), 0.0, OptimizerKind::Sgd);
    let faults = "rank=2 step=3 kill; rank=2 restart=1 step=5 kill";
    let options = ["-n", "2:3", "--max-restarts", "5", "--restart-delay", "0"];
    let ended = launch(&options, &job, faults);
    let shrunk = result(&job, &ended);
    assert_eq!(
        (shrunk.restarts, shrunk.world_size),
        (2, 2),
        "{}",
        ended.stderr
    );
    assert_exact(folder.path(), &job);

    // The global batch stays the same, and so does the trajectory, up to rounding.
    let reference = tempfile::tempdir().unwrap();
    let reference_job = TrainingJob {
        checkpoints: reference.path().join("checkpoints"),
        result: reference.path().join("result.json"),
        ..job
    };
    let whole = result(&reference_job, &launch(&["-n", "3"], &reference_job, ""));
    assert_eq!(whole.steps, shrunk.steps);
    for (at, (left, right)) in whole.parameters.iter().zip(&shrunk.parameters).enumerate() {
        let (left, right) = (f64::from_bits(*left), f64::from_bits(*right));
        assert!(
            (left - right).abs() < 1e-5,
            "value {at}: {left} and {right}"
        );
    }
}

/// The program supports preemptions but not live changes: it saves and is restarted.
#[test]
fn a_job_that_has_a_slot_back_continues_with_more_ranks_and_misses_no_sample() {
    let folder = tempfile::tempdir().unwrap();
    let job = TrainingJob {
        // The job must not end before the process is back.
        pause_ms: 400,
        ..job(folder.path(), 0.0, OptimizerKind::Sgd)
    };
    let faults = "rank=2 step=1 kill; rank=2 restart=1 step=1 kill";
    let options = ["-n", "2:3", "--restart-delay", "0", "--regrow-after", "1"];
    let ended = launch(&options, &job, faults);
    let regrown = result(&job, &ended);
    assert_eq!(
        (regrown.restarts, regrown.world_size),
        (3, 3),
        "{}",
        ended.stderr
    );
    assert_exact(folder.path(), &job);
}

/// Asserts that nothing but checkpoints and `latest` is left: each save sweeps the drafts of dead processes.
fn assert_only_checkpoints(folder: &Path) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(
            name == "latest" || name.starts_with("checkpoint-"),
            "{name} was left behind"
        );
    }
}
