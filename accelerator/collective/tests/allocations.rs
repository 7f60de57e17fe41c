//! Once everything has been used, operations take no memory from the allocator.

#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    reason = "a test fails where its preparation does"
)]

#[allow(dead_code, reason = "other tests use the rest of it")]
#[path = "suite/world.rs"]
mod world;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use accelerator_collective::{DType, ProcessGroup, ReduceOp};
use world::{Means, run};

/// Counts what each thread asks for.
struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

#[expect(unsafe_code, reason = "an allocator is")]
// SAFETY: everything is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends has nothing to count.
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What one step of a training program asks of the group.
fn step(group: &ProcessGroup, buffers: &mut [accelerator_collective::Buffer], values: &mut [f32]) {
    for buffer in buffers {
        group.all_reduce_buffer(buffer, ReduceOp::Sum).unwrap();
    }
    group.all_reduce(values, ReduceOp::Mean).unwrap();
    group.all_reduce(&mut values[..10], ReduceOp::Max).unwrap();
    group.broadcast(values, 1).unwrap();
    group.barrier().unwrap();
}

fn nothing_is_allocated(means: Means) {
    let counts = run(means, 2, |group| {
        let mut buffers = [10, 5_000, 300_000].map(|len| group.buffer(DType::F32, len));
        let mut values = vec![1.0; 200_000];
        for _ in 0..3 {
            step(&group, &mut buffers, &mut values);
        }
        let before = COUNT.get();
        for _ in 0..20 {
            step(&group, &mut buffers, &mut values);
        }
        COUNT.get() - before
    });
    assert_eq!(counts, [0, 0], "{means:?}");
}

#[test]
fn nothing_is_allocated_over_shared_memory() {
    nothing_is_allocated(Means::Shm);
}

#[test]
fn nothing_is_allocated_among_threads() {
    nothing_is_allocated(Means::Threads);
}
