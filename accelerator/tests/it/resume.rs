//! Contents of a checkpoint, and checkpoints that do not fit.

use std::path::Path;

use crate::common::checkpoints::{Parts, adam, misfit, names, prepared, train, without_privileges};
use crate::common::{
    ColumnBatcher, assert_close, assert_contains, assert_error, columns, distance, flat, learn,
    learner, line, loader,
};
use accelerator::checkpoint::{Position, Rescale};
use accelerator::data::AssumeDeterministic;
use accelerator::optim::{Manual, Scheduled};
use accelerator::prelude::*;
use burn::data::dataloader::DataLoaderBuilder as BurnBuilder;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::noam::NoamLrSchedulerConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{RmsPropConfig, SgdConfig};

/// Saves two checkpoints, after two and after four steps.
fn two_checkpoints(folder: &Path) -> Parts {
    let accelerator = Accelerator::new().unwrap();
    let mut parts = prepared(&accelerator);
    for steps in [2, 4] {
        parts = prepared(&accelerator);
        parts = train(&accelerator, parts, steps);
        let (model, optimizer, train) = &parts;
        let saved = accelerator
            .save_state(folder, (model, optimizer, train))
            .unwrap();
        assert_eq!(saved.step(), steps as u64);
    }
    parts
}

fn resumed(folder: &Path) -> accelerator::Result<(Parts, Position)> {
    let accelerator = Accelerator::new().unwrap();
    let parts = prepared(&accelerator);
    accelerator.resume(folder, parts)
}

#[test]
fn without_a_checkpoint_parts_come_back_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    for path in [folder.path().to_owned(), folder.path().join("not/there")] {
        let ((model, optimizer, _), position) = resumed(&path).unwrap();
        assert!(position.is_start() && position.checkpoint().is_none());
        assert_eq!(
            (position.epoch(), position.step(), optimizer.steps()),
            (0, 0, 0)
        );
        assert_eq!(flat(&model), [0.5, 0.25]);
    }
}

#[test]
fn the_newest_checkpoint_is_resumed_and_names_the_rest_of_the_epoch() {
    let folder = tempfile::tempdir().unwrap();
    let (model, ..) = two_checkpoints(folder.path());
    let ((back, optimizer, train), position) = resumed(folder.path()).unwrap();
    assert_eq!(flat(&back), flat(&model));
    assert_eq!(
        (position.checkpoint(), position.step(), position.epoch()),
        (Some(2), 4, 0)
    );
    assert_eq!(optimizer.steps(), 4);
    // Looking at the first batch does not use up the offset.
    for _ in 0..2 {
        let batch = train.epoch(0).next().unwrap().unwrap();
        assert_eq!((batch.numbers.clone(), batch.step()), (vec![8, 9], 4));
    }
    // An iterator's own count continues too.
    let numbers = |epoch| -> Vec<usize> {
        let batches = train.epoch(epoch).enumerate();
        let numbers = batches.flat_map(|(step, batch)| {
            let batch = batch.unwrap();
            assert_eq!(batch.step(), step as u64);
            batch.numbers.clone()
        });
        numbers.collect()
    };
    assert_eq!(numbers(1).len(), 12);
    assert_eq!(numbers(0), [8, 9, 10, 11]);
    assert_eq!(numbers(0).len(), 12, "the offset holds once");
}

#[test]
fn an_epoch_whose_end_was_seen_is_followed_by_the_next() {
    for seen in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let accelerator = Accelerator::new().unwrap();
        let parts = prepared(&accelerator);
        let steps = if seen { usize::MAX } else { 6 };
        let (model, optimizer, train) = train(&accelerator, parts, steps);
        accelerator
            .save_state(folder.path(), (&model, &optimizer, &train))
            .unwrap();
        let ((_, _, train), position) = resumed(folder.path()).unwrap();
        assert_eq!(position.epoch(), u64::from(seen));
        let left = train.epoch(position.epoch()).count();
        assert_eq!(left, if seen { 6 } else { 0 });
    }
}

#[test]
fn a_batch_that_is_in_no_step_yet_comes_again() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::new().unwrap();
    let (mut model, mut optimizer, train) = prepared(&accelerator);
    for batch in train.epoch(0) {
        let batch = batch.unwrap();
        if batch.step() == 3 {
            accelerator
                .save_state(folder.path(), (&model, &optimizer, &train))
                .unwrap();
            break;
        }
        model = learn(&accelerator, model, &mut optimizer, 0.05, &batch).unwrap();
    }
    let ((_, _, train), _) = resumed(folder.path()).unwrap();
    assert_eq!(train.epoch(0).next().unwrap().unwrap().numbers, [6, 7]);
}

