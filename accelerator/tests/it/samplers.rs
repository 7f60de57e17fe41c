//! The program's own orders and batches, weights, places of samples, and nested loaders.

use crate::common::{
    Column, ColumnBatcher, assert_chain, assert_close, assert_errors, columns, flat, learn,
    learner, loader, of_every_rank,
};
use accelerator::data::{AssumeDeterministic, Loader, SamplePlace};
use accelerator::plan::WeightedSampler;
use accelerator::prelude::*;
use burn::data::dataloader::DataLoaderBuilder as BurnBuilder;

fn builder() -> LoaderBuilder<usize, Column> {
    LoaderBuilder::new(ColumnBatcher)
}

type Seen = (Vec<usize>, usize, bool);

fn seen(batch: &Batch<Column>) -> Seen {
    (batch.numbers.clone(), batch.real(), batch.is_last())
}

/// Returns every rank's batches of an epoch.
fn shares(
    ranks: usize,
    epoch: u64,
    build: impl Fn() -> Loader<Column> + Send + Sync,
) -> Vec<Vec<Vec<usize>>> {
    accelerator::launch(ranks, |accelerator| {
        let loader = accelerator.prepare(build())?;
        loader
            .epoch(epoch)
            .map(|batch| Ok(batch?.numbers.clone()))
            .collect()
    })
    .unwrap()
}

/// Joins the batches of all ranks step by step.
fn joined(ranks: &[Vec<Vec<usize>>]) -> Vec<usize> {
    let steps = 0..ranks[0].len();
    let all = steps.flat_map(|step| ranks.iter().flat_map(move |rank| rank[step].clone()));
    all.collect()
}

fn five() -> Vec<Vec<u64>> {
    [0..3, 3..5, 5..9, 9..12, 12..14].map(Vec::from_iter).into()
}

/// C1: the tables of batch samplers without a batch size hold for loaders.
#[test]
fn c1_given_batches_go_round_as_in_accelerate() {
    let deal = |ranks, tail| {
        shares(ranks, 0, move || {
            builder()
                .tail(tail)
                .batch_sampler(|_| five())
                .build(columns(14))
        })
    };
    let zero = vec![vec![0, 1, 2], vec![5, 6, 7, 8], vec![12, 13]];
    let one = vec![vec![3, 4], vec![9, 10, 11]];
    let padded = [one.clone(), vec![vec![0, 1, 2]]].concat();
    assert_eq!(deal(2, TailPolicy::Uneven), [zero.clone(), one.clone()]);
    assert_eq!(deal(2, TailPolicy::Pad), [zero.clone(), padded]);
    assert_eq!(deal(2, TailPolicy::Drop), [&zero[..2], &one[..]]);
}

#[test]
fn given_batches_of_all_ranks_are_learnt_from_as_one_batch() {
    let trained = |ranks, batches: fn(u64) -> Vec<Vec<u64>>| {
        let weights = accelerator::launch(ranks, |accelerator| {
            let loader = builder().batch_sampler(batches).build(columns(14));
            let (mut model, mut optimizer, train) = learner(&accelerator, loader)?;
            assert_eq!(train.steps(), None);
            for batch in (0..3).flat_map(|epoch| train.epoch(epoch)) {
                model = learn(&accelerator, model, &mut optimizer, 0.1, &batch?)?;
            }
            Ok(flat(&model))
        });
        of_every_rank(weights.unwrap())
    };
    // Each batch joins what two ranks use in a step. In the last step, only rank 0 has samples.
    let whole = |_| [0..5, 5..12, 12..14].map(Vec::from_iter).into();
    assert_close(&trained(2, |_| five()), &trained(1, whole), 1e-6);
}

