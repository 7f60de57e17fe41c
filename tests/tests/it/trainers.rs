//! A trainer reaches the same result even if it is killed, or loses ranks.

use std::path::Path;
use std::process::Command;

use accelerator_tests::processes::{Ended, launcher, run};
use accelerator_tests::trainers::{Kill, KillPoint, TrainerJob};
use serde_json::Value;

use super::recovery::only_finished_run;

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

/// Ranks are killed in a step, an evaluation or a save, or between epochs, and the others continue.
#[test]
fn a_trainer_that_loses_ranks_ends_as_one_never_disturbed() {
    let expected = undisturbed();
    for point in [
        KillPoint::Begin,
        KillPoint::Step(1),
        KillPoint::Step(5),
        KillPoint::Step(29),
        KillPoint::Evaluation(12),
        KillPoint::Save(12),
        KillPoint::Epoch(14),
        KillPoint::Epoch(29),
    ] {
        for rank in 0..3 {
            assert_recovers(
                &NO_REPLACEMENT,
                without_dropout(vec![Kill { rank, point }]),
                "",
                2,
                &expected,
            );
        }
    }
    let kill = |rank| Kill {
        rank,
        point: KillPoint::Step(7),
    };
    assert_recovers(
        &NO_REPLACEMENT,
        without_dropout(vec![kill(0), kill(2)]),
        "",
        1,
        &expected,
    );
}

/// Ranks are killed in the backward pass.
#[test]
fn a_trainer_that_loses_a_rank_in_a_step_continues() {
    let expected = undisturbed();
    for step in [0, 9, 28] {
        // The next group has no rank 2, so the fault occurs only once.
        let faults = format!("rank=2 step={step} kill");
        assert_recovers(
            &NO_REPLACEMENT,
            without_dropout(Vec::new()),
            &faults,
            2,
            &expected,
        );
    }
}

/// Another process takes the place of a lost rank, and the job has three ranks again.
#[test]
fn a_process_joins_a_trainer_in_place_of_a_lost_rank() {
    let expected = undisturbed();
    for rank in 0..3 {
        let point = KillPoint::Step(3);
        let job = TrainerJob {
            // The new process must join before the job ends.
            pause_ms: 40,
            ..without_dropout(vec![Kill { rank, point }])
        };
        assert_recovers(&[], job, "", 3, &expected);
    }
}

/// Nobody has the lost rank's part of the optimizer's state.
#[test]
fn a_trainer_with_a_sharded_optimizer_is_restarted_after_a_loss() {
    let own = "optim = \"sgd\"\nmomentum = 0.9\nsharded_optimizer = true";
    let trained = |options: &[&str], faults| {
        let folder = tempfile::tempdir().unwrap();
        let job = without_dropout(Vec::new());
        let ended = launch(folder.path(), own, &job, options, faults);
        ended.succeeded();
        (state(folder.path()), ended)
    };
    let (expected, _) = trained(&["-n", "3"], "");
    let options = ["-n", "3", "--on-loss", "continue", "--restart-delay", "0"];
    let (restarted, ended) = trained(&options, "rank=1 restart=0 step=7 kill");
    let what = format!("{}\n{}", ended.stdout, ended.stderr);
    assert!(ended.stdout.contains("after 1 restarts, on 3"), "{what}");
    let warning = "a sharded optimizer cannot continue without a lost rank";
    assert!(what.contains(warning), "{what}");
    assert_eq!(restarted, expected, "{what}");
}

/// Runs a job that loses ranks, and checks that `ranks` ranks finish it with the result of the undisturbed job.
fn assert_recovers(
    options: &[&str],
    job: TrainerJob,
    faults: &str,
    ranks: usize,
    expected: &Value,
) {
    let folder = tempfile::tempdir().unwrap();
    let continues = ["-n", "3", "--on-loss", "continue", "--max-restarts", "0"];
    let options = [&continues[..], options].concat();
    let ended = launch(folder.path(), ARGUMENTS, &job, &options, faults);
    let what = format!("{job:?}\n{}\n{}", ended.stdout, ended.stderr);
    let last = format!("after 0 restarts, on {ranks} ranks");
    assert!(ended.succeeded().contains(&last), "{what}");
    assert_close(&state(folder.path()), expected, &what);
    let run = only_finished_run(folder.path(), &what);
    for (name, steps) in [("train/loss", &LOGGED[..]), ("eval/loss", &EVALUATED)] {
        let points = &run.series(name).unwrap().points;
        let found: Vec<u64> = points.iter().map(|point| point.step).collect();
        assert_eq!(found, steps, "{name}: {what}");
    }
}

const LOGGED: [u64; 15] = [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 29];

const EVALUATED: [u64; 10] = [3, 6, 9, 12, 15, 18, 21, 24, 27, 29];

/// Selects an optimizer that does not amplify rounding errors, and tracks the run.
const ARGUMENTS: &str = "optim = \"sgd\"\nreport_to = [\"csv\"]";

/// Delays the replacement of a lost rank until after the end of the job.
const NO_REPLACEMENT: [&str; 2] = ["--regrow-after", "600"];

/// Returns a job without dropout.
fn without_dropout(kills: Vec<Kill>) -> TrainerJob {
    TrainerJob {
        kills,
        ..TrainerJob::default()
    }
}

fn undisturbed() -> Value {
    let folder = tempfile::tempdir().unwrap();
    let job = without_dropout(Vec::new());
    let ended = launch(folder.path(), ARGUMENTS, &job, &["-n", "3"], "");
    assert!(ended.succeeded().contains("on 3 ranks"), "{}", ended.stdout);
    state(folder.path())
}

/// Checks that two JSON values are equal; numbers may differ by less than 1e-4.
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
