//! Measures memory: `backward` allocates bookkeeping beyond plain Burn's, but no gradients, and while batch sizes are
//! tried, nothing stays of a failed attempt.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod common;

use core::cell::Cell;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use accelerator::prelude::*;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};

/// Counts the bytes that each thread requests and those that the process holds.
struct Counting;

thread_local! {
    static BYTES: Cell<usize> = const { Cell::new(0) };
}

static HELD: AtomicIsize = AtomicIsize::new(0);

/// Serializes the tests, since the held bytes are those of the whole process.
static TURN: Mutex<()> = Mutex::new(());

#[expect(unsafe_code, reason = "an allocator is")]
// SAFETY: every call is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // The count of a thread that ends does not matter.
        let _ = BYTES.try_with(|bytes| bytes.set(bytes.get() + layout.size()));
        HELD.fetch_add(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn counted<R>(work: impl FnOnce() -> R) -> (usize, R) {
    let before = BYTES.get();
    let result = work();
    (BYTES.get() - before, result)
}

const WIDTH: usize = 200;

#[derive(Debug, Module)]
struct Layers {
    layers: Vec<Linear>,
}

impl Layers {
    fn new(device: &Device) -> Self {
        let layer = |_| LinearConfig::new(WIDTH, WIDTH).init(device);
        Self {
            layers: (0..4).map(layer).collect(),
        }
    }

    fn loss(&self, device: &Device) -> Tensor<1> {
        let input = Tensor::<2>::ones([2, WIDTH], &device.clone().inner());
        let output = self
            .layers
            .iter()
            .fold(input, |x, layer| relu(layer.forward(x)));
        output.mean()
    }

    /// Returns the size of the gradients in bytes.
    fn size(&self) -> usize {
        4 * self.num_params()
    }
}

/// The memory that a rank's calls of `backward` took in one micro-step of the window.
#[derive(Clone, Default)]
struct Taken {
    /// Bytes, one entry per window.
    ours: Vec<usize>,
    plain: Vec<usize>,
    operations: usize,
}

impl Taken {
    /// Returns the bytes beyond those of plain Burn. All threads share Burn's table of graphs, and chance decides which
    /// of them grows or clears it. That only adds bytes, so the minimum counts.
    fn bytes(&self) -> isize {
        let least = |bytes: &[usize]| bytes.iter().min().copied().unwrap_or(0) as isize;
        least(&self.ours) - least(&self.plain)
    }
}

/// Returns what every rank took in 24 windows, after 6 windows of warm-up.
fn taken(overlap: Overlap, accumulation: usize) -> Vec<(Vec<Taken>, usize)> {
    let train = |accelerator: Accelerator| {
        let device = accelerator.device();
        let parts = (accelerator.init(Layers::new), SgdConfig::new().init());
        let (mut model, mut optimizer) = accelerator.prepare(parts)?;
        let operations = Arc::new(AtomicUsize::new(0));
        let count = operations.clone();
        accelerator.group().observe(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
        })?;
        let mut taken = vec![Taken::default(); accumulation];
        for step in 0..30 * accumulation {
            let loss = model.loss(&device);
            let (plain, _) = counted(|| GradientsParams::from_grads(loss.backward(), &model));
            let loss = model.loss(&device);
            let before = operations.load(Ordering::Relaxed);
            let (ours, gradients) = counted(|| accelerator.backward(loss, &model, 2));
            if step >= 6 * accumulation {
                let taken = &mut taken[step % accumulation];
                taken.ours.push(ours);
                taken.plain.push(plain);
                taken.operations += operations.load(Ordering::Relaxed) - before;
            }
            model = optimizer.step(0.1, model, gradients?);
        }
        Ok((taken, model.size()))
    };
    Accelerator::builder()
        .device(BackendKind::Flex)
        .bucket_size(WIDTH * WIDTH * 4)
        .accumulation_steps(accumulation)
        .overlap(overlap)
        .launch(2, train)
        .unwrap()
}

#[test]
fn a_step_allocates_no_gradients_beside_burns() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for (overlap, accumulation) in [
        (Overlap::Off, 1),
        (Overlap::Off, 3),
        (Overlap::On, 1),
        (Overlap::On, 3),
    ] {
        for (taken, size) in taken(overlap, accumulation) {
            let all: isize = taken.iter().map(Taken::bytes).sum();
            let share = all as f64 / (accumulation * size) as f64;
            // A copy would be 1. The observers are nodes of Burn's graph, which allocates for them.
            assert!(
                share < 0.05,
                "{overlap}, {accumulation} micro-steps: {share} of the gradients"
            );
            let Some((last, others)) = taken.split_last() else {
                panic!("a window has a step");
            };
            assert!(last.operations > 0);
            for micro_step in others {
                // These micro-steps fill buckets that exist and send nothing.
                assert_eq!(micro_step.operations, 0, "{overlap}");
                let share = micro_step.bytes() as f64 / size as f64;
                // A copy of the biases alone would be 0.005. Less may be Burn's table, which either rank grows.
                assert!(share < 0.004, "{overlap}: {share} of the gradients");
            }
        }
    }
}

#[test]
fn c20_what_an_attempt_recorded_that_failed_is_not_held_in_the_next() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let accelerator = Accelerator::builder()
        .device(BackendKind::Flex)
        .build()
        .unwrap();
    let device = accelerator.device();
    let model = accelerator.init(Layers::new);
    let model = accelerator.prepare(model).unwrap();
    drop(model.loss(&device).backward());
    let mut held = Vec::new();
    let attempt = |size| {
        held.push(HELD.load(Ordering::Relaxed));
        let input = Tensor::<2>::ones([1000 * size, WIDTH], &device.clone().inner());
        let forward = |x, layer: &Linear| relu(layer.forward(x));
        let output = model.layers.iter().fold(input, forward);
        // An error, not a panic: printing a backtrace would keep the program's symbols in memory.
        if size >= 3 {
            return Err(Box::<dyn std::error::Error>::from("out of memory"));
        }
        drop(output.mean().backward());
        Ok(())
    };
    let found = accelerator.find_executable_batch_size(6, &model, attempt);
    assert_eq!(found.unwrap().0, 2);
    // The first attempt records more than 40 million bytes. Matrix products keep some workspace.
    let most = held.iter().max().unwrap();
    assert!(most - held[0] < 10_000_000, "{held:?}");
}