/// Batches do not depend on the number of ranks, and contain each sample once.
#[test]
fn batches_by_tokens_are_the_same_on_any_number_of_ranks() {
    let length = |n: usize| n * n % 23 + 1;
    let build = move || {
        let builder = builder().shuffle(5).max_tokens(40, move |n| length(*n));
        builder.build(columns(97))
    };
    let alone = shares(1, 2, build).remove(0);
    for batch in &alone {
        let longest = batch.iter().map(|n| length(*n)).max().unwrap();
        assert!(longest * batch.len() <= 40, "{batch:?}");
    }
    let mut samples = alone.concat();
    samples.sort_unstable();
    assert_eq!(samples, (0..97).collect::<Vec<_>>());
    assert_ne!(alone, shares(1, 3, build).remove(0));
    for ranks in 2..5 {
        let steps = accelerator::launch(ranks, |accelerator| {
            let loader = accelerator.prepare(build())?;
            let batches = loader.epoch(2).map(|batch| Ok(seen(&batch?)));
            let batches = batches.collect::<Result<Vec<_>>>()?;
            assert_eq!(loader.steps(), Some(batches.len() as u64));
            Ok(batches)
        });
        let steps = steps.unwrap();
        let given = (0..steps[0].len()).flat_map(|step| steps.iter().map(move |rank| &rank[step]));
        let given: Vec<_> = given.filter(|(_, real, _)| *real > 0).collect();
        assert!(given.iter().map(|(batch, ..)| batch).eq(&alone));
    }
}

/// A job of two ranks resumes on other numbers of ranks in mid-epoch.
#[test]
fn batches_by_tokens_resume_on_any_number_of_ranks() {
    let build = || {
        let builder = builder().shuffle(5).max_tokens(12, |n| n % 5 + 1);
        builder.build(columns(61))
    };
    let folder = tempfile::tempdir().unwrap();
    let before = accelerator::launch(2, |accelerator| {
        let (mut model, mut optimizer, train) = learner(&accelerator, build())?;
        let mut used = Vec::new();
        for batch in train.epoch(1).take(3) {
            let batch = batch?;
            used.extend(batch.real_indices().to_vec());
            model = learn(&accelerator, model, &mut optimizer, 0.1, &batch)?;
        }
        accelerator.save_state(folder.path(), (&model, &optimizer, &train))?;
        Ok(used)
    });
    let before = before.unwrap().concat();
    for ranks in 1..5 {
        let rest = accelerator::launch(ranks, |accelerator| {
            let parts = learner(&accelerator, build())?;
            let ((_, _, train), position) = accelerator.resume(folder.path(), parts)?;
            assert_eq!(position.epoch(), 1);
            let rest = train
                .epoch(1)
                .map(|batch| Ok(batch?.real_indices().to_vec()));
            Ok(rest.collect::<Result<Vec<_>>>()?.concat())
        });
        let mut all = [before.clone(), rest.unwrap().concat()].concat();
        all.sort_unstable();
        assert_eq!(all, (0..61).collect::<Vec<_>>(), "{ranks} ranks");
    }
}

#[test]
fn a_limit_of_tokens_that_cannot_be_kept_is_refused_on_every_rank() {
    let refuse = |build: fn() -> Loader<Column>, words: &[&str]| {
        let errors = accelerator::launch(2, |accelerator| {
            Ok(accelerator.prepare(build()).map(drop).unwrap_err())
        });
        assert_errors(errors.unwrap(), Error::is_config, words);
    };
    let too_long = || builder().max_tokens(8, |n| *n).build(columns(14));
    refuse(too_long, &["sample 9 has 9 tokens", "at most 8"]);
    let ordered = || {
        let builder = builder().sampler(|_| vec![0, 1]);
        builder.max_tokens(8, |n| *n).build(columns(4))
    };
    refuse(ordered, &["with `shuffle`", "sampler"]);
    let streamed = || {
        let numbers = |_part| (0..13_usize).map(std::io::Result::Ok);
        builder().max_tokens(8, |n| *n).build_stream(numbers)
    };
    refuse(streamed, &["a stream", "tokens"]);
    let dropped = || {
        let builder = builder().max_tokens(100, |_| 1).tail(TailPolicy::Drop);
        builder.build(columns(9))
    };
    refuse(dropped, &["9 samples do not fill a step of 2 ranks"]);
}

