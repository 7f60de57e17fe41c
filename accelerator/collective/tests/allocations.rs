//! After a warm-up, operations allocate no memory.

#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    reason = "a test fails where its preparation does"
)]

#[allow(dead_code, reason = "other tests use the rest of it")]
#[path = "it/suite/world.rs"]
mod world;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use accelerator_collective::internal::ShardLayout;
use accelerator_collective::{Buffer, DType, ProcessGroup, ReduceOp};
use world::{Means, run};

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

#[expect(unsafe_code, reason = "an allocator is")]
// SAFETY: every call is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // The count of a thread that ends does not matter.
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// With one allocation per step, the count would exceed every bound.
const STEPS: usize = 100;

const LENS: [usize; 3] = [10, 5_000, 300_000];

/// Returns a layout of some elements over two ranks for each length.
fn layouts() -> [Arc<ShardLayout>; 3] {
    LENS.map(|len| {
        let of = |rank: usize| {
            let starts = (300 * rank..len).step_by(600);
            starts.map(|start| start..len.min(start + 300)).collect()
        };
        Arc::new(ShardLayout::new(len, vec![of(0), of(1)]).unwrap())
    })
}

/// Runs the collectives of one step of a training program.
fn step(
    group: &ProcessGroup,
    buffers: &mut [Buffer],
    layouts: &[Arc<ShardLayout>],
    values: &mut [f32],
) {
    for (buffer, layout) in buffers.iter_mut().zip(layouts) {
        group.all_reduce_buffer(buffer, ReduceOp::Sum).unwrap();
        group
            .reduce_scatter_buffer(buffer, ReduceOp::Sum, layout)
            .unwrap();
    }
    group.all_reduce(values, ReduceOp::Mean).unwrap();
    group.all_reduce(&mut values[..10], ReduceOp::Max).unwrap();
    group.broadcast(values, 1).unwrap();
    group.barrier().unwrap();
}

/// Returns the allocations that all steps together may make. Over connections, the number of waiting parts differs from
/// step to step and may reach its maximum late.
fn bound(means: Means) -> usize {
    match means {
        Means::Tcp => 32,
        _ => 0,
    }
}

fn assert_within_bound(means: Means, counts: &[usize]) {
    let within = counts.iter().all(|count| *count <= bound(means));
    assert!(within, "{counts:?}, {means:?}");
}

fn nothing_is_allocated(means: Means) {
    let counts = run(means, 2, |group| {
        let mut buffers = LENS.map(|len| group.buffer(DType::F32, len));
        let layouts = layouts();
        let mut values = vec![1.0; 200_000];
        for _ in 0..10 {
            step(&group, &mut buffers, &layouts, &mut values);
        }
        let before = COUNT.get();
        for _ in 0..STEPS {
            step(&group, &mut buffers, &layouts, &mut values);
        }
        COUNT.get() - before
    });
    assert_within_bound(means, &counts);
}

/// Counts both the thread that starts operations and the one that runs them.
fn nothing_is_allocated_for_started_operations(means: Means) {
    let counts = run(means, 2, |group| {
        let beside = Arc::new(AtomicUsize::new(0));
        let noted = Arc::clone(&beside);
        // The observer is called on the thread that ran the operation.
        let note = move |_: &_| noted.store(COUNT.get(), Ordering::Relaxed);
        group.observe(note).unwrap();
        let mut buffers = LENS.map(|len| Some(group.buffer(DType::F32, len)));
        let layouts = layouts();
        let mut step = || {
            for scatters in [false, true] {
                let pending = [0, 1, 2].map(|index| {
                    let buffer = buffers[index].take().unwrap();
                    let started = match scatters {
                        true => group.start_reduce_scatter(buffer, ReduceOp::Sum, &layouts[index]),
                        false => group.start_all_reduce(buffer, ReduceOp::Sum),
                    };
                    started.unwrap()
                });
                for (place, pending) in buffers.iter_mut().zip(pending) {
                    *place = Some(pending.wait().unwrap());
                }
            }
            COUNT.get() + beside.load(Ordering::Relaxed)
        };
        // The distance between the threads differs from step to step.
        for _ in 0..20 {
            step();
        }
        let before = step();
        for _ in 0..STEPS {
            step();
        }
        step() - before
    });
    assert_within_bound(means, &counts);
}

#[test]
fn nothing_is_allocated_over_shared_memory() {
    nothing_is_allocated(Means::Shm);
    nothing_is_allocated_for_started_operations(Means::Shm);
}

#[test]
fn nothing_is_allocated_over_tcp() {
    nothing_is_allocated(Means::Tcp);
    nothing_is_allocated_for_started_operations(Means::Tcp);
}

#[test]
fn nothing_is_allocated_among_threads() {
    nothing_is_allocated(Means::Threads);
    nothing_is_allocated_for_started_operations(Means::Threads);
}
