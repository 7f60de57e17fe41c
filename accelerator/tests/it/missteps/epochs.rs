//! Epochs without steps, left early, trained again, or resumed in their middle.

use std::path::Path;

use super::{assert_told_once, log_of, logged};
use crate::common::{
    Column, ColumnBatcher, assert_error, columns, distance, learn, learner, line, line_and_sgd,
    loader,
};
use accelerator::Weight;
use accelerator::checkpoint::{Object, PerRank};
use accelerator::data::{AssumeDeterministic, Batch, Loader, StreamPart};
use accelerator::metric::Mean;
use accelerator::prelude::*;
use burn::data::dataloader::DataLoaderBuilder as BurnBuilder;
use burn::data::dataset::transform::{SamplerDataset, SamplerDatasetOptions};
use burn::optim::SgdConfig;

type Load = fn() -> Loader<Column>;

/// Returns the loss and its number of samples over one epoch. Stops after `until` steps and saves, and resumes if there
/// is a checkpoint.
fn epoch(ranks: usize, folder: &Path, until: Option<usize>) -> Vec<(Mean, Mean)> {
    let run = |accelerator: Accelerator| {
        let (model, optimizer, train) = learner(&accelerator, loader(22, 2))?;
        let (own, all) = (PerRank(Mean::new()), Object(Mean::new()));
        let ((mut model, mut optimizer, train, PerRank(own), Object(all)), position) =
            accelerator.resume(folder, (model, optimizer, train, own, all))?;
        let mut own = own;
        // This mean is for any number of ranks.
        let mut mine = match accelerator.is_main_process() {
            true => all,
            false => Mean::new(),
        };
        for batch in train.epoch(position.epoch()).take(until.unwrap_or(100)) {
            let batch = batch?;
            let loss = distance(&model, &batch);
            for mean in [&mut own, &mut mine] {
                mean.update_with(loss.clone(), batch.real());
            }
            let gradients = accelerator.backward(loss, &model, &batch)?;
            // The rate is 0, so the loss of a sample is always the same.
            model = optimizer.step(0.0, model, gradients);
        }
        if until.is_some() {
            let all = accelerator.reduce_metric(mine)?;
            let parts = (&model, &optimizer, &train, PerRank(&own), Object(&all));
            accelerator.save_state(folder, parts)?;
        }
        accelerator.reduce_metric((own, mine))
    };
    accelerator::launch(ranks, run).unwrap()
}

#[test]
fn the_mean_of_an_epoch_is_exact_after_a_resume_in_its_middle() {
    let fresh = || tempfile::tempdir().unwrap();
    let close = |mean: Mean, wanted: Mean| {
        assert_eq!(mean.samples(), 22.0);
        assert!(
            (mean.value() - wanted.value()).abs() < 1e-6,
            "{mean} {wanted}"
        );
    };
    let (wanted, _) = epoch(1, fresh().path(), None)[0];
    assert_eq!(wanted.samples(), 22.0);
    for ranks in [1, 2, 3] {
        let folder = fresh();
        let cut = epoch(2, folder.path(), Some(3));
        assert_eq!(cut[0].0.samples(), 12.0);
        for (own, all) in epoch(ranks, folder.path(), None) {
            close(all, wanted);
            if ranks > 1 {
                close(own, wanted);
            }
        }
    }
}

#[test]
fn a_data_set_that_makes_no_step_is_refused_when_it_is_prepared() {
    for ranks in [1, 2] {
        let errors = accelerator::launch(ranks, |accelerator| {
            let empty = accelerator.prepare(loader(0, 2)).unwrap_err();
            let short = LoaderBuilder::new(ColumnBatcher)
                .batch_size(4)
                .tail(TailPolicy::Drop)
                .build(columns(3));
            let short = accelerator.prepare(short).unwrap_err();
            let burns = BurnBuilder::new(ColumnBatcher)
                .batch_size(2)
                .build(columns(0));
            let burns = accelerator.prepare(AssumeDeterministic(burns)).unwrap_err();
            accelerator.wait_for_everyone()?;
            Ok([empty, burns, short])
        });
        for [empty, burns, short] in errors.unwrap() {
            for error in [&empty, &burns] {
                assert_error(error, Error::is_config, &["has no samples"]);
            }
            assert_error(&short, Error::is_config, &["3 samples", "drop"]);
        }
    }
}