/// A weight that is a number says nothing about the position in the data. The batches that were yielded count from the
/// first step on, and the model tells that there was one.
#[test]
fn an_epoch_whose_weights_are_numbers_continues_in_its_middle() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let accelerator = Accelerator::new().unwrap();
    let prepared = || learner(&accelerator, loader(12, 2)).unwrap();
    let next = || {
        let ((_, optimizer, train), _) = accelerator.resume(folder, prepared()).unwrap();
        let next = train.epoch(0).next().unwrap().unwrap();
        (optimizer.steps(), next.numbers.clone())
    };
    let (mut model, mut optimizer, train) = prepared();
    let batch = train.epoch(0).next().unwrap().unwrap();
    let save = |model: &Linear, optimizer: &PreparedOptimizer<Manual>| {
        let parts = (model, optimizer, &train);
        accelerator.save_state(folder, parts).unwrap();
    };
    save(&model, &optimizer);
    assert_eq!(next(), (0, vec![0, 1]), "it was only looked at");
    let loss = distance(&model, &batch);
    let gradients = accelerator.backward(loss, &model, 2).unwrap();
    model = optimizer.step(0.1, model, gradients);
    save(&model, &optimizer);
    assert_eq!(next(), (1, vec![2, 3]));
}

#[test]
fn ranks_that_resume_different_loaders_are_told_of_which_call() {
    let folder = tempfile::tempdir().unwrap();
    let texts = accelerator::launch(2, |accelerator| {
        let (train, other) = accelerator.prepare((loader(8, 2), loader(8, 2)))?;
        let one = match accelerator.is_main_process() {
            true => train,
            false => other,
        };
        let error = accelerator.resume_loader(folder.path(), one).unwrap_err();
        Ok(error.to_string())
    });
    let words = ["what is passed to `resume_loader` differs between ranks: rank 0 has loader 0"];
    for text in texts.unwrap() {
        assert_contains(&text, &words);
    }
}

#[test]
fn damage_is_found_and_the_checkpoint_before_is_used() {
    let folder = tempfile::tempdir().unwrap();
    two_checkpoints(folder.path());
    let newest = folder.path().join("checkpoint-000002");
    for file in names(&newest) {
        let path = newest.join(&file);
        let good = std::fs::read(&path).unwrap();
        let mut bad = good.clone();
        let middle = bad.len() / 2;
        bad[middle] ^= 1;
        std::fs::write(&path, bad).unwrap();
        let (_, position) = resumed(folder.path()).unwrap();
        assert_eq!(
            (position.checkpoint(), position.step()),
            (Some(1), 2),
            "{file}"
        );
        std::fs::write(&path, good).unwrap();
    }
    assert_eq!(resumed(folder.path()).unwrap().1.step(), 4);
    // No checkpoint is complete, which is no reason to start afresh.
    for number in [1, 2] {
        let path = folder.path().join(format!("checkpoint-00000{number}"));
        std::fs::remove_file(path.join("optimizer.bpk")).unwrap();
    }
    let error = resumed(folder.path()).unwrap_err();
    misfit(&error, &["checkpoint-000001", "optimizer.bpk"]);
    assert_eq!(names(folder.path()).len(), 3, "nothing is deleted");
}

