//! A process that dies anywhere, also in the midst of a save, is started again and ends with the
//! weights of one that did not die. Needs the feature `faults`.

#![cfg(all(feature = "faults", unix))]
#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod common;

use std::path::Path;
use std::process::{Command, Stdio};

use accelerator::prelude::*;
use burn::optim::AdamWConfig;
use common::{distance, flat, line, loader};

/// Tells the test below that it is the program, and where it saves.
const FOLDER: &str = "RESUME_FAULTS_FOLDER";

/// Five steps with a save after each, from wherever the last life came to; the weights go into a
/// file.
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

/// Runs the program until it succeeds; returns its weights, and how often it was started again.
fn run(faults: &str) -> (String, u32) {
    let folder = tempfile::tempdir().unwrap();
    for restart in 0..10 {
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["the_program", "--exact"])
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
