//! The distribution of samples over ranks by every kind of loader.

use std::sync::Arc;

use crate::common::{
    Column, ColumnBatcher, assert_chain, assert_contains, assert_error, columns, loader,
};
use accelerator::data::AssumeDeterministic;
use accelerator::plan::WeightedSampler;
use accelerator::prelude::*;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder as BurnBuilder};
use burn::data::dataset::transform::{SamplerDataset, SamplerDatasetOptions, ShuffledDataset};
use burn::data::dataset::{Dataset, DatasetError, InMemDataset};

/// The numbers of a batch, how many are real, and whether the batch is idle.
type Share = (Vec<usize>, usize, bool);

/// Returns every rank's batches of an epoch.
fn shares(
    ranks: usize,
    epoch: u64,
    build: impl Fn() -> accelerator::data::Loader<Column> + Send + Sync,
) -> Vec<Vec<Share>> {
    accelerator::launch(ranks, |accelerator| {
        let loader = accelerator.prepare(build())?;
        loader
            .epoch(epoch)
            .map(|batch| {
                let batch = batch?;
                assert_eq!(batch.numbers.len(), batch.num_samples());
                let numbers: Vec<u64> = batch.numbers.iter().map(|&n| n as u64).collect();
                assert_eq!(numbers, batch.indices());
                Ok((batch.numbers.clone(), batch.real(), batch.is_idle()))
            })
            .collect()
    })
    .unwrap()
}

#[test]
fn the_last_step_is_divided_and_an_idle_rank_repeats_itself() {
    let ranks = shares(3, 0, || loader(10, 3));
    assert_eq!(ranks[0], [(vec![0, 1, 2], 3, false), (vec![9], 1, false)]);
    assert_eq!(ranks[1][1], (vec![3, 4, 5], 0, true));
    assert_eq!(ranks[2][1], (vec![6, 7, 8], 0, true));
}

#[test]
fn workers_do_not_change_the_order() {
    let build = |workers| {
        move || {
            LoaderBuilder::new(ColumnBatcher)
                .batch_size(3)
                .shuffle(9)
                .num_workers(workers)
                .build(columns(50))
        }
    };
    let inline = shares(2, 5, build(0));
    assert_eq!(inline, shares(2, 5, build(1)));
    assert_eq!(inline, shares(2, 5, build(3)));
    assert_ne!(
        inline,
        shares(2, 6, build(1)),
        "another epoch, another order"
    );
    let mut all: Vec<usize> = inline
        .into_iter()
        .flatten()
        .flat_map(|batch| batch.0)
        .collect();
    all.sort_unstable();
    assert_eq!(all, (0..50).collect::<Vec<_>>());
}

