//! Parameters of several types, and gradients sent in half precision.

use accelerator::prelude::*;
use accelerator::{Compression, OverlapState};

use super::harness::{Place, Setting, assert_on, same_bits};
use super::models::{Mixed, Mlp, top_and_later_bottom};
use crate::common::devices;

#[test]
fn gradients_in_half_precision() {
    for kind in devices() {
        for compression in [Compression::F16, Compression::Bf16] {
            for accumulation in [1, 2] {
                let setting = Setting {
                    accumulation,
                    compression,
                    ..Setting::new(kind)
                };
                // Timing decides whether the weights are known early enough.
                for report in same_bits(setting, Mlp::four, Mlp::loss) {
                    assert_eq!((report.state, report.repairs), (OverlapState::On, 0));
                }
                same_bits(setting, Mlp::four, top_and_later_bottom);
            }
        }
    }
}

#[test]
fn what_overflows_in_one_bucket_leaves_no_trace_of_the_layout() {
    for kind in devices() {
        for accumulation in [1, 2] {
            let setting = Setting {
                accumulation,
                compression: Compression::F16,
                ..Setting::new(kind)
            };
            // The gradient of one bias exceeds f16. With overlap its bucket holds others too, without it none. In the
            // first steps everything fits.
            let loss = |model: &Mlp, place: &Place| {
                let factor = if place.step < 4 { 1.0 } else { 1000.0 };
                let bias = model.layers[1].bias.as_ref().unwrap();
                model.loss(place) + bias.val().sum() * factor
            };
            for report in same_bits(setting, Mlp::four, loss) {
                assert_eq!((report.state, report.repairs), (OverlapState::On, 0));
            }
        }
    }
}

#[test]
fn parameters_of_several_types() {
    // The backend `ndarray` has no half precision.
    for kind in devices().filter(|kind| *kind == BackendKind::Flex) {
        assert_on(&same_bits(Setting::new(kind), Mixed::new, Mixed::loss));
    }
}
