//! The ways in which gradients on a device reach other ranks.

use std::sync::Mutex;

use accelerator::hook::PowerSgd;
use accelerator::optim::{Sharded, StepOutcome};
use accelerator::prelude::*;
use accelerator::{Clip, Compression, GradientReduction};
use burn::module::Module;
use burn::nn::LinearConfig;
use burn::optim::SgdConfig;

use super::harness::{Place, parameters};
use super::models::Mlp;
use crate::common::{assert_error, known};

/// Trains two ranks for four steps and returns the outcomes of each.
fn trained<T: Send>(
    reduction: GradientReduction,
    body: impl Fn(&Accelerator, Mlp, usize) -> accelerator::Result<T> + Send + Sync,
) -> Vec<Vec<accelerator::Result<T>>> {
    let outcome = Accelerator::builder()
        .gradient_reduction(reduction)
        .bucket_size(1024)
        .launch(2, |accelerator| {
            let model = known(Mlp::four(&accelerator.device()));
            let model = accelerator.prepare(model)?;
            Ok((0..4)
                .map(|step| body(&accelerator, model.clone(), step))
                .collect())
        });
    outcome.unwrap()
}

#[test]
fn nccl_that_cannot_be_is_refused_before_anything_is_trained() {
    let nccl = || Accelerator::builder().gradient_reduction(GradientReduction::Nccl);
    let error = nccl().launch(2, |_| Ok(())).unwrap_err();
    let words = ["the reduction `nccl` was asked for, and cannot be: rank 0 has the device `flex`"];
    assert_error(&error, Error::is_device, &words);
    nccl().launch(1, |_| Ok(())).unwrap();
}

#[test]
fn who_asks_for_a_norm_alone_waits_for_nobody() {
    let outcomes = trained(GradientReduction::Staged, |accelerator, model, step| {
        let place = Place::of(accelerator, step);
        let mut gradients = accelerator.backward(model.loss(&place), &model, place.rows())?;
        let norms = [
            // In the first step, the norm has not been requested yet.
            (accelerator.rank() == step % 2).then(|| gradients.norm()),
            (accelerator.rank() == 1).then(|| gradients.norm_of_order(1.0)),
        ];
        let mut gradients = gradients.clip_norm(0.01);
        let after = gradients.norm_of_order(2.0).unwrap();
        assert!((after - 0.01).abs() < 1e-5, "{after}");
        Ok((norms, gradients.norm().unwrap().to_bits()))
    });
    let [first, second] = &outcomes[..] else {
        panic!("two ranks");
    };
    for (step, (first, second)) in first.iter().zip(second).enumerate() {
        let ((asked, norm), (asked_there, norm_there)) =
            (first.as_ref().unwrap(), second.as_ref().unwrap());
        assert_eq!(norm, norm_there, "what all clip by");
        let alone = [asked, asked_there][step % 2][0].flatten().unwrap();
        assert!((alone - f64::from_bits(*norm)).abs() <= 1e-5 * alone);
        assert!(asked_there[1].flatten().is_some_and(|norm| norm > 0.0));
    }
}

#[test]
fn buckets_of_a_device_take_no_memory_of_the_host_where_there_is_one_rank() {
    const WIDTH: usize = 128;
    let bytes = |reduction| {
        let accelerator = Accelerator::builder()
            .gradient_reduction(reduction)
            .accumulation_steps(2)
            .build()?;
        let device = accelerator.device();
        let layer = |_| LinearConfig::new(WIDTH, WIDTH).init(&device);
        let model = known(Mlp {
            layers: (0..3).map(layer).collect(),
        });
        let gradients = 4 * model.num_params();
        let (mut model, mut optimizer) = accelerator.prepare((model, SgdConfig::new().init()))?;
        for step in 0..4 {
            let loss = model
                .forward(Place::of(&accelerator, step).input([2, WIDTH]))
                .mean();
            let gradients = accelerator.backward(loss, &model, 2)?;
            model = optimizer.step(0.1, model, gradients);
        }
        Ok::<_, Error>((accelerator.bucket_memory(), gradients))
    };
    let (host, gradients) = bytes(GradientReduction::Auto).unwrap();
    let (device, _) = bytes(GradientReduction::Staged).unwrap();
    // Control vectors take a page or two.
    assert!(
        host >= gradients && device < gradients / 10,
        "{host}, {device}"
    );
}

/// A window is open while sums become whole, in buffers that another window has used.
#[test]
fn what_moves_to_a_device_takes_nothing_of_an_older_window_along() {
    let run = |reduction| {
        let builder = Accelerator::builder()
            .gradient_reduction(reduction)
            .bucket_size(1024);
        let outcome = builder.accumulation_steps(2).launch(2, |accelerator| {
            let mut model = accelerator.prepare(known(Mlp::four(&accelerator.device())))?;
            let mut sharded = accelerator.prepare(Sharded(SgdConfig::new().init()))?;
            let mut whole = accelerator.prepare(SgdConfig::new().init())?;
            let mut step = 0;
            let mut backward = |model: &Mlp, part: Part| {
                let place = Place::of(&accelerator, step);
                step += 1;
                let loss = match part {
                    Part::All => model.loss(&place),
                    Part::First => model.layers[0].weight.val().powi_scalar(2).mean(),
                };
                accelerator.backward(loss, model, place.rows())
            };
            // In the next windows, each rank gets its part of the sums.
            assert!(backward(&model, Part::All)?.is_accumulating());
            let gradients = backward(&model, Part::All)?;
            model = sharded.step(0.05, model, gradients);
            assert!(backward(&model, Part::All)?.is_accumulating());
            let held = backward(&model, Part::All)?;
            assert!(backward(&model, Part::All)?.is_accumulating());
            let late = backward(&model, Part::All)?;
            // The buffers of `held` are free again, and full of sums.
            model = sharded.step(0.05, model, held);
            assert!(backward(&model, Part::First)?.is_accumulating());
            // Sums become whole while an open window has not touched all of them.
            model = whole.step(0.05, model, late);
            // In the end, rank 1 has a gradient that rank 0 never had.
            let part = match accelerator.rank() {
                0 => Part::First,
                _ => Part::All,
            };
            let gradients = backward(&model, part)?;
            model = whole.step(0.05, model, gradients);
            Ok(parameters(&model))
        });
        outcome.unwrap()
    };
    let (plain, staged) = (run(GradientReduction::Auto), run(GradientReduction::Staged));
    assert_eq!(plain, staged);
}