/// Files that the manifest does not list are not read, whatever their names, nor are the targets of links.
#[test]
fn files_that_the_manifest_does_not_list_are_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::new().unwrap();
    let device = accelerator.device();
    let (model, _, _) = prepared(&accelerator);
    let mut other = line(&device);
    other.weight = burn::module::Param::from_data([[9.0_f32]], &device);
    let average: Linear = accelerator.prepare(line(&device)).unwrap();
    let checkpoints = Checkpoints::new(folder.path()).with_max_shard_size(4);
    let saved = accelerator
        .save_state(&checkpoints, (&model, &average))
        .unwrap();
    let saved = saved.path();
    assert!(names(saved).contains(&"model-00001-of-00002.safetensors".to_owned()));

    let elsewhere = tempfile::tempdir().unwrap();
    let elsewhere = elsewhere.path().join("model.safetensors");
    accelerator.save_model(&other, &elsewhere).unwrap();
    let places = [
        saved.join("model.safetensors"),
        saved.join("model-2/model.safetensors"),
    ];
    for is_link in [false, true] {
        for place in &places {
            match is_link {
                false => drop(std::fs::copy(&elsewhere, place).unwrap()),
                true => std::os::unix::fs::symlink(&elsewhere, place).unwrap(),
            }
        }
        let fresh = || -> Linear {
            let model: Linear = LinearConfig::new(1, 1).init(&device);
            accelerator.prepare(model).unwrap()
        };
        let ((first, second), _) = accelerator
            .resume(folder.path(), (fresh(), fresh()))
            .unwrap();
        assert_eq!(
            [flat(&first), flat(&second)],
            [[0.5, 0.25]; 2],
            "link: {is_link}"
        );
        for path in [saved, &*saved.join("model-2"), &*places[0], &*places[1]] {
            let loaded = accelerator.load_model(fresh(), path).unwrap();
            assert_eq!(
                flat(&loaded),
                [0.5, 0.25],
                "{} link: {is_link}",
                path.display()
            );
        }
        for place in &places {
            std::fs::remove_file(place).unwrap();
        }
    }

    // A program may put its own file there and name it.
    let named = saved.join("other.safetensors");
    std::fs::rename(&elsewhere, &named).unwrap();
    let loaded = accelerator.load_model(line(&device), &named).unwrap();
    assert_eq!(flat(&loaded), [9.0, 0.25]);

    // A link replaces a listed file, although its target has the right content.
    let shard = saved.join("model-00001-of-00002.safetensors");
    std::fs::rename(&shard, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &shard).unwrap();
    let fresh = (line(&device), line(&device));
    let fresh = accelerator.prepare(fresh).unwrap();
    let error = accelerator.resume(folder.path(), fresh).unwrap_err();
    misfit(&error, &["a symbolic link"]);
    let error = accelerator.load_model(line(&device), saved).unwrap_err();
    misfit(&error, &["a symbolic link"]);
}

#[test]
fn a_checkpoint_that_is_loaded_is_compared_with_its_hashes() {
    let folder = tempfile::tempdir().unwrap();
    two_checkpoints(folder.path());
    let newest = folder.path().join("checkpoint-000002");
    let file = newest.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let accelerator = Accelerator::new().unwrap();
    let device = accelerator.device();
    for path in [&newest, &file] {
        let error = accelerator.load_model(line(&device), path).unwrap_err();
        misfit(&error, &["has changed since it was written"]);
    }
    // A file that is left of a checkpoint can still be loaded by its name.
    std::fs::write(newest.join("manifest.json"), "{}").unwrap();
    let error = accelerator.load_model(line(&device), &newest).unwrap_err();
    misfit(&error, &["manifest.json"]);
    accelerator.load_model(line(&device), &file).unwrap();
}

/// A user who names a checkpoint does not want to start anew.
#[test]
fn a_named_checkpoint_without_its_manifest_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    two_checkpoints(folder.path());
    let named = folder.path().join("checkpoint-000002");
    // A link to a checkpoint works as well.
    let best = folder.path().join("best");
    std::os::unix::fs::symlink(&named, &best).unwrap();
    assert_eq!(resumed(&best).unwrap().1.checkpoint(), Some(2));

    std::fs::remove_file(named.join("manifest.json")).unwrap();
    for name in ["checkpoint-000002", "checkpoint-2", "copy"] {
        let path = folder.path().join(name);
        let _ = std::fs::rename(&named, &path);
        misfit(&resumed(&path).unwrap_err(), &[name, "manifest.json"]);
        std::fs::rename(&path, &named).unwrap();
    }
    // In the folder, that checkpoint is skipped.
    assert_eq!(resumed(folder.path()).unwrap().1.checkpoint(), Some(1));

    let error = resumed(&folder.path().join("checkpoint-000003")).unwrap_err();
    misfit(&error, &["there is no checkpoint"]);
}