#[test]
fn an_epoch_without_batches_is_told_once() {
    for ranks in [1, 2] {
        let texts = accelerator::launch(ranks, |accelerator| {
            let builder = || LoaderBuilder::new(ColumnBatcher).batch_size(2);
            let empty = |_: u64| Vec::<u64>::new();
            let sampled = accelerator.prepare(builder().sampler(empty).build(columns(8)))?;
            let items = |part: StreamPart| (0..4 * part.epoch() as usize).map(std::io::Result::Ok);
            let stream = accelerator.prepare(builder().build_stream(items))?;
            let read = |loader: &PreparedLoader<Column>, skip| {
                let (counts, text) = logged(|| {
                    let epochs = (0..3).map(|epoch| loader.epoch(epoch).skip_first_batches(skip));
                    epochs.map(Iterator::count).collect::<Vec<_>>()
                });
                (counts.iter().sum::<usize>(), text)
            };
            // A program that skips all batches gets no warning.
            Ok([read(&stream, 100), read(&stream, 0), read(&sampled, 0)])
        });
        for (rank, [skipped, stream, sampled]) in texts.unwrap().into_iter().enumerate() {
            assert_eq!(skipped, (0, String::new()));
            assert!(stream.0 > 0 && sampled.0 == 0);
            for (_, text) in [stream, sampled] {
                for word in ["epoch 0 of a loader had no batches", "WARN"] {
                    let count = text.matches(word).count();
                    assert_eq!(count, usize::from(rank == 0), "{text}");
                }
            }
        }
    }
}

/// Returns the warnings about windows in a training of two epochs with three micro-steps per step. Each epoch is left
/// after the given number of batches.
fn warnings_after_breaks(
    ranks: usize,
    batches: [usize; 2],
    weight: fn(&Batch<Column>) -> Weight,
) -> Vec<String> {
    let builder = Accelerator::builder().accumulation_steps(3);
    let texts = builder.launch(ranks, |accelerator| {
        let (mut model, mut optimizer, train) = learner(&accelerator, loader(4 * ranks, 1))?;
        log_of(|| {
            for (epoch, batches) in batches.into_iter().enumerate() {
                for batch in train.epoch(epoch as u64).take(batches) {
                    let batch = batch?;
                    let loss = distance(&model, &batch);
                    let weight = weight(&batch);
                    let gradients = accelerator.backward(loss, &model, weight)?;
                    model = optimizer.step(0.1, model.clone(), gradients);
                }
            }
            accelerator.finish()
        })
    });
    texts.unwrap()
}

#[test]
fn an_epoch_that_is_left_in_mid_window_is_told_once() {
    for ranks in [1, 2] {
        for (left, told) in [([2, 4], true), ([4, 4], false), ([3, 3], false)] {
            let texts = warnings_after_breaks(ranks, left, Batch::weight);
            let wanted = usize::from(told);
            let text = &texts[0];
            assert_eq!(text.matches("epoch 0 was left").count(), wanted, "{text}");
            assert!(!told || text.contains("2 micro-steps"), "{text}");
            assert_eq!(text.matches("WARN").count(), wanted, "{text}");
            assert!(texts[1..].iter().all(String::is_empty), "{texts:?}");
        }
        // The program keeps the window open.
        let texts = warnings_after_breaks(ranks, [4, 1], |batch| batch.weight().no_sync());
        assert!(!texts[0].contains("was left"), "{texts:?}");
    }
}

/// Returns the log of a training of two epochs that resumes from a checkpoint, saved after `saved_after` batches of the
/// earlier epochs. `first` chooses the epoch to resume with.
fn logged_after_resume(
    ranks: usize,
    saved_after: [usize; 2],
    first: fn(u64) -> u64,
) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let life = |accelerator: Accelerator, batches: Option<[usize; 2]>| {
        let (model, optimizer) = line_and_sgd(&accelerator)?;
        let (train, valid) = accelerator.prepare((loader(4 * ranks, 1), loader(4 * ranks, 1)))?;
        let parts = (model, optimizer, train, valid);
        let ((mut model, mut optimizer, train, valid), position) =
            accelerator.resume(folder.path(), parts)?;
        let start = batches.map_or_else(|| first(position.epoch()), |_| 0);
        let (done, text) = logged(|| -> Result<()> {
            // Looking at the data is not training.
            let _ = train.epoch(0).next().unwrap()?;
            for epoch in start..start + 2 {
                let most = batches.map_or(usize::MAX, |batches| batches[epoch as usize]);
                for batch in train.epoch(epoch).take(most) {
                    let batch = batch?;
                    model = learn(&accelerator, model.clone(), &mut optimizer, 0.1, &batch)?;
                }
                for batch in valid.epoch(0).take(most) {
                    let _ = batch?.real();
                }
            }
            Ok(())
        });
        done?;
        if batches.is_some() {
            accelerator.save_state(folder.path(), (&model, &optimizer, &train, &valid))?;
        }
        Ok(text)
    };
    accelerator::launch(ranks, |accelerator| life(accelerator, Some(saved_after))).unwrap();
    accelerator::launch(ranks, |accelerator| life(accelerator, None)).unwrap()
}

#[test]
fn an_epoch_that_is_trained_again_after_a_resume_is_told_once() {
    const ALL: usize = usize::MAX;
    for ranks in [1, 2] {
        for saved_after in [[ALL, 2], [ALL, 0], [ALL, ALL]] {
            let texts = logged_after_resume(ranks, saved_after, |_| 0);
            let words = ["WARN", "epoch 0 is trained again", "position.epoch().."];
            assert_told_once(&texts, &words);
        }
        for (saved_after, first) in [
            ([ALL, 2], (|epoch| epoch) as fn(u64) -> u64),
            ([ALL, ALL], |epoch| epoch),
            // The program starts later, as it does to skip a broken batch.
            ([ALL, 2], |epoch| epoch + 1),
            ([2, 0], |_| 0),
        ] {
            let texts = logged_after_resume(ranks, saved_after, first);
            assert!(texts.iter().all(String::is_empty), "{texts:?}");
        }
    }
}

