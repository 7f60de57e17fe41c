//! Compares reductions with a scalar oracle, for any length, type, reduction and layout, on 2 to 5 ranks.

use std::{ops::Range, sync::Arc};

use crate::suite::sample::{Sample, assert_same, buffer, reduced};
use crate::suite::world::{Means, run};
use accelerator_collective::internal::ShardLayout;
use accelerator_collective::{Partition, ProcessGroup, ReduceOp};
use half::{bf16, f16};
use proptest::{prelude::*, sample::select};

/// One operation: type, reduction, number of elements, and the way in which each rank passes them.
#[derive(Clone, Debug)]
struct OracleOp {
    check: fn(&ProcessGroup, &OracleOp),
    op: ReduceOp,
    len: usize,
    /// Bit `r` is set if rank `r` passes a buffer of the group.
    placed: u32,
    /// The length of each range of a layout and the rank that keeps it, repeated. No rank keeps some of them.
    ranges: Vec<(usize, usize)>,
}

impl OracleOp {
    fn layout(&self, world_size: usize) -> Arc<ShardLayout> {
        let mut parts: Vec<Vec<Range<usize>>> = vec![Vec::new(); world_size];
        let (mut start, mut ranges) = (0, self.ranges.iter().cycle());
        while start < self.len {
            let (size, rank) = ranges.next().unwrap();
            let end = self.len.min(start + size);
            if let Some(part) = parts.get_mut(*rank) {
                part.push(start..end);
            }
            start = end;
        }
        Arc::new(ShardLayout::new(self.len, parts).unwrap())
    }
}

fn check<T: Sample>(group: &ProcessGroup, operation: &OracleOp) {
    let (rank, world_size) = (group.rank(), group.world_size());
    let OracleOp {
        op, len, placed, ..
    } = *operation;
    let what = format!("{} {operation:?}, W = {world_size}", T::DTYPE);
    let expected = reduced::<T>(world_size, world_size, len, op);
    let mut values = buffer::<T>(rank, len);
    let own = group.reduce_scatter(&values, op).unwrap();
    let part = Partition::new(len, world_size).range(rank);
    assert_same(&own, &expected[part], &what);
    let layout = operation.layout(world_size);
    let stranger = ProcessGroup::single();
    let home = match placed >> rank & 1 {
        1 => group,
        _ => &stranger,
    };
    let mut shared = home.buffer(T::DTYPE, len);
    shared.as_mut_slice::<T>().unwrap().copy_from_slice(&values);
    group
        .reduce_scatter_buffer(&mut shared, op, &layout)
        .unwrap();
    for range in layout.of(rank) {
        let kept = &shared.as_slice::<T>().unwrap()[range.clone()];
        assert_same(kept, &expected[range.clone()], &what);
    }
    if placed >> rank & 1 == 1 {
        let mut shared = group.buffer(T::DTYPE, len);
        shared.as_mut_slice::<T>().unwrap().copy_from_slice(&values);
        group.all_reduce_buffer(&mut shared, op).unwrap();
        assert_same(shared.as_slice::<T>().unwrap(), &expected, &what);
    } else {
        group.all_reduce(&mut values, op).unwrap();
        assert_same(&values, &expected, &what);
    }
}

fn operation() -> impl Strategy<Value = OracleOp> {
    let checks: [fn(&ProcessGroup, &OracleOp); 12] = [
        check::<f32>,
        check::<f64>,
        check::<f16>,
        check::<bf16>,
        check::<i8>,
        check::<i16>,
        check::<i32>,
        check::<i64>,
        check::<u8>,
        check::<u16>,
        check::<u32>,
        check::<u64>,
    ];
    let ops = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min];
    // Lengths around the ends of vectors, of short operations, and of chunks of any type.
    let lens = prop_oneof![
        0..70_usize,
        2_000..2_100_usize,
        (
            select(vec![16 * 1024, 128 * 1024, 256 * 1024]),
            select(vec![1, 2, 4, 8]),
            0..140_usize
        )
            .prop_map(|(bytes, size, near)| (bytes / size + near).saturating_sub(70)),
    ];
    let placed = prop_oneof![Just(u32::MAX), Just(0), any::<u32>()];
    let sizes = prop_oneof![1..4_usize, 1..200_usize, 1..100_000_usize];
    let ranges = proptest::collection::vec((sizes, 0..6_usize), 1..20);
    let (checks, ops) = (select(checks.to_vec()), select(ops.to_vec()));
    (checks, ops, lens, placed, ranges).prop_map(|(check, op, len, placed, ranges)| OracleOp {
        check,
        op,
        len,
        placed,
        ranges,
    })
}

fn holds(means: Means, world_size: usize, operations: &[OracleOp]) {
    let operations = operations.to_vec();
    run(means, world_size, move |group| {
        for operation in &operations {
            (operation.check)(&group, operation);
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn threads_agree_with_the_oracle(
        world_size in 2..=5_usize,
        operations in proptest::collection::vec(operation(), 1..6),
    ) {
        holds(Means::Threads, world_size, &operations);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn shared_memory_agrees_with_the_oracle(
        world_size in 2..=5_usize,
        operations in proptest::collection::vec(operation(), 1..6),
    ) {
        holds(Means::Shm, world_size, &operations);
    }

    #[test]
    fn connections_agree_with_the_oracle(
        world_size in 2..=5_usize,
        operations in proptest::collection::vec(operation(), 1..6),
    ) {
        holds(Means::Tcp, world_size, &operations);
    }
}
