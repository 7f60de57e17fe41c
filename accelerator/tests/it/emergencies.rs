//! Saves by survivors after a rank is lost.

use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::common::checkpoints::{self, Parts, adam, batch_is_cursed};
use crate::common::{
    ColumnBatcher, assert_close, assert_contains, assert_error, assert_errors, columns, flat,
    learn, line, loader, of_every_rank,
};
use accelerator::hook::{CommunicationHook, GradientBucket, HookError, Ranks, SavedBy};
use accelerator::prelude::*;

#[test]
fn survivors_save_the_last_complete_step() {
    let folder = tempfile::tempdir().unwrap();
    let saved = Mutex::new(Vec::new());
    let lost = accelerator::launch(3, |accelerator| {
        let train = LoaderBuilder::new(ColumnBatcher)
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
                model = learn(&accelerator, model.clone(), &mut optimizer, 0.05, &batch)?;
            }
            Ok(())
        };
        let error = looped().unwrap_err();
        if error.is_peer_lost() {
            let words = ["rank 0", "accumulation_steps is 0"];
            assert_contains(&error.to_string(), &words);
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

    let accelerator = Accelerator::new().unwrap();
    let parts = (line(&accelerator.device()), adam(), loader(12, 1));
    let parts: Parts = accelerator.prepare(parts).unwrap();
    let ((_, optimizer, train), position) = accelerator.resume(folder.path(), parts).unwrap();
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

    let error = accelerator
        .save_emergency(folder.path(), Object(&1))
        .unwrap_err();
    assert_error(&error, Error::is_misuse, &["save_state"]);
}

#[test]
fn of_two_ranks_that_die_together_neither_is_to_write() {
    let folder = tempfile::tempdir().unwrap();
    let saved = Mutex::new(Vec::new());
    // No rank dies while another still trains.
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

/// The optimizer is sharded, so survivors save without it. Training resumes from the checkpoint that has all parts.
#[test]
fn a_save_that_lacks_parts_is_passed_over_and_removes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path()).with_total_limit(1);
    let life = |dies_in: Option<u64>| {
        accelerator::launch(2, |accelerator| {
            let train = accelerator.prepare(loader(40, 1))?;
            let train = accelerator.resume_loader(&checkpoints, train)?;
            let (model, optimizer) = (line(&accelerator.device()), Sharded(adam()));
            let (model, optimizer) = accelerator.prepare((model, optimizer))?;
            let parts = (model, optimizer, train);
            let ((mut model, mut optimizer, train), position) =
                accelerator.resume(&checkpoints, parts)?;
            let mut looped = || -> Result<()> {
                for batch in train.epoch(0) {
                    let batch = batch?;
                    model = learn(&accelerator, model.clone(), &mut optimizer, 0.05, &batch)?;
                    if optimizer.steps() == 3 {
                        accelerator.save_state(&checkpoints, (&model, &optimizer, &train))?;
                    }
                    if Some(optimizer.steps()) == dies_in && accelerator.rank() == 0 {
                        return Err(batch_is_cursed());
                    }
                }
                accelerator.save_state(&checkpoints, (&model, &optimizer, &train))?;
                Ok(())
            };
            if let Err(error) = looped() {
                if error.is_peer_lost() {
                    let saved = accelerator.save_emergency(&checkpoints, (&model, &train))?;
                    assert!(saved.is_some());
                }
                return Err(error);
            }
            Ok((flat(&model), position))
        })
    };
    let there = || checkpoints::names(folder.path());
    life(Some(5)).unwrap_err();
    let both = ["checkpoint-000001", "checkpoint-000002", "latest"];
    assert_eq!(there(), both);
    life(Some(7)).unwrap_err();
    assert_eq!(there().len(), 4, "{:?}", there());

    // The loader alone resumes from the same checkpoint.
    let accelerator = Accelerator::new().unwrap();
    let train = accelerator.prepare(loader(40, 1)).unwrap();
    let train = accelerator.resume_loader(&checkpoints, train).unwrap();
    let batch = train.epoch(0).next().unwrap().unwrap();
    assert_eq!(batch.numbers, [6, 7], "three steps of two ranks");

    let (resumed, position) = life(None).unwrap().remove(0);
    assert_eq!((position.checkpoint(), position.step()), (Some(1), 3));
    let words = [
        "checkpoint-000002",
        "checkpoint-000003",
        "emergency",
        "an optimizer",
    ];
    assert_contains(&position.passed_over().join("\n"), &words);
    // All parts are there again, and the limit applies.
    assert_eq!(there(), ["checkpoint-000004", "latest"]);

    let (nowhere, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let undisturbed = Checkpoints::new(nowhere.path());
    let whole = accelerator::launch(2, |accelerator| {
        let (model, optimizer) = (line(&accelerator.device()), Sharded(adam()));
        let parts = accelerator.prepare((model, optimizer, loader(40, 1)))?;
        let (mut model, mut optimizer, train) = parts;
        for batch in train.epoch(0) {
            model = learn(&accelerator, model, &mut optimizer, 0.05, &batch?)?;
        }
        accelerator.save_state(&undisturbed, (&model, &optimizer, &train))?;
        Ok(flat(&model))
    });
    assert_eq!(resumed, of_every_rank(whole.unwrap()));

    // If no checkpoint has all the parts, the error gives the reason for each.
    let checkpoints = Checkpoints::new(elsewhere.path());
    accelerator::launch(2, |accelerator| {
        let model = accelerator.prepare(line(&accelerator.device()))?;
        if accelerator.rank() == 0 {
            return Ok(());
        }
        accelerator.wait_for_everyone().unwrap_err();
        accelerator.save_emergency(&checkpoints, &model).map(drop)
    })
    .unwrap();
    let accelerator = Accelerator::new().unwrap();
    let parts = (line(&accelerator.device()), adam());
    let parts = accelerator.prepare(parts).unwrap();
    let error = accelerator.resume(&checkpoints, parts).unwrap_err();
    checkpoints::misfit(&error, &["part 2 of the tuple", "checkpoint-000001"]);
}

/// The settings of regular saves do not count, nor does a folder that a regular save refuses.
#[test]
fn the_last_state_is_saved_whatever_a_regular_save_refuses() {
    let outer = tempfile::tempdir().unwrap();
    let folder = outer.path().join("run");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("journal.jsonl"), "").unwrap();
    let checkpoints = Checkpoints::new(&folder)
        .with_total_limit(0)
        .with_protected(outer.path().join("other/checkpoint-000001"));
    accelerator::launch(2, |accelerator| {
        if accelerator.rank() == 0 {
            return Ok(());
        }
        accelerator.wait_for_everyone().unwrap_err();
        let saved = accelerator.save_emergency(&checkpoints, Object(&7))?;
        assert!(saved.is_some());
        Ok(())
    })
    .unwrap();
    let saved = folder.join("checkpoint-000001");

    // A training that would save there gets the error when it begins.
    let errors = accelerator::launch(2, |accelerator| {
        Ok(accelerator.resume(&folder, Object(0)).unwrap_err())
    });
    assert_errors(errors.unwrap(), Error::is_misuse, &["tracked run"]);
    let accelerator = Accelerator::new().unwrap();
    let (Object(state), _) = accelerator.resume(saved, Object(0)).unwrap();
    assert_eq!(state, 7);
}

