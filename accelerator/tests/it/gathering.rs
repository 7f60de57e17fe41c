//! Gathering from all ranks: each sample counts once on every path. C4, C12 and C15 are numbers of the conformance list
//! that follows Accelerate's tests.

use crate::common::{Column, ColumnBatcher, assert_errors, columns, devices, learn, learner};
use accelerator::data::AssumeDeterministic;
use accelerator::metric::{Accuracy, Confusion, Mean, TopK};
use accelerator::prelude::*;
use burn::data::dataloader::DataLoaderBuilder as BurnBuilder;
use burn::tensor::{Device, FloatDType, Int, Tensor};

fn numbers(batch: &Column, device: &Device) -> Tensor<1, Int> {
    let numbers: Vec<i64> = batch.numbers.iter().map(|&number| number as i64).collect();
    Tensor::from_ints(numbers.as_slice(), device)
}

fn list(tensor: Tensor<1, Int>) -> Vec<i64> {
    let data = tensor.into_data().convert::<i64>();
    data.try_to_vec::<i64>().unwrap()
}

/// Returns the sample numbers that each step of an epoch gathers, the same on every rank.
fn gathered(
    accelerator: &Accelerator,
    loader: &PreparedLoader<Column>,
    epoch: u64,
) -> Result<Vec<Vec<i64>>> {
    let device = accelerator.device();
    loader
        .epoch(epoch)
        .map(|batch| {
            let batch = batch?;
            let all = accelerator.gather_for_metrics(numbers(&batch, &device), &batch)?;
            Ok(list(all))
        })
        .collect()
}

fn on_every_rank<T: PartialEq + std::fmt::Debug>(ranks: Vec<T>) -> T {
    let mut ranks = ranks.into_iter();
    let first = ranks.next().unwrap();
    ranks.for_each(|other| assert_eq!(other, first, "every rank gathers the same"));
    first
}

fn each_once(mut numbers: Vec<i64>, samples: usize) {
    numbers.sort_unstable();
    assert_eq!(numbers, (0..samples as i64).collect::<Vec<_>>());
}

#[test]
fn c12_each_sample_is_gathered_once_under_every_policy_and_size() {
    for (samples, batch_size) in [(99, 16), (512, 16), (9, 5), (30, 4), (3, 2), (1, 4)] {
        for ranks in 1..=4 {
            for tail in [TailPolicy::Exact, TailPolicy::Pad] {
                for global in [false, true] {
                    let steps = accelerator::launch(ranks, |accelerator| {
                        let builder = LoaderBuilder::new(ColumnBatcher).tail(tail);
                        let builder = if global {
                            builder.global_batch_size(batch_size * ranks)
                        } else {
                            builder.batch_size(batch_size)
                        };
                        let shuffled = builder.shuffle(7).build(columns(samples));
                        let loader = accelerator.prepare(shuffled)?;
                        Ok([
                            gathered(&accelerator, &loader, 0)?,
                            gathered(&accelerator, &loader, 3)?,
                        ])
                    })
                    .unwrap();
                    for epoch in on_every_rank(steps) {
                        each_once(epoch.concat(), samples);
                    }
                }
            }
        }
    }
}

#[test]
fn c12_a_dropped_tail_is_gathered_nowhere() {
    for ranks in [1, 2, 3] {
        let steps = accelerator::launch(ranks, |accelerator| {
            let loader = LoaderBuilder::new(ColumnBatcher)
                .batch_size(5)
                .tail(TailPolicy::Drop)
                .build(columns(10 * ranks + 1));
            gathered(&accelerator, &accelerator.prepare(loader)?, 0)
        })
        .unwrap();
        let steps = on_every_rank(steps);
        assert_eq!(
            steps.iter().map(Vec::len).collect::<Vec<_>>(),
            [5 * ranks; 2]
        );
        each_once(steps.concat(), 10 * ranks);
    }
}

#[test]
fn c12_a_loader_of_burns_is_gathered_once_idle_ranks_included() {
    for (samples, batch_size, ranks) in [(30, 4, 2), (99, 16, 2), (15, 2, 3), (2, 4, 3)] {
        let steps = accelerator::launch(ranks, |accelerator| {
            let loader = BurnBuilder::new(ColumnBatcher)
                .batch_size(batch_size)
                .build(columns(samples));
            gathered(
                &accelerator,
                &accelerator.prepare(AssumeDeterministic(loader))?,
                0,
            )
        })
        .unwrap();
        each_once(on_every_rank(steps).concat(), samples);
    }
}

