//! Streams without a length: read by every rank, in parts, or by rank 0 for all.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use crate::common::{
    Column, ColumnBatcher, assert_chain, assert_close, assert_contains, assert_error,
    assert_errors, columns, flat, learn, learner, of_every_rank,
};
use accelerator::data::{Loader, SampleStream, StreamError, StreamItems, StreamPart};
use accelerator::prelude::*;
use burn::data::dataloader::batcher::Batcher;
use burn::tensor::Device;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    Dispatched,
    Interleaved,
    Parts,
}

const KINDS: [Kind; 3] = [Kind::Dispatched, Kind::Interleaved, Kind::Parts];
/// The kinds that go through the samples in the order of a single rank.
const IN_ORDER: [Kind; 2] = [Kind::Dispatched, Kind::Interleaved];

/// Returns a stream of the numbers below `samples`, which are dealt out to the parts in turn.
fn numbers(samples: usize) -> impl SampleStream<Item = usize> {
    move |part: StreamPart| {
        let mine = (part.index()..samples).step_by(part.count());
        mine.map(std::io::Result::Ok)
    }
}

fn builder(batch_size: usize, tail: TailPolicy) -> LoaderBuilder<usize, Column> {
    LoaderBuilder::new(ColumnBatcher)
        .batch_size(batch_size)
        .tail(tail)
}

fn build<S: SampleStream<Item = usize>>(
    kind: Kind,
    builder: LoaderBuilder<usize, Column>,
    stream: S,
) -> Loader<Column> {
    match kind {
        Kind::Dispatched => builder.build_dispatched_stream(stream),
        Kind::Interleaved => builder.build_stream(stream),
        Kind::Parts => builder.build_sharded_stream(stream),
    }
}

/// The numbers of a batch, how many are real, and whether it is the last one.
type Seen = (Vec<usize>, usize, bool);

fn seen(batch: &Batch<Column>) -> Seen {
    assert_eq!(batch.numbers.len(), batch.num_samples());
    (batch.numbers.clone(), batch.real(), batch.is_last())
}

/// Returns a loader of the first numbers: of a stream, or of a listed data set.
fn of_kind(
    kind: Option<Kind>,
    builder: LoaderBuilder<usize, Column>,
    samples: usize,
) -> Loader<Column> {
    match kind {
        Some(kind) => build(kind, builder, numbers(samples)),
        None => {
            let listed = move |_| (0..samples as u64).collect();
            builder.sampler(listed).build(columns(samples))
        }
    }
}

/// Returns the batches of an epoch.
fn epoch(loader: &PreparedLoader<Column>) -> Result<Vec<Seen>> {
    loader.epoch(0).map(|batch| Ok(seen(&batch?))).collect()
}

fn shares(
    ranks: usize,
    kind: Kind,
    samples: usize,
    batch_size: usize,
    tail: TailPolicy,
) -> Vec<Vec<Seen>> {
    accelerator::launch(ranks, |accelerator| {
        let loader = build(kind, builder(batch_size, tail), numbers(samples));
        let loader = accelerator.prepare(loader)?;
        // Passes before it change nothing.
        for _ in 0..2 {
            epoch(&loader)?;
        }
        epoch(&loader)
    })
    .unwrap()
}

/// C2: the batches of the ranks, joined step by step, are the stream.
#[test]
fn c2_rounds_keep_the_order_of_the_stream() {
    for kind in IN_ORDER {
        for (ranks, size, is_global) in [(1, 8, false), (2, 8, false), (2, 8, true), (3, 5, false)]
        {
            accelerator::launch(ranks, |accelerator| {
                let builder = LoaderBuilder::new(ColumnBatcher);
                let builder = match is_global {
                    true => builder.global_batch_size(size),
                    false => builder.batch_size(size),
                };
                let loader = accelerator.prepare(build(kind, builder, numbers(32 * ranks)))?;
                let mut all = Vec::new();
                for batch in loader.epoch(0) {
                    let batch = batch?;
                    let indices: Vec<_> = batch.indices().iter().map(|&i| i as usize).collect();
                    assert_eq!(batch.numbers, indices);
                    let mine = &batch.numbers[..batch.real()];
                    all.extend(accelerator.gather_object(&mine.to_vec())?.concat());
                }
                assert_eq!(all, (0..32 * ranks).collect::<Vec<_>>());
                Ok(())
            })
            .unwrap();
        }
    }
}

