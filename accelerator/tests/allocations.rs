//! What `backward` takes from the allocator beside what plain Burn takes: books, and no gradients. And what is held
//! while a batch size is tried: what steps hold.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod common;

use core::cell::Cell;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use accelerator::optim::{InitFused, Sharded};
use accelerator::prelude::*;
use accelerator::{BatchSizeFinder, Compression, Overlap};
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, SgdConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};

/// Counts the bytes that each thread asks for, and those that the process holds.
struct Counting;

thread_local! {
    static BYTES: Cell<usize> = const { Cell::new(0) };
}

static HELD: AtomicIsize = AtomicIsize::new(0);

/// What the process holds is of one test at a time.
static TURN: Mutex<()> = Mutex::new(());

#[expect(unsafe_code, reason = "an allocator is")]
// SAFETY: everything is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends has nothing to count.
        let _ = BYTES.try_with(|bytes| bytes.set(bytes.get() + layout.size()));
        HELD.fetch_add(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: the caller's promise.
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

    /// Of the gradients, in bytes.
    fn size(&self) -> usize {
        4 * self.num_params()
    }
}

/// What a rank's calls of `backward` took, by micro-step of their window.
#[derive(Clone, Default)]
struct Taken {
    /// By window, in bytes.
    ours: Vec<usize>,
    plain: Vec<usize>,
    operations: usize,
}

impl Taken {
    /// Bytes of every window beside what plain Burn takes. Graphs of all threads are in one table of Burn's, and
    /// whose thread has to grow or clear it is chance, which only adds.
    fn bytes(&self) -> isize {
        let least = |bytes: &[usize]| bytes.iter().min().copied().unwrap_or(0) as isize;
        least(&self.ours) - least(&self.plain)
    }
}

/// What every rank took in 24 windows, after six others.
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
            // A copy would be 1. Watches are nodes of Burn's graph, which allocates for them.
            assert!(
                share < 0.05,
                "{overlap}, {accumulation} micro-steps: {share} of the gradients"
            );
            let Some((last, others)) = taken.split_last() else {
                panic!("a window has a step");
            };
            assert!(last.operations > 0);
            for micro_step in others {
                // They fill buckets that are there already, and tell nobody.
                assert_eq!(micro_step.operations, 0, "{overlap}");
                let share = micro_step.bytes() as f64 / size as f64;
                // A copy of the biases alone would be 0.005. What is less may be Burn's table, which either rank grows.
                assert!(share < 0.004, "{overlap}: {share} of the gradients");
            }
        }
    }
}

/// How a model is trained.
#[derive(Clone, Copy, Debug)]
struct Training {
    accumulation: usize,
    compression: Compression,
    is_sharded: bool,
    overlap: Overlap,
    ranks: usize,
}

/// What a rank held beside its model, in bytes: while a batch size was tried, and while it trained with it. And the
/// bytes of its gradients.
type HeldBytes = (isize, isize, isize);

impl Training {
    fn held(self) -> Vec<HeldBytes> {
        let meeting = Meeting::default();
        let rank = |accelerator: Accelerator| {
            let model = accelerator.init(Layers::new);
            let optimizer = AdamWConfig::new().init_fused();
            if self.is_sharded {
                let parts = accelerator.prepare((model, Sharded(optimizer)))?;
                self.held_by(&accelerator, &meeting, parts)
            } else {
                let parts = accelerator.prepare((model, optimizer))?;
                self.held_by(&accelerator, &meeting, parts)
            }
        };
        Accelerator::builder()
            .device(BackendKind::Flex)
            .bucket_size(WIDTH * WIDTH * 4)
            .accumulation_steps(self.accumulation)
            .compression(self.compression)
            .overlap(self.overlap)
            .launch(self.ranks, rank)
            .unwrap()
    }