/// Resuming from an older checkpoint would repeat or lose training steps because a disk was unreachable for a moment.
#[test]
fn a_checkpoint_that_cannot_be_read_is_an_error() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    two_checkpoints(folder.path());
    let newest = folder.path().join("checkpoint-000002");
    let set_mode = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    for (locked, mode) in [
        (newest.join("optimizer.bpk"), 0o644),
        (newest.join("manifest.json"), 0o644),
        (newest.clone(), 0o755),
        (folder.path().to_owned(), 0o755),
    ] {
        set_mode(&locked, 0);
        without_privileges(|| {
            for path in [folder.path(), &*newest] {
                let error = resumed(path).map(|(_, position)| position).unwrap_err();
                assert!(error.is_io(), "{}: {error:?}", locked.display());
                let text = error.to_string();
                assert!(text.contains("Permission denied"), "{text}");
            }
            let accelerator = Accelerator::new().unwrap();
            let error = accelerator.load_model(line(&accelerator.device()), &newest);
            let is_read = locked == newest.join("optimizer.bpk");
            assert_eq!(error.is_ok(), is_read, "{}", locked.display());
            assert!(is_read || error.unwrap_err().is_io());
        });
        set_mode(&locked, mode);
    }
    assert_eq!(resumed(folder.path()).unwrap().1.checkpoint(), Some(2));
}

#[test]
fn parts_that_were_not_saved_so_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    two_checkpoints(folder.path());
    let accelerator = Accelerator::new().unwrap();
    let device = accelerator.device();
    let (model, optimizer, train) = prepared(&accelerator);
    let error = accelerator
        .resume(folder.path(), (optimizer, model, train))
        .unwrap_err();
    misfit(&error, &["part 1 of the tuple, it has a model"]);

    let (model, optimizer, _) = prepared(&accelerator);
    let error = accelerator
        .resume(folder.path(), (model, optimizer))
        .unwrap_err();
    misfit(
        &error,
        &["part 3 of the tuple, it has a loader, but `resume` was given nothing"],
    );

    let wide: Linear = LinearConfig::new(2, 1).init(&device);
    let parts = accelerator.prepare((wide, adam(), loader(12, 2))).unwrap();
    let error = accelerator.resume(folder.path(), parts).unwrap_err();
    let words = ["`weight` of [1, 1]", "[2, 1]"];
    assert_error(&error, Error::is_model, &words);

    let builder = || LoaderBuilder::new(ColumnBatcher).batch_size(2);
    for (other, samples, text) in [
        (builder(), 13, "number of samples was 12"),
        (builder().shuffle(3), 12, "shuffled by 3"),
        (builder().tail(TailPolicy::Drop), 12, "tail policy"),
    ] {
        let other = other.build(columns(samples));
        let parts = accelerator.prepare((line(&device), adam(), other)).unwrap();
        let error = accelerator.resume(folder.path(), parts).unwrap_err();
        misfit(&error, &[text]);
    }

    for other in [SgdConfig::new().init(), RmsPropConfig::new().init()] {
        let parts = accelerator
            .prepare((line(&device), other, loader(12, 2)))
            .unwrap();
        let error = accelerator.resume(folder.path(), parts).unwrap_err();
        misfit(&error, &["of each parameter it keeps `moment"]);
        assert!(!format!("{error:?}").contains("__rank"), "{error:?}");
    }

    let scheduled = (adam(), cosine());
    let parts = accelerator
        .prepare((line(&device), scheduled, loader(12, 2)))
        .unwrap();
    let error = accelerator.resume(folder.path(), parts).unwrap_err();
    misfit(&error, &["no scheduler", "prepare it without a scheduler"]);
}

fn cosine() -> burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler {
    CosineAnnealingLrSchedulerConfig::new(0.1, 10)
        .init()
        .unwrap()
}

#[test]
fn another_scheduler_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::new().unwrap();
    let device = accelerator.device();
    let run = |optimizer: PreparedOptimizer<Scheduled>, resume| {
        let (model, train) = accelerator.prepare((line(&device), loader(12, 2))).unwrap();
        let (mut model, mut optimizer) = (model, optimizer);
        if resume {
            (model, optimizer) = accelerator.resume(folder.path(), (model, optimizer))?.0;
        }
        for batch in train.epoch(0).take(2) {
            let batch = batch?;
            let gradients = accelerator.backward(distance(&model, &batch), &model, &batch)?;
            model = optimizer.step(model, gradients);
        }
        accelerator.save_state(folder.path(), (&model, &optimizer))?;
        Ok(optimizer.learning_rate())
    };
    let first = run(accelerator.prepare((adam(), cosine())).unwrap(), false).unwrap();
    let second = run(accelerator.prepare((adam(), cosine())).unwrap(), true).unwrap();
    assert!(second < first, "{second:?} {first:?}");
    let noam = NoamLrSchedulerConfig::new(0.1).init().unwrap();
    let others = [
        accelerator.prepare((adam(), noam)).unwrap(),
        accelerator.prepare((adam(), PerEpoch(cosine()))).unwrap(),
    ];
    for other in others {
        let error = run(other, true).map(|_: Option<f64>| ()).unwrap_err();
        misfit(&error, &["scheduler"]);
    }
}