/// The tails are those of Accelerate's dispatcher, without its duplicates.
#[test]
fn the_last_round_is_divided_as_accelerate_dispatches_it() {
    for kind in IN_ORDER {
        let last = |ranks, samples, size| -> Vec<Vec<usize>> {
            let ranks = shares(ranks, kind, samples, size, TailPolicy::Exact);
            assert!(ranks.iter().all(|rank| rank.len() == ranks[0].len()));
            let real = |(numbers, real, _): &Seen| numbers[..*real].to_vec();
            ranks
                .iter()
                .map(|rank| real(rank.last().unwrap()))
                .collect()
        };
        assert_eq!(last(2, 22, 3), [[18, 19], [20, 21]]);
        assert_eq!(last(2, 21, 3), [vec![18, 19], vec![20]]);
        assert_eq!(last(2, 20, 3), [[18], [19]]);
        assert_eq!(last(2, 30, 4), [[24, 25, 26], [27, 28, 29]]);
        assert_eq!(last(2, 2, 3), [[0], [1]]);
        assert_eq!(last(4, 1, 4), [vec![0], vec![], vec![], vec![]]);
    }
}

#[test]
fn tail_policies_do_what_they_do_of_a_data_set() {
    let planned = |ranks, samples, size, tail| {
        let rows = accelerator::launch(ranks, |accelerator| {
            epoch(&accelerator.prepare(builder(size, tail).build(columns(samples)))?)
        });
        // A data set without a step is refused, but a stream cannot be known to have none.
        rows.unwrap_or_else(|error| {
            assert!(error.is_config(), "{error:?}");
            vec![Vec::new(); ranks]
        })
    };
    for kind in IN_ORDER {
        for tail in [TailPolicy::Pad, TailPolicy::Drop, TailPolicy::Uneven] {
            if (kind, tail) == (Kind::Dispatched, TailPolicy::Uneven) {
                continue;
            }
            for (ranks, samples, size) in [(2, 10, 4), (2, 16, 4), (3, 13, 2), (2, 2, 4), (2, 0, 3)]
            {
                assert_eq!(
                    shares(ranks, kind, samples, size, tail),
                    planned(ranks, samples, size, tail),
                    "{kind:?}, {tail}, {samples} samples, {ranks} ranks with {size}"
                );
            }
        }
    }
}

#[test]
fn parts_end_together_and_idle_until_then() {
    // Rank 0 has 0, 2, …, 8, and rank 1 has only 1 and 3.
    let ragged = |part: StreamPart| {
        let index = part.index();
        (0..[5, 2][index]).map(move |n| std::io::Result::Ok(2 * n + index))
    };
    let shares = |tail| {
        accelerator::launch(2, |accelerator| {
            epoch(&accelerator.prepare(builder(2, tail).build_sharded_stream(ragged))?)
        })
        .unwrap()
    };
    let full = vec![(vec![0, 2], 2, false), (vec![4, 6], 2, false)];
    let exact = shares(TailPolicy::Exact);
    assert_eq!(exact[0], [full.clone(), vec![(vec![8], 1, true)]].concat());
    let idle = |is_last| (vec![1, 3], 0, is_last);
    assert_eq!(exact[1], [(vec![1, 3], 2, false), idle(false), idle(true)]);
    let pad = shares(TailPolicy::Pad);
    assert_eq!(pad[0], [full.clone(), vec![(vec![8, 0], 1, true)]].concat());
    assert_eq!(pad[1], exact[1]);
    let drop = shares(TailPolicy::Drop);
    assert_eq!(drop, [[(vec![0, 2], 2, true)], [(vec![1, 3], 2, true)]]);
    let uneven = shares(TailPolicy::Uneven);
    assert_eq!(uneven[0], exact[0]);
    assert_eq!(uneven[1], [(vec![1, 3], 2, true)]);
}

#[test]
fn a_part_that_is_empty_is_named_on_every_rank() {
    let errors = accelerator::launch(3, |accelerator| {
        let loader = builder(2, TailPolicy::Exact).build_sharded_stream(numbers(2));
        let loader = accelerator.prepare(loader)?;
        Ok(loader.epoch(0).next().unwrap().unwrap_err())
    })
    .unwrap();
    assert_errors(errors, Error::is_data, &["ranks 2 hold no sample"]);
}