#[test]
fn ranks_that_sample_differently_are_named_on_every_rank() {
    let errors = accelerator::launch(3, |accelerator| {
        let rank = accelerator.rank() as u64;
        let loader = builder()
            .batch_size(2)
            .sampler(move |epoch| (0..8).map(|n| n ^ (rank & epoch & 1)).collect())
            .build(columns(8));
        let loader = accelerator.prepare(loader)?;
        assert_eq!(loader.epoch(0).count(), 2, "here they are alike");
        Ok(loader.epoch(1).next().unwrap().unwrap_err())
    })
    .unwrap();
    let words = ["ranks 0, 2: ", "rank 1: ", "epoch 1"];
    assert_errors(errors, Error::is_data, &words);
}

#[test]
fn a_sample_that_is_not_there_is_named_on_every_rank() {
    let errors = accelerator::launch(2, |accelerator| {
        let last = if accelerator.rank() == 1 { 8 } else { 7 };
        let loader = builder().sampler(move |_| vec![0, last]).build(columns(8));
        let loader = accelerator.prepare(loader)?;
        Ok(loader.epoch(0).next().unwrap().unwrap_err())
    })
    .unwrap();
    assert_errors(errors, Error::is_data, &["sample 8"]);
}

#[test]
fn draws_by_weight_are_those_of_the_plan_at_every_world_size() {
    let sampler = || WeightedSampler::new((0..20).map(f64::from).collect::<Vec<_>>()).unwrap();
    let wanted: Vec<_> = sampler().with_replacement(30, 7, 2);
    for ranks in 1..4 {
        let drawn = shares(ranks, 2, || {
            let builder = builder().global_batch_size(6);
            builder.weighted(sampler(), 30, 7).build(columns(20))
        });
        let all = joined(&drawn).into_iter().map(|n| n as u64);
        assert_eq!(all.collect::<Vec<_>>(), wanted, "{ranks} ranks");
    }
    let distinct = shares(2, 0, || {
        let builder = builder().batch_size(3);
        let builder = builder
            .weighted_without_replacement(sampler(), 12, 7)
            .unwrap();
        builder.build(columns(20))
    });
    let mut distinct = distinct.concat().concat();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), 12);
    let error = builder()
        .weighted_without_replacement(sampler(), 20, 7)
        .unwrap_err();
    assert_chain(&error, Error::is_config, &["only 19"]);
}

#[test]
fn given_orders_and_batches_go_on_in_mid_epoch() {
    let reversed = || {
        let builder = builder().batch_size(2);
        builder
            .sampler(|epoch| (epoch..13).rev().collect())
            .build(columns(13))
    };
    let batched = || builder().batch_sampler(|_| five()).build(columns(14));
    let weighted = || {
        let sampler = WeightedSampler::new(vec![1.0; 9]).unwrap();
        builder()
            .batch_size(2)
            .weighted(sampler, 14, 3)
            .build(columns(9))
    };
    let by_tokens = || {
        let builder = builder().shuffle(3).max_tokens(12, |n| n % 5 + 1);
        builder.build(columns(14))
    };
    let all: [&(dyn Fn() -> Loader<Column> + Sync); 4] =
        [&reversed, &batched, &weighted, &by_tokens];
    for build in all {
        let folder = tempfile::tempdir().unwrap();
        // The first step runs in one process, and the rest after a resume.
        let ranks = accelerator::launch(2, |accelerator| {
            let (model, mut optimizer, train) = learner(&accelerator, build())?;
            let whole: Vec<_> = train.epoch(1).map(|batch| seen(&batch.unwrap())).collect();
            let batch = train.epoch(1).next().unwrap()?;
            let model = learn(&accelerator, model, &mut optimizer, 0.1, &batch)?;
            accelerator.save_state(folder.path(), (&model, &optimizer, &train))?;
            let parts = learner(&accelerator, build())?;
            let ((_, _, train), position) = accelerator.resume(folder.path(), parts)?;
            assert_eq!(position.epoch(), 1);
            let rest: Vec<_> = train.epoch(1).map(|batch| seen(&batch.unwrap())).collect();
            Ok((whole, rest))
        })
        .unwrap();
        for (whole, rest) in ranks {
            assert_eq!(rest, &whole[1..]);
        }
    }
}