/// An all-reduce that counts its calls.
struct Counting {
    calls: u8,
    /// The step in which it fails on rank 0.
    fails_in: Option<u64>,
    rank: usize,
    restored: Restored,
}

type Restored = Arc<Mutex<Vec<(Vec<u8>, SavedBy)>>>;

impl CommunicationHook for Counting {
    fn name(&self) -> String {
        "counting".to_owned()
    }

    fn reduce(
        &mut self,
        bucket: &mut GradientBucket<'_>,
        ranks: &Ranks<'_>,
    ) -> Result<(), HookError> {
        self.rank = ranks.rank();
        if self.rank == 0 && self.fails_in == Some(bucket.step()) {
            return Err("the codebook is empty".into());
        }
        bucket.all_reduce(ranks)?;
        self.calls += 1;
        Ok(())
    }

    fn save(&self) -> Result<Vec<u8>, HookError> {
        Ok(vec![self.rank as u8, self.calls])
    }

    fn restore(&mut self, state: &[u8], saved_by: SavedBy) -> Result<(), HookError> {
        let state = state.to_vec();
        self.restored.lock().unwrap().push((state, saved_by));
        Ok(())
    }
}

/// The way in which rank 0 ends, in the third step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Dies {
    BeforeItsStep,
    InItsHook,
    Never,
}

