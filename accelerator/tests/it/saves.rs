//! Saves: agreed on by all ranks, complete or absent, and with errors on every rank.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::checkpoints::{batch_is_cursed, misfit, names, prepared, train};
use crate::common::{assert_chain, assert_error, assert_errors, counted, distance, line};
use accelerator::prelude::*;

#[test]
fn between_micro_steps_nothing_is_saved_on_any_rank() {
    let folder = tempfile::tempdir().unwrap();
    let errors = Accelerator::builder()
        .accumulation_steps(2)
        .launch(2, |accelerator| {
            let (model, optimizer, train) = prepared(&accelerator);
            let batch = train.epoch(0).next().unwrap()?;
            let gradients = accelerator.backward(distance(&model, &batch), &model, &batch)?;
            assert!(gradients.is_accumulating());
            let parts = (&model, &optimizer, &train);
            Ok(accelerator.save_state(folder.path(), parts).unwrap_err())
        })
        .unwrap();
    assert_errors(errors, Error::is_misuse, &["1 micro-steps"]);
    assert!(names(folder.path()).is_empty());
}

#[test]
fn folders_that_differ_are_shown_and_nothing_is_saved_or_read() {
    let folder = tempfile::tempdir().unwrap();
    let outcomes = accelerator::launch(3, |accelerator| {
        let own = ["a", "b", "a"][accelerator.rank()];
        let own = folder.path().join(own);
        let saved = accelerator.save_state(&own, Object(&1)).unwrap_err();
        let beside = accelerator.save_state_async(&own, Object(&1)).map(drop);
        let resumed = accelerator.resume(&own, Object(0)).map(drop);
        accelerator.wait_for_everyone()?;
        // Ranks that agree can save.
        accelerator.save_state(folder.path().join("c"), Object(&1))?;
        Ok([saved, beside.unwrap_err(), resumed.unwrap_err()])
    })
    .unwrap();
    let [a, b] = ["a", "b"].map(|name| folder.path().join(name).display().to_string());
    for error in outcomes.into_iter().flatten() {
        let word = format!("ranks 0, 2: {a}; rank 1: {b}");
        assert_error(&error, Error::is_config, &[&word]);
    }
    assert!(names(&folder.path().join("a")).is_empty());
    assert!(!folder.path().join("b").exists());
}

#[test]
fn an_average_of_a_model_that_was_not_prepared_is_told_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let errors = accelerator::launch(2, |accelerator| {
        let fresh = line(&accelerator.device());
        let ema = Ema::new(&fresh, 0.9);
        let model = accelerator.prepare(line(&accelerator.device()))?;
        let error = accelerator.save_state(folder.path(), (&model, &ema));
        Ok(error.unwrap_err())
    })
    .unwrap();
    for error in errors {
        let words = [
            "an `Ema` cannot be saved",
            "Begin it with the model that `prepare` gave",
        ];
        assert_chain(&error, Error::is_misuse, &words);
    }
    assert!(names(folder.path()).is_empty());
}

#[test]
fn ranks_that_save_different_things_are_told_so() {
    let folder = tempfile::tempdir().unwrap();
    let errors = accelerator::launch(2, |accelerator| {
        let (_, mut optimizer, _) = prepared(&accelerator);
        if accelerator.rank() == 1 {
            // Rank 1 makes one step more than rank 0.
            let alone = Accelerator::new()?;
            (_, optimizer, _) = train(&alone, prepared(&alone), 1);
        }
        Ok(accelerator
            .save_state(folder.path(), &optimizer)
            .unwrap_err())
    })
    .unwrap();
    for error in errors {
        let words = ["rank 1 has an optimizer after 1 steps"];
        assert_chain(&error, Error::is_misuse, &words);
    }
    assert!(names(folder.path()).is_empty(), "nothing is left");
}

#[test]
fn an_optimizer_is_saved_with_its_model() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::new().unwrap();
    let (_, optimizer, _) = train(&accelerator, prepared(&accelerator), 1);
    let error = accelerator
        .save_state(folder.path(), &optimizer)
        .unwrap_err();
    assert_error(&error, Error::is_misuse, &["together with its model"]);
    assert!(names(folder.path()).is_empty());
}

#[test]
fn c18_of_eleven_checkpoints_the_last_two_stay() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::new().unwrap();
    let checkpoints = Checkpoints::new(folder.path()).with_total_limit(2);
    for number in 1..=11 {
        let saved = accelerator
            .save_state(&checkpoints, Object(&number))
            .unwrap();
        assert_eq!(saved.number(), number);
    }
    assert_eq!(
        names(folder.path()),
        ["checkpoint-000010", "checkpoint-000011", "latest"]
    );
    let error = accelerator
        .save_state(
            Checkpoints::new(folder.path()).with_total_limit(0),
            Object(&0),
        )
        .unwrap_err();
    assert!(error.is_config(), "{error:?}");
}

