//! Blocks of a model that are recomputed.

use accelerator::nn::Units;
use accelerator::prelude::*;
use accelerator::{Overlap, Oversubscription};
use burn::optim::AdamWConfig;
use burn::tensor::{Tensor, TensorData};

use crate::common::{Encoder, flat};
use crate::harness::is_there;

/// Trains one rank or two for three steps of 32 rows.
fn train(units: Units, ranks: usize) -> Vec<Vec<f32>> {
    Accelerator::builder()
        .device(BackendKind::Wgpu)
        .oversubscription(Oversubscription::Allow)
        .overlap(Overlap::On)
        .units(units)
        .seed(4)
        .launch(ranks, |accelerator| {
            let model = accelerator.init(|device| Encoder::new(2, 0.3, device));
            let (mut model, mut optimizer) =
                accelerator.prepare((model, AdamWConfig::new().init()))?;
            for step in 0..3 {
                let values = (0..4 * 8 * 16).map(|at| {
                    let place = at + 7 * step + 31 * accelerator.rank();
                    (place as f32 * 0.37).sin()
                });
                let values = TensorData::new(values.collect::<Vec<_>>(), [4, 8, 16]);
                let x = Tensor::from_data(values, &accelerator.device());
                let gradients = accelerator.backward(model.loss(x), &model, 4)?;
                model = optimizer.step(0.01, model, gradients);
            }
            Ok(flat(&model))
        })
        .unwrap()
}

#[test]
fn recomputed_blocks_train_as_kept_ones() {
    if !is_there() {
        return;
    }
    // Ranks that are threads draw from one generator, so that dropout of two depends on who is first.
    let plain = train(Units::Plain, 1);
    assert!(plain[0].iter().all(|value| value.is_finite()));
    for units in [Units::Keep, Units::Recompute] {
        let other = train(units, 1);
        if cfg!(feature = "fusion") {
            // Operations are fused otherwise.
            for (plain, other) in plain[0].iter().zip(&other[0]) {
                assert!((plain - other).abs() <= 1e-4, "{units}: {plain}, {other}");
            }
        } else {
            assert!(other == plain, "{units}");
        }
        let two = train(units, 2);
        assert!(two[0] == two[1], "{units}");
    }
}
