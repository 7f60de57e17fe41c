//! Gradients sent in half precision.

use crate::common::{Column, columns, devices, distance, flat, line, linear, of_every_rank};
use accelerator::prelude::*;
use accelerator::{AcceleratorBuilder, Compression};
use burn::module::Module;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, Relu};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor};

const COMPRESSED: [Compression; 2] = [Compression::F16, Compression::Bf16];

#[derive(Debug, Module)]
struct Network {
    first: Linear,
    second: Linear,
    last: Linear,
}

impl Network {
    fn new(device: &Device) -> Self {
        Self {
            first: linear(1, 24, device),
            second: linear(24, 24, device),
            last: linear(24, 1, device),
        }
    }

    fn loss(&self, batch: &Column) -> Tensor<1> {
        let values = batch.values.clone();
        let hidden = Relu::new().forward(self.first.forward(values.clone()));
        let hidden = Relu::new().forward(self.second.forward(hidden));
        let wanted = values.clone() * values * 0.5 - 1.0;
        MseLoss::new().forward(self.last.forward(hidden), wanted, Reduction::Mean)
    }
}

/// Returns the weights that all ranks hold after 120 steps, in small buckets. The last step of an epoch is smaller.
fn trained(builder: AcceleratorBuilder, ranks: usize) -> Vec<f32> {
    let outcomes = builder
        .bucket_size(1024)
        .launch(ranks, |accelerator| {
            let model = Network::new(&accelerator.device());
            let train = LoaderBuilder::new(crate::common::ColumnBatcher)
                .global_batch_size(12)
                .shuffle(3)
                .build(columns(31));
            let (mut model, mut optimizer, train) =
                accelerator.prepare((model, SgdConfig::new().init(), train))?;
            for epoch in 0..40 {
                for batch in train.epoch(epoch) {
                    let batch = batch?;
                    let gradients = accelerator.backward(model.loss(&batch), &model, &batch)?;
                    model = optimizer.step(0.02, model, gradients);
                }
            }
            Ok(flat(&model))
        })
        .unwrap();
    of_every_rank(outcomes)
}

#[test]
fn a_compressed_trajectory_stays_close_and_repeats_to_the_bit() {
    for kind in devices() {
        let builder = || Accelerator::builder().device(kind);
        for ranks in [2, 3] {
            let exact = trained(builder(), ranks);
            let scale = length(&exact);
            for compression in COMPRESSED {
                let compressed = builder().compression(compression);
                let ours = trained(compressed.clone(), ranks);
                let off: Vec<f32> = ours.iter().zip(&exact).map(|(a, b)| a - b).collect();
                let off = length(&off) / scale;
                assert!(off < 1e-2, "{compression}: {off}");
                assert!(off > 0.0, "{compression}: nothing was rounded");
                if ranks == 2 {
                    assert_eq!(trained(compressed, ranks), ours);
                }
            }
        }
    }
}

#[test]
fn a_window_is_rounded_once_and_one_rank_not_at_all() {
    for compression in COMPRESSED {
        let builder = || Accelerator::builder().accumulation_steps(3);
        let exact = trained(builder(), 2);
        let ours = trained(builder().compression(compression), 2);
        let off: Vec<f32> = ours.iter().zip(&exact).map(|(a, b)| a - b).collect();
        let off = length(&off) / length(&exact);
        assert!(off > 0.0 && off < 1e-2, "{off}");
        let alone = trained(builder().compression(compression), 1);
        assert_eq!(alone, trained(builder(), 1));
    }
}

fn length(values: &[f32]) -> f32 {
    values.iter().map(|value| value * value).sum::<f32>().sqrt()
}

/// Returns the gradients of a line on two ranks whose losses are multiplied by `factors[rank]`.
fn gradients_of(compression: Compression, factors: [f32; 2]) -> Vec<f32> {
    let outcomes = Accelerator::builder()
        .compression(compression)
        .launch(2, |accelerator| {
            let model = line(&accelerator.device());
            let train = LoaderBuilder::new(crate::common::ColumnBatcher)
                .global_batch_size(10)
                .build(columns(10));
            let (model, mut optimizer, train) =
                accelerator.prepare((model, SgdConfig::new().init(), train))?;
            let batch = train.epoch(0).next().unwrap()?;
            let loss = distance(&model, &batch) * factors[accelerator.rank()];
            let before = flat(&model);
            let gradients = accelerator.backward(loss, &model, &batch)?;
            let after = flat(&optimizer.step(1.0, model, gradients));
            Ok(before
                .iter()
                .zip(after)
                .map(|(before, after)| before - after)
                .collect::<Vec<f32>>())
        })
        .unwrap();
    of_every_rank(outcomes)
}

#[test]
fn what_overflows_is_reduced_again_as_it_is() {
    // Either the contribution of a rank is infinite, or the sum is.
    for factors in [
        [1e6, 1.0],
        [1.0, 1e6],
        [1e6, 1e6],
        [1e30, 1e30],
        [1e6, -1e6],
    ] {
        let exact = gradients_of(Compression::None, factors);
        assert!(exact.iter().all(|gradient| gradient.is_finite()));
        assert_eq!(gradients_of(Compression::F16, factors), exact);
    }
    // The largest values of f32 are infinite when rounded to bf16.
    let factor = f32::MAX / 40.0;
    let exact = gradients_of(Compression::None, [factor, 0.0]);
    let ours = gradients_of(Compression::Bf16, [factor, 0.0]);
    assert!(
        exact
            .iter()
            .chain(&ours)
            .all(|gradient| gradient.is_finite())
    );
}

#[test]
fn what_is_not_finite_stays_so() {
    for compression in COMPRESSED {
        for factor in [f32::NAN, f32::INFINITY] {
            let exact = gradients_of(Compression::None, [1.0, factor]);
            let ours = gradients_of(compression, [1.0, factor]);
            let same = |(a, b): (&f32, &f32)| a == b || (a.is_nan() && b.is_nan());
            assert!(exact.iter().zip(&ours).all(same), "{exact:?} {ours:?}");
            assert!(ours.iter().any(|gradient| !gradient.is_finite()));
        }
    }
}

#[test]
fn small_gradients_keep_their_digits() {
    for (compression, bound) in [(Compression::F16, 1e-3), (Compression::Bf16, 1e-2)] {
        // Around 1e-6, unscaled f16 values have one digit left.
        let exact = gradients_of(Compression::None, [1e-6, 1e-6]);
        let ours = gradients_of(compression, [1e-6, 1e-6]);
        for (ours, exact) in ours.iter().zip(&exact) {
            // The gradient is observed as the difference of two f32 values near one.
            assert!(
                (ours - exact).abs() <= bound * exact.abs() + 2e-7,
                "{ours} {exact}"
            );
        }
    }
}

#[test]
fn a_name_that_is_no_compression_is_refused() {
    for name in ["none", "f16", "bf16"] {
        assert_eq!(name.parse::<Compression>().unwrap().to_string(), name);
    }
    let error = "fp8".parse::<Compression>().unwrap_err();
    assert!(error.is_config());
    let text = error.to_string();
    assert!(text.contains("fp8") && text.contains("bf16"), "{text}");
}