#[test]
fn objects_come_back_exactly_and_to_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let numbers = |rank: usize| vec![f64::INFINITY, 0.1 + 0.2, -0.0, rank as f64];
    let save = |ranks| {
        accelerator::launch(ranks, |accelerator| {
            let mine = numbers(accelerator.rank());
            let parts = (Object(&mine), PerRank(&mine), Object(&accelerator.rank()));
            accelerator.save_state(folder.path(), parts).map(|_| ())
        })
        .unwrap();
    };
    let load = |ranks| {
        accelerator::launch(ranks, |accelerator| {
            let rank = accelerator.rank();
            let parts = (Object(vec![]), PerRank(vec![7.0]), Object(9));
            let ((Object(shared), PerRank(mine), Object(zero)), _) =
                accelerator.resume(folder.path(), parts)?;
            assert_eq!((shared, zero), (numbers(0), 0));
            let saved = if rank < 3 { numbers(rank) } else { vec![7.0] };
            assert_eq!(mine, saved, "rank {rank} of {ranks}");
            Ok(())
        })
        .unwrap();
    };
    save(3);
    (1..=4).for_each(load);

    let accelerator = Accelerator::new().unwrap();
    let parts = (Object(String::new()), PerRank(0), Object(0));
    let error = accelerator.resume(folder.path(), parts).unwrap_err();
    misfit(&error, &["the object (part 1 of the tuple)"]);
}

#[test]
fn a_value_that_one_rank_cannot_read_is_an_error_on_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let errors = accelerator::launch(2, |accelerator| {
        let mine = (accelerator.rank() == 0).then_some(5);
        accelerator.save_state(folder.path(), PerRank(&mine))?;
        let error = accelerator.resume(folder.path(), PerRank(0)).unwrap_err();
        // The group still works.
        accelerator.wait_for_everyone()?;
        Ok(error)
    });
    for error in errors.unwrap() {
        misfit(&error, &["the value for each rank (part 1 of the tuple)"]);
    }
}

#[test]
fn the_place_names_the_steps_of_each_optimizer() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::new().unwrap();
    let device = accelerator.device();
    let parts = (line(&device), adam(), adam());
    let (mut model, mut first, mut second) = accelerator.prepare(parts).unwrap();
    let step = |optimizer: &mut PreparedOptimizer<Manual>, model: Linear| {
        let loss = model.weight.val().sum();
        let gradients = accelerator.backward(loss, &model, 1).unwrap();
        optimizer.step(0.1, model, gradients)
    };
    for _ in 0..3 {
        model = step(&mut first, model);
    }
    model = step(&mut second, model);
    accelerator
        .save_state(folder.path(), (&model, &first, &second))
        .unwrap();
    let ((_, first, second), position) = accelerator
        .resume(folder.path(), (model, first, second))
        .unwrap();
    assert_eq!((first.steps(), second.steps()), (3, 1));
    assert_eq!(position.step(), 3);
    assert_eq!(
        position.to_string(),
        "steps 3 and 1 in epoch 0, by checkpoint 1"
    );
}