#[test]
fn c12_an_epoch_that_continues_gathers_the_rest_also_on_more_ranks() {
    for ranks in [1, 2, 3] {
        let folder = tempfile::tempdir().unwrap();
        let parts = |accelerator: &Accelerator| {
            let loader = LoaderBuilder::new(ColumnBatcher)
                .global_batch_size(6)
                .shuffle(3)
                .build(columns(41));
            learner(accelerator, loader)
        };
        let before = accelerator::launch(2, |accelerator| {
            let (mut model, mut optimizer, loader) = parts(&accelerator)?;
            let mut seen = Vec::new();
            for batch in loader.epoch(1).take(3) {
                let batch = batch?;
                let all = numbers(&batch, &accelerator.device());
                seen.extend(list(accelerator.gather_for_metrics(all, &batch)?));
                model = learn(&accelerator, model, &mut optimizer, 0.01, &batch)?;
            }
            accelerator.save_state(folder.path(), (&model, &optimizer, &loader))?;
            Ok(seen)
        })
        .unwrap();
        let after = accelerator::launch(ranks, |accelerator| {
            let parts = parts(&accelerator)?;
            let ((_, _, loader), position) = accelerator.resume(folder.path(), parts)?;
            Ok(gathered(&accelerator, &loader, position.epoch())?.concat())
        })
        .unwrap();
        each_once([on_every_rank(before), on_every_rank(after)].concat(), 41);
    }
}

#[test]
fn c12_what_ranks_with_other_numbers_of_steps_gather_is_gathered_at_the_end() {
    let gathered = accelerator::launch(2, |accelerator| {
        let loader = LoaderBuilder::new(ColumnBatcher)
            .batch_size(16)
            .tail(TailPolicy::Uneven)
            .build(columns(97));
        let loader = accelerator.prepare(loader)?;
        let mut mine = Vec::new();
        for batch in loader.epoch(0) {
            let batch = batch?;
            let rows = numbers(&batch, &accelerator.device());
            // The error comes at once, not when the other rank is missing in the last step.
            let error = accelerator.gather_for_metrics(rows, &batch).unwrap_err();
            assert!(error.is_misuse() && !error.is_collective(), "{error:?}");
            mine.extend(batch.real_indices().iter().map(|&number| number as i64));
        }
        Ok(accelerator.gather_object(&mine)?.concat())
    })
    .unwrap();
    each_once(on_every_rank(gathered), 97);
}

#[test]
fn c12_metrics_of_every_kind_count_each_sample_once() {
    for tail in [TailPolicy::Exact, TailPolicy::Pad, TailPolicy::Uneven] {
        metrics_count_each_sample_once(tail);
    }
}

fn metrics_count_each_sample_once(tail: TailPolicy) {
    let samples = 23;
    let figures = accelerator::launch(3, |accelerator| {
        let device = accelerator.device().inner();
        let loader = LoaderBuilder::new(ColumnBatcher)
            .batch_size(4)
            .tail(tail)
            .build(columns(samples));
        let loader = accelerator.prepare(loader)?;
        let (mut accuracy, mut top, mut confusion) =
            (Accuracy::new(), TopK::new(2), Confusion::new(3));
        let mut mean = Mean::new();
        for batch in loader.epoch(0) {
            let batch = batch?;
            let real = batch.values.clone().narrow(0, 0, batch.real().max(1));
            mean.update_with(real.mean(), batch.real());
            // The prediction is always class 1, and class 2 is second.
            let logits = Tensor::<1>::from_floats([0.0, 2.0, 1.0], &device);
            let logits = logits.reshape([1, 3]).repeat_dim(0, batch.num_samples());
            let targets = numbers(&batch, &device).remainder_scalar(3);
            accuracy.update(logits.clone(), targets.clone(), batch.real());
            top.update(logits.clone(), targets.clone(), batch.real());
            confusion.update(logits, targets, batch.real())?;
        }
        let (accuracy, top, confusion) = accelerator.reduce_metric((accuracy, top, confusion))?;
        assert_eq!(confusion.samples(), samples as u64);
        let mean = accelerator.reduce_metric(mean)?;
        assert_eq!(mean.samples(), 23.0);
        assert!((mean.value() - 0.1).abs() < 1e-6, "{mean}");
        let of = [0, 1, 2].map(|class| confusion.of(class, 1));
        assert_eq!(confusion.accuracy(), accuracy.value());
        Ok((of, accuracy.value(), top.value()))
    })
    .unwrap();
    // Classes 0, 1 and 2 have 8, 8 and 7 samples.
    let (of, accuracy, top) = on_every_rank(figures);
    assert_eq!(of, [8, 8, 7]);
    assert_eq!((accuracy, top), (8.0 / 23.0, 15.0 / 23.0));
}