#[cfg(unix)]
#[test]
fn a_protected_checkpoint_stays_however_its_path_is_spelt() {
    let outer = tempfile::tempdir().unwrap();
    let folder = outer.path().join("out");
    let accelerator = Accelerator::new().unwrap();
    let best = accelerator.save_state(&folder, Object(&0)).unwrap();
    let name = best.path().file_name().unwrap();
    let link = outer.path().join("link");
    std::os::unix::fs::symlink(&folder, &link).unwrap();
    let spellings = [
        outer.path().join("./out").join(name),
        outer.path().join("link/../out").join(name),
        link.join(name),
    ];
    for (at, spelling) in spellings.iter().enumerate() {
        for path in [&folder, &link, &outer.path().join("./out/.")] {
            let checkpoints = Checkpoints::new(path)
                .with_total_limit(2)
                .with_protected(spelling);
            for state in 1..=3 {
                accelerator
                    .save_state(&checkpoints, Object(&state))
                    .unwrap();
            }
            assert!(best.path().exists(), "{at}: {path:?}");
            assert_eq!(names(&folder).len(), 3, "two of them, and `latest`");
        }
    }
}

#[test]
fn a_protected_path_of_another_folder_is_refused_before_anything_is_saved() {
    let outer = tempfile::tempdir().unwrap();
    let folder = outer.path().join("out");
    let accelerator = Accelerator::new().unwrap();
    let stranger = accelerator
        .save_state(outer.path().join("other"), Object(&0))
        .unwrap();
    accelerator.save_state(&folder, Object(&0)).unwrap();
    for path in [stranger.path(), &folder, Path::new("checkpoint-000001")] {
        let checkpoints = Checkpoints::new(&folder)
            .with_total_limit(1)
            .with_protected(path);
        let error = accelerator
            .save_state(&checkpoints, Object(&1))
            .unwrap_err();
        let word = format!("`{}` is not in", path.display());
        assert_error(&error, Error::is_config, &[&word]);
    }
    assert_eq!(names(&folder), ["checkpoint-000001", "latest"]);
    // A checkpoint that is gone needs no protection.
    let checkpoints = Checkpoints::new(&folder).with_protected(folder.join("checkpoint-000009"));
    accelerator.save_state(&checkpoints, Object(&1)).unwrap();
}

#[cfg(unix)]
#[test]
fn where_a_protected_path_cannot_be_resolved_nothing_is_removed() {
    let outer = tempfile::tempdir().unwrap();
    let folder = outer.path().join("out");
    let best = folder.join("best");
    let accelerator = Accelerator::new().unwrap();
    let checkpoints = Checkpoints::new(&folder)
        .with_total_limit(1)
        .with_protected(&best);
    let save = |checkpoints: &Checkpoints| accelerator.save_state(checkpoints, Object(&1));
    assert!(!folder.exists());
    save(&checkpoints).unwrap();
    // A link to itself cannot be followed.
    std::os::unix::fs::symlink(&best, &best).unwrap();
    for number in 2..=3 {
        assert_eq!(save(&checkpoints).unwrap().number(), number);
    }
    assert_eq!(names(&folder).len(), 5, "{:?}", names(&folder));
    std::fs::remove_file(&best).unwrap();
    save(&checkpoints).unwrap();
    assert_eq!(names(&folder), ["checkpoint-000004", "latest"]);

    let endless = outer.path().join("endless");
    std::os::unix::fs::symlink(&endless, &endless).unwrap();
    let checkpoints = checkpoints.with_protected(endless.join("checkpoint-000001"));
    let error = save(&checkpoints).unwrap_err();
    assert!(error.is_io(), "{error:?}");
}

#[test]
fn another_job_that_saves_into_the_folder_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (Accelerator::new().unwrap(), Accelerator::new().unwrap());
    let save = |job: &Accelerator| job.save_state(folder.path(), Object(&0));
    save(&ours).unwrap();
    save(&ours).unwrap();
    // The other job may have resumed from the first one's checkpoint.
    assert_eq!(save(&theirs).unwrap().number(), 3);
    assert_eq!(save(&theirs).unwrap().number(), 4);
    let error = save(&ours).unwrap_err();
    misfit(&error, &["saved checkpoint 2, and 4 is there"]);
    // Nothing of it is left behind, and the other job is not disturbed.
    assert_eq!(save(&theirs).unwrap().number(), 5);
    assert_eq!(names(folder.path()).len(), 6);
    // Another folder works.
    let elsewhere = tempfile::tempdir().unwrap();
    let saved = ours.save_state(elsewhere.path(), Object(&0)).unwrap();
    assert_eq!(saved.number(), 1);
}

