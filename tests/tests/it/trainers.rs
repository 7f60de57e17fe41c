//! A trainer reaches the same result even if it is killed, or loses ranks.

use std::path::Path;
use std::process::Command;

use accelerator::track::{RunHistory, RunStatus};
use accelerator_tests::processes::{Ended, launcher, run};
use accelerator_tests::trainers::{Kill, Moment, TrainerJob};
use serde_json::Value;

/// Compares weights, averages, logs, the table and the best model.
#[test]
fn a_trainer_killed_ten_times_ends_bit_equal_to_one_never_disturbed() {
    let dropout = TrainerJob {
        dropout: 0.2,
        ..TrainerJob::default()
    };
    let undisturbed = tempfile::tempdir().unwrap();
    let ended = launch(undisturbed.path(), "", &dropout, &["-n", "2"], "");
    let table = rows(ended.succeeded());
    assert_eq!(table.len(), 1 + 10, "{}", ended.stdout);

    let killed = tempfile::tempdir().unwrap();
    let faults = "rank=1 step=1 kill; rank=0 restart=1 step=5 kill; rank=0 restart=2 save=2 written kill; \
                  rank=1 restart=3 rendezvous exit 9; rank=1 restart=4 step=10 panic; \
                  rank=0 restart=5 save=4 data kill; rank=1 restart=6 step=16 segv; \
                  rank=0 restart=7 save=6 renamed kill; rank=1 restart=8 step=22 kill; \
                  rank=0 restart=9 step=28 exit 4";
    let options = ["-n", "2", "--max-restarts", "20", "--restart-delay", "0"];
    let ended = launch(killed.path(), "", &dropout, &options, faults);
    let is_told = ended.succeeded().contains("after 10 restarts");
    assert!(is_told, "{}\n{}", ended.stdout, ended.stderr);

    let model = |folder: &Path| std::fs::read(folder.join("pushed/model.safetensors")).unwrap();
    assert_eq!(model(killed.path()), model(undisturbed.path()));
    assert_eq!(state(killed.path()), state(undisturbed.path()));
    // A row printed before a kill is printed again.
    let mut printed = rows(&ended.stdout);
    let last = printed.pop();
    assert_eq!(last.as_ref(), table.last());
    assert!(
        printed.iter().all(|row| table.contains(row)),
        "{printed:?}\n{table:?}"
    );
}

/// Ranks are killed in a step, an evaluation, a save or between epochs, and the others train on.
#[test]
fn a_trainer_that_loses_ranks_ends_as_one_never_disturbed() {
    let whole = undisturbed();
    for moment in [
        Moment::Begin,
        Moment::Step(1),
        Moment::Step(5),
        Moment::Step(29),
        Moment::Evaluation(12),
        Moment::Save(12),
        Moment::Epoch(14),
        Moment::Epoch(29),
    ] {
        for rank in 0..3 {
            recovers(&ALONE, sgd(vec![Kill { rank, moment }]), "", 2, &whole);
        }
    }
    let kill = |rank| Kill {
        rank,
        moment: Moment::Step(7),
    };
    recovers(&ALONE, sgd(vec![kill(0), kill(2)]), "", 1, &whole);
}

/// Ranks are killed in the backward pass.
#[test]
fn a_trainer_that_loses_a_rank_in_a_step_trains_on() {
    let whole = undisturbed();
    for step in [0, 9, 28] {
        // There is no rank 2 in the next group.
        let faults = format!("rank=2 step={step} kill");
        recovers(&ALONE, sgd(Vec::new()), &faults, 2, &whole);
    }
}

/// Another process takes the place of a lost rank, and the job has three ranks again.
#[test]
fn a_process_joins_a_trainer_in_place_of_a_lost_rank() {
    let whole = undisturbed();
    for rank in 0..3 {
        let moment = Moment::Step(3);
        let job = TrainerJob {
            // The new process must join before the job ends.
            pause_ms: 40,
            ..sgd(vec![Kill { rank, moment }])
        };
        recovers(&[], job, "", 3, &whole);
    }
}

/// Runs a job that loses ranks, and checks that `ranks` ranks finish it with the same training as the whole job.
fn recovers(options: &[&str], job: TrainerJob, faults: &str, ranks: usize, whole: &Value) {
    let folder = tempfile::tempdir().unwrap();
    let continues = ["-n", "3", "--on-loss", "continue", "--max-restarts", "0"];
    let options = [&continues[..], options].concat();
    let ended = launch(folder.path(), ARGUMENTS, &job, &options, faults);
    let what = format!("{job:?}\n{}\n{}", ended.stdout, ended.stderr);
    let expected = format!("after 0 restarts, on {ranks} ranks");
    assert!(ended.succeeded().contains(&expected), "{what}");
    assert_close(&state(folder.path()), whole, &what);
    let runs = std::fs::read_dir(folder.path().join("runs")).unwrap();
    let runs = runs.filter_map(|entry| RunHistory::read(entry.unwrap().path()).ok());
    let runs: Vec<_> = runs
        .filter(|run| run.status() == RunStatus::Finished)
        .collect();
    assert_eq!(runs.len(), 1, "{what}");
    for (name, steps) in [("train/loss", &LOGGED[..]), ("eval/loss", &EVALUATED)] {
        let points = &runs[0].series(name).unwrap().points;
        let found: Vec<u64> = points.iter().map(|point| point.step).collect();
        assert_eq!(found, steps, "{name}: {what}");
    }
}

