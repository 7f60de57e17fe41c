//! Cases that every transport must pass: reductions of which each rank keeps its part of a layout.

use std::{ops::Range, sync::Arc};

use accelerator_collective::internal::ShardLayout;
use accelerator_collective::{Buffer, Element, Partition, Pending, ProcessGroup, ReduceOp, Result};
use half::{bf16, f16};

use super::{
    sample::{Sample, assert_same, buffer},
    world::{Means, run},
};

/// Returns the ranges that each rank keeps of `len` elements.
type Shape = fn(len: usize, world_size: usize) -> Vec<Vec<Range<usize>>>;

const SHAPES: [Shape; 5] = [
    // The parts are equally long.
    |len, world_size| {
        let partition = Partition::new(len, world_size);
        (0..world_size)
            .map(|rank| vec![partition.range(rank)])
            .collect()
    },
    // The last rank keeps everything.
    |len, world_size| {
        let mut parts = vec![Vec::new(); world_size];
        parts[world_size - 1].push(0..len);
        parts
    },
    // There are many tiny ranges, and gaps.
    |len, world_size| {
        let of = |rank: usize| {
            let starts = (3 * rank..len).step_by(3 * world_size + 2);
            starts.map(|start| start..len.min(start + 3)).collect()
        };
        (0..world_size).map(of).collect()
    },
    // There are a few ranges, each shorter than the one before, and none for rank 0.
    |len, world_size| {
        let mut parts = vec![Vec::new(); world_size];
        let mut start = 0;
        for turn in 0..20 {
            let end = start + (len - start) / 2;
            if let Some(others) = (world_size - 1).checked_sub(1) {
                parts[1 + turn % (others + 1)].push(start..end);
            }
            start = end;
        }
        parts
    },
    // No rank keeps anything.
    |_, world_size| vec![Vec::new(); world_size],
];

fn layout(shape: Shape, len: usize, world_size: usize) -> Arc<ShardLayout> {
    Arc::new(ShardLayout::new(len, shape(len, world_size)).unwrap())
}

fn filled<T: Sample>(home: &ProcessGroup, rank: usize, len: usize) -> Buffer {
    let mut values = home.buffer(T::DTYPE, len);
    let own = buffer::<T>(rank, len);
    values.as_mut_slice::<T>().unwrap().copy_from_slice(&own);
    values
}

/// Asserts that a rank's elements of a layout are those of an all-reduce.
fn assert_kept<T: Sample>(
    rank: usize,
    layout: &ShardLayout,
    found: &Buffer,
    all: &Buffer,
    what: &str,
) {
    let (found, all) = (found.as_slice::<T>().unwrap(), all.as_slice::<T>().unwrap());
    for range in layout.of(rank) {
        assert_same(&found[range.clone()], &all[range.clone()], what);
    }
}

/// Scatters with every layout, for lengths around those at which the algorithm changes, and buffers of the group and of
/// another one.
pub(crate) fn scatters(means: Means, world_size: usize) {
    fn check<T: Sample>(group: &ProcessGroup, stranger: &ProcessGroup, ops: &[ReduceOp]) {
        let (rank, world_size) = (group.rank(), group.world_size());
        let short = 16 * 1024 / size_of::<T>();
        let chunk = 128 * 1024 / size_of::<T>();
        for len in [0, 1, 17, short, short + 1, chunk + 33, 6 * chunk + 5] {
            for op in ops {
                let mut all = filled::<T>(group, rank, len);
                group.all_reduce_buffer(&mut all, *op).unwrap();
                for (number, shape) in SHAPES.into_iter().enumerate() {
                    let layout = layout(shape, len, world_size);
                    let what = format!(
                        "{op} {} x {len}, W = {world_size}, layout {number}",
                        T::DTYPE
                    );
                    // All ranks pass buffers of the group, then those of odd rank.
                    for placed in [true, rank % 2 == 1] {
                        let home = if placed { group } else { stranger };
                        let mut values = filled::<T>(home, rank, len);
                        group
                            .reduce_scatter_buffer(&mut values, *op, &layout)
                            .unwrap();
                        assert_kept::<T>(rank, &layout, &values, &all, &what);
                    }
                }
            }
        }
    }
    run(means, world_size, |group| {
        let stranger = ProcessGroup::single();
        check::<f32>(&group, &stranger, &[ReduceOp::Sum]);
        check::<f64>(&group, &stranger, &[ReduceOp::Mean]);
        check::<bf16>(&group, &stranger, &[ReduceOp::Sum]);
        check::<f16>(&group, &stranger, &[ReduceOp::Max]);
        check::<i8>(&group, &stranger, &[ReduceOp::Mean]);
        check::<u32>(&group, &stranger, &[ReduceOp::Min]);
        group.barrier().unwrap();
    });
}

