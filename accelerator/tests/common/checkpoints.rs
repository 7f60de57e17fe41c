//! Helpers for tests of checkpoints: a small training, and a look into folders.

use std::path::Path;

use accelerator::optim::Manual;
use accelerator::prelude::*;
use burn::nn::Linear;
use burn::optim::{AdamWConfig, ModuleOptimizer};

use super::{Column, assert_chain, distance, line, loader};

pub type Parts = (Linear, PreparedOptimizer<Manual>, PreparedLoader<Column>);

pub fn adam() -> ModuleOptimizer {
    AdamWConfig::new().init()
}

pub fn prepared(accelerator: &Accelerator) -> Parts {
    let parts = (line(&accelerator.device()), adam(), loader(12, 2));
    accelerator.prepare(parts).unwrap()
}

/// Makes `steps` steps of epoch 0.
pub fn train(accelerator: &Accelerator, parts: Parts, steps: usize) -> Parts {
    let (mut model, mut optimizer, train) = parts;
    for batch in train.epoch(0).take(steps) {
        let batch = batch.unwrap();
        let loss = distance(&model, &batch);
        let gradients = accelerator.backward(loss, &model, &batch).unwrap();
        model = optimizer.step(0.05, model, gradients);
    }
    (model, optimizer, train)
}

/// Trains for `epochs` epochs, or for the rest of them after a checkpoint, and saves after each step into a folder.
pub fn train_epochs(
    accelerator: &Accelerator,
    mut parts: Parts,
    epochs: u64,
    from: Option<&Path>,
    into: Option<&Path>,
) -> accelerator::Result<Parts> {
    let mut start = 0;
    if let Some(from) = from {
        let position;
        (parts, position) = accelerator.resume(from, parts)?;
        start = position.epoch();
    }
    let (mut model, mut optimizer, train) = parts;
    for epoch in start..epochs {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let loss = distance(&model, &batch);
            let gradients = accelerator.backward(loss, &model, &batch)?;
            model = optimizer.step(0.05, model, gradients);
            if let Some(into) = into
                && optimizer.outcome() != StepOutcome::Accumulated
            {
                accelerator.save_state(into, (&model, &optimizer, &train))?;
            }
        }
    }
    Ok((model, optimizer, train))
}

/// Asserts that an error blames the checkpoint, with these words.
#[track_caller]
pub fn misfit(error: &Error, words: &[&str]) {
    assert_chain(error, Error::is_checkpoint, words);
}

/// Returns the sorted names in a folder.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = folder.read_dir().unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

pub fn batch_is_cursed() -> Error {
    Accelerator::builder()
        .accumulation_steps(0)
        .build()
        .unwrap_err()
}

/// Runs `work` without the privileges of root, so that file permissions apply: on a thread that has given up its
/// capabilities.
pub fn without_privileges<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

    let none = CapabilitySet::empty();
    let unprivileged = || {
        let sets = CapabilitySets {
            effective: none,
            permitted: none,
            inheritable: none,
        };
        set_capabilities(None, sets).unwrap();
        work()
    };
    std::thread::scope(|scope| scope.spawn(unprivileged).join().unwrap())
}