/// Trains to the end of an epoch from the folder's checkpoint, if it has one. Survivors save there.
fn with_hook(ranks: usize, folder: &Path, dies: Dies) -> (Result<Vec<f32>>, Restored) {
    let restored = Restored::default();
    let seen = restored.clone();
    let builder = Accelerator::builder().communication_hook(move || Counting {
        calls: 0,
        fails_in: (dies == Dies::InItsHook).then_some(2),
        rank: 9,
        restored: seen.clone(),
    });
    let outcome = builder.launch(ranks, |accelerator| {
        let parts = (line(&accelerator.device()), adam(), loader(12, 1));
        let parts: Parts = accelerator.prepare(parts)?;
        let ((mut model, mut optimizer, train), _) = accelerator.resume(folder, parts)?;
        let mut looped = || -> Result<()> {
            for batch in train.epoch(0) {
                let batch = batch?;
                let is_third = accelerator.rank() == 0 && batch.step() == 2;
                if is_third && dies == Dies::BeforeItsStep {
                    return Err(batch_is_cursed());
                }
                model = learn(&accelerator, model.clone(), &mut optimizer, 0.05, &batch)?;
            }
            Ok(())
        };
        if let Err(error) = looped() {
            if accelerator.rank() > 0 {
                assert!(error.is_peer_lost(), "{error:?}");
                accelerator.save_emergency(folder, (&model, &optimizer, &train))?;
            }
            return Err(error);
        }
        Ok(flat(&model))
    });
    (outcome.map(of_every_rank), restored)
}

#[test]
fn what_the_writers_hook_keeps_is_for_every_rank() {
    let nowhere = tempfile::tempdir().unwrap();
    let whole = with_hook(3, nowhere.path(), Dies::Never).0.unwrap();
    for dies in [Dies::BeforeItsStep, Dies::InItsHook] {
        let folder = tempfile::tempdir().unwrap();
        let (lost, restored) = with_hook(3, folder.path(), dies);
        let error = lost.unwrap_err();
        let is_culprits = match dies {
            Dies::InItsHook => error.is_hook(),
            _ => error.is_config(),
        };
        assert!(is_culprits, "{dies:?}: {error:?}");
        assert!(restored.lock().unwrap().is_empty());
        // Rank 1 of the two that are left writes, and can ask only its own hook.
        let checkpoint = folder.path().join("checkpoint-000001");
        let hooks = checkpoints::names(&checkpoint);
        let hooks: Vec<_> = hooks
            .iter()
            .filter(|name| name.starts_with("hook"))
            .collect();
        assert_eq!(hooks, ["hook-rank-00001.bin"], "{dies:?}");
        for ranks in 1..=3 {
            let (resumed, restored) = with_hook(ranks, folder.path(), Dies::Never);
            // Two steps were complete, with one bucket each.
            let state = (vec![1, 2], SavedBy::OneForAll);
            assert_eq!(*restored.lock().unwrap(), vec![state; ranks], "{dies:?}");
            let resumed = resumed.unwrap();
            if ranks == 3 {
                assert_eq!(resumed, whole, "{dies:?}");
            }
            assert_close(&resumed, &whole, 1e-5);
        }
    }
}
