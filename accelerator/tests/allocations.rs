//! What `backward` takes from the allocator beside what plain Burn takes: books, and no gradients.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod common;

use core::cell::Cell;
use std::alloc::{GlobalAlloc, Layout, System};

use accelerator::Overlap;
use accelerator::prelude::*;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};

/// Counts the bytes that each thread asks for.
struct Counting;

thread_local! {
    static BYTES: Cell<usize> = const { Cell::new(0) };
}

#[expect(unsafe_code, reason = "an allocator is")]
// SAFETY: everything is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends has nothing to count.
        let _ = BYTES.try_with(|bytes| bytes.set(bytes.get() + layout.size()));
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

#[test]
fn a_step_allocates_no_gradients_beside_burns() {
    for (overlap, accumulation) in [
        (Overlap::Off, 1),
        (Overlap::Off, 2),
        (Overlap::On, 1),
        (Overlap::On, 2),
    ] {
        let shares = Accelerator::builder()
            .device(DeviceKind::Flex)
            .bucket_size(WIDTH * WIDTH * 4)
            .accumulation_steps(accumulation)
            .with_overlap(overlap)
            .launch(2, |accelerator| {
                let device = accelerator.device();
                let parts = (accelerator.init(Layers::new), SgdConfig::new().init());
                let (mut model, mut optimizer) = accelerator.prepare(parts)?;
                let (mut ours, mut plain) = (0, 0);
                for step in 0..12 * accumulation {
                    let loss = model.loss(&device);
                    let (bytes, _) =
                        counted(|| GradientsParams::from_grads(loss.backward(), &model));
                    plain += if step < 6 * accumulation { 0 } else { bytes };
                    let loss = model.loss(&device);
                    let (bytes, gradients) = counted(|| accelerator.backward(loss, &model, 2));
                    ours += if step < 6 * accumulation { 0 } else { bytes };
                    model = optimizer.step(0.1, model, gradients?);
                }
                let measured = 6 * accumulation * model.size();
                Ok((ours as f64 - plain as f64) / measured as f64)
            })
            .unwrap();
        for share in shares {
            // A copy would be 1. Watches are nodes of Burn's graph, which allocates for them.
            assert!(
                share < 0.05,
                "{overlap}, {accumulation} micro-steps: {share} of the gradients"
            );
        }
    }
}