/// Gathers with every layout, blocking and started, for buffers of the group and of another one.
pub(crate) fn shards_are_gathered(means: Means, world_size: usize) {
    fn check<T: Sample>(group: &ProcessGroup, stranger: &ProcessGroup) {
        let (rank, world_size) = (group.rank(), group.world_size());
        let of_rank = |rank: usize, len| buffer::<T>(rank, len);
        let short = 16 * 1024 / size_of::<T>();
        let chunk = 256 * 1024 / size_of::<T>();
        for len in [0, 1, 17, short + 1, chunk + 33, 7 * chunk + 5] {
            for (number, shape) in SHAPES.into_iter().enumerate() {
                let layout = layout(shape, len, world_size);
                // Where no rank keeps anything, each has values of its own.
                let mut wanted = of_rank(world_size + rank, len);
                for peer in 0..world_size {
                    let theirs = of_rank(peer, len);
                    for range in layout.of(peer) {
                        wanted[range.clone()].copy_from_slice(&theirs[range.clone()]);
                    }
                }
                let what = format!("{} x {len}, W = {world_size}, layout {number}", T::DTYPE);
                for placed in [true, rank % 2 == 1] {
                    let home = if placed { group } else { stranger };
                    let mut values = filled::<T>(home, world_size + rank, len);
                    let own = of_rank(rank, len);
                    for range in layout.of(rank) {
                        values.as_mut_slice::<T>().unwrap()[range.clone()]
                            .copy_from_slice(&own[range.clone()]);
                    }
                    // Ranks that start it take part in the same operation as ranks that wait.
                    let values = match (number + rank) % 2 {
                        0 => group
                            .start_all_gather(values, &layout)
                            .and_then(Pending::wait)
                            .unwrap(),
                        _ => {
                            group.all_gather_buffer(&mut values, &layout).unwrap();
                            values
                        }
                    };
                    assert_same(values.as_slice::<T>().unwrap(), &wanted, &what);
                }
            }
        }
    }
    run(means, world_size, |group| {
        let stranger = ProcessGroup::single();
        check::<f32>(&group, &stranger);
        check::<u8>(&group, &stranger);
        group.barrier().unwrap();
    });
}

/// Gathers are in flight beside reductions, and beside one another.
pub(crate) fn gathers_are_in_flight(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        let (rank, len) = (group.rank(), 400_000);
        let layout = layout(SHAPES[2], len, group.world_size());
        let start = |round: usize| {
            let mut values = group.buffer(f32::DTYPE, len);
            let value = (1000 * round + rank) as f32;
            for range in layout.of(rank) {
                values.as_mut_slice::<f32>().unwrap()[range.clone()].fill(value);
            }
            group.start_all_gather(values, &layout).unwrap()
        };
        let mut ahead = vec![start(0), start(1)];
        for round in 0..6 {
            ahead.push(start(round + 2));
            let mut ones = group.buffer(f32::DTYPE, 60_000);
            ones.as_mut_slice::<f32>().unwrap().fill(1.0);
            let sum = group.start_all_reduce(ones, ReduceOp::Sum).unwrap();
            let gathered = ahead.remove(0).wait().unwrap();
            let gathered = gathered.as_slice::<f32>().unwrap();
            for peer in 0..group.world_size() {
                let mut theirs = layout.of(peer).iter().cloned().flatten();
                let wanted = (1000 * round + peer) as f32;
                assert!(theirs.all(|element| gathered[element] == wanted));
            }
            let sum = sum.wait().unwrap();
            let sum = sum.as_slice::<f32>().unwrap();
            assert!(sum.iter().all(|x| *x == group.world_size() as f32));
        }
        ahead
            .into_iter()
            .for_each(|pending| drop(pending.wait().unwrap()));
        group.barrier().unwrap();
    });
}