/// C12: each sample is gathered once.
#[test]
fn c12_metrics_see_each_sample_once() {
    for kind in KINDS {
        for (samples, size, tail, wanted) in [
            (30, 4, TailPolicy::Exact, 30),
            (30, 4, TailPolicy::Pad, 30),
            (99, 16, TailPolicy::Exact, 99),
            (512, 16, TailPolicy::Exact, 512),
            (21, 5, TailPolicy::Drop, 20),
        ] {
            let gathered = accelerator::launch(2, |accelerator| {
                let loader = build(kind, builder(size, tail), numbers(samples));
                let loader = accelerator.prepare(loader)?;
                let mut rows = 0;
                for batch in loader.epoch(0) {
                    let batch = batch?;
                    let all = accelerator.gather_for_metrics(batch.values.clone(), &batch)?;
                    rows += all.dims()[0];
                }
                Ok(rows)
            })
            .unwrap();
            assert_eq!(
                gathered,
                [wanted, wanted],
                "{kind:?}, {samples} samples, {tail}"
            );
        }
    }
}

/// Trains an epoch and returns the weights.
fn train(accelerator: &Accelerator, loader: Loader<Column>) -> Result<Vec<f32>> {
    let (mut model, mut optimizer, train) = learner(accelerator, loader)?;
    for batch in train.epoch(0) {
        model = learn(accelerator, model, &mut optimizer, 0.1, &batch?)?;
    }
    Ok(flat(&model))
}

#[test]
fn ranks_learn_from_a_stream_what_one_learns_from_a_data_set() {
    // The last round of three ranks is short, and some are idle in it.
    for (ranks, samples) in [(1, 26), (2, 25), (3, 25), (3, 26)] {
        let size = 12 / ranks;
        let one = accelerator::launch(1, |accelerator| {
            train(
                &accelerator,
                builder(12, TailPolicy::Exact).build(columns(samples)),
            )
        });
        let one = one.unwrap().remove(0);
        for kind in KINDS {
            let many = accelerator::launch(ranks, |accelerator| {
                let builder = builder(size, TailPolicy::Exact);
                train(&accelerator, build(kind, builder, numbers(samples)))
            });
            assert_close(&of_every_rank(many.unwrap()), &one, 1e-6);
        }
    }
}

#[test]
fn errors_of_rank_0s_reader_reach_every_rank() {
    for (after, workers, panics) in [(0, 1, false), (9, 1, false), (9, 0, false), (3, 1, true)] {
        let outcomes = accelerator::launch(3, |accelerator| {
            let broken = move |_: StreamPart| {
                (0..).map(move |n| match n < after {
                    true => Ok(n),
                    false if panics => panic!("the reader fell over"),
                    false => Err("the disk is gone"),
                })
            };
            let builder = builder(2, TailPolicy::Exact).num_workers(workers);
            let loader = accelerator.prepare(builder.build_dispatched_stream(broken))?;
            let (batches, errors): (Vec<_>, Vec<_>) =
                loader.epoch(0).partition(|batch| batch.is_ok());
            accelerator.wait_for_everyone()?;
            let mut errors = errors.into_iter().map(|error| error.unwrap_err());
            Ok((batches.len(), errors.next().unwrap(), errors.count()))
        })
        .unwrap();
        for (rank, (batches, error, more)) in outcomes.into_iter().enumerate() {
            assert_eq!(
                (batches, more),
                (after / 6, 0),
                "what came before is given out"
            );
            if panics {
                assert_error(&error, Error::is_panic, &["the reader fell over"]);
                continue;
            }
            assert_chain(&error, Error::is_data, &["the disk is gone"]);
            let is_told = format!("{error:?}").contains("rank 0 failed to read the stream");
            assert_eq!(is_told, rank > 0, "{error:?}");
        }
    }
}

/// A number that cannot be read if it is seven.
#[derive(Clone, Serialize)]
struct Fragile(usize);

impl<'de> Deserialize<'de> for Fragile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match usize::deserialize(deserializer)? {
            7 => Err(D::Error::custom("seven is broken")),
            number => Ok(Self(number)),
        }
    }
}

struct FragileBatcher;

impl Batcher<Fragile, Column> for FragileBatcher {
    fn batch(&self, items: Vec<Fragile>, device: &Device) -> Column {
        ColumnBatcher.batch(items.into_iter().map(|Fragile(n)| n).collect(), device)
    }
}

