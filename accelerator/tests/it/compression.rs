//! Gradients sent in half precision.

use crate::common::{ColumnBatcher, assert_error, columns, distance, flat, learner, of_every_rank};
use crate::communication_hooks::{farthest, trained};
use accelerator::Compression;
use accelerator::prelude::*;

const COMPRESSED: [Compression; 2] = [Compression::F16, Compression::Bf16];

#[test]
fn a_window_is_rounded_once_and_one_rank_not_at_all() {
    for compression in COMPRESSED {
        let builder = || Accelerator::builder().accumulation_steps(3);
        let exact = trained(builder(), 2);
        let ours = trained(builder().compression(compression), 2);
        let off = farthest(&ours, &exact);
        assert!(off > 0.0 && off < 1e-2, "{off}");
        let alone = trained(builder().compression(compression), 1);
        assert_eq!(alone, trained(builder(), 1));
    }
}

/// Returns the gradients of a line on two ranks whose losses are multiplied by `factors[rank]`.
fn gradients_of(compression: Compression, factors: [f32; 2]) -> Vec<f32> {
    let outcomes = Accelerator::builder()
        .compression(compression)
        .launch(2, |accelerator| {
            let train = LoaderBuilder::new(ColumnBatcher)
                .global_batch_size(10)
                .build(columns(10));
            let (model, mut optimizer, train) = learner(&accelerator, train)?;
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
    assert_error(&error, Error::is_config, &["fp8", "bf16"]);
}