const LOGGED: [u64; 15] = [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 29];

const EVALUATED: [u64; 10] = [3, 6, 9, 12, 15, 18, 21, 24, 27, 29];

/// Arguments of an optimizer that does not amplify rounding, and of a tracked run.
const ARGUMENTS: &str = "optim = \"sgd\"\nreport_to = [\"csv\"]";

/// An option of a launcher that does not replace lost ranks.
const ALONE: [&str; 2] = ["--regrow-after", "600"];

/// Returns a job without dropout.
fn sgd(kills: Vec<Kill>) -> TrainerJob {
    TrainerJob {
        kills,
        ..TrainerJob::default()
    }
}

fn undisturbed() -> Value {
    let folder = tempfile::tempdir().unwrap();
    let job = sgd(Vec::new());
    let ended = launch(folder.path(), ARGUMENTS, &job, &["-n", "3"], "");
    assert!(ended.succeeded().contains("on 3 ranks"), "{}", ended.stdout);
    state(folder.path())
}

/// Compares texts and numbers, the latter up to the rounding of sums.
fn assert_close(ours: &Value, other: &Value, what: &str) {
    match (ours, other) {
        (Value::Array(ours), Value::Array(other)) => {
            assert_eq!(ours.len(), other.len(), "{what}");
            for (ours, other) in ours.iter().zip(other) {
                assert_close(ours, other, what);
            }
        }
        (Value::Object(ours), Value::Object(other)) => {
            assert!(ours.keys().eq(other.keys()), "{ours:?} {other:?} {what}");
            for (ours, other) in ours.values().zip(other.values()) {
                assert_close(ours, other, what);
            }
        }
        (Value::Number(ours), Value::Number(other)) => {
            let (ours, other) = (ours.as_f64().unwrap(), other.as_f64().unwrap());
            assert!((ours - other).abs() < 1e-4, "{ours} {other} {what}");
        }
        _ => assert_eq!(ours, other, "{what}"),
    }
}

fn launch(folder: &Path, own: &str, job: &TrainerJob, options: &[&str], faults: &str) -> Ended {
    let arguments = format!(
        "output_dir = {:?}\n\
         ema_decay = 0.8\neval_steps = 3\neval_strategy = \"steps\"\ngradient_accumulation_steps = 2\n\
         learning_rate = 0.01\nload_best_model_at_end = true\nlogging_steps = 2\n\
         metric_for_best_model = \"accuracy\"\nnum_train_epochs = 10\nper_device_eval_batch_size = 5\n\
         per_device_train_batch_size = 16\nsave_steps = 3\nsave_total_limit = 2\nwarmup_ratio = 0.1\n\
         weight_decay = 0.01\ntrain_sampling_strategy = \"random\"\nmax_steps = 29\n{own}",
        folder.join("checkpoints")
    );
    let file = folder.join("arguments.toml");
    std::fs::write(&file, arguments).unwrap();
    let mut command = Command::new(launcher());
    command
        .args(options)
        .arg(env!("CARGO_BIN_EXE_rank"))
        .arg("train-by-arguments")
        .args([&file, &folder.join("pushed")])
        .arg(serde_json::to_string(job).unwrap())
        .env("ACCEL_FAULTS", faults)
        .env("ACCEL_LIVENESS_TIMEOUT", "2");
    run(command)
}

/// Returns what was logged, without times and paths.
fn state(folder: &Path) -> Value {
    let text = std::fs::read(folder.join("pushed/trainer_state.json")).unwrap();
    let mut state: Value = serde_json::from_slice(&text).unwrap();
    let best = state["best_model_checkpoint"].take();
    assert!(best.is_string(), "{state}");
    // It is about the checkpoint that contains the state.
    state.as_object_mut().unwrap().remove("best_is_beside");
    for entry in state["log_history"].as_array_mut().unwrap() {
        let metrics = entry["metrics"].as_array_mut().unwrap();
        metrics.retain(|metric| {
            let name = metric[0].as_str().unwrap();
            !name.ends_with("runtime") && !name.ends_with("per_second")
        });
    }
    state
}

fn rows(printed: &str) -> Vec<String> {
    let rows = printed.lines().filter(|line| line.contains(" | "));
    rows.map(|row| row.trim_start_matches("[0] ").to_owned())
        .collect()
}
