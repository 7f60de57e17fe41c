//! Clipping by any norm, by value, and by groups of parameters.

use crate::common::{assert_close, devices, flat, line, of_every_rank};
use accelerator::Clip;
use accelerator::prelude::*;
use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor, TensorData};

/// Numbers whose gradients are the factors that the loss multiplies them by.
#[derive(Debug, Module)]
struct Numbers {
    body: Param<Tensor<1>>,
    head: Param<Tensor<1>>,
}

fn numbers(device: &Device) -> Numbers {
    let zeros = |count| Param::from_data(TensorData::zeros::<f32, _>([count]), device);
    Numbers {
        body: zeros(2),
        head: zeros(1),
    }
}

/// Returns how far a step of rate 1 moves numbers whose mean gradient is `[3, -4, 12]`, after `clip`.
fn moved(
    kind: BackendKind,
    ranks: usize,
    clip: &(impl Fn(AveragedGradients) -> AveragedGradients + Sync),
) -> Vec<f32> {
    let rows = Accelerator::builder()
        .device(kind)
        .launch(ranks, |accelerator| {
            let device = accelerator.device();
            let parts = (numbers(&device), SgdConfig::new().init());
            let (mut model, mut optimizer) = accelerator.prepare(parts)?;
            // Ranks have different parts, whose weighted mean is the same on any number of ranks.
            let (weight, share) = match (ranks, accelerator.rank()) {
                (1, _) => (4, 1.0),
                (_, 0) => (3, 0.0),
                (_, _) => (1, 4.0),
            };
            let slopes = Tensor::<1>::from_data([3.0_f32 * share, -4.0 * share], &device);
            let loss =
                (model.body.val() * slopes).sum() + (model.head.val() * (12.0 * share)).sum();
            let gradients = accelerator.backward(loss, &model, weight)?;
            model = optimizer.step(1.0, model, clip(gradients));
            Ok(flat(&model).iter().map(|value| -value).collect())
        });
    of_every_rank(rows.unwrap())
}

fn check(clip: impl Fn(AveragedGradients) -> AveragedGradients + Sync, expected: [f32; 3]) {
    for kind in devices() {
        for ranks in [1, 2] {
            assert_close(&moved(kind, ranks, &clip), &expected, 1e-5);
        }
    }
}

#[test]
fn any_norm_over_everything() {
    check(|g| g, [3.0, -4.0, 12.0]);
    // The norms are 13, 12 and 19.
    check(|g| g.clip_norm(6.5), [1.5, -2.0, 6.0]);
    check(
        |g| g.clip(Clip::norm(6.0).of_order(f64::INFINITY)),
        [1.5, -2.0, 6.0],
    );
    check(|g| g.clip(Clip::norm(9.5).of_order(1.0)), [1.5, -2.0, 6.0]);
    // The norm is the cube root of 27 + 64 + 1728.
    let cube = 1819_f64.cbrt();
    check(
        |g| g.clip(Clip::norm(cube / 2.0).of_order(3.0)),
        [1.5, -2.0, 6.0],
    );
    check(
        |g| g.clip(Clip::norm(cube * 1.1).of_order(3.0)),
        [3.0, -4.0, 12.0],
    );
    check(|g| g.clip_norm(-1.0), [0.0, 0.0, 0.0]);
}

#[test]
fn values_and_groups() {
    check(|g| g.clip_value(3.5), [3.0, -3.5, 3.5]);
    check(
        |g| g.clip(Clip::value(3.5).only(|path| path == "body")),
        [3.0, -3.5, 12.0],
    );
    check(
        |g| g.clip(Clip::norm(2.5).only(|path| path == "body")),
        [1.5, -2.0, 12.0],
    );
    check(
        |g| g.clip(Clip::norm(6.0).only(|path| path == "head")),
        [3.0, -4.0, 6.0],
    );
    check(
        |g| g.clip(Clip::norm(1.0).only(|_| false)),
        [3.0, -4.0, 12.0],
    );
    // The clips act one after the other: by 2.5 and 6, then the whole by 6.5.
    check(
        |g| {
            g.clip(Clip::norm(2.5).only(|path| path == "body"))
                .clip(Clip::norm(6.0).only(|path| path == "head"))
                .clip_norm(3.25)
        },
        [0.75, -1.0, 3.0],
    );
    check(|g| g.clip_norm(6.5).clip_value(1.75), [1.5, -1.75, 1.75]);
    check(
        |g| g.clip_value(1.0).clip(Clip::norm(1.5).of_order(1.0)),
        [0.5, -0.5, 0.5],
    );
}

#[test]
fn norms_are_told_before_and_after() {
    for ranks in [1, 2] {
        let norms = accelerator::launch(ranks, |accelerator| {
            let device = accelerator.device();
            let model = accelerator.prepare(numbers(&device))?;
            let slopes = Tensor::<1>::from_data([3.0_f32, -4.0], &device);
            let loss = (model.body.val() * slopes).sum() + (model.head.val() * 12.0).sum();
            let mut gradients = accelerator.backward(loss, &model, 1)?;
            assert_eq!(gradients.norm_of_order(f64::INFINITY), Some(12.0));
            assert_eq!(gradients.norm_of_order(1.0), Some(19.0));
            let mut gradients = gradients.clip_norm(6.5);
            assert_eq!(gradients.norm(), Some(13.0), "before clipping");
            Ok(gradients.norm_of_order(f64::INFINITY).unwrap())
        });
        for norm in norms.unwrap() {
            assert!((norm - 6.0).abs() < 1e-5, "{norm}");
        }
    }
}

#[test]
fn what_is_not_finite_is_not_hidden() {
    for clip in [
        || Clip::norm(1.0),
        || Clip::norm(1.0).of_order(f64::INFINITY),
        || Clip::norm(1.0).of_order(1.0),
    ] {
        let accelerator = Accelerator::new().unwrap();
        let parts = (line(&accelerator.device()), SgdConfig::new().init());
        let (mut model, mut optimizer): (Linear, _) = accelerator.prepare(parts).unwrap();
        let loss = model.weight.val().sum() * f32::NAN + model.bias.as_ref().unwrap().val().sum();
        let gradients = accelerator.backward(loss.reshape([1]), &model, 1).unwrap();
        model = optimizer.step(1.0, model, gradients.clip(clip()));
        assert!(flat(&model).iter().all(|value| value.is_nan()), "{model:?}");
    }
}

#[test]
fn a_limit_that_is_no_number_is_seen_in_what_it_limits() {
    for kind in devices() {
        for ranks in [1, 2] {
            let values = moved(kind, ranks, &|gradients| gradients.clip_value(f64::NAN));
            assert!(values.iter().all(|value| value.is_nan()), "{values:?}");
            let head = |gradients: AveragedGradients| {
                gradients.clip(Clip::value(f64::NAN).only(|path| path == "head"))
            };
            let values = moved(kind, ranks, &head);
            assert!(values[2].is_nan() && !values[0].is_nan(), "{values:?}");
        }
    }
}