#[test]
fn a_data_set_that_draws_at_each_read_is_told_where_one_rank_resumes() {
    fn drawn(check: bool) -> Loader<Column> {
        let options = SamplerDatasetOptions::default().with_fixed_size(8);
        let dataset = SamplerDataset::new(columns(1 << 20), options.with_seed(7));
        let builder = LoaderBuilder::new(ColumnBatcher).batch_size(2);
        match check {
            true => builder.build(dataset),
            false => builder.without_item_check().build(dataset),
        }
    }
    let trains: [(Load, bool); 3] = [
        (|| drawn(true), true),
        (|| drawn(false), false),
        (|| loader(8, 2), false),
    ];
    for (train, told) in trains {
        let folder = tempfile::tempdir().unwrap();
        let life = || -> Result<String> {
            let accelerator = Accelerator::new()?;
            let model = line(&accelerator.device());
            let parts = (model, SgdConfig::new().init(), train(), drawn(true));
            let parts = accelerator.prepare(parts)?;
            let (resumed, text) = logged(|| accelerator.resume(folder.path(), parts));
            let ((mut model, mut optimizer, train, valid), _) = resumed?;
            let batch = train.epoch(0).next().unwrap()?;
            model = learn(&accelerator, model, &mut optimizer, 0.1, &batch)?;
            let _ = valid.epoch(0).next().unwrap()?;
            accelerator.save_state(folder.path(), (&model, &optimizer, &train, &valid))?;
            Ok(text)
        };
        assert!(!life().unwrap().contains("WARN"));
        let text = life().unwrap();
        assert_eq!(text.matches("WARN").count(), usize::from(told), "{text}");
        assert_eq!(
            text.contains("the loader (part 3 of the tuple)"),
            told,
            "{text}"
        );
        assert_eq!(text.contains("`SamplerDataset`"), told, "{text}");
    }
}

#[test]
fn an_epoch_that_continues_in_a_second_pass_is_not_taken_for_one_that_was_left() {
    let ((), text) = logged(|| {
        let accelerator = Accelerator::builder()
            .accumulation_steps(2)
            .build()
            .unwrap();
        let (mut model, mut optimizer, train) = learner(&accelerator, loader(24, 2)).unwrap();
        let rest = train.epoch(0).skip_first_batches(3);
        for batch in train.epoch(0).take(3).chain(rest) {
            let batch = batch.unwrap();
            model = learn(&accelerator, model, &mut optimizer, 0.1, &batch).unwrap();
        }
        accelerator.finish().unwrap();
    });
    assert!(text.is_empty(), "{text}");
}

/// The program finds its own position.
#[test]
fn batches_that_are_left_out_of_an_epoch_that_continues_are_told_once() {
    let folder = tempfile::tempdir().unwrap();
    let steps = |resume: bool, skip: u64| {
        logged(|| {
            let accelerator = Accelerator::new().unwrap();
            let mut parts = learner(&accelerator, loader(24, 2)).unwrap();
            if resume {
                parts = accelerator.resume(folder.path(), parts).unwrap().0;
            }
            let (mut model, mut optimizer, train) = parts;
            for epoch in 0..2 {
                for batch in train.epoch(epoch).skip_first_batches(skip) {
                    let batch = batch.unwrap();
                    model = learn(&accelerator, model, &mut optimizer, 0.1, &batch).unwrap();
                    if !resume && batch.step() == 3 {
                        let parts = (&model, &optimizer, &train);
                        accelerator.save_state(folder.path(), parts).unwrap();
                        return optimizer.steps();
                    }
                }
            }
            optimizer.steps()
        })
    };
    let (saved, text) = steps(false, 1);
    assert!(
        saved == 3 && text.is_empty(),
        "an epoch that is whole: {text}"
    );
    let (_, text) = steps(true, 0);
    assert!(!text.contains("WARN"), "nothing is left out: {text}");
    let (_, text) = steps(true, 4);
    let words = ["WARN", "continues after step 4 of epoch 0", "4 more"];
    assert_told_once(&[text], &words);
}

#[test]
fn micro_steps_that_no_step_came_of_are_told_at_the_end() {
    for ranks in [1, 2] {
        let texts = warnings_after_breaks(ranks, [4, 2], Batch::weight);
        let words = [
            "2 micro-steps",
            "no optimizer step",
            "run the epoch to its end",
        ];
        assert_told_once(&texts, &words);
        // The library cannot know where the epochs end.
        let texts = warnings_after_breaks(ranks, [4, 4], |batch| Weight::from(batch.num_samples()));
        let words = [
            "2 micro-steps",
            "`backward` was given a number",
            "pass `&batch`",
        ];
        assert_told_once(&texts[..1], &words);
        let text = &texts[0];
        assert!(!text.contains("run the epoch to its end"), "{text}");
    }
}