    fn held_by(
        self,
        accelerator: &Accelerator,
        meeting: &Meeting,
        (mut model, mut optimizer): (Layers, PreparedOptimizer<accelerator::optim::Manual>),
    ) -> accelerator::Result<HeldBytes> {
        let device = accelerator.device();
        // Buffers of several ranks lie in memory that is no allocator's.
        let held = || {
            meeting.wait(self.ranks);
            let held = HELD.load(Ordering::Relaxed) / self.ranks as isize;
            meeting.wait(self.ranks);
            held + accelerator.group().buffer_bytes() as isize
        };
        // What the first backward of a thread keeps for those that follow.
        drop(model.loss(&device).backward());
        let before = held();
        let mut tried = 0;
        let attempt = |_| {
            // It clears what there is of graphs.
            drop(model.loss(&device).backward());
            tried = held() - before;
            Ok::<_, accelerator::Error>(())
        };
        accelerator.find_executable_batch_size(2, &model, &optimizer, attempt)?;
        let left = held() - before;
        assert!(
            left < model.size() as isize / 2,
            "{left} bytes are held after the search"
        );
        assert_eq!((optimizer.steps(), optimizer.state_memory()?), (0, 0));
        let mut trained = 0;
        for step in 0..12 * self.accumulation {
            trained = held() - before;
            let gradients = accelerator.backward(model.loss(&device), &model, 2)?;
            model = optimizer.step(0.1, model, gradients);
            assert!(step < self.accumulation || optimizer.steps() > 0);
        }
        Ok((tried, trained, model.size() as isize))
    }
}

/// Where ranks, which are threads, wait for each other without a collective.
#[derive(Default)]
struct Meeting(AtomicUsize);

impl Meeting {
    fn wait(&self, ranks: usize) {
        let mine = self.0.fetch_add(1, Ordering::SeqCst);
        let all = mine - mine % ranks + ranks;
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.0.load(Ordering::SeqCst) < all {
            assert!(Instant::now() < deadline, "another rank does not come");
            std::thread::yield_now();
        }
    }
}

#[test]
fn c20_a_trial_of_a_batch_size_holds_what_steps_hold() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let alone = Training {
        accumulation: 1,
        compression: Compression::None,
        is_sharded: false,
        overlap: Overlap::Off,
        ranks: 1,
    };
    let two = Training { ranks: 2, ..alone };
    let accumulating = Training {
        accumulation: 3,
        overlap: Overlap::On,
        ..two
    };
    let cases = [
        alone,
        Training {
            accumulation: 2,
            ..alone
        },
        two,
        accumulating,
        Training {
            compression: Compression::Bf16,
            ..two
        },
        Training {
            is_sharded: true,
            ..two
        },
    ];
    for case in cases {
        for (tried, trained, size) in case.held() {
            let slack = size as usize / 10;
            assert!(
                tried.abs_diff(trained) < slack,
                "{case:?}: {tried} bytes are held in a trial, and {trained} in training, of gradients of {size}"
            );
            assert!(trained > size, "{case:?}: {trained} of {size}");
        }
    }
}

#[test]
fn c20_a_batch_size_for_a_model_that_was_not_prepared_is_refused() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let errors = accelerator::launch(2, |accelerator| {
        let optimizer = accelerator.prepare(SgdConfig::new().init())?;
        let model = accelerator.init(Layers::new);
        let finder = BatchSizeFinder::starting_at(2).with_step_of(&model, &optimizer);
        let found = finder.find(&accelerator, |_| Ok::<_, accelerator::Error>(()));
        Ok(found.unwrap_err())
    });
    for error in errors.unwrap() {
        assert!(error.is_misuse(), "{error:?}");
        assert!(error.to_string().contains("not prepared"), "{error}");
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
    let parts = accelerator.prepare((model, SgdConfig::new().init()));
    let (model, optimizer) = parts.unwrap();
    drop(model.loss(&device).backward());
    let mut held = Vec::new();
    let attempt = |size| {
        held.push(HELD.load(Ordering::Relaxed));
        let input = Tensor::<2>::ones([1000 * size, WIDTH], &device.clone().inner());
        let forward = |x, layer: &Linear| relu(layer.forward(x));
        let output = model.layers.iter().fold(input, forward);
        assert!(size < 3, "out of memory");
        drop(output.mean().backward());
        Ok::<_, accelerator::Error>(())
    };
    let found = accelerator.find_executable_batch_size(6, &model, &optimizer, attempt);
    assert_eq!(found.unwrap().0, 2);
    // The first attempt records more than 40 million bytes. Products of matrices keep some room to work in.
    let most = held.iter().max().unwrap();
    assert!(most - held[0] < 10_000_000, "{held:?}");
}