/// Sample 7 belongs to the first rank, to the second, or to a single rank.
#[test]
fn a_sample_that_cannot_be_read_fails_every_rank_whosever_it_is() {
    for (ranks, size, good) in [(2, 6, 0), (2, 4, 0), (3, 2, 1), (1, 4, 1)] {
        let outcomes = accelerator::launch(ranks, |accelerator| {
            let numbers = |_: StreamPart| (0..40).map(|n| std::io::Result::Ok(Fragile(n)));
            let loader = LoaderBuilder::new(FragileBatcher)
                .batch_size(size)
                .build_dispatched_stream(numbers);
            let loader = accelerator.prepare(loader)?;
            let mut epoch = loader.epoch(0);
            let error = epoch.find_map(Result::err).unwrap();
            // No rank waits for one that has returned.
            accelerator.wait_for_everyone()?;
            let good_batches = loader.epoch(0).take_while(Result::is_ok).count();
            Ok((error, good_batches))
        });
        for (error, good_batches) in outcomes.unwrap() {
            assert_eq!(good_batches, good);
            let words = ["cannot be read", "seven is broken"];
            assert_chain(&error, Error::is_data, &words);
        }
    }
}

#[test]
fn a_batcher_that_panics_on_one_rank_is_an_error_on_every_rank() {
    struct Falls;
    impl Batcher<usize, Column> for Falls {
        fn batch(&self, items: Vec<usize>, device: &Device) -> Column {
            assert!(!items.contains(&3), "the batcher fell over");
            ColumnBatcher.batch(items, device)
        }
    }
    for kind in [Kind::Dispatched, Kind::Parts] {
        for workers in [0, 1] {
            let errors = accelerator::launch(3, |accelerator| {
                // Sample 3 is in rank 1's first batch if dispatched, and in rank 0's second batch in parts.
                let builder = LoaderBuilder::new(Falls).batch_size(2).num_workers(workers);
                let loader = accelerator.prepare(build(kind, builder, numbers(40)))?;
                let error = loader.epoch(0).find_map(Result::err).unwrap();
                accelerator.wait_for_everyone()?;
                Ok(error)
            });
            assert_errors(errors.unwrap(), Error::is_panic, &["the batcher fell over"]);
        }
    }
}

/// An evaluation on one rank alone, or epochs counted differently, would do this.
#[test]
fn ranks_that_read_different_data_are_named_on_every_rank() {
    // The step, epoch and loader of most ranks, and those of rank 1.
    let cases = [
        ([0, 0, 0], [0, 0, 1]),
        ([0, 4, 1], [0, 5, 1]),
        ([0, 1, 0], [1, 1, 0]),
    ];
    for kind in [Some(Kind::Dispatched), Some(Kind::Parts), None] {
        for (most, one) in cases {
            let errors = accelerator::launch(3, |accelerator| {
                let loader =
                    || accelerator.prepare(of_kind(kind, builder(2, TailPolicy::Exact), 18));
                let loaders = [loader()?, loader()?];
                let [step, epoch, loader] = if accelerator.rank() == 1 { one } else { most };
                let epoch = loaders[loader].epoch(epoch as u64);
                let batch = epoch.skip_first_batches(step as u64).next();
                accelerator.wait_for_everyone()?;
                Ok(batch.unwrap().unwrap_err())
            });
            let [most, one] = [most, one].map(|[step, epoch, loader]| {
                format!("step {step} of epoch {epoch} of loader {loader}")
            });
            for error in errors.unwrap() {
                let words = format!("ranks 0, 2: {most}; rank 1: {one}");
                assert_error(&error, Error::is_misuse, &[&words]);
            }
        }
    }
}

/// An evaluation on rank 0 alone would do this. Every rank learns what each was doing, in terms of its program.
#[test]
fn a_rank_that_reads_no_data_is_told_apart_from_those_that_do() {
    for kind in [Some(Kind::Dispatched), Some(Kind::Parts), None] {
        let errors = accelerator::launch(2, |accelerator| {
            let loader = accelerator.prepare(of_kind(kind, builder(2, TailPolicy::Exact), 18))?;
            Ok(match accelerator.rank() {
                0 => loader.epoch(0).next().unwrap().unwrap_err(),
                _ => accelerator.gather_object(&0.5).unwrap_err(),
            })
        });
        for error in errors.unwrap() {
            let sides = [
                "rank 0: the next batch of a loader (",
                "rank 1: gather_object (all_gather_object ",
            ];
            assert_chain(&error, Error::is_collective, &sides);
            let text = format!("{error:?}");
            assert_eq!(text.matches("tests/it/streams.rs:").count(), 2, "{text}");
            assert!(!text.contains("cannot be read as"), "{text}");
        }
    }
}