#[test]
fn it_is_a_burn_loader_too() {
    accelerator::launch(3, |accelerator| {
        let loader: Arc<dyn DataLoader<Column>> = Arc::new(accelerator.prepare(loader(10, 3))?);
        let read = |loader: &Arc<dyn DataLoader<Column>>| -> Vec<usize> {
            loader
                .iter()
                .flat_map(|batch| batch.unwrap().numbers)
                .collect()
        };
        let mine = read(&loader);
        assert_eq!(mine.len(), loader.num_items(), "idle batches are left out");
        let all = accelerator.gather_object(&mine)?;
        let mut all = all.concat();
        all.sort_unstable();
        assert_eq!(all, (0..10).collect::<Vec<_>>());

        let mut pass = loader.iter();
        while pass.next().is_some() {}
        assert!(pass.progress().is_completed());

        let part = loader.slice(2, 5);
        let all = accelerator.gather_object(&read(&part))?.concat();
        assert_eq!(all, [2, 3, 4]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_loader_of_burns_is_shared_out_batch_by_batch() {
    let ranks = accelerator::launch(3, |accelerator| {
        let loader = BurnBuilder::new(ColumnBatcher)
            .batch_size(2)
            .build(columns(15));
        let loader = accelerator.prepare(AssumeDeterministic(loader))?;
        loader
            .epoch(0)
            .map(|batch| {
                let batch = batch?;
                Ok((batch.numbers.clone(), batch.real(), batch.is_last()))
            })
            .collect::<Result<Vec<_>>>()
    })
    .unwrap();
    // Eight batches go to three ranks, so the third is idle in the last round.
    let last = [
        (vec![12, 13], 2, true),
        (vec![14], 1, true),
        (vec![12, 13], 0, true),
    ];
    for (rank, last) in last.into_iter().enumerate() {
        let full = |first: usize| (vec![first, first + 1], 2, false);
        assert_eq!(ranks[rank], [full(2 * rank), full(6 + 2 * rank), last]);
    }
}

struct Broken {
    at: usize,
    how: Fault,
}

#[derive(Clone, Copy, Eq, PartialEq)]
enum Fault {
    Error,
    Panic,
}

/// Tells whether reading is to blame for an error.
fn is_readers(error: &Error) -> bool {
    error.is_data() || error.is_panic()
}

impl Dataset<usize> for Broken {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        match self.how {
            _ if index != self.at => Ok(index),
            Fault::Error => Err(DatasetError::new(std::io::Error::other("disk on fire"))),
            Fault::Panic => panic!("index {index} is cursed"),
        }
    }

    fn len(&self) -> usize {
        10
    }
}

#[test]
fn a_data_set_that_fails_ends_the_epoch_with_its_error() {
    for (how, text) in [(Fault::Error, "disk on fire"), (Fault::Panic, "cursed")] {
        for workers in [0, 1, 3] {
            if workers == 0 && how == Fault::Panic {
                continue; // That one reaches the program itself, as a panic does.
            }
            let accelerator = Accelerator::new().unwrap();
            let loader = LoaderBuilder::new(ColumnBatcher)
                .batch_size(2)
                .num_workers(workers)
                .build(Broken { at: 5, how });
            let loader = accelerator.prepare(loader).unwrap();
            let batches: Vec<_> = loader.epoch(0).collect();
            assert_eq!(batches.len(), 3, "two batches and an error");
            assert_chain(batches[2].as_ref().unwrap_err(), is_readers, &[text]);
        }
    }
}

#[test]
fn an_epoch_can_be_left_early() {
    let accelerator = Accelerator::new().unwrap();
    let loader = accelerator.prepare(loader(1_000_000, 2)).unwrap();
    for epoch in 0..3 {
        let batch = loader.epoch(epoch).next().unwrap().unwrap();
        assert_eq!(batch.numbers, [0, 1]);
    }
}

#[test]
fn sizes_that_make_no_sense_are_refused() {
    let accelerator = Accelerator::new().unwrap();
    let error = accelerator.prepare(loader(10, 0)).unwrap_err();
    assert_chain(&error, Error::is_config, &["batch size"]);
    for (tail, size) in [(TailPolicy::Exact, 1), (TailPolicy::Pad, 5)] {
        let error = accelerator::launch(2, |accelerator| {
            let loader = LoaderBuilder::new(ColumnBatcher)
                .global_batch_size(size)
                .tail(tail)
                .build(columns(10));
            accelerator.prepare(loader).map(|_| ())
        })
        .unwrap_err();
        let word = format!("a global batch of {size}");
        assert_chain(&error, Error::is_config, &[&word]);
    }
}

#[test]
fn a_global_batch_that_does_not_divide_is_shared_as_evenly_as_possible() {
    let build = || {
        LoaderBuilder::new(ColumnBatcher)
            .global_batch_size(5)
            .build(columns(12))
    };
    let numbers = |batches: Vec<Share>| batches.into_iter().map(|batch| batch.0);
    let [zero, one] = shares(2, 0, build).try_into().unwrap();
    assert!(numbers(zero).eq([vec![0, 1, 2], vec![5, 6, 7], vec![10]]));
    assert!(numbers(one).eq([vec![3, 4], vec![8, 9], vec![11]]));
}

#[test]
fn loaders_that_differ_between_ranks_are_named() {
    let build = |rank: usize, what: &str| {
        let (samples, size, seed, tail) = match (rank, what) {
            (1, "length") => (11, 2, 1, TailPolicy::Exact),
            (1, "size") => (10, 3, 1, TailPolicy::Exact),
            (1, "seed") => (10, 2, 2, TailPolicy::Exact),
            (1, "tail") => (10, 2, 1, TailPolicy::Drop),
            _ => (10, 2, 1, TailPolicy::Exact),
        };
        LoaderBuilder::new(ColumnBatcher)
            .batch_size(size)
            .shuffle(seed)
            .tail(tail)
            .build(columns(samples))
    };
    for what in ["length", "size", "seed", "tail"] {
        let errors = accelerator::launch(2, |accelerator| {
            Ok(accelerator
                .prepare(build(accelerator.rank(), what))
                .unwrap_err()
                .to_string())
        })
        .unwrap();
        assert_eq!(errors[0], errors[1]);
        assert!(errors[0].contains("rank 1 has"), "{}", errors[0]);
    }
}

/// Calls `prepare` on two ranks with a data set of each rank's own, and returns the outcomes.
fn prepared_of_each<D: Dataset<usize> + 'static>(
    dataset: impl Fn(usize) -> D + Sync,
) -> Vec<Result<()>> {
    let outcomes = accelerator::launch(2, |accelerator| {
        let train = LoaderBuilder::new(ColumnBatcher)
            .batch_size(4)
            .build(dataset(accelerator.rank()));
        let outcome = accelerator.prepare(train).map(drop);
        accelerator.wait_for_everyone()?;
        Ok(outcome)
    });
    outcomes.unwrap()
}

#[test]
fn a_data_set_that_each_rank_has_drawn_by_itself_is_refused() {
    let shuffled = |seed: u64| ShuffledDataset::new(columns(64), seed);
    for outcome in prepared_of_each(|rank| shuffled(rank as u64)) {
        let words = ["the data set of a loader differs between ranks: rank 0 has the item "];
        assert_error(&outcome.unwrap_err(), Error::is_config, &words);
    }
    // The error shows once what each process has.
    for outcome in prepared_of_each(|rank| InMemDataset::new(vec![7000 + rank; 64])) {
        let text = outcome.unwrap_err().to_string();
        let found = "rank 0 has the item 0 (`7000`), and rank 1 has the item 0 (`7001`)";
        assert_eq!(text.matches("differs between ranks").count(), 1, "{text}");
        assert_contains(&text, &[found, "without_item_check"]);
    }
    for outcome in prepared_of_each(|_| shuffled(7)) {
        outcome.unwrap();
    }
}

#[test]
fn a_data_set_that_draws_for_each_read_is_refused_on_several_ranks() {
    let drawn = |options| SamplerDataset::new(columns(1 << 20), options);
    let sizes = || SamplerDatasetOptions::default().with_fixed_size(64);
    let own = prepared_of_each(|_| drawn(sizes().with_system_rng()));
    let seeded = prepared_of_each(|_| drawn(sizes().with_seed(7)));
    for outcome in own.into_iter().chain(seeded) {
        let text = outcome.unwrap_err().to_string();
        let words = [
            "items that change from one read to the next",
            "`SamplerDataset` draws anew at each read, also `with_seed`",
            "`weighted`",
        ];
        assert_contains(&text, &words);
        assert!(
            !text.contains("every rank must have the same values"),
            "{text}"
        );
    }
    // A single process may draw at random.
    let accelerator = Accelerator::new().unwrap();
    let train = LoaderBuilder::new(ColumnBatcher)
        .batch_size(4)
        .build(drawn(sizes().with_system_rng()));
    accelerator.prepare(train).unwrap();
}

#[test]
fn a_data_set_that_cannot_be_read_is_told_to_every_rank() {
    for (how, cause) in [(Fault::Error, "disk on fire"), (Fault::Panic, "cursed")] {
        let broken = |at| Broken { at, how };
        // The last item is one of those that are compared.
        for outcome in prepared_of_each(|_| broken(9)) {
            assert_chain(&outcome.unwrap_err(), is_readers, &[cause]);
        }
        for outcome in prepared_of_each(|rank| broken([99, 9][rank])) {
            let words = ["rank 1 failed to read", cause];
            assert_error(&outcome.unwrap_err(), is_readers, &words);
        }
    }
}

/// One rank alone cannot use the settings. The group still works afterwards.
#[test]
fn a_loader_that_one_rank_refuses_is_told_to_every_rank() {
    let weighted = |samples: usize, weights: usize| {
        let sampler = WeightedSampler::new(vec![1.0; weights]).unwrap();
        LoaderBuilder::new(ColumnBatcher)
            .batch_size(2)
            .weighted(sampler, 8, 1)
            .build(columns(samples))
    };
    let small = |batch: usize| {
        LoaderBuilder::new(ColumnBatcher)
            .global_batch_size(batch)
            .build(columns(8))
    };
    let burns = |samples: usize| {
        BurnBuilder::new(ColumnBatcher)
            .batch_size(2)
            .build(columns(samples))
    };
    let outcomes = accelerator::launch(2, |accelerator| {
        let rank = accelerator.rank();
        let each = |rank: usize, sizes: [usize; 2]| sizes[rank];
        let errors = [
            // The weights fit only the data set of rank 0.
            accelerator
                .prepare(weighted(each(rank, [8, 7]), 8))
                .map(drop),
            accelerator
                .prepare(weighted(8, each(rank, [8, 7])))
                .map(drop),
            accelerator.prepare(small(each(rank, [8, 1]))).map(drop),
            accelerator.prepare(loader(each(rank, [8, 0]), 2)).map(drop),
            accelerator
                .prepare(AssumeDeterministic(burns(each(rank, [8, 0]))))
                .map(drop),
        ];
        accelerator.wait_for_everyone()?;
        Ok(errors.map(|error| error.unwrap_err().to_string()))
    });
    let outcomes = outcomes.unwrap();
    assert_eq!(outcomes[0], outcomes[1]);
    let [length, weights, batch, empty, burns] = &outcomes[0];
    for text in [length, weights] {
        assert_contains(text, &["rank 1 has ", "give each"]);
    }
    assert!(batch.contains("a global batch of 1"), "{batch}");
    for text in [empty, burns] {
        assert!(text.contains("rank 1 has 0 samples"), "{text}");
    }
}
