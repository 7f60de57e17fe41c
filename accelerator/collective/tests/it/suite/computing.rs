//! Cases that every transport must pass: the results of operations.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use accelerator_collective::internal::BufferSlice;
use accelerator_collective::{Buffer, DType, Element, Partition, ProcessGroup, ReduceOp};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use super::{
    sample::{Sample, assert_same, buffer, reduced},
    world::{Means, run},
};

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min];

/// Returns lengths around the world size, and some that are cut into several chunks.
fn lengths(world_size: usize) -> [usize; 7] {
    [0, 1, world_size - 1, world_size, world_size + 1, 1000, 9001]
}

pub(crate) fn every_type_and_reduction(means: Means, world_size: usize) {
    fn all_ops<T: Sample>(means: Means, group: &ProcessGroup) {
        let (rank, world_size) = (group.rank(), group.world_size());
        let per_host = means.per_host(world_size);
        for len in lengths(world_size) {
            for op in OPS {
                let what = format!("{op} {} x {len}, W = {world_size}", T::DTYPE);
                let expected = reduced::<T>(world_size, per_host, len, op);
                let mut values = buffer::<T>(rank, len);
                group.all_reduce(&mut values, op).unwrap();
                assert_same(&values, &expected, &what);

                let own = group.reduce_scatter(&buffer::<T>(rank, len), op).unwrap();
                let expected = reduced::<T>(world_size, world_size, len, op);
                let part = Partition::new(len, world_size).range(rank);
                assert_same(&own, &expected[part], format_args!("scattered {what}"));
            }
        }
    }
    run(means, world_size, move |group| {
        all_ops::<f32>(means, &group);
        all_ops::<f64>(means, &group);
        all_ops::<f16>(means, &group);
        all_ops::<bf16>(means, &group);
        all_ops::<i8>(means, &group);
        all_ops::<i16>(means, &group);
        all_ops::<i32>(means, &group);
        all_ops::<i64>(means, &group);
        all_ops::<u8>(means, &group);
        all_ops::<u16>(means, &group);
        all_ops::<u32>(means, &group);
        all_ops::<u64>(means, &group);
    });
}

/// Parts have more chunks than are sent ahead, a shorter last chunk, and different sizes.
pub(crate) fn many_chunks(means: Means, world_size: usize) {
    for len in [world_size * 65_536 + 1, world_size * 330_000 - 1] {
        let reduced = |per_host| Arc::new(reduced::<f32>(world_size, per_host, len, ReduceOp::Sum));
        let (expected, scattered) = (reduced(means.per_host(world_size)), reduced(world_size));
        run(means, world_size, move |group| {
            let (rank, world_size) = (group.rank(), group.world_size());
            let own = buffer::<f32>(rank, len);
            let mut values = own.clone();
            group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
            assert_same(&values, &expected, len);
            let own = group.reduce_scatter(&own, ReduceOp::Sum).unwrap();
            let part = Partition::new(len, world_size).range(rank);
            assert_same(&own, &scattered[part], len);
        });
    }
}

/// The buffer is larger than the 25 MB of a gradient bucket.
pub(crate) fn beyond_a_bucket(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        let len = 7_000_001;
        let mut values: Vec<f32> = (0..len).map(|i| (i % 1000 + group.rank()) as f32).collect();
        group.all_reduce(&mut values, ReduceOp::Mean).unwrap();
        let shift = (group.world_size() - 1) as f32 / 2.0;
        let wrong = values
            .iter()
            .enumerate()
            .find(|(i, x)| **x != (*i % 1000) as f32 + shift);
        assert_eq!(wrong, None);
    });
}