#[test]
fn a_part_that_fails_fails_every_rank() {
    struct Second;
    impl SampleStream for Second {
        type Item = usize;

        fn read(&self, part: StreamPart) -> Result<StreamItems<usize>, StreamError> {
            match part.index() {
                1 => Err("no such file".into()),
                _ => Ok(Box::new((0..9).map(Ok))),
            }
        }
    }
    let errors = accelerator::launch(2, |accelerator| {
        let loader = builder(1, TailPolicy::Exact).build_sharded_stream(Second);
        let loader = accelerator.prepare(loader)?;
        Ok(loader.epoch(0).find_map(Result::err).unwrap())
    })
    .unwrap();
    for error in &errors {
        assert_chain(error, Error::is_data, &["no such file"]);
    }
    assert_contains(&errors[0].to_string(), &["rank 1 failed to read its part"]);
}

/// Returns a stream without an end that counts the samples that were read.
fn endless(count: &Arc<AtomicUsize>) -> impl SampleStream<Item = usize> + use<> {
    let count = count.clone();
    move |_: StreamPart| {
        let count = count.clone();
        (0..).map(move |n: usize| {
            count.fetch_add(1, Ordering::SeqCst);
            std::io::Result::Ok(n)
        })
    }
}

#[test]
fn rank_0_alone_reads_a_dispatched_stream_and_not_far_ahead() {
    let read: Vec<Arc<AtomicUsize>> = (0..2).map(|_| Arc::default()).collect();
    let limit = accelerator::launch(2, |accelerator| {
        let builder = builder(4, TailPolicy::Exact).prefetch(3);
        let endless = endless(&read[accelerator.rank()]);
        let loader = accelerator.prepare(builder.build_dispatched_stream(endless))?;
        for batch in loader.epoch(0).take(5) {
            batch?;
        }
        Ok(())
    });
    limit.unwrap();
    let [first, second] = [0, 1].map(|rank| read[rank].load(Ordering::SeqCst));
    assert_eq!(second, 0);
    // Five rounds of eight were used, three wait, and one is being sent, with one sample to know of more.
    assert!((40..=8 * (5 + 3 + 1) + 1).contains(&first), "{first}");
}

/// A slow source delays a batch only until it is known whether it is the last.
#[test]
fn a_batch_waits_for_what_tells_of_more_and_no_further() {
    use TailPolicy::{Drop, Exact, Pad, Uneven};
    let cases: [(Kind, TailPolicy, [usize; 2]); 10] = [
        (Kind::Dispatched, Exact, [9, 0]),
        (Kind::Dispatched, Pad, [9, 0]),
        (Kind::Dispatched, Drop, [16, 0]),
        (Kind::Interleaved, Exact, [9, 9]),
        (Kind::Interleaved, Pad, [9, 9]),
        (Kind::Interleaved, Drop, [16, 16]),
        (Kind::Interleaved, Uneven, [9, 13]),
        (Kind::Parts, Exact, [5, 5]),
        (Kind::Parts, Uneven, [5, 5]),
        (Kind::Parts, Drop, [8, 8]),
    ];
    for (kind, tail, expected) in cases {
        let read = accelerator::launch(2, |accelerator| {
            let read = Arc::<AtomicUsize>::default();
            let builder = builder(4, tail).num_workers(0);
            let loader = accelerator.prepare(build(kind, builder, endless(&read)))?;
            let mut epoch = loader.epoch(0);
            assert!(!epoch.next().unwrap()?.is_last());
            Ok(read.load(Ordering::SeqCst))
        });
        assert_eq!(read.unwrap(), expected, "{kind:?}, {tail}");
    }
}