#[test]
fn an_epoch_does_not_go_on_in_another_order_than_it_began_in() {
    type Build = dyn Fn(u64) -> Loader<Column> + Sync;
    let listed = |salt: u64| {
        let builder = builder().batch_size(2);
        let order = move |epoch| (0..13).map(|n| (n + epoch * salt) % 13).collect();
        builder.sampler(order).build(columns(13))
    };
    let batched = |salt: u64| {
        let order = move |epoch| (0..6).map(|n| vec![n, (7 + epoch * salt) % 14]).collect();
        builder().batch_sampler(order).build(columns(14))
    };
    let weighted = |salt: u64| {
        let weights: Vec<_> = (0..9).map(|n| 1.0 + (n * salt) as f64).collect();
        let sampler = WeightedSampler::new(weights).unwrap();
        let builder = builder().batch_size(2);
        builder.weighted(sampler, 14, 3).build(columns(9))
    };
    let all: [&Build; 3] = [&listed, &batched, &weighted];
    for build in all {
        let folder = tempfile::tempdir().unwrap();
        let errors = accelerator::launch(2, |accelerator| {
            let (model, mut optimizer, train) = learner(&accelerator, build(1))?;
            let batch = train.epoch(1).next().unwrap()?;
            let model = learn(&accelerator, model, &mut optimizer, 0.1, &batch)?;
            accelerator.save_state(folder.path(), (&model, &optimizer, &train))?;
            let parts = learner(&accelerator, build(2))?;
            let ((_, _, train), _) = accelerator.resume(folder.path(), parts)?;
            // No other epoch was used.
            assert!(train.epoch(0).all(|batch| batch.is_ok()));
            let error = train.epoch(1).next().unwrap().unwrap_err();
            accelerator.wait_for_everyone()?;
            let parts = learner(&accelerator, build(1))?;
            let ((_, _, train), _) = accelerator.resume(folder.path(), parts)?;
            assert!(train.epoch(1).all(|batch| batch.is_ok()));
            Ok(error)
        })
        .unwrap();
        let words = ["epoch 1", "4 samples"];
        assert_errors(errors, Error::is_checkpoint, &words);
    }
}

/// C11: two ranks share three samples in batches of one. Accelerate joins rank 1, which has one step, with rank 0,
/// which has two. Here evaluation does so, and in training rank 1 is idle.
#[test]
fn c11_uneven_ranks_are_joined() {
    let uneven = shares(2, 0, || {
        builder().tail(TailPolicy::Uneven).build(columns(3))
    });
    let steps: Vec<Vec<usize>> = uneven
        .iter()
        .map(|rank| (0..rank.len()).collect())
        .collect();
    assert_eq!(steps, [vec![0, 1], vec![0]]);
    let trained = |ranks, size| {
        let weights = accelerator::launch(ranks, |accelerator| {
            let (mut model, mut optimizer, train) = learner(&accelerator, loader(3, size))?;
            let mut weights = Vec::new();
            for batch in train.epoch(0) {
                let batch = batch?;
                let is_idle = batch.is_idle();
                weights.push(if is_idle { 0 } else { batch.num_samples() });
                model = learn(&accelerator, model, &mut optimizer, 0.1, &batch)?;
            }
            let all = accelerator.gather_object(&weights)?;
            assert!(ranks == 1 || all == [[1, 1], [1, 0]], "{all:?}");
            Ok(flat(&model))
        });
        of_every_rank(weights.unwrap())
    };
    assert_close(&trained(2, 1), &trained(1, 2), 1e-6);
}