/// Reduces buffers of the group and of another group, with lengths around those at which the algorithm changes.
pub(crate) fn buffers(means: Means, world_size: usize) {
    fn check<T: Sample>(means: Means, group: &ProcessGroup, stranger: &ProcessGroup, op: ReduceOp) {
        let (rank, world_size) = (group.rank(), group.world_size());
        let short = 16 * 1024 / size_of::<T>();
        let chunk = 128 * 1024 / size_of::<T>();
        for len in [
            0,
            1,
            17,
            short,
            short + 1,
            chunk - 1,
            chunk + 33,
            3 * chunk + 5,
        ] {
            let expected = reduced::<T>(world_size, means.per_host(world_size), len, op);
            let own = buffer::<T>(rank, len);
            // All ranks pass buffers of the group, then none, then those of odd rank.
            for placed in [true, false, rank % 2 == 1] {
                let home = if placed { group } else { stranger };
                let mut values = home.buffer(T::DTYPE, len);
                values.as_mut_slice::<T>().unwrap().copy_from_slice(&own);
                let what = format!("{op} {} x {len}, W = {world_size}", T::DTYPE);
                group.all_reduce_buffer(&mut values, op).unwrap();
                assert_same(values.as_slice::<T>().unwrap(), &expected, what);
            }
        }
    }
    run(means, world_size, move |group| {
        let stranger = ProcessGroup::single();
        check::<f32>(means, &group, &stranger, ReduceOp::Sum);
        check::<f64>(means, &group, &stranger, ReduceOp::Mean);
        check::<bf16>(means, &group, &stranger, ReduceOp::Sum);
        check::<f16>(means, &group, &stranger, ReduceOp::Max);
        check::<i8>(means, &group, &stranger, ReduceOp::Mean);
        check::<u32>(means, &group, &stranger, ReduceOp::Min);
        assert_eq!((group.buffer_bytes(), stranger.buffer_bytes()), (0, 0));
        // A buffer can be reduced again, with another one beside it.
        let mut first = group.buffer(f32::DTYPE, 50_000);
        let mut second = group.buffer(f32::DTYPE, 70_000);
        assert!(group.buffer_bytes() >= 4 * 120_000);
        for round in 0..4 {
            first.as_mut_slice::<f32>().unwrap().fill(round as f32);
            group.all_reduce_buffer(&mut first, ReduceOp::Sum).unwrap();
            second.as_mut_slice::<f32>().unwrap().fill(1.0);
            group.all_reduce_buffer(&mut second, ReduceOp::Sum).unwrap();
            let sum = (round * group.world_size()) as f32;
            assert!(first.as_slice::<f32>().unwrap().iter().all(|x| *x == sum));
            let sum = group.world_size() as f32;
            assert!(second.as_slice::<f32>().unwrap().iter().all(|x| *x == sum));
        }
    });
}

pub(crate) fn broadcasts(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        let world_size = group.world_size();
        for root in [0, world_size / 2, world_size - 1] {
            for len in [0, 1, 1000, 65_536, 300_001] {
                let mut values = buffer::<f32>(group.rank(), len);
                group.broadcast(&mut values, root).unwrap();
                assert_same(
                    &values,
                    &buffer::<f32>(root, len),
                    format_args!("{len} from {root}"),
                );
            }
        }
        // The data exceeds the queue of a slow rank.
        let mut values = vec![group.rank() as u8; 20_000_000];
        if group.rank() == world_size - 1 {
            std::thread::sleep(Duration::from_millis(200));
        }
        group.broadcast(&mut values, 0).unwrap();
        assert!(values.iter().all(|x| *x == 0));
    });
}

pub(crate) fn gathers(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        let (rank, world_size) = (group.rank(), group.world_size());
        for len in [0, 1, 1000, 400_000] {
            let all = group.all_gather(&buffer::<f32>(rank, len)).unwrap();
            let expected: Vec<f32> = (0..world_size).flat_map(|r| buffer(r, len)).collect();
            assert_same(&all, &expected, len);
        }
        for len in [0, 1, 1000, 400_000] {
            let mut single = group.buffer(DType::F32, len);
            let values = buffer::<f32>(rank, len);
            single.as_mut_slice().unwrap().copy_from_slice(&values);
            let mut bytes = group.buffer(DType::U8, world_size);
            bytes.bytes_mut().fill(rank as u8);
            // Each rank has a byte of one buffer, and of the other twice as much as the rank before.
            let bound = |rank: u32| {
                4 * (len * (2_usize.pow(rank) - 1) / (2_usize.pow(world_size as u32) - 1))
            };
            let parts: Vec<_> = (0..world_size)
                .map(|rank| {
                    let some = bound(rank as u32)..bound(rank as u32 + 1);
                    [(0, some), (1, rank..rank + 1)]
                        .map(|(buffer, bytes)| BufferSlice { buffer, bytes })
                })
                .map(Vec::from)
                .collect();
            let (mut all, mut ranks) = (Vec::new(), Vec::new());
            let show = |rank, number, part: &[u8]| match number {
                0 => all.extend_from_slice(part),
                _ => ranks.push((rank, part.to_vec())),
            };
            let mut buffers = [&mut single, &mut bytes];
            group.all_gather_parts(&mut buffers, &parts, show).unwrap();
            let mut expected = Vec::new();
            for (rank, parts) in parts.iter().enumerate() {
                let values = buffer::<f32>(rank, len);
                let bytes = bytemuck::cast_slice::<f32, u8>(&values);
                expected.extend_from_slice(&bytes[parts[0].bytes.clone()]);
            }
            assert!(all == expected, "{len}");
            let expected: Vec<_> = (0..world_size)
                .map(|rank| (rank, vec![rank as u8]))
                .collect();
            assert_eq!(ranks, expected);
        }
        for unit in [0, 1, 100_000] {
            // Rank 0 has nothing to give, and the last rank the most.
            let all = group
                .all_gather_varied(&buffer::<bf16>(rank, rank * unit))
                .unwrap();
            assert_eq!(all.len(), world_size);
            for (rank, values) in all.iter().enumerate() {
                assert_same(values, &buffer::<bf16>(rank, rank * unit), rank);
            }
        }
    });
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
struct RankSummary {
    rank: usize,
    loss: f64,
    counts: BTreeMap<u32, String>,
    note: Option<String>,
    blob: String,
}

