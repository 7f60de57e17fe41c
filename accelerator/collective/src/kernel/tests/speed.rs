//! A measurement, not a test: run it on an idle machine with
//!
//! ```text
//! cargo test --release -p burn-accelerate-collective --lib kernel::tests::speed -- --ignored --nocapture
//! ```
//!
//! As many threads as ranks combine their parts of all ranks' buffers into all of them. Beside it
//! stand the bound (each thread reads and writes the same memory, one buffer after the other, and
//! combines nothing) and a copy of one buffer. Sides alternate; medians are printed in GB/s of buffers
//! combined, the size of one rank's buffer over time.

use std::{sync::Barrier, thread, time::Instant};

use crate::kernel::*;

const ROUNDS: usize = 11;

#[test]
#[ignore = "measures and asserts nothing"]
fn folding_beside_the_bound_of_memory() {
    for world in [2, 3, 4, 8] {
        for kibibytes in [64, 256, 1024, 4096, 25 * 1024, 100 * 1024] {
            compare(DType::F32, ReduceOp::Sum, world, kibibytes << 10);
        }
    }
}

#[test]
#[ignore = "measures and asserts nothing"]
fn every_kernel_within_caches() {
    for level in SimdLevel::all() {
        for dtype in DType::ALL {
            for op in ReduceOp::ALL {
                let bytes = 16 << 10;
                let mut buffers = vec![vec![0_u64; bytes / 8]; 2];
                let targets: Vec<*mut u8> = buffers
                    .iter_mut()
                    .map(|buffer| buffer.as_mut_ptr().cast())
                    .collect();
                let sources: Vec<_> = targets.iter().map(|target| target.cast_const()).collect();
                let mut times: Vec<f64> = (0..ROUNDS)
                    .map(|_| {
                        let began = Instant::now();
                        for _ in 0..200 {
                            let len = bytes / dtype.size();
                            // SAFETY: the buffers have this length and are the test's own.
                            unsafe { fold_by(level, dtype, op, &sources, &targets, len) };
                        }
                        began.elapsed().as_secs_f64() / 200.0
                    })
                    .collect();
                let rate = bytes as f64 / median(&mut times) / 1e9;
                println!("{level:?} {dtype} {op}: {rate:.1} GB/s");
            }
        }
    }
}

fn compare(dtype: DType, op: ReduceOp, world: usize, bytes: usize) {
    let threads = world.min(2);
    let part = bytes / threads / 64 * 64;
    let times = (200 << 20) / (bytes * world);
    let times = times.clamp(2, 2000);
    let mut buffers = vec![vec![0_u64; bytes / 8 + 8]; world];
    let bases: Vec<Base> = buffers
        .iter_mut()
        .map(|buffer| {
            let base: *mut u8 = buffer.as_mut_ptr().cast();
            Base(base.wrapping_add(base.align_offset(64)))
        })
        .collect();
    let barrier = Barrier::new(threads);
    let work = |thread: usize| {
        let targets: Vec<*mut u8> = bases
            .iter()
            .map(|base| base.0.wrapping_add(thread * part))
            .collect();
        let sources: Vec<_> = targets.iter().map(|target| target.cast_const()).collect();
        let mut measured = [const { Vec::new() }; 3];
        for _ in 0..ROUNDS {
            for (side, times_of) in measured.iter_mut().enumerate() {
                barrier.wait();
                let began = Instant::now();
                for _ in 0..times {
                    // SAFETY: each thread has a part of its own of buffers that are long
                    // enough and outlive the scope.
                    unsafe {
                        match side {
                            0 => fold(dtype, op, &sources, &targets, part / dtype.size()),
                            1 => {
                                for (source, target) in sources.iter().zip(&targets) {
                                    let len = part / dtype.size();
                                    fold(dtype, op, &[*source], &[*target], len);
                                }
                            }
                            _ => sources[0].copy_to_nonoverlapping(targets[1], part),
                        }
                    }
                }
                times_of.push(began.elapsed().as_secs_f64() / times as f64);
            }
        }
        measured
    };
    let measured: Vec<[Vec<f64>; 3]> = thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || work(thread)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a thread that measures"))
            .collect()
    });
    // A round is over when the slowest thread is.
    let [fold, bound, copy] = [0, 1, 2].map(|side| {
        let mut rounds: Vec<f64> = (0..ROUNDS)
            .map(|round| {
                let threads = measured.iter().map(|measured| measured[side][round]);
                threads.fold(0.0, f64::max)
            })
            .collect();
        bytes as f64 / median(&mut rounds) / 1e9
    });
    println!(
        "{world} ranks, {:>6} KiB: {fold:6.1} GB/s, bound {bound:6.1} ({:3.0} % of it), copy {copy:6.1}",
        bytes >> 10,
        100.0 * fold / bound,
    );
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

#[derive(Clone, Copy)]
struct Base(*mut u8);

// SAFETY: threads take parts of the memory that do not touch.
unsafe impl Send for Base {}
// SAFETY: as above.
unsafe impl Sync for Base {}
