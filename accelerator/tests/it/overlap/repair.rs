//! Buckets that were sent too early.

use accelerator::OverlapState;

use super::harness::{Place, Setting, same_bits};
use super::models::{Mlp, top_and_later_bottom};
use crate::common::devices;

#[test]
fn what_was_sent_too_early_is_reduced_again_and_given_up_after_three_times() {
    for kind in devices() {
        for (steps, repairs, state) in [
            (4, 1, OverlapState::On),
            (5, 2, OverlapState::On),
            (6, 3, OverlapState::GivenUp),
            (8, 3, OverlapState::GivenUp),
        ] {
            let setting = Setting {
                steps,
                ..Setting::new(kind)
            };
            for report in same_bits(setting, Mlp::four, top_and_later_bottom) {
                assert_eq!(
                    (report.repairs, report.state),
                    (repairs, state),
                    "{report:?}"
                );
            }
        }
    }
}

#[test]
fn one_rank_that_sent_too_early_makes_all_repair() {
    for kind in devices() {
        for rank in [0, 1] {
            let loss = move |model: &Mlp, place: &Place| {
                if place.rank == rank {
                    top_and_later_bottom(model, place)
                } else {
                    model.loss(place)
                }
            };
            for report in same_bits(Setting::new(kind), Mlp::four, loss) {
                assert_eq!(report.repairs, 3);
                assert_eq!(report.state, OverlapState::GivenUp);
            }
        }
    }
}

#[test]
fn a_repair_in_the_last_micro_step_keeps_what_was_accumulated() {
    for kind in devices() {
        let setting = Setting {
            accumulation: 3,
            steps: 5,
            ..Setting::new(kind)
        };
        // The first micro-steps of a window are as before, and the last one is not.
        let loss = |model: &Mlp, place: &Place| {
            if place.step % 3 == 2 && place.step > 9 {
                top_and_later_bottom(model, place)
            } else {
                model.loss(place)
            }
        };
        for report in same_bits(setting, Mlp::four, loss) {
            assert_eq!(report.repairs, 2, "{report:?}");
        }
    }
}