impl RankSummary {
    fn of(rank: usize) -> Self {
        Self {
            rank,
            loss: f64::INFINITY,
            counts: BTreeMap::from([(rank as u32, "é".to_owned())]),
            note: (rank % 2 == 1).then(|| "odd".to_owned()),
            // The values of the last ranks take several chunks.
            blob: "x".repeat(rank * 270_000),
        }
    }
}

pub(crate) fn objects(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        let (rank, world_size) = (group.rank(), group.world_size());
        let expected: Vec<RankSummary> = (0..world_size).map(RankSummary::of).collect();
        assert_eq!(
            group.all_gather_object(&RankSummary::of(rank)).unwrap(),
            expected
        );
        for root in 0..world_size {
            let gathered = group.gather_object(&RankSummary::of(rank), root).unwrap();
            assert_eq!(gathered, (rank == root).then(|| expected.clone()));
            let mine = RankSummary::of(rank);
            let value = (rank == root).then_some(&mine);
            assert_eq!(group.broadcast_object(value, root).unwrap(), expected[root]);
            let parts = (rank == root).then_some(&expected[..]);
            let part: RankSummary = group.scatter_object(parts, root).unwrap();
            assert_eq!(part, expected[rank]);
        }
        let losses = group.all_gather_object(&f64::NAN).unwrap();
        assert!(losses.iter().all(|x| x.is_nan()));
    });
}

pub(crate) fn barriers(means: Means, world_size: usize) {
    let arrived = Arc::new(AtomicUsize::new(0));
    run(means, world_size, move |group| {
        for round in 1..50 {
            arrived.fetch_add(1, Ordering::SeqCst);
            group.barrier().unwrap();
            let seen = arrived.load(Ordering::SeqCst);
            assert!(
                seen >= round * group.world_size(),
                "{seen} in round {round}"
            );
            group.barrier().unwrap();
        }
    });
}

pub(crate) fn started_beside_blocking(means: Means, world_size: usize) {
    fn fill(group: &ProcessGroup, index: usize, len: usize) -> Buffer {
        let mut buffer = group.buffer(f32::DTYPE, len);
        buffer
            .as_mut_slice()
            .unwrap()
            .fill((group.rank() + index) as f32);
        buffer
    }
    run(means, world_size, |group| {
        let world_size = group.world_size();
        let ranks = (world_size * (world_size - 1) / 2) as f32;
        for len in [0, 10, 200_000] {
            let mut pending = Vec::new();
            for index in 0..6 {
                let started = group
                    .start_all_reduce(fill(&group, index, len), ReduceOp::Sum)
                    .unwrap();
                pending.push((index, started));
                if index == 3 {
                    let mut values = [1_i64];
                    group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
                    assert_eq!(values, [world_size as i64]);
                    assert!(pending.iter().all(|(_, pending)| pending.is_ready()));
                }
            }
            // The order of waiting is not that of starting.
            pending.reverse();
            for (index, pending) in pending {
                let buffer = pending.wait().unwrap();
                let expected = ranks + (index * world_size) as f32;
                assert_eq!(buffer.len(), len);
                assert!(
                    buffer
                        .as_slice::<f32>()
                        .unwrap()
                        .iter()
                        .all(|x| *x == expected)
                );
            }
        }
    });
}

/// One rank starts many operations at once, and the others have one at a time.
pub(crate) fn ranks_start_as_they_like(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        let (rank, world_size) = (group.rank(), group.world_size());
        let sum = |index: usize| (world_size * (world_size - 1) / 2 + index * world_size) as f32;
        let mut pending = Vec::new();
        for (index, len) in [300_000, 10, 0, 70_000, 1_000_000, 5, 5, 200_000, 1, 4_200]
            .into_iter()
            .enumerate()
        {
            let mut buffer = group.buffer(f32::DTYPE, len);
            let values = buffer.as_mut_slice::<f32>().unwrap();
            values.fill((rank + index) as f32);
            let check = move |values: &[f32]| {
                assert_eq!(values.len(), len);
                assert!(values.iter().all(|x| *x == sum(index)));
            };
            match rank % 3 {
                0 => {
                    let started = group.start_all_reduce(buffer, ReduceOp::Sum).unwrap();
                    pending.push((started, check));
                }
                1 => {
                    group.all_reduce(values, ReduceOp::Sum).unwrap();
                    check(values);
                }
                _ => {
                    let started = group.start_all_reduce(buffer, ReduceOp::Sum).unwrap();
                    check(started.wait().unwrap().as_slice().unwrap());
                }
            }
        }
        for (pending, check) in pending {
            check(pending.wait().unwrap().as_slice().unwrap());
        }
        group.barrier().unwrap();
    });
}

pub(crate) fn several_threads_share_a_handle(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        // Calls of different threads have no fixed order, so all are alike.
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let group = group.clone();
                scope.spawn(move || {
                    for _ in 0..20 {
                        let mut values = [1.0_f64; 5];
                        group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
                        assert_eq!(values, [group.world_size() as f64; 5]);
                    }
                });
            }
        });
    });
}
