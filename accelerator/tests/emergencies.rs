//! What survivors save when a rank is lost.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod common;

use std::path::PathBuf;
use std::sync::Mutex;

use accelerator::checkpoint::Position;
use accelerator::prelude::*;
use common::checkpoints::{self, Parts, adam, batch_is_cursed};
use common::{ColumnBatcher, columns, distance, line, loader};

#[test]
fn survivors_save_the_last_complete_step() {
    let folder = tempfile::tempdir().unwrap();
    let saved = Mutex::new(Vec::new());
    let lost = accelerator::launch(3, |accelerator| {
        let train = DataLoaderBuilder::new(ColumnBatcher)
            .batch_size(1)
            .num_workers(2)
            .build(columns(12));
        let parts = (line(&accelerator.device()), adam(), train);
        let (mut model, mut optimizer, train) = accelerator.prepare(parts)?;
        let mut looped = || -> Result<()> {
            for batch in train.epoch(0) {
                let batch = batch?;
                if accelerator.rank() == 0 && batch.step() == 2 {
                    return Err(batch_is_cursed());
                }
                let gradients = accelerator.backward(distance(&model, &batch), &model, &batch)?;
                model = optimizer.step(0.05, model.clone(), gradients);
            }
            Ok(())
        };
        let error = looped().unwrap_err();
        if error.is_peer_lost() {
            let text = error.to_string();
            assert!(
                text.contains("rank 0") && text.contains("accumulation_steps is 0"),
                "{text}"
            );
            let parts = (&model, &optimizer, &train);
            let outcome = accelerator.save_emergency(folder.path(), parts)?;
            saved
                .lock()
                .unwrap()
                .push((accelerator.rank(), outcome.is_some()));
        }
        Err::<(), _>(error)
    });
    assert!(lost.unwrap_err().is_config(), "the culprit's error");
    let mut saved = saved.into_inner().unwrap();
    saved.sort_unstable();
    assert_eq!(
        saved,
        [(1, true), (2, false)],
        "the lowest that lives writes"
    );

    let ((_, optimizer, train), position) = resumed_one_by_one(&folder.path().to_owned());
    assert_eq!((position.step(), optimizer.steps()), (2, 2));
    let numbers: Vec<_> = train
        .epoch(0)
        .flat_map(|batch| batch.unwrap().numbers.clone())
        .collect();
    assert_eq!(
        numbers,
        (6..12).collect::<Vec<_>>(),
        "the failed step's samples come again"
    );

    let accelerator = Accelerator::new().unwrap();
    let error = accelerator
        .save_emergency(folder.path(), Object(&1))
        .unwrap_err();
    assert!(
        error.is_misuse() && error.to_string().contains("save_state"),
        "{error}"
    );
}

#[test]
fn of_two_ranks_that_die_together_neither_is_to_write() {
    let folder = tempfile::tempdir().unwrap();
    let saved = Mutex::new(Vec::new());
    // Nobody dies while another still trains.
    let trained = std::sync::Barrier::new(4);
    let lost = accelerator::launch(4, |accelerator| {
        let parts = accelerator.prepare((line(&accelerator.device()), adam(), loader(16, 1)))?;
        let (model, optimizer, train) = checkpoints::train(&accelerator, parts, 2);
        trained.wait();
        match accelerator.rank() {
            0 => return Err(batch_is_cursed()),
            1 => panic!("a panic that the test wants"),
            _ => {}
        }
        let error = accelerator.group().barrier().map_err(Error::from);
        let error = error.unwrap_err();
        assert!(error.is_peer_lost(), "{error:?}");
        let parts = (&model, &optimizer, &train);
        let outcome = accelerator.save_emergency(folder.path(), parts)?;
        let mut saved = saved.lock().unwrap();
        saved.push((accelerator.rank(), outcome.is_some()));
        Err::<(), _>(error)
    });
    let error = lost.unwrap_err();
    assert!(error.is_config() || error.is_panic(), "{error:?}");
    let mut saved = saved.into_inner().unwrap();
    saved.sort_unstable();
    assert_eq!(saved, [(2, true), (3, false)]);

    let accelerator = Accelerator::new().unwrap();
    let parts = (line(&accelerator.device()), adam(), loader(16, 1));
    let parts = accelerator.prepare(parts).unwrap();
    let ((_, optimizer, _), position) = accelerator.resume(folder.path(), parts).unwrap();
    assert_eq!((position.step(), optimizer.steps()), (2, 2));
    assert_eq!(position.world_size_before(), 4);
}

fn resumed_one_by_one(folder: &PathBuf) -> (Parts, Position) {
    let accelerator = Accelerator::new().unwrap();
    let parts = (line(&accelerator.device()), adam(), loader(12, 1));
    let parts = accelerator.prepare(parts).unwrap();
    accelerator.resume(folder, parts).unwrap()
}