#[test]
fn two_models_come_back_with_their_optimizers() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path()).with_max_shard_size(4);
    let accelerator = Accelerator::new().unwrap();
    let device = accelerator.device();
    let prepare = || {
        let (a, b) = (line(&device), line(&device));
        let parts = (a, adam(), b, adam(), loader(12, 2));
        accelerator.prepare(parts).unwrap()
    };
    let run = |resume| {
        let (mut a, mut first, mut b, mut second, mut train) = prepare();
        if resume {
            let parts = (a, first, b, second, train);
            ((a, first, b, second, train), _) = accelerator.resume(&checkpoints, parts).unwrap();
        }
        for batch in train.epoch(0) {
            let batch = batch.unwrap();
            let gradients = accelerator
                .backward(distance(&a, &batch), &a, &batch)
                .unwrap();
            a = first.step(0.05, a, gradients);
            let loss = distance(&b, &batch) * 2.0;
            let gradients = accelerator.backward(loss, &b, batch.weight()).unwrap();
            b = second.step(0.01, b, gradients);
            if !resume && batch.step() == 2 {
                let parts = (&a, &first, &b, &second, &train);
                accelerator.save_state(&checkpoints, parts).unwrap();
            }
        }
        (flat(&a), flat(&b))
    };
    let whole = run(false);
    assert_ne!(whole.0, whole.1);
    assert_eq!(run(true), whole);
    let checkpoint = folder.path().join("checkpoint-000001");
    for shard in [
        "model.safetensors.index.json",
        "model-2/model-00001-of-00002.safetensors",
    ] {
        assert!(checkpoint.join(shard).exists(), "{shard}");
    }
}

#[test]
fn a_global_batch_that_micro_steps_reach_is_kept_at_another_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    for (life, ranks) in [2, 1, 4].into_iter().enumerate() {
        let outcomes = Accelerator::builder()
            .global_batch(16, 4)
            .launch(ranks, |accelerator| {
                assert_eq!(accelerator.accumulation_steps() * ranks, 4);
                let parts = learner(&accelerator, loader(160, 4))?;
                let (parts, position) = accelerator.resume(folder.path(), parts)?;
                let (mut model, mut optimizer, train) = parts;
                let mut samples = Vec::new();
                for batch in train.epoch(position.epoch()) {
                    let batch = batch?;
                    let gradients =
                        accelerator.backward(distance(&model, &batch), &model, &batch)?;
                    samples.extend(gradients.samples());
                    model = optimizer.step(0.05, model, gradients);
                    if samples.len() == 2 {
                        break;
                    }
                }
                accelerator.save_state(folder.path(), (&model, &optimizer, &train))?;
                Ok((samples, optimizer.steps()))
            });
        for outcome in outcomes.unwrap() {
            assert_eq!(
                outcome,
                (vec![16.0; 2], 2 * (life as u64 + 1)),
                "{ranks} ranks"
            );
        }
    }
}

/// Runs a job at each of the sizes in turn for `steps` steps, and at the last one to the end of two epochs. Returns the
/// samples that each epoch used, and the weights.
fn through_sizes(sizes: &[usize], steps: usize) -> (Vec<Vec<u64>>, Vec<f32>) {
    let folder = tempfile::tempdir().unwrap();
    let mut used = vec![Vec::new(); 2];
    let mut weights = Vec::new();
    for (life, &ranks) in sizes.iter().enumerate() {
        let is_last = life + 1 == sizes.len();
        let outcomes = accelerator::launch(ranks, |accelerator| {
            let device = accelerator.device();
            let train = LoaderBuilder::new(ColumnBatcher)
                .batch_size(12 / sizes[0])
                .shuffle(5)
                .num_workers(2)
                .build(columns(50));
            let optimizer = SgdConfig::new()
                .with_momentum(Some(MomentumConfig::new()))
                .init();
            let parts = accelerator.prepare((line(&device), optimizer, train))?;
            let ((mut model, mut optimizer, train), position) =
                accelerator.resume(folder.path(), parts)?;
            if life > 0 {
                assert_eq!(position.world_size_before(), sizes[life - 1]);
            }
            let mut used = vec![Vec::new(); 2];
            let mut done = 0;
            'job: for epoch in position.epoch()..2 {
                for batch in train.epoch(epoch) {
                    if done == steps && !is_last {
                        break 'job;
                    }
                    let batch = batch?;
                    let loss = distance(&model, &batch);
                    let gradients = accelerator.backward(loss, &model, &batch)?;
                    assert!(gradients.samples() <= Some(12.0));
                    model = optimizer.step(0.05, model, gradients);
                    used[epoch as usize].extend_from_slice(batch.real_indices());
                    done += 1;
                }
            }
            accelerator.save_state(folder.path(), (&model, &optimizer, &train))?;
            Ok((used, flat(&model)))
        })
        .unwrap();
        for (rank, _) in &outcomes {
            for (all, mine) in used.iter_mut().zip(rank) {
                all.extend_from_slice(mine);
            }
        }
        weights = outcomes[0].1.clone();
    }
    used.iter_mut().for_each(|epoch| epoch.sort_unstable());
    (used, weights)
}