#[test]
fn c19_hooks_add_files_that_are_verified_and_belong_to_one_folder_value() {
    let folder = tempfile::tempdir().unwrap();
    let seen = std::sync::Arc::new(Mutex::new(Vec::new()));
    let notes = seen.clone();
    let checkpoints = Checkpoints::new(folder.path())
        .before_save(|draft| Ok(std::fs::write(draft.path().join("note.txt"), "hello")?))
        .after_resume(move |resumed| {
            let note = std::fs::read_to_string(resumed.path().join("note.txt"))?;
            notes.lock().unwrap().push((resumed.number(), note));
            Ok(())
        });
    accelerator::launch(2, |accelerator| {
        accelerator.save_state(&checkpoints, Object(&1))?;
        accelerator.resume(&checkpoints, Object(0)).map(|_| ())
    })
    .unwrap();
    assert_eq!(
        *seen.lock().unwrap(),
        [(1, "hello".to_owned())],
        "on rank 0 only"
    );

    let accelerator = Accelerator::new().unwrap();
    std::fs::write(folder.path().join("checkpoint-000001/note.txt"), "hellO").unwrap();
    let error = accelerator.resume(&checkpoints, Object(0)).unwrap_err();
    misfit(&error, &["note.txt"]);

    // The hooks belong to the value, so one without them has none.
    let plain = Checkpoints::new(folder.path());
    let saved = accelerator.save_state(&plain, Object(&1)).unwrap();
    assert!(!saved.path().join("note.txt").exists());
    std::fs::remove_dir_all(saved.path()).unwrap();

    let failing = checkpoints
        .clone()
        .before_save(|_| Err("no licence".into()));
    let errors = accelerator::launch(2, |accelerator| {
        Ok(accelerator.save_state(&failing, Object(&1)).unwrap_err())
    })
    .unwrap();
    for error in errors {
        misfit(&error, &["no licence"]);
    }
    assert_eq!(names(folder.path()), ["checkpoint-000001", "latest"]);
}

#[test]
fn a_folder_that_cannot_be_written_or_read_is_an_error_on_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "no folder").unwrap();
    let errors = accelerator::launch(2, |accelerator| {
        let save = accelerator.save_state(&file, Object(&1)).unwrap_err();
        let resume = accelerator.resume(&file, Object(1)).unwrap_err();
        Ok([save, resume])
    })
    .unwrap();
    for error in errors.iter().flatten() {
        assert!(error.is_misuse() || error.is_io(), "{error:?}");
        assert!(format!("{error:?}").contains("file"), "{error:?}");
    }
}

/// Returns the files of a checkpoint without the manifest, which contains the time.
fn content(checkpoint: &Path) -> Vec<(String, Vec<u8>)> {
    let files = names(checkpoint)
        .into_iter()
        .filter(|name| !name.starts_with("manifest"));
    files
        .map(|name| {
            let bytes = std::fs::read(checkpoint.join(&name)).unwrap();
            (name, bytes)
        })
        .collect()
}

#[test]
fn what_is_saved_beside_training_is_what_was_there_when_it_began() {
    let folder = tempfile::tempdir().unwrap();
    accelerator::launch(2, |accelerator| {
        let mut parts = train(&accelerator, prepared(&accelerator), 2);
        let (model, optimizer, loader) = &parts;
        accelerator.save_state(folder.path(), (model, optimizer, loader))?;
        let saving = accelerator.save_state_async(folder.path(), (model, optimizer, loader))?;
        // These steps update the tensors in place unless the save holds them.
        for _ in 0..20 {
            parts = train(&accelerator, parts, 3);
        }
        let saved = saving.wait()?;
        assert_eq!((saved.number(), saved.step()), (2, 2));
        let (model, optimizer, loader) = &parts;
        let saving = accelerator.save_state_async(folder.path(), (model, optimizer, loader))?;
        let next = accelerator.save_state(folder.path(), (model, optimizer, loader))?;
        assert_eq!(next.number(), 4, "after the one before");
        assert_eq!(saving.wait()?.number(), 3);
        accelerator.finish()
    })
    .unwrap();
    let at = |number| content(&folder.path().join(format!("checkpoint-00000{number}")));
    let (first, second) = (at(1), at(2));
    assert_eq!(first.len(), 3);
    for ((name, first), (_, second)) in first.iter().zip(&second) {
        // Burn writes an optimizer's entries in no order.
        if name != "optimizer.bpk" {
            assert_eq!(first, second, "{name}");
        }
    }
    assert_ne!(at(3)[0], first[0]);
}

