//! Saving and resuming.

use std::path::Path;

use accelerator::Oversubscription;
use accelerator::prelude::*;

use crate::common::checkpoints::{adam, train_epochs};
use crate::common::{flat, line, loader, of_every_rank};
use crate::harness::is_there;

const EPOCHS: u64 = 2;

/// Returns the final weights of ranks that start at a checkpoint or at the beginning and save into a folder after each
/// step.
fn train(ranks: usize, from: Option<&Path>, into: Option<&Path>) -> Vec<f32> {
    let rows = Accelerator::builder()
        .device(BackendKind::Wgpu)
        .oversubscription(Oversubscription::Allow)
        .accumulation_steps(2)
        .launch(ranks, |accelerator| {
            let line = line(&accelerator.device());
            // The last batch of an epoch leaves rank 1 of 2 idle.
            let parts = (line, adam(), loader(25, 4));
            let parts = accelerator.prepare(parts)?;
            let (model, ..) = train_epochs(&accelerator, parts, EPOCHS, from, into)?;
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
