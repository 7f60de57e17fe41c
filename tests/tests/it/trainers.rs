//! A trainer reaches the same result even if it is killed.

use std::path::Path;
use std::process::Command;

use accelerator_tests::processes::{Ended, launcher, run};
use serde_json::Value;

/// Compares weights, averages, logs, the table and the best model.
#[test]
fn a_trainer_killed_ten_times_ends_bit_equal_to_one_never_disturbed() {
    let undisturbed = tempfile::tempdir().unwrap();
    let ended = launch(undisturbed.path(), &["-n", "2"], "");
    let table = rows(ended.succeeded());
    assert_eq!(table.len(), 1 + 10, "{}", ended.stdout);

    let killed = tempfile::tempdir().unwrap();
    let faults = "rank=1 step=1 kill; rank=0 restart=1 step=5 kill; rank=0 restart=2 save=2 written kill; \
                  rank=1 restart=3 rendezvous exit 9; rank=1 restart=4 step=10 panic; \
                  rank=0 restart=5 save=4 data kill; rank=1 restart=6 step=16 segv; \
                  rank=0 restart=7 save=6 renamed kill; rank=1 restart=8 step=22 kill; \
                  rank=0 restart=9 step=28 exit 4";
    let options = ["-n", "2", "--max-restarts", "20", "--restart-delay", "0"];
    let ended = launch(killed.path(), &options, faults);
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

fn launch(folder: &Path, options: &[&str], faults: &str) -> Ended {
    let arguments = format!(
        "output_dir = {:?}\n\
         ema_decay = 0.8\neval_steps = 3\neval_strategy = \"steps\"\ngradient_accumulation_steps = 2\n\
         learning_rate = 0.01\nload_best_model_at_end = true\nlogging_steps = 2\n\
         metric_for_best_model = \"accuracy\"\nnum_train_epochs = 10\nper_device_eval_batch_size = 5\n\
         per_device_train_batch_size = 16\nsave_steps = 3\nsave_total_limit = 2\nwarmup_ratio = 0.1\n\
         weight_decay = 0.01\ntrain_sampling_strategy = \"random\"\nmax_steps = 29\n",
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