#[test]
fn at_another_size_each_sample_is_used_once_and_weights_are_those_of_the_first_size() {
    for sizes in [[2, 3], [3, 2], [4, 1], [1, 4]] {
        for steps in [2, 7] {
            let (used, weights) = through_sizes(&sizes, steps);
            let whole: Vec<u64> = (0..50).collect();
            assert_eq!(used, [whole.clone(), whole.clone()], "{sizes:?}");
            let (_, alone) = through_sizes(&sizes[..1], steps);
            assert_close(&weights, &alone, 1e-5);
        }
    }
    // Three ranks divide twelve samples evenly, and five do not: 3, 3, 2, 2, 2.
    let (used, weights) = through_sizes(&[3, 5, 2, 3], 2);
    assert_eq!(used[0].len() + used[1].len(), 100);
    let (_, alone) = through_sizes(&[3], 2);
    assert_close(&weights, &alone, 1e-5);
}

#[test]
fn the_program_may_rescale_instead() {
    let folder = tempfile::tempdir().unwrap();
    let life = |ranks: usize, factor: Option<f64>| {
        let outcomes = accelerator::launch(ranks, |accelerator| {
            let scheduler = burn::lr_scheduler::constant::ConstantLr::new(0.1);
            let optimizer = (SgdConfig::new().init(), scheduler);
            let checkpoints = Checkpoints::new(folder.path()).with_rescale(move |change| {
                assert_eq!(change.now, ranks);
                factor.map_or_else(Rescale::keep_global_batch, |factor| {
                    Rescale::keep_batch_per_rank().with_learning_rate_factor(factor)
                })
            });
            let train = accelerator.prepare(loader(64, 4))?;
            let train = accelerator.resume_loader(checkpoints.clone(), train)?;
            let model = line(&accelerator.device());
            let (model, optimizer) = accelerator.prepare((model, optimizer))?;
            let parts = (model, optimizer, train);
            let ((mut model, mut optimizer, train), position) =
                accelerator.resume(checkpoints, parts)?;
            let batch = train.epoch(0).next().unwrap()?;
            let gradients = accelerator.backward(distance(&model, &batch), &model, &batch)?;
            let samples = gradients.samples();
            model = optimizer.step(model, gradients);
            accelerator.save_state(folder.path(), (&model, &optimizer, &train))?;
            Ok((
                samples.unwrap(),
                optimizer.learning_rate().unwrap(),
                position.learning_rate_factor(),
            ))
        })
        .unwrap();
        outcomes[0]
    };
    assert_eq!(life(2, None), (8.0, 0.1, 1.0));
    assert_eq!(life(3, Some(1.5)), (12.0, 0.1 * 1.5, 1.5));
    assert_eq!(life(3, None), (12.0, 0.1 * 1.5, 1.5), "the factor stays");
    assert_eq!(
        life(2, None),
        (12.0, 0.1 * 1.5, 1.5),
        "and so does the batch"
    );
    assert_eq!(life(1, Some(0.5)), (6.0, 0.1 * 0.75, 0.75));
}

#[test]
fn a_loader_of_burns_is_skipped_through() {
    let folder = tempfile::tempdir().unwrap();
    let life = |ranks: usize, steps: usize| {
        accelerator::launch(ranks, |accelerator| {
            let train = BurnBuilder::new(ColumnBatcher)
                .batch_size(2)
                .build(columns(22));
            let parts = (
                line(&accelerator.device()),
                adam(),
                AssumeDeterministic(train),
            );
            let parts = accelerator.prepare(parts)?;
            let ((mut model, mut optimizer, train), _) =
                accelerator.resume(folder.path(), parts)?;
            let mut numbers = Vec::new();
            for batch in train.epoch(0).take(steps) {
                let batch = batch?;
                let gradients = accelerator.backward(distance(&model, &batch), &model, &batch)?;
                model = optimizer.step(0.05, model, gradients);
                numbers.extend(batch.numbers.iter().take(batch.real()).copied());
            }
            accelerator.save_state(folder.path(), (&model, &optimizer, &train))?;
            Ok(numbers)
        })
    };
    let mut used = life(2, 2).unwrap().concat();
    misfit(&life(3, 1).unwrap_err(), &["as many ranks"]);
    used.extend(life(2, usize::MAX).unwrap().concat());
    used.sort_unstable();
    assert_eq!(used, (0..22).collect::<Vec<_>>());
}