/// The reader's thread hangs in a source that gives nothing more.
#[test]
fn an_epoch_that_is_left_early_does_not_wait_for_its_reader() {
    const DEADLINE: Duration = Duration::from_secs(60);
    for kind in KINDS {
        let outcomes = accelerator::launch(2, |accelerator| {
            let (left, has_left) = mpsc::channel::<()>();
            let (say, said) = mpsc::channel();
            let shared = Arc::new(Mutex::new((has_left, say)));
            // After enough samples to know that the first batch is not the last, the source is silent.
            let enough = if kind == Kind::Parts { 5 } else { 9 };
            let silent = move |_: StreamPart| {
                let shared = shared.clone();
                (0..).map(move |n: usize| {
                    if n >= enough {
                        let shared = shared.lock().unwrap();
                        let _ = shared.1.send(shared.0.recv_timeout(DEADLINE));
                    }
                    std::io::Result::Ok(n)
                })
            };
            let loader = build(kind, builder(4, TailPolicy::Exact), silent);
            let loader = accelerator.prepare(loader)?;
            let mut epoch = loader.epoch(0);
            epoch.next().unwrap()?;
            drop(epoch);
            left.send(()).unwrap();
            let reads = kind != Kind::Dispatched || accelerator.rank() == 0;
            Ok(!reads || said.recv_timeout(DEADLINE).unwrap().is_ok())
        });
        assert_eq!(outcomes.unwrap(), [true, true], "{kind:?}");
    }
}

#[test]
fn settings_that_do_not_fit_a_stream_are_refused() {
    let shuffled = builder(2, TailPolicy::Exact).shuffle(3);
    let uneven = builder(2, TailPolicy::Uneven);
    for (loader, word) in [
        (shuffled.build_stream(numbers(9)), "shuffled by 3"),
        (uneven.build_dispatched_stream(numbers(9)), "`build_stream`"),
    ] {
        let accelerator = Accelerator::new().unwrap();
        let error = accelerator.prepare(loader).unwrap_err();
        assert_error(&error, Error::is_config, &[word]);
    }
}

#[test]
fn ranks_that_share_a_stream_differently_are_told() {
    let error = accelerator::launch(2, |accelerator| {
        let kind = IN_ORDER[accelerator.rank()];
        let loader = build(kind, builder(2, TailPolicy::Exact), numbers(9));
        accelerator.prepare(loader).map(drop)
    })
    .unwrap_err();
    assert_error(&error, Error::is_config, &["dispatched from rank 0"]);
}

#[test]
fn skipped_batches_are_not_read_where_the_stream_can_skip() {
    #[derive(Default)]
    struct Skipping(Arc<AtomicU64>);
    impl SampleStream for Skipping {
        type Item = usize;

        fn read(&self, part: StreamPart) -> Result<StreamItems<usize>, StreamError> {
            self.read_from(part, 0)
        }

        fn read_from(
            &self,
            _part: StreamPart,
            skipped: u64,
        ) -> Result<StreamItems<usize>, StreamError> {
            self.0.store(skipped, Ordering::SeqCst);
            Ok(Box::new((skipped as usize..16).map(Ok)))
        }
    }
    let skipped = Arc::new(AtomicU64::new(0));
    let accelerator = Accelerator::new().unwrap();
    let loader = builder(4, TailPolicy::Exact).build_stream(Skipping(skipped.clone()));
    let loader = accelerator.prepare(loader).unwrap();
    let rest: Vec<_> = loader
        .epoch(0)
        .skip_first_batches(2)
        .map(Result::unwrap)
        .collect();
    assert_eq!(skipped.load(Ordering::SeqCst), 8);
    assert_eq!(rest[0].numbers, [8, 9, 10, 11]);
    assert_eq!(
        (rest.len(), rest[0].step(), rest[1].is_last()),
        (2, 2, true)
    );
    for kind in KINDS {
        let steps = accelerator::launch(2, |accelerator| {
            let loader = build(kind, builder(2, TailPolicy::Exact), numbers(13));
            let loader = accelerator.prepare(loader)?;
            let whole: Vec<_> = loader.epoch(0).map(|batch| seen(&batch.unwrap())).collect();
            for skipped in 0..6 {
                let epoch = loader.epoch(0).skip_first_batches(skipped);
                let rest: Vec<_> = epoch.map(|batch| seen(&batch.unwrap())).collect();
                let wanted = &whole[whole.len().min(skipped as usize)..];
                // An idle rank runs a batch again, and here it has no previous one.
                let real = |seen: &[Seen]| -> Vec<(Vec<usize>, bool)> {
                    seen.iter()
                        .map(|(n, real, last)| (n[..*real].to_vec(), *last))
                        .collect()
                };
                assert_eq!(real(&rest), real(wanted), "{kind:?}, {skipped}");
            }
            Ok(whole.len())
        })
        .unwrap();
        assert_eq!(steps, [4, 4]);
    }
}

