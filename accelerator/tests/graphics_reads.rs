//! Counts how often a training waits for results of a graphics device.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};

use accelerator::Oversubscription;
use accelerator::prelude::*;
use burn::module::Module;
use burn::nn::Linear;
use burn::optim::SgdConfig;
use burn::tensor::{Tensor, TensorData};
use common::linear;
use log::{LevelFilter, Log, Metadata, Record};

/// The number of reads from the device's memory in this process.
static READS: AtomicUsize = AtomicUsize::new(0);

/// A logger that sees the calls of `wgpu`.
struct Reads;

impl Log for Reads {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("wgpu_core")
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata())
            && record.args().to_string().starts_with("Buffer::map_async")
        {
            READS.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn flush(&self) {}
}

#[derive(Clone, Copy)]
struct Setting {
    ranks: usize,
    accumulation: usize,
    looks: fn(&mut AveragedGradients),
    clip: fn(AveragedGradients) -> AveragedGradients,
    /// Set if the program reads the outcome of a step.
    told: bool,
}

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
}

/// Returns the number of reads from the device's memory by all ranks together.
fn reads(setting: Setting, steps: usize) -> usize {
    let counts = Accelerator::builder()
        .device(BackendKind::Wgpu)
        .oversubscription(Oversubscription::Allow)
        .accumulation_steps(setting.accumulation)
        .launch(setting.ranks, |accelerator| {
            let device = accelerator.device();
            let layers = (0..3).map(|_| linear(4, 4, &device)).collect();
            let parts = (Net { layers }, SgdConfig::new().init());
            let (mut model, mut optimizer) = accelerator.prepare(parts)?;
            accelerator.wait_for_everyone()?;
            let before = READS.load(Ordering::SeqCst);
            accelerator.wait_for_everyone()?;
            for _ in 0..steps * setting.accumulation {
                let input = TensorData::from([[1.0_f32, 2.0, 3.0, 4.0]]);
                let mut output = Tensor::<2>::from_data(input, &device.clone().inner());
                for layer in &model.layers {
                    output = layer.forward(output);
                }
                let loss = output.powi_scalar(2).mean();
                let gradients = accelerator.backward(loss, &model, 1)?;
                let mut gradients = (setting.clip)(gradients);
                (setting.looks)(&mut gradients);
                model = optimizer.step(0.01, model, gradients);
                if setting.told {
                    let _ = optimizer.outcome();
                }
            }
            device.sync().unwrap();
            accelerator.wait_for_everyone()?;
            let reads = READS.load(Ordering::SeqCst) - before;
            accelerator.wait_for_everyone()?;
            Ok(reads)
        });
    counts.unwrap()[0]
}

#[test]
fn steps_read_what_they_are_asked_for_and_no_more() {
    if let Err(error) = Accelerator::builder().device(BackendKind::Wgpu).build() {
        assert!(error.is_device(), "{error:?}");
        eprintln!("skipped, since there is no graphics device here: {error}");
        return;
    }
    log::set_logger(&Reads).unwrap();
    log::set_max_level(LevelFilter::Trace);
    for accumulation in [1, 3] {
        let plain = Setting {
            ranks: 1,
            accumulation,
            looks: |_| {},
            clip: |gradients| gradients,
            told: false,
        };
        let more = |setting| {
            // Kernels are measured and chosen at their first use.
            reads(setting, 2);
            // Both runs include the reads that happen once.
            reads(setting, 12) - reads(setting, 2)
        };
        let of = |ranks, looks: fn(&mut AveragedGradients)| {
            more(Setting {
                ranks,
                looks,
                ..plain
            })
        };
        let clips: [fn(AveragedGradients) -> AveragedGradients; 3] = [
            |gradients| gradients.clip_norm(0.1),
            |gradients| gradients.clip_value(0.1),
            |gradients| gradients.clip_norm(0.1).clip_value(0.01),
        ];
        for clip in clips {
            let clipped = Setting { clip, ..plain };
            assert_eq!(more(clipped), 0, "one rank reads nothing to clip");
            let told = Setting {
                told: true,
                ..clipped
            };
            assert_eq!(more(told), 10, "the norm, once a step");
        }
        assert_eq!(of(1, |_| {}), 0, "one rank reads nothing by itself");
        let losses = of(1, |gradients| {
            assert_eq!(gradients.loss(), gradients.loss());
        });
        assert_eq!(losses, accumulation * 10, "a loss a micro-step");
        let norms = of(1, |gradients| _ = gradients.norm());
        assert_eq!(norms, 6 * 10, "a number of each parameter, and no gradient");
        let two = of(2, |_| {});
        let of_a_rank = 1 + accumulation;
        assert_eq!(two, 2 * of_a_rank * 10, "the bucket and its losses");
    }
}