#[derive(Clone, Copy, Debug)]
enum Part {
    All,
    First,
}

#[test]
fn no_step_is_taken_with_what_could_not_be_clipped() {
    let moved = Mutex::new(None);
    let builder = Accelerator::builder().gradient_reduction(GradientReduction::Staged);
    let outcome = builder.launch(2, |accelerator| {
        let model = known(Mlp::four(&accelerator.device()));
        let parts = (model, SgdConfig::new().init());
        let (model, mut optimizer) = accelerator.prepare(parts)?;
        let before = parameters(&model);
        let place = Place::of(&accelerator, 0);
        let gradients = accelerator.backward(model.loss(&place), &model, place.rows())?;
        if accelerator.rank() == 1 {
            return Err(Error::other("its validation set is empty"));
        }
        let model = optimizer.step(1.0, model, gradients.clip_norm(1e-6));
        let lost = optimizer.outcome() == StepOutcome::Lost;
        *moved.lock().unwrap() = Some((lost, parameters(&model) != before));
        Ok(())
    });
    assert!(
        outcome
            .unwrap_err()
            .to_string()
            .contains("its validation set is empty")
    );
    assert_eq!(moved.into_inner().unwrap(), Some((true, false)));
}

#[test]
fn one_rank_clips_on_its_device_as_in_memory_and_reads_nothing() {
    let biases = |path: &str| path.ends_with("bias");
    let clips: [&dyn Fn(AveragedGradients) -> AveragedGradients; 6] = [
        &|gradients| gradients.clip_norm(0.1),
        &|gradients| gradients.clip_norm(1e9),
        &|gradients| gradients.clip_value(0.02),
        &|gradients| gradients.clip_value(0.02).clip_norm(0.05),
        &|gradients| gradients.clip_norm(0.1).clip(Clip::norm(0.01).only(biases)),
        &|gradients| {
            let by_largest = Clip::norm(0.01).of_order(f64::INFINITY);
            gradients.clip_norm(0.1).clip(by_largest).clip_norm(0.03)
        },
    ];
    for (number, clip) in clips.into_iter().enumerate() {
        let run = |reduction| {
            let accelerator = Accelerator::builder()
                .gradient_reduction(reduction)
                .accumulation_steps(2)
                .bucket_size(1024)
                .build()?;
            let model = known(Mlp::four(&accelerator.device()));
            let (mut model, mut optimizer) =
                accelerator.prepare((model, SgdConfig::new().init()))?;
            let mut norms = Vec::new();
            for step in 0..6 {
                let place = Place::of(&accelerator, step);
                let gradients = accelerator.backward(model.loss(&place), &model, place.rows())?;
                if gradients.is_accumulating() {
                    continue;
                }
                let mut gradients = clip(gradients);
                if reduction == GradientReduction::Staged {
                    let shown = format!("{gradients:?}");
                    assert!(shown.contains("Some(on the device)"), "{number}: {shown}");
                }
                let after = gradients.norm_of_order(2.0).unwrap();
                norms.extend([gradients.norm().unwrap(), after]);
                model = optimizer.step(0.5, model, gradients);
                let norm = norms.get(norms.len() - 2).copied();
                assert!(
                    matches!(optimizer.outcome(), StepOutcome::Stepped { norm: told, .. } if told == norm)
                );
            }
            Ok::<_, Error>((norms, parameters(&model)))
        };
        let (host, device) = (
            run(GradientReduction::Auto).unwrap(),
            run(GradientReduction::Staged).unwrap(),
        );
        let norms = host.0.iter().zip(&device.0);
        for (host, device) in norms {
            assert!(
                (host - device).abs() <= 1e-5 * host,
                "{number}: {host}, {device}"
            );
        }
        for (host, device) in host.1.iter().zip(&device.1) {
            for (host, device) in host.iter::<f32>().zip(device.iter::<f32>()) {
                assert!((host - device).abs() <= 1e-5, "{number}: {host}, {device}");
            }
        }
    }
}

#[test]
fn what_nccl_cannot_do_is_refused_at_once() {
    let nccl = || Accelerator::builder().gradient_reduction(GradientReduction::Nccl);
    let compressed = nccl().compression(Compression::F16);
    let hooked = nccl().communication_hook(|| PowerSgd::new(1));
    for builder in [compressed, hooked] {
        let error = builder.build().unwrap_err();
        assert_error(&error, Error::is_config, &["nccl"]);
    }
}
