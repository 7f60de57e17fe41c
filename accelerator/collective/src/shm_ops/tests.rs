//! Whole operations over shared memory, small enough for memcheck.

use std::{ops::Range, sync::Arc, thread};

use crate::buffer::BufferSlice;
use crate::group::{GroupOptions, ProcessGroup};
use crate::shard_layout::ShardLayout;
use crate::shm::SHM_CHUNK;
use crate::{DType, ReduceOp};

fn run(world_size: usize, start: u32, body: impl Fn(&ProcessGroup) + Sync) {
    let ranks = ProcessGroup::threads(world_size, &GroupOptions::new()).unwrap();
    for group in &ranks {
        let counter = group.shm_peers().unwrap().own().counter();
        // A count must not jump by more than half its range.
        for part in 1..=4 {
            counter.publish(start / 4 * part);
        }
        counter.publish(start);
    }
    thread::scope(|scope| {
        for group in &ranks {
            scope.spawn(|| body(group));
        }
    });
}

/// Returns some elements of a buffer of `f32`.
fn part(buffer: usize, elements: Range<usize>) -> BufferSlice {
    BufferSlice {
        buffer,
        bytes: 4 * elements.start..4 * elements.end,
    }
}

/// Returns a layout in which the ranks take turns, with ever longer ranges and gaps between them.
fn layout(len: usize, world_size: usize) -> Arc<ShardLayout> {
    let mut parts = vec![Vec::new(); world_size];
    let mut start = 0;
    for backoff in 0.. {
        if start >= len {
            break;
        }
        parts[backoff % world_size].push(start..len.min(start + 5 * backoff + 1));
        start += 5 * backoff + 1 + backoff % 3;
    }
    Arc::new(ShardLayout::new(len, parts).unwrap())
}

/// Runs every operation, with lengths around those at which the algorithm changes.
fn everything(group: &ProcessGroup) {
    let (rank, world_size) = (group.rank(), group.world_size());
    let ranks = (world_size * (world_size - 1) / 2) as f32;
    let stranger = ProcessGroup::single();
    for len in [1, 100, 5_000, SHM_CHUNK / 4 + 1, SHM_CHUNK / 2 + 77] {
        let own: Vec<f32> = (0..len).map(|i| (i + rank) as f32).collect();
        let sum = |i: usize| (i * world_size) as f32 + ranks;
        let is_sum = |(i, x): (usize, &f32)| *x == sum(i);
        for home in [group, &stranger] {
            let mut buffer = home.buffer(DType::F32, len);
            buffer.as_mut_slice::<f32>().unwrap().copy_from_slice(&own);
            group.all_reduce_buffer(&mut buffer, ReduceOp::Sum).unwrap();
            let values = buffer.as_slice::<f32>().unwrap();
            assert!(values.iter().enumerate().all(is_sum), "{len}");
            buffer.as_mut_slice::<f32>().unwrap().copy_from_slice(&own);
            let layout = layout(len, world_size);
            group
                .reduce_scatter_buffer(&mut buffer, ReduceOp::Sum, &layout)
                .unwrap();
            let values = buffer.as_slice::<f32>().unwrap();
            let mut kept = layout.of(rank).iter().cloned().flatten();
            assert!(kept.all(|i| values[i] == sum(i)), "{len}");
        }
        let mut values = own.clone();
        group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
        assert!(values.iter().enumerate().all(is_sum), "{len}");
        let reduced = group.reduce_scatter(&own, ReduceOp::Max).unwrap();
        assert!(reduced.len() <= len.div_ceil(world_size));
        let all = group.all_gather(&own).unwrap();
        assert_eq!(all[(world_size - 1) * len], (world_size - 1) as f32);
        let varied = group.all_gather_varied(&own[..len / (rank + 1)]).unwrap();
        assert_eq!(varied[1].len(), len / 2);
        for homes in [[group, group], [group, &stranger]] {
            let mut buffers = homes.map(|home| home.buffer(DType::F32, len));
            for buffer in &mut buffers {
                buffer.as_mut_slice::<f32>().unwrap().fill(rank as f32);
            }
            // The last rank has nothing.
            let large = |rank: usize| {
                let bound = |rank| len * rank / (world_size - 1);
                bound(rank)..bound(rank + 1)
            };
            let small = |rank: usize| rank.min(len)..(rank + 1).min(len);
            let parts: Vec<_> = (0..world_size)
                .map(|rank| match rank + 1 == world_size {
                    true => Vec::new(),
                    false => vec![part(1, large(rank)), part(0, small(rank))],
                })
                .collect();
            let mut seen = Vec::new();
            let [one, other] = &mut buffers;
            let show = |rank, number, bytes: &[u8]| {
                let values = bytemuck::cast_slice::<u8, f32>(bytes);
                assert!(values.iter().all(|x| *x == rank as f32));
                seen.push((rank, number, values.len()));
            };
            group
                .all_gather_parts(&mut [one, other], &parts, show)
                .unwrap();
            let of = |rank| [(rank, 0, large(rank).len()), (rank, 1, small(rank).len())];
            let expected: Vec<_> = (0..world_size - 1).flat_map(of).collect();
            assert_eq!(seen, expected, "{len}");
        }
        let mut values = own;
        group.broadcast(&mut values, 1).unwrap();
        assert_eq!(values[0], 1.0);
        let text = "x".repeat(len);
        let told = group.broadcast_object(Some(&text), 0).unwrap();
        assert_eq!(told.len(), len);
        group.barrier().unwrap();
    }
}

