//! A process that dies anywhere, even during a save, is started again and ends with the weights of one that did not
//! die. Needs the feature `faults`.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::{distance, flat, line, loader};
use accelerator::prelude::*;
use burn::optim::AdamWConfig;

/// The variable that makes the test below act as the program, with the folder it saves into.
const FOLDER: &str = "RESUME_FAULTS_FOLDER";

/// Trains five steps from the last checkpoint on, saves after each, and writes the weights into a file.
#[test]
fn the_program() {
    let Some(folder) = std::env::var_os(FOLDER) else {
        return;
    };
    let folder = Path::new(&folder);
    let accelerator = Accelerator::new().unwrap();
    let parts = (
        line(&accelerator.device()),
        AdamWConfig::new().init(),
        loader(10, 2),
    );
    let parts = accelerator.prepare(parts).unwrap();
    let checkpoints = Checkpoints::new(folder.join("checkpoints")).with_total_limit(2);
    let ((mut model, mut optimizer, train), position) =
        accelerator.resume(&checkpoints, parts).unwrap();
    for epoch in position.epoch()..1 {
        for batch in train.epoch(epoch) {
            let batch = batch.unwrap();
            let loss = distance(&model, &batch);
            let gradients = accelerator.backward(loss, &model, &batch).unwrap();
            model = optimizer.step(0.05, model, gradients);
            accelerator
                .save_state(&checkpoints, (&model, &optimizer, &train))
                .unwrap();
        }
    }
    assert_eq!(optimizer.steps(), 5);
    std::fs::write(folder.join("weights"), format!("{:?}", flat(&model))).unwrap();
}

/// The variable that makes the test below act as the program, with the folder it saves into.
const SLOW_FOLDER: &str = "SLOW_SAVES_FOLDER";

/// The time that ranks wait for one that shows no progress.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(4);

/// Saves once on two ranks, in the foreground or in the background, and prints the outcomes.
#[test]
fn the_slow_program() {
    let Some(folder) = std::env::var_os(SLOW_FOLDER) else {
        return;
    };
    let folder = Path::new(&folder);
    let outcomes = Accelerator::builder()
        .progress_timeout(PROGRESS_TIMEOUT)
        .launch(2, |accelerator| {
            let state = Object(&"state");
            let saved = match folder.ends_with("beside") {
                true => accelerator
                    .save_state_async(folder, state)
                    .and_then(|saving| saving.wait()),
                false => accelerator.save_state(folder, state),
            };
            Ok(saved.map(|saved| saved.number()))
        })
        .unwrap();
    for (rank, outcome) in outcomes.iter().enumerate() {
        println!("outcome of rank {rank}: {outcome:?}");
    }
}

/// Runs both ways at the same time, since they mostly sleep.
fn save_slowly_each_way(faults: &str) -> [(&'static str, Vec<String>); 2] {
    std::thread::scope(|scope| {
        ["at-once", "beside"]
            .map(|name| (name, scope.spawn(move || save_slowly(name, faults))))
            .map(|(name, saves)| (name, saves.join().unwrap()))
    })
}

fn save_slowly(name: &str, faults: &str) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["resume_faults::the_slow_program", "--exact", "--nocapture"])
        .env(SLOW_FOLDER, folder.path().join(name))
        .env("ACCEL_FAULTS", faults)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let outcomes = text
        .lines()
        .filter(|line| line.contains("outcome of rank "));
    let outcomes: Vec<_> = outcomes.map(str::to_owned).collect();
    assert_eq!(outcomes.len(), 2, "{text}");
    outcomes
}

/// The save may take any time as long as each piece of it is done in time.
#[test]
fn a_save_that_continues_is_waited_for() {
    let faults = "rank=0 save=1 data slow 2.5s; rank=0 save=1 written slow 2.5s; rank=0 save=1 renamed slow 2.5s";
    for (name, outcomes) in save_slowly_each_way(faults) {
        for outcome in outcomes {
            assert!(outcome.ends_with("Ok(1)"), "{name}: {outcome}");
        }
    }
}

#[test]
fn a_save_that_hangs_is_named() {
    for (name, outcomes) in save_slowly_each_way("rank=0 save=1 data slow 7s") {
        let text = &outcomes[1];
        assert!(
            text.contains("rank 1 waited ") && text.contains(" for rank 0 in "),
            "{name}: {text}"
        );
    }
}

/// Runs the program until it succeeds, and returns its weights and the number of restarts.
fn run(faults: &str) -> (String, u32) {
    let folder = tempfile::tempdir().unwrap();
    for restart in 0..10 {
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["resume_faults::the_program", "--exact"])
            .env(FOLDER, folder.path())
            .env("ACCEL_FAULTS", faults)
            .env("ACCEL_RESTART", restart.to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap();
        if status.success() {
            let weights = std::fs::read_to_string(folder.path().join("weights")).unwrap();
            return (weights, restart);
        }
    }
    panic!("{faults}: no life came to the end");
}

#[test]
fn a_process_that_dies_anywhere_ends_with_the_same_weights() {
    let (undisturbed, restarts) = run("");
    assert_eq!(restarts, 0);
    for faults in [
        "rank=0 step=0 kill",
        "rank=0 step=3 kill; rank=0 restart=1 step=4 segv",
        "rank=0 save=1 begin kill",
        "rank=0 save=3 data kill; rank=0 restart=1 save=3 written kill; rank=0 restart=2 save=4 renamed kill",
        "rank=0 save=1 renamed kill",
        "rank=0 save=2 data disk-full",
        "rank=0 save=5 data fail-write",
    ] {
        let (weights, restarts) = run(faults);
        assert_eq!(weights, undisturbed, "{faults}");
        assert_eq!(restarts as usize, faults.split(';').count(), "{faults}");
    }
}