/// Trains two epochs up to step `stop`, from the checkpoint if there is one, and saves.
fn part_of_a_run(
    folder: &std::path::Path,
    ranks: usize,
    build: impl Fn() -> Loader<Column> + Send + Sync,
    stop: u64,
) -> Result<(Vec<f32>, Vec<usize>)> {
    let outcomes = accelerator::launch(ranks, |accelerator| {
        let parts = learner(&accelerator, build())?;
        let ((mut model, mut optimizer, train), position) = accelerator.resume(folder, parts)?;
        let mut numbers = Vec::new();
        let mut step = position.step();
        'epochs: for epoch in position.epoch()..2 {
            for batch in train.epoch(epoch) {
                let batch = batch?;
                numbers.extend(batch.numbers[..batch.real()].to_vec());
                model = learn(&accelerator, model, &mut optimizer, 0.1, &batch)?;
                step += 1;
                if step == stop {
                    break 'epochs;
                }
            }
        }
        accelerator.save_state(folder, (&model, &optimizer, &train))?;
        Ok((flat(&model), accelerator.gather_object(&numbers)?.concat()))
    })?;
    let numbers = outcomes[0].1.clone();
    let weights = of_every_rank(outcomes.into_iter().map(|(weights, _)| weights).collect());
    Ok((weights, numbers))
}

const TO_THE_END: u64 = u64::MAX;

#[test]
fn a_stream_continues_in_mid_epoch() {
    for kind in KINDS {
        for tail in [TailPolicy::Exact, TailPolicy::Pad] {
            let build = || build(kind, builder(3, tail), numbers(20));
            let (once, twice) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let (whole, mut all) = part_of_a_run(once.path(), 2, build, TO_THE_END).unwrap();
            for stop in [2, 3, 6] {
                part_of_a_run(twice.path(), 2, build, stop).unwrap();
            }
            let (resumed, _) = part_of_a_run(twice.path(), 2, build, TO_THE_END).unwrap();
            assert_eq!(resumed, whole, "{kind:?}, {tail}");
            all.sort_unstable();
            let wanted: Vec<_> = (0..20).flat_map(|n| [n, n]).collect();
            assert_eq!(all, wanted);
        }
    }
}

#[test]
fn another_number_of_ranks_continues_with_a_stream_but_not_with_parts() {
    for kind in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let build = || build(kind, builder(2, TailPolicy::Exact), numbers(20));
        let (_, before) = part_of_a_run(folder.path(), 3, build, 2).unwrap();
        let outcome = part_of_a_run(folder.path(), 2, build, TO_THE_END);
        if kind == Kind::Parts {
            let words = ["build_dispatched_stream"];
            assert_error(&outcome.unwrap_err(), Error::is_checkpoint, &words);
            continue;
        }
        let (_, after) = outcome.unwrap();
        let mut all = [before, after].concat();
        all.sort_unstable();
        assert_eq!(
            all,
            (0..20).flat_map(|n| [n, n]).collect::<Vec<_>>(),
            "{kind:?}"
        );
    }
}

#[test]
fn time_spent_waiting_for_a_stream_is_told() {
    const PAUSE: Duration = Duration::from_millis(3);
    for kind in KINDS {
        let summaries = Accelerator::builder()
            .step_summary()
            .launch(2, |accelerator| {
                let slow = |part: StreamPart| {
                    let mine = (part.index()..8).step_by(part.count());
                    mine.map(|n: usize| {
                        std::thread::sleep(PAUSE);
                        std::io::Result::Ok(n)
                    })
                };
                let builder = builder(2, TailPolicy::Exact).num_workers(0);
                train(&accelerator, build(kind, builder, slow))?;
                Ok(accelerator.step_summary().unwrap())
            })
            .unwrap();
        for summary in summaries {
            assert_eq!(summary.steps, 2);
            let waited = summary.data.mean * summary.steps as f64;
            // The wait includes this rank's part, since samples are read when they are needed.
            assert!(waited >= 4.0 * PAUSE.as_secs_f64(), "{kind:?}: {summary}");
        }
    }
}
