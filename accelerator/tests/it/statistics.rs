//! Running statistics over all ranks.

use std::sync::atomic::Ordering;

use crate::common::{counted, devices};
use accelerator::prelude::*;
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};

#[derive(Debug, Module)]
struct Net {
    frozen: Linear,
    norm: BatchNorm,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            frozen: LinearConfig::new(2, 2).init(device).no_grad(),
            norm: BatchNormConfig::new(2).with_momentum(1.0).init(device),
        }
    }

    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        self.norm.forward(self.frozen.forward(input))
    }
}

fn rows(rank: usize, device: &Device) -> Tensor<2> {
    let values = (0..8).map(|i| ((i + 13 * rank) as f32 * 0.7).sin() + rank as f32);
    let data = TensorData::new(values.collect::<Vec<_>>(), [4, 2]);
    Tensor::from_data(data, device)
}

fn values(tensor: Tensor<1>) -> Vec<f64> {
    tensor.into_data().convert::<f64>().try_to_vec().unwrap()
}

#[test]
fn statistics_become_those_of_everything_that_was_seen() {
    for kind in devices() {
        let ranks = Accelerator::builder()
            .device(kind)
            .launch(3, |accelerator| {
                let device = accelerator.device();
                let model = accelerator.prepare(accelerator.init(Net::new))?;
                let before = model.frozen.weight.val().into_data();
                let own = model.frozen.forward(rows(accelerator.rank(), &device));
                model.forward(rows(accelerator.rank(), &device));
                let valid = accelerator.valid(&model)?;
                assert_eq!(model.frozen.weight.val().into_data(), before);
                assert!(!model.norm.running_mean.value().is_require_grad());
                let seen = rows(7, &device).inner();
                Ok((
                    own.into_data()
                        .convert::<f64>()
                        .try_to_vec::<f64>()
                        .unwrap(),
                    values(valid.norm.running_mean.value()),
                    values(valid.norm.running_var.value()),
                    valid.forward(seen).into_data(),
                ))
            })
            .unwrap();
        let all: Vec<f64> = ranks.iter().flat_map(|rank| rank.0.clone()).collect();
        for channel in 0..2 {
            let seen = || all.iter().skip(channel).step_by(2);
            let mean = seen().sum::<f64>() / 12.0;
            // Burn's running variance divides by n − 1 or by n of each rank's own batch.
            let found = ranks[0].1[channel];
            assert!((found - mean).abs() < 1e-6, "{found} {mean}");
            let spread = seen().map(|x| (x - mean).powi(2)).sum::<f64>() / 12.0;
            let between = spread - ranks[0].2[channel];
            assert!(between.abs() < 1e-5 * spread, "{between} {spread}");
        }
        for rank in &ranks[1..] {
            assert_eq!(
                (&rank.1, &rank.2, &rank.3),
                (&ranks[0].1, &ranks[0].2, &ranks[0].3)
            );
        }
    }
}

#[test]
fn what_is_the_same_everywhere_stays_and_models_without_buffers_send_nothing() {
    accelerator::launch(3, |accelerator| {
        let model = accelerator.prepare(accelerator.init(Net::new))?;
        let line: Linear =
            accelerator.prepare(accelerator.init(|device| LinearConfig::new(3, 3).init(device)))?;
        let operations = counted(&accelerator);
        let frozen = model.frozen.weight.val().into_data();
        accelerator.sync_buffers(&line)?;
        assert_eq!(operations.load(Ordering::Relaxed), 0);
        accelerator.sync_buffers(&model)?;
        // Only the comparison is sent.
        assert_eq!(operations.load(Ordering::Relaxed), 1);
        assert_eq!(model.frozen.weight.val().into_data(), frozen);
        Ok(())
    })
    .unwrap();
}

#[test]
fn parameters_are_neither_compared_nor_sent_where_frozen_ones_differ() {
    accelerator::launch(2, |accelerator| {
        let mut model = accelerator.prepare(accelerator.init(Net::new))?;
        let own = accelerator.rank() as f64 + 1.0;
        model.frozen.weight = model.frozen.weight.map(|weight| weight * own);
        let before = model.frozen.weight.val().into_data();
        let operations = counted(&accelerator);
        accelerator.sync_buffers(&model.frozen)?;
        // This model has no parameter that takes a gradient.
        accelerator.sync_buffers(&model.frozen.valid())?;
        assert_eq!(operations.load(Ordering::Relaxed), 0);
        // Each call compares the running statistics.
        accelerator.sync_buffers(&model)?;
        accelerator.sync_buffers(&model.valid())?;
        assert_eq!(operations.load(Ordering::Relaxed), 2);
        assert_eq!(model.frozen.weight.val().into_data(), before);
        Ok(())
    })
    .unwrap();
}

/// A checkpoint holds what `save_model` would write, and every rank continues with it.
#[test]
fn checkpoints_hold_the_statistics_of_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let means = |model: &Net| values(model.norm.running_mean.value());
    let saved = accelerator::launch(2, |accelerator| {
        let model = accelerator.prepare(accelerator.init(Net::new))?;
        let value = accelerator.rank() as f64 * 4.0;
        let seen = Tensor::<2>::full([3, 2], value, &accelerator.device());
        model.norm.forward(seen);
        accelerator.save_state(folder.path(), &model)?;
        assert_eq!(means(&model), [2.0, 2.0]);
        // A save in the background does the same.
        let seen = Tensor::<2>::full([3, 2], value + 1.0, &accelerator.device());
        model.norm.forward(seen);
        let saving = accelerator.save_state_async(folder.path(), &model)?;
        assert_eq!(means(&model), [3.0, 3.0]);
        saving.wait()
    });
    assert_eq!(saved.unwrap()[1].number(), 2);
    for (number, mean) in [(1, 2.0), (2, 3.0)] {
        let accelerator = Accelerator::new().unwrap();
        let model = accelerator.init(Net::new);
        let model = accelerator.prepare(model).unwrap();
        let path = folder.path().join(format!("checkpoint-{number:06}"));
        let (model, _) = accelerator.resume(path, model).unwrap();
        assert_eq!(means(&model), [mean; 2]);
    }
}