#[test]
fn operations_touch_no_more_than_their_memory() {
    for world_size in [2, 3] {
        run(world_size, 0, everything);
    }
}

/// Steps are counted in 31 bits.
#[test]
fn steps_go_on_where_their_count_begins_anew() {
    for before in 1..=6 {
        run(2, (1 << 31) - before, |group| {
            for len in [10, 10_000, 100_000] {
                let mut buffer = group.buffer(DType::I32, len);
                buffer.as_mut_slice::<i32>().unwrap().fill(1);
                group.all_reduce_buffer(&mut buffer, ReduceOp::Sum).unwrap();
                assert!(buffer.as_slice::<i32>().unwrap().iter().all(|x| *x == 2));
                let mut values = vec![1_i32; len];
                group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
                assert!(values.iter().all(|x| *x == 2));
            }
        });
    }
}

/// If a rank fails in an operation, others may still write to its buffer.
#[test]
fn a_buffer_that_others_may_write_to_is_given_up() {
    let ranks = ProcessGroup::threads(2, &GroupOptions::new()).unwrap();
    let mut buffer = ranks[0].buffer(DType::F32, 10_000);
    let before = buffer.bytes().as_ptr();
    assert!(buffer.lend(ranks[0].shm_peers().unwrap().own()).is_some());
    assert_ne!(buffer.bytes().as_ptr(), before, "the loan did not end well");
    assert_eq!(buffer.bytes().len(), 40_000);
    assert!(buffer.lend(ranks[0].shm_peers().unwrap().own()).is_none());

    let mut buffer = ranks[0].buffer(DType::F32, 10_000);
    let before = buffer.bytes().as_ptr();
    assert!(buffer.lend(ranks[1].shm_peers().unwrap().own()).is_none());
    buffer
        .lend(ranks[0].shm_peers().unwrap().own())
        .unwrap()
        .end();
    assert_eq!(buffer.bytes().as_ptr(), before);
    ranks[1].abort("its data set is empty");
    let error = ranks[0].all_reduce_buffer(&mut buffer, ReduceOp::Sum);
    assert!(error.unwrap_err().is_peer_lost());
    assert_ne!(buffer.bytes().as_ptr(), before, "the operation failed");
}

/// All ranks learn that they mean different parts, and none sees any.
#[test]
fn other_parts_are_a_mismatch_on_every_rank() {
    run(2, 0, |group| {
        let mut buffer = group.buffer(DType::F32, 10_000);
        let parts = [vec![part(0, 0..1 + group.rank())], vec![part(0, 2..3)]];
        let mut buffers = [&mut buffer];
        let error = group
            .all_gather_parts(&mut buffers, &parts, |_, _, _| panic!("parts are shown"))
            .unwrap_err();
        assert!(error.is_mismatch(), "{error}");
    });
}
