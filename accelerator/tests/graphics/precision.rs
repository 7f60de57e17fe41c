//! Half-precision computation with full-precision parameters.

use accelerator::Overlap;
use accelerator::prelude::*;

use crate::harness::{Setting, is_there};

#[test]
fn half_precision_trains_about_as_full_precision_does() {
    if !is_there() {
        return;
    }
    let full = Setting {
        steps: 30,
        ..Setting::new(2)
    };
    let exact = full.run();
    for precision in [Precision::F16, Precision::Bf16] {
        let half = Setting { precision, ..full };
        let one = Setting { ranks: 1, ..half };
        let one = match one.try_run() {
            Ok(mut outcomes) => outcomes.swap_remove(0),
            Err(error) => {
                assert!(error.is_device(), "{error:?}");
                eprintln!("not tested in {precision}: {error}");
                continue;
            }
        };
        let late = half.run();
        let early = Setting {
            overlap: Overlap::On,
            ..half
        };
        let early = early.run();
        assert!(late.parameters == early.parameters, "{:?}", early.report);
        assert_eq!(late.skipped, early.skipped);
        assert!(late.skipped < 12, "{}", late.skipped);
        assert!(early.report.early_total > 0, "{:?}", early.report);
        assert!(exact.losses != late.losses);
        // Steps are skipped until the scale is small enough.
        for outcome in [&one, &late] {
            let apart = outcome.ends().1 - exact.ends().1;
            assert!(apart < 0.3 * exact.ends().0, "{:?}", outcome.losses);
        }
    }
}
