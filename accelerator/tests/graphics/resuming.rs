//! Saving and going on.

use std::path::Path;

use accelerator::Oversubscription;
use accelerator::optim::Manual;
use accelerator::prelude::*;
use burn::nn::Linear;
use burn::optim::AdamWConfig;

use crate::common::{distance, flat, line, loader, of_every_rank};
use crate::harness::is_there;

const EPOCHS: u64 = 2;

/// What ranks end with, from a checkpoint or the beginning; saves after each step into a folder.
fn train(ranks: usize, from: Option<&Path>, into: Option<&Path>) -> Vec<f32> {
    let rows = Accelerator::builder()
        .device(DeviceKind::Wgpu)
        .with_oversubscription(Oversubscription::Allow)
        .accumulation_steps(2)
        .launch(ranks, |accelerator| {
            let line = line(&accelerator.device());
            // The last batch of an epoch leaves rank 1 of 2 idle.
            let parts = (line, AdamWConfig::new().init(), loader(25, 4));
            let mut parts: (Linear, PreparedOptimizer<Manual>, _) = accelerator.prepare(parts)?;
            let mut start = 0;
            if let Some(from) = from {
                let position;
                (parts, position) = accelerator.resume(from, parts)?;
                start = position.epoch();
            }
            let (mut model, mut optimizer, train) = parts;
            for epoch in start..EPOCHS {
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
            Ok(flat(&model))
        });
    of_every_rank(rows.unwrap())
}

#[test]
fn a_run_that_was_resumed_ends_with_the_same_bits() {
    if !is_there() {
        return;
    }
    for ranks in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let undisturbed = train(ranks, None, None);
        assert_eq!(train(ranks, None, Some(folder.path())), undisturbed);
        for number in 1..=3 {
            let from = folder.path().join(format!("checkpoint-{number:06}"));
            assert_eq!(train(ranks, Some(&from), None), undisturbed, "{number}");
        }
    }
}