/// Started and blocking scatters alternate with all-reduces, differently on each rank.
pub(crate) fn scatters_are_started_as_ranks_like(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        let (rank, world_size) = (group.rank(), group.world_size());
        let mut pending = Vec::new();
        for (index, len) in [300_000, 10, 0, 70_000, 500_000, 5, 5_000, 200_000]
            .into_iter()
            .enumerate()
        {
            let shape = SHAPES[index % SHAPES.len()];
            let layout = layout(shape, len, world_size);
            let mut buffer = group.buffer(f32::DTYPE, len);
            let value = (rank + index) as f32;
            buffer.as_mut_slice::<f32>().unwrap().fill(value);
            let sum = (world_size * (world_size - 1) / 2 + index * world_size) as f32;
            let check = {
                let layout = Arc::clone(&layout);
                move |buffer: &Buffer| {
                    let values = buffer.as_slice::<f32>().unwrap();
                    assert_eq!(values.len(), len);
                    let mut kept = layout.of(rank).iter().cloned().flatten();
                    assert!(kept.all(|element| values[element] == sum), "{index}");
                }
            };
            let started = match (index + rank) % 3 {
                0 => {
                    group
                        .reduce_scatter_buffer(&mut buffer, ReduceOp::Sum, &layout)
                        .unwrap();
                    check(&buffer);
                    None
                }
                _ => Some(
                    group
                        .start_reduce_scatter(buffer, ReduceOp::Sum, &layout)
                        .unwrap(),
                ),
            };
            pending.extend(started.map(|pending| (pending, check)));
            let mut values = [1.0_f32; 5];
            match index {
                2 => group.all_reduce(&mut values, ReduceOp::Sum).unwrap(),
                5 => {
                    let buffer = filled::<f32>(&group, rank, 100_000);
                    let started = group.start_all_reduce(buffer, ReduceOp::Sum).unwrap();
                    drop(started);
                }
                _ => {}
            }
        }
        pending.reverse();
        for (pending, check) in pending {
            check(&pending.wait().unwrap());
        }
        group.barrier().unwrap();
    });
}

/// Different layouts give the same error on every rank, in both ways of calling.
pub(crate) fn other_cuts(means: Means, world_size: usize) {
    for len in [100, 100_000] {
        for (is_started, gathers) in [(false, false), (true, false), (false, true), (true, true)] {
            let errors = run(means, world_size, move |group| {
                group.barrier().unwrap();
                let shape = SHAPES[usize::from(group.rank() == 1)];
                let layout = layout(shape, len, group.world_size());
                let mut buffer = group.buffer(f32::DTYPE, len);
                let outcome: Result<()> = match (gathers, is_started && group.rank() == 0) {
                    (false, true) => {
                        let started = group.start_reduce_scatter(buffer, ReduceOp::Sum, &layout);
                        started.unwrap().wait().map(drop)
                    }
                    (false, false) => {
                        group.reduce_scatter_buffer(&mut buffer, ReduceOp::Sum, &layout)
                    }
                    (true, true) => {
                        let started = group.start_all_gather(buffer, &layout);
                        started.unwrap().wait().map(drop)
                    }
                    (true, false) => group.all_gather_buffer(&mut buffer, &layout),
                };
                let error = outcome.unwrap_err();
                assert!(error.is_mismatch(), "{error}");
                let later = group.barrier().unwrap_err();
                assert_eq!(later.to_string(), error.to_string());
                error.to_string()
            });
            for error in &errors {
                assert_eq!(error, &errors[0], "all ranks tell the same");
                assert!(
                    error.contains("collective #1: their shard layouts"),
                    "{error}"
                );
            }
        }
    }
}

/// A layout that does not fit is refused and leaves the group intact.
pub(crate) fn cuts_that_do_not_fit(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        let (shape, world_size) = (SHAPES[0], group.world_size());
        for (layout, found) in [
            (layout(shape, 9, world_size), "found one of 9 for"),
            (layout(shape, 10, world_size + 1), "found one of 10 for"),
        ] {
            let mut buffer = group.buffer(f32::DTYPE, 10);
            let blocking = group.reduce_scatter_buffer(&mut buffer, ReduceOp::Sum, &layout);
            let started = group.start_reduce_scatter(buffer, ReduceOp::Sum, &layout);
            for error in [blocking.unwrap_err(), started.unwrap_err()] {
                assert!(error.is_misuse(), "{error}");
                assert!(error.to_string().contains(found), "{error}");
            }
        }
        group.barrier().unwrap();
    });
}

/// A rank that gets an error keeps its buffer, and no other rank reads it any more.
pub(crate) fn a_scattered_buffer_outlives_a_failure(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        // Without this, ranks that still connect would get the error there.
        group.barrier().unwrap();
        let len = 100_000;
        let mut values = group.buffer(f32::DTYPE, len);
        values.as_mut_slice::<f32>().unwrap().fill(1.0);
        if group.rank() == 0 {
            group.abort("its data set is empty");
            return;
        }
        let layout = layout(SHAPES[0], len, group.world_size());
        let error = group.reduce_scatter_buffer(&mut values, ReduceOp::Sum, &layout);
        assert!(error.unwrap_err().is_peer_lost());
        values.as_mut_slice::<f32>().unwrap().fill(2.0);
        drop(group);
        assert!(values.as_slice::<f32>().unwrap().iter().all(|x| *x == 2.0));
    });
}