#[test]
fn c4_tensors_are_padded_to_the_longest_of_all_ranks() {
    for kind in devices() {
        Accelerator::builder()
            .device(kind)
            .launch(2, |accelerator| {
                let device = accelerator.device();
                let rank = accelerator.rank();
                // The shapes are those of Accelerate's own test: [0, 1, 2] and [0, 1].
                let mine = || Tensor::<1, Int>::arange(0..3 - rank as i64, &device);
                let pad =
                    |value: i32, side| accelerator.pad_across_processes(mine(), 0, value, side);
                let whole = vec![0, 1, 2];
                for (side, value, padded) in [
                    (PadSide::End, 0, vec![0, 1, 0]),
                    (PadSide::Start, 0, vec![0, 0, 1]),
                    (PadSide::End, -100, vec![0, 1, -100]),
                ] {
                    let expected = [whole.clone(), padded];
                    assert_eq!(list(pad(value, side)?), expected[rank]);
                    assert_eq!(
                        list(accelerator.gather(pad(value, side)?)?),
                        expected.concat()
                    );
                }
                // Other dimensions stay as they are.
                let wide = Tensor::<2>::ones([1 + rank, 2 + rank], &device);
                let wide = accelerator.pad_across_processes(wide, 1, 0.5, PadSide::End)?;
                assert_eq!(wide.dims(), [1 + rank, 3]);
                let values = wide.into_data().try_to_vec::<f32>().unwrap();
                assert_eq!(values[2], [0.5, 1.0][rank]);
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn c4_a_dimension_that_is_not_there_is_refused_on_every_rank() {
    let errors = accelerator::launch(2, |accelerator| {
        let tensor = Tensor::<1>::zeros([2], &accelerator.device());
        let dim = accelerator.rank();
        let padded = accelerator.pad_across_processes(tensor, dim, 0, PadSide::End);
        accelerator.wait_for_everyone()?;
        Ok(padded.unwrap_err())
    })
    .unwrap();
    let words = ["rank 1: dimension 1 of [2] of F32"];
    assert_errors(errors, Error::is_misuse, &words);
}

/// C5: Accelerate's debug mode, which is always on here. Every rank learns the shapes of all ranks, and the ranks can
/// continue.
#[test]
fn c5_tensors_that_do_not_fit_together_are_named_on_every_rank() {
    type Call = fn(&Accelerator, &Batch<Column>) -> Result<()>;
    // Returns a tensor of the shape `others`, or `one` on rank 1.
    fn tensor(accelerator: &Accelerator, others: [usize; 2], one: [usize; 2]) -> Tensor<2> {
        let shape = if accelerator.rank() == 1 { one } else { others };
        Tensor::ones(shape, &accelerator.device())
    }
    // Its tensor on rank 1 is of another type.
    fn of_another_type(accelerator: &Accelerator) -> Tensor<2> {
        let tensor = tensor(accelerator, [2, 3], [2, 3]);
        let dtype = [FloatDType::F32, FloatDType::F64][usize::from(accelerator.rank() == 1)];
        tensor.cast(dtype)
    }
    let calls: [(&str, Call, [&str; 2]); 9] = [
        (
            "gather",
            |x, _| x.gather(tensor(x, [2, 3], [2, 4])).map(drop),
            ["[2, 3] of F32", "[2, 4] of F32"],
        ),
        (
            "all_reduce, with as many elements",
            |x, _| x.reduce(tensor(x, [2, 3], [3, 2]), ReduceOp::Sum).map(drop),
            ["[2, 3] of F32", "[3, 2] of F32"],
        ),
        (
            "all_reduce",
            |x, _| x.reduce(tensor(x, [2, 3], [2, 2]), ReduceOp::Max).map(drop),
            ["[2, 3] of F32", "[2, 2] of F32"],
        ),
        (
            "all_reduce of another type",
            |x, _| x.reduce(of_another_type(x), ReduceOp::Sum).map(drop),
            ["all_reduce sum of [2, 3] of F32", "[2, 3] of F64"],
        ),
        (
            "all_reduce in another way",
            |x, _| {
                let op = [ReduceOp::Sum, ReduceOp::Max][usize::from(x.rank() == 1)];
                x.reduce(tensor(x, [2, 3], [2, 3]), op).map(drop)
            },
            ["all_reduce sum of [2, 3]", "all_reduce max of [2, 3]"],
        ),
        (
            "broadcast",
            |x, _| x.broadcast(tensor(x, [2, 3], [6, 1]), 2).map(drop),
            ["broadcast from rank 2 of [2, 3] of F32", "[6, 1] of F32"],
        ),
        (
            "gather_for_metrics",
            // The batch of each rank has two samples.
            |x, batch| {
                x.gather_for_metrics(tensor(x, [2, 3], [1, 3]), batch)
                    .map(drop)
            },
            ["[2, 3] for 2 samples", "[1, 3] for 2 samples"],
        ),
        (
            "pad_across_processes",
            |x, _| {
                let padded = x.pad_across_processes(of_another_type(x), 0, 0, PadSide::End);
                padded.map(drop)
            },
            [
                "dimension 0 of [2, 3] of F32",
                "dimension 0 of [2, 3] of F64",
            ],
        ),
        (
            "reduce",
            |x, _| {
                let (two, three) = (Confusion::new(2), Confusion::new(3));
                match x.rank() {
                    1 => x.reduce_metric((two, three)).map(drop),
                    _ => x.reduce_metric((three, two)).map(drop),
                }
            },
            ["[9, 4]", "[4, 9]"],
        ),
    ];
    accelerator::launch(3, |accelerator| {
        let loader = LoaderBuilder::new(ColumnBatcher).batch_size(2);
        let loader = accelerator.prepare(loader.build(columns(6)))?;
        let batch = loader.epoch(0).next().unwrap()?;
        for (name, call, [others, one]) in calls {
            let error = call(&accelerator, &batch).unwrap_err();
            assert!(error.is_misuse(), "{name}: {error:?}");
            let text = error.to_string();
            let (Some(first), Some(second)) = (text.find("ranks 0, 2: "), text.find("rank 1: "))
            else {
                panic!("{name}: {text}");
            };
            assert!(text[first..second].contains(others), "{name}: {text}");
            assert!(text[second..].contains(one), "{name}: {text}");
            accelerator.wait_for_everyone()?;
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn c4_objects_of_every_rank_come_to_every_rank() {
    accelerator::launch(3, |accelerator| {
        let rank = accelerator.rank();
        let mine = (rank, "x".repeat(rank));
        let all = accelerator.gather_object(&mine)?;
        assert_eq!(all, [0, 1, 2].map(|rank| (rank, "x".repeat(rank))));
        for root in 0..3 {
            let told = accelerator.broadcast_object(&mine, root)?;
            assert_eq!(told, (root, "x".repeat(root)));
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn c15_items_are_split_as_accelerate_does() {
    let shares = |ranks: usize, count: usize| {
        let items: Vec<usize> = (0..count).collect();
        let shares = accelerator::launch(ranks, |accelerator| {
            Ok(accelerator.split_between_processes(&items).to_vec())
        });
        let plain = shares.unwrap();
        assert_eq!(plain.concat(), items);
        plain.iter().map(Vec::len).collect::<Vec<_>>()
    };
    for ranks in 1..6 {
        (0..20).for_each(|count| drop(shares(ranks, count)));
    }
    assert_eq!(shares(1, 17), [17]);
    assert_eq!(shares(2, 17), [9, 8]);
    assert_eq!(shares(4, 17), [5, 4, 4, 4]);
    assert_eq!(shares(8, 17), [3, 2, 2, 2, 2, 2, 2, 2]);
    assert_eq!(shares(2, 3), [2, 1]);
    assert_eq!(shares(4, 2), [1, 1, 0, 0]);
    assert_eq!(shares(4, 16), [4, 4, 4, 4]);
    assert_eq!(shares(3, 0), [0, 0, 0]);
}
