//! The cost of the settings, and their contradictions.

use accelerator::prelude::*;
use accelerator::{Overlap, Weight};
use burn::module::Module;
use burn::nn::LinearConfig;
use burn::optim::SgdConfig;

use super::harness::Place;
use super::models::Mlp;
use crate::common::{assert_error, child, known};

#[test]
fn buckets_hold_the_gradients_once() {
    const WIDTH: usize = 128;
    const BUCKET: usize = WIDTH * WIDTH * 4;
    for (overlap, accumulation, times) in [
        (Overlap::Off, 1, 1),
        (Overlap::On, 1, 1),
        (Overlap::Off, 2, 1),
        // A step may have to be undone.
        (Overlap::On, 2, 2),
    ] {
        let outcomes = Accelerator::builder()
            .bucket_size(BUCKET)
            .accumulation_steps(accumulation)
            .overlap(overlap)
            .launch(2, |accelerator| {
                let device = accelerator.device();
                let layer = |_| LinearConfig::new(WIDTH, WIDTH).init(&device);
                let model = known(Mlp {
                    layers: (0..6).map(layer).collect(),
                });
                let (mut model, mut optimizer) =
                    accelerator.prepare((model, SgdConfig::new().init()))?;
                assert_eq!(accelerator.bucket_memory(), 0);
                for step in 0..10 {
                    let place = Place::of(&accelerator, step);
                    let loss = model.forward(place.input([2, WIDTH])).mean();
                    let gradients = accelerator.backward(loss, &model, Weight::from(2))?;
                    model = optimizer.step(0.05, model, gradients);
                }
                Ok((accelerator.bucket_memory(), 4 * model.num_params()))
            })
            .unwrap();
        for (bytes, gradients) in outcomes {
            // Buffers are whole pages.
            let bounds = times * gradients..times * gradients + BUCKET;
            assert!(bounds.contains(&bytes), "{bytes}, not within {bounds:?}");
        }
    }
}

#[test]
fn the_variable_and_the_program_must_not_contradict_each_other() {
    // The variable is set for a process of its own.
    let (is_well, text) = child(
        "overlap::settings::asks_for_overlap",
        "ACCEL_OVERLAP",
        "off",
    );
    assert!(is_well && text.contains("refused"), "{text}");
}

#[test]
#[ignore = "a part of another test"]
fn asks_for_overlap() {
    let error = Accelerator::builder()
        .overlap(Overlap::On)
        .build()
        .unwrap_err();
    assert_error(&error, Error::is_config, &["ACCEL_OVERLAP"]);
    println!("refused: {error}");
}
