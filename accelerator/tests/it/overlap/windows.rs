//! Windows of several micro-steps, and several models.

use accelerator::Overlap;
use accelerator::prelude::*;
use burn::optim::{GradientsParams, SgdConfig};

use super::harness::{Place, Setting, assert_on, parameters, same_bits};
use super::models::{Cnn, Mlp};
use crate::common::{devices, known};

#[test]
fn accumulation() {
    for kind in devices() {
        let setting = Setting {
            accumulation: 3,
            ..Setting::new(kind)
        };
        assert_on(&same_bits(setting, Mlp::four, Mlp::loss));
    }
}

#[test]
fn two_models_in_turn_and_two_backward_calls_in_a_step() {
    for kind in devices() {
        let outcomes = [Overlap::Off, Overlap::On].map(|overlap| {
            Accelerator::builder()
                .device(kind)
                .bucket_size(1024)
                .overlap(overlap)
                .launch(2, |accelerator| {
                    let parts = (
                        known(Mlp::four(&accelerator.device())),
                        SgdConfig::new().init(),
                        known(Cnn::new(&accelerator.device())),
                        SgdConfig::new().init(),
                    );
                    let (mut mlp, mut first, mut cnn, mut second) = accelerator.prepare(parts)?;
                    for step in 0..6 {
                        let place = Place::of(&accelerator, step);
                        // Both losses exist before either is used.
                        let (one, other) = (mlp.loss(&place), cnn.loss(&place));
                        let of_cnn = accelerator.backward(other, &cnn, 2)?;
                        let of_mlp = accelerator.backward(one, &mlp, 2)?;
                        // Plain Burn allows this too: the gradients are dropped.
                        drop(accelerator.backward(mlp.loss(&place), &mlp, 2)?);
                        let plain = mlp.loss(&place).backward();
                        drop(GradientsParams::from_grads(plain, &mlp));
                        mlp = first.step(0.05, mlp, of_mlp);
                        cnn = second.step(0.05, cnn, of_cnn);
                    }
                    let reports = [
                        accelerator.overlap_report(&mlp)?,
                        accelerator.overlap_report(&cnn)?,
                    ];
                    if overlap == Overlap::On {
                        assert_on(&reports);
                    }
                    Ok((parameters(&mlp), parameters(&cnn)))
                })
                .unwrap()
        });
        assert_eq!(outcomes[0], outcomes[1]);
        assert_eq!(outcomes[0][0], outcomes[0][1]);
    }
}