/// C16: the same seed gives the same order on every number of ranks, and another seed another order.
#[test]
fn c16_orders_follow_seed_and_epoch_alone() {
    let order = |ranks: usize, seed, epoch| {
        let build = || {
            builder()
                .global_batch_size(4)
                .shuffle(seed)
                .build(columns(24))
        };
        joined(&shares(ranks, epoch, build))
    };
    let epochs = |ranks, seed| -> Vec<Vec<usize>> {
        (0..3).map(|epoch| order(ranks, seed, epoch)).collect()
    };
    let first = epochs(1, 42);
    assert_eq!(first, epochs(1, 42));
    assert_eq!(first, epochs(2, 42));
    let other = epochs(2, 43);
    for (mine, theirs) in first.iter().zip(&other) {
        assert_ne!(mine, theirs);
        let mut sorted = mine.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..24).collect::<Vec<_>>());
    }
    assert_ne!(first[0], first[1]);
}

/// Returns every kind of loader, over 13 samples.
fn every_kind(accelerator: &Accelerator) -> Vec<(&'static str, PreparedLoader<Column>)> {
    let burns = BurnBuilder::new(ColumnBatcher)
        .batch_size(2)
        .build(columns(13));
    let numbers = |_part| (0..13_usize).map(std::io::Result::Ok);
    let own = |part: accelerator::data::StreamPart| {
        (part.index()..13)
            .step_by(part.count())
            .map(std::io::Result::Ok)
    };
    let two = || builder().batch_size(2);
    let given = two()
        .batch_sampler(|_| five()[..4].to_vec())
        .build(columns(13));
    let sampler = |_| (0..13).collect();
    let ours = [
        ("planned", two().build(columns(13))),
        ("inline", two().num_workers(0).build(columns(13))),
        ("sampler", two().sampler(sampler).build(columns(13))),
        ("batches", given),
        (
            "tokens",
            builder().max_tokens(6, |n| n % 3 + 1).build(columns(13)),
        ),
        ("stream", two().build_stream(numbers)),
        ("parts", two().build_sharded_stream(own)),
        ("dispatched", two().build_dispatched_stream(numbers)),
    ];
    let mut all: Vec<_> = ours
        .map(|(name, loader)| (name, accelerator.prepare(loader).unwrap()))
        .into();
    let burns = accelerator.prepare(AssumeDeterministic(burns));
    all.push(("Burn's", burns.unwrap()));
    all
}

/// C25: loaders within loaders, of which the inner one is read to its end, left, or begun later.
#[test]
fn c25_ends_are_right_in_every_kind_of_loader_also_inside_each_other() {
    accelerator::launch(2, |accelerator| {
        let ends = |epoch: accelerator::data::Epoch<Column>| -> Vec<bool> {
            epoch.map(|batch| batch.unwrap().is_last()).collect()
        };
        let last_alone = |steps: usize| (1..=steps).map(|step| step == steps).collect::<Vec<_>>();
        let loaders = every_kind(&accelerator);
        for (name, outer) in &loaders {
            let steps = outer.epoch(0).count();
            assert!((2..8).contains(&steps), "{name}: {steps}");
            for (other, inner) in &loaders {
                let inner_steps = inner.epoch(0).count();
                let mut outer_ends = Vec::new();
                for (step, batch) in outer.epoch(0).enumerate() {
                    let batch = batch?;
                    match step % 3 {
                        0 => assert_eq!(ends(inner.epoch(1)), last_alone(inner_steps), "{other}"),
                        // The epoch is left after its first batch.
                        1 => assert!(!inner.epoch(1).next().unwrap()?.is_last(), "{other}"),
                        _ => assert_eq!(
                            ends(inner.epoch(2).skip_first_batches(1)),
                            last_alone(inner_steps - 1),
                            "{other}"
                        ),
                    }
                    outer_ends.push(batch.is_last());
                }
                assert_eq!(outer_ends, last_alone(steps), "{name} around {other}");
            }
        }
        Ok(())
    })
    .unwrap();
}

