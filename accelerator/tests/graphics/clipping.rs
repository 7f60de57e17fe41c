//! Norms and clipping, computed by the device.

use accelerator::prelude::*;
use accelerator::{Clip, Oversubscription};
use burn::module::{Module, Param};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor, TensorData};

use crate::common::{flat, of_every_rank};
use crate::harness::{Setting, cpu, is_there};

const CLIPS: [fn(AveragedGradients) -> AveragedGradients; 7] = [
    |gradients| gradients,
    |gradients| gradients.clip_norm(0.1),
    |gradients| gradients.clip_value(0.02),
    |gradients| gradients.clip(Clip::norm(0.3).of_order(1.0)),
    |gradients| gradients.clip(Clip::norm(0.01).of_order(f64::INFINITY)),
    |gradients| gradients.clip(Clip::norm(0.1).of_order(3.0)),
    |gradients| {
        gradients
            .clip(Clip::value(0.01).only(|path| path.ends_with("bias")))
            .clip_norm(0.2)
    },
];

#[test]
fn norms_and_clips_are_those_of_the_cpu() {
    let (true, Some(kind)) = (is_there(), cpu()) else {
        return;
    };
    for (number, clip) in CLIPS.into_iter().enumerate() {
        for (ranks, accumulation) in [(1, 1), (1, 2), (2, 1), (2, 2)] {
            let here = Setting {
                accumulation,
                clip,
                steps: 3,
                ..Setting::new(ranks)
            };
            let there = Setting { kind, ..here };
            let (here, there) = (here.run(), there.run());
            eprintln!("clip {number} of {ranks} ranks, {accumulation} micro-steps");
            here.assert_near(&there, 1e-5);
        }
    }
}

/// Numbers whose gradients are the factors that the loss multiplies them by.
#[derive(Debug, Module)]
struct Numbers {
    body: Param<Tensor<1>>,
    head: Param<Tensor<1>>,
}

/// Returns the norm, and how far a step of rate 1 moves numbers that have these gradients.
fn moved(
    ranks: usize,
    slopes: [f32; 3],
    clip: fn(AveragedGradients) -> AveragedGradients,
) -> (f64, Vec<f32>) {
    let rows = Accelerator::builder()
        .device(BackendKind::Wgpu)
        .oversubscription(Oversubscription::Allow)
        .launch(ranks, |accelerator| {
            let device = accelerator.device();
            let zeros = |count| {
                let zeros = TensorData::zeros::<f32, _>([count]);
                Param::from_data(zeros, &device)
            };
            let numbers = Numbers {
                body: zeros(3),
                head: zeros(1),
            };
            let parts = (numbers, SgdConfig::new().init());
            let (mut model, mut optimizer) = accelerator.prepare(parts)?;
            let slopes = tensor(slopes, &device);
            let loss = (model.body.val() * slopes).sum() + (model.head.val() * 2.0).sum();
            let gradients = accelerator.backward(loss, &model, 1)?;
            let mut gradients = clip(gradients);
            let norm = gradients.norm().unwrap();
            model = optimizer.step(1.0, model, gradients);
            let moved = flat(&model).iter().map(|value| -value).collect();
            Ok((norm, moved))
        });
    let (norms, moved): (Vec<f64>, _) = rows.unwrap().into_iter().unzip();
    (norms[0], of_every_rank(moved))
}

fn tensor(values: [f32; 3], device: &Device) -> Tensor<1> {
    Tensor::from_data(TensorData::from(values), &device.clone().inner())
}

#[test]
fn what_is_no_number_is_not_hidden() {
    if !is_there() {
        return;
    }
    for ranks in [1, 2] {
        let (norm, moved) = moved(ranks, [1.0, f32::NAN, -3.0], |g| g.clip_value(0.5));
        assert!(norm.is_nan(), "{norm}");
        assert!(moved[1].is_nan(), "{moved:?}");
        assert_eq!([moved[0], moved[2], moved[3]], [0.5, -0.5, 0.5]);
        let by_largest: fn(AveragedGradients) -> AveragedGradients =
            |g| g.clip(Clip::norm(0.5).of_order(f64::INFINITY));
        let (_, moved) = self::moved(ranks, [1.0, f32::NAN, -3.0], by_largest);
        assert!(moved.iter().all(|value| value.is_nan()), "{moved:?}");
    }
}