/// One of two ranks writes, and both leave the loop at the same step.
#[test]
fn all_ranks_learn_at_the_same_step_that_a_save_is_done() {
    let folder = tempfile::tempdir().unwrap();
    let is_held = Arc::new(AtomicBool::new(true));
    let steps = accelerator::launch(2, |accelerator| {
        let held = is_held.clone();
        let slow = Checkpoints::new(folder.path()).before_save(move |_| {
            while held.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        });
        let mut parts = train(&accelerator, prepared(&accelerator), 1);
        let (model, optimizer, loader) = &parts;
        let saving = accelerator.save_state_async(&slow, (model, optimizer, loader))?;
        let operations = counted(&accelerator);
        let mut steps = 0;
        assert!(!saving.is_done()?, "asked where no window has told");
        assert_eq!(operations.load(Ordering::Relaxed), 1);
        loop {
            parts = train(&accelerator, parts, 1);
            steps += 1;
            let before = operations.load(Ordering::Relaxed);
            let is_done = saving.is_done()?;
            assert_eq!(
                operations.load(Ordering::Relaxed),
                before,
                "a window has told"
            );
            if is_done {
                break;
            }
            if steps == 3 {
                is_held.store(false, Ordering::Relaxed);
            }
        }
        assert!(saving.is_done()?, "what is done stays done");
        assert_eq!(saving.wait()?.number(), 1);
        // No steps are made meanwhile.
        let (model, optimizer, loader) = &parts;
        let saving = accelerator.save_state_async(&slow, (model, optimizer, loader))?;
        let mut polls = 0;
        while !saving.is_done()? {
            std::thread::sleep(Duration::from_millis(1));
            polls += 1;
        }
        // The next save settles it, and it stays done.
        let next = accelerator.save_state_async(folder.path(), (model, optimizer, loader))?;
        assert!(saving.is_done()?);
        assert_eq!(next.wait()?.number(), 3);
        assert!(!accelerator.check_trigger()?, "nobody has raised the flag");
        Ok((steps, polls))
    })
    .unwrap();
    assert!(steps[0].0 > 3 && steps[0] == steps[1], "{steps:?}");
}

#[test]
fn a_save_beside_training_that_fails_is_told_to_every_rank() {
    for told_by in ["wait", "next", "finish"] {
        let folder = tempfile::tempdir().unwrap();
        let errors = accelerator::launch(2, |accelerator| {
            let failing = Checkpoints::new(folder.path()).before_save(|_| Err("disk gone".into()));
            let saving = accelerator.save_state_async(&failing, Object(&1))?;
            let outcome = match told_by {
                "wait" => saving.wait().map(drop),
                "next" => accelerator.save_state(folder.path(), Object(&1)).map(drop),
                _ => accelerator.finish(),
            };
            Ok(outcome.unwrap_err())
        })
        .unwrap();
        for error in errors {
            misfit(&error, &["disk gone"]);
        }
        assert!(names(folder.path()).is_empty());
    }
}

#[test]
fn a_save_that_failed_is_told_at_the_end_though_a_rank_is_lost_too() {
    let folder = tempfile::tempdir().unwrap();
    let told = Mutex::new(None);
    let lost = accelerator::launch(2, |accelerator| {
        let failing = Checkpoints::new(folder.path()).before_save(|_| Err("disk gone".into()));
        let saving = accelerator.save_state_async(&failing, Object(&1))?;
        if accelerator.rank() == 1 {
            return Err(batch_is_cursed());
        }
        drop(saving);
        let error = accelerator.finish().unwrap_err();
        *told.lock().unwrap() = Some(error);
        Ok(())
    });
    assert!(lost.unwrap_err().is_config(), "the culprit's error");
    let error = told.into_inner().unwrap().unwrap();
    misfit(&error, &["disk gone"]);
    assert!(error.is_peer_lost(), "{error:?}");
    assert_eq!(error.culprit().map(|culprit| culprit.rank()), Some(1));
}

#[test]
fn a_program_that_does_not_wait_still_completes_its_save() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::new().unwrap();
    let slow = Checkpoints::new(folder.path()).before_save(|_| {
        std::thread::sleep(Duration::from_millis(200));
        Ok(())
    });
    drop(accelerator.save_state_async(&slow, Object(&1)).unwrap());
    drop(accelerator);
    assert_eq!(names(folder.path()), ["checkpoint-000001", "latest"]);
}