/// Corresponds to Accelerate's `SkipBatchSampler(BatchSampler(range(16), 4), 2)`.
#[test]
fn skipped_batches_are_left_out_and_the_others_stay_what_they_are() {
    accelerator::launch(2, |accelerator| {
        for (name, loader) in every_kind(&accelerator) {
            let whole: Vec<_> = loader.epoch(0).map(Result::unwrap).collect();
            for skipped in 0..=whole.len() + 1 {
                let epoch = loader.epoch(0).skip_first_batches(skipped as u64);
                assert!(
                    epoch
                        .size_hint()
                        .1
                        .is_none_or(|most| most == whole.len().saturating_sub(skipped))
                );
                let rest: Vec<_> = epoch.map(Result::unwrap).collect();
                let wanted = &whole[skipped.min(whole.len())..];
                assert_eq!(rest.len(), wanted.len(), "{name}");
                for (found, wanted) in rest.iter().zip(wanted) {
                    let told = |batch: &Batch<Column>| {
                        (batch.step(), batch.real(), batch.is_idle(), batch.is_last())
                    };
                    assert_eq!(told(found), told(wanted), "{name}, {skipped} skipped");
                    let real = |batch: &Batch<Column>| batch.numbers[..batch.real()].to_vec();
                    assert_eq!(real(found), real(wanted), "{name}, {skipped} skipped");
                }
            }
            let mut begun = loader.epoch(0);
            begun.next().unwrap()?;
            let rest: Vec<_> = begun
                .skip_first_batches(1)
                .map(|batch| batch.unwrap().step())
                .collect();
            assert_eq!(rest, (2..whole.len() as u64).collect::<Vec<_>>(), "{name}");
        }
        Ok(())
    })
    .unwrap();
    let alone = shares(1, 0, || builder().batch_size(4).build(columns(16)));
    assert_eq!(alone[0][2..], [[8, 9, 10, 11], [12, 13, 14, 15]]);
}

#[test]
fn what_is_done_to_a_sample_depends_on_its_place_alone() {
    // The numbers of samples become random numbers of their places.
    let mapped = |ranks, workers| {
        let mut all = shares(ranks, 3, || {
            builder()
                .batch_size(2)
                .shuffle(5)
                .num_workers(workers)
                .map_samples(|item, place: SamplePlace| {
                    assert_eq!((item as u64, place.epoch()), (place.index(), 3));
                    place.rng_seed(9) as usize >> 8
                })
                .build(columns(12))
        })
        .concat()
        .concat();
        all.sort_unstable();
        all
    };
    let one = mapped(1, 0);
    assert_eq!(one, mapped(2, 2));
    assert_eq!(one, mapped(3, 1));
    // The same holds for a stream.
    let streamed = accelerator::launch(2, |accelerator| {
        let numbers = |_part| (0..12_usize).map(std::io::Result::Ok);
        let map = |_, place: SamplePlace| place.rng_seed(9) as usize >> 8;
        let builder = builder().batch_size(2).map_samples(map);
        let loader = accelerator.prepare(builder.build_dispatched_stream(numbers))?;
        loader
            .epoch(3)
            .map(|batch| Ok(batch?.numbers.clone()))
            .collect::<Result<Vec<_>>>()
    });
    let mut streamed = streamed.unwrap().concat().concat();
    streamed.sort_unstable();
    assert_eq!(one, streamed);
}
