//! The rungs of successive halving.

use super::trial_scheduler::{Compatibility, misuse};
use crate::error::Result;

/// The times of a bracket's rungs, ascending: `grace`, `grace·η`, … and at last `max_t`.
pub(super) fn times(grace: u64, eta: u64, max_t: u64) -> Vec<u64> {
    let steps = std::iter::successors(Some(grace), |time| time.checked_mul(eta));
    let mut times: Vec<_> = steps.take_while(|time| *time < max_t).collect();
    times.push(max_t);
    times
}

/// Returns the times of Ray Tune, whose count is a truncated logarithm: the last is missing if that falls short, and
/// `max_t` is one only if it is a power.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "as Ray computes them"
)]
pub(super) fn times_of_ray(grace: u64, eta: u64, max_t: u64, bracket: u32) -> Vec<u64> {
    let (grace_f, eta_f, max_f) = (grace as f64, eta as f64, max_t as f64);
    let count = (max_f / grace_f).ln() / eta_f.ln() - f64::from(bracket) + 1.0;
    let count = count.trunc().max(0.0) as u32;
    (0..count)
        .map(|rung| grace * eta.pow(rung + bracket))
        .collect()
}

pub(super) fn check(scheduler: &str, grace: u64, eta: u64, max_t: u64) -> Result<()> {
    if max_t == 0 {
        return Err(misuse(scheduler, "`max_t` is 0; it is at least 1"));
    }
    if grace == 0 || grace > max_t {
        let what = format!("`grace_period` is {grace}; it is from 1 to `max_t`, {max_t}");
        return Err(misuse(scheduler, &what));
    }
    if eta < 2 {
        let what = format!("`reduction_factor` is {eta}; it is at least 2");
        return Err(misuse(scheduler, &what));
    }
    Ok(())
}

/// The percentile that a value has to reach: numpy's `nanpercentile` with linear interpolation. `None` of no values.
///
/// A difference of infinities is NaN to numpy, and then nobody is stopped any more; in the exact form the nearer of the two
/// values counts.
pub(super) fn percentile(
    values: &[f64],
    fraction: f64,
    compatibility: Compatibility,
) -> Option<f64> {
    if values.is_empty() {
        return None;
    }
    let mut sorted: Vec<_> = values
        .iter()
        .copied()
        .filter(|value| !value.is_nan())
        .collect();
    if sorted.is_empty() {
        return Some(f64::NAN);
    }
    sorted.sort_by(f64::total_cmp);
    #[expect(clippy::cast_precision_loss, reason = "a count of trials")]
    let place = (sorted.len() - 1) as f64 * fraction;
    let gap = place.fract();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 0 and the count"
    )]
    let index = place.floor() as usize;
    let low = sorted[index];
    let high = sorted[(index + 1).min(sorted.len() - 1)];
    if compatibility == Compatibility::Exact && !(low.is_finite() && high.is_finite()) {
        return Some(if gap < 0.5 { low } else { high });
    }
    // As numpy's `_lerp`, to the bit.
    Some(match gap < 0.5 {
        true => low + (high - low) * gap,
        false => high - (high - low) * (1.0 - gap),
    })
}

/// Formats a value of a rung with all digits. NaN is `nan`, as in Ray.
pub(super) fn shown(value: f64) -> String {
    match value.is_nan() {
        true => "nan".to_owned(),
        false => format!("{value:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rungs_are_powers_and_the_last_is_the_longest_time() {
        assert_eq!(times(1, 4, 100), [1, 4, 16, 64, 100]);
        assert_eq!(times(1, 10, 1000), [1, 10, 100, 1000]);
        assert_eq!(times(1, 3, 243), [1, 3, 9, 27, 81, 243]);
        assert_eq!(times(2, 3, 9), [2, 6, 9]);
        assert_eq!(times(5, 2, 5), [5]);
        // Ray loses the last one where a logarithm falls short of an integer.
        assert_eq!(times_of_ray(1, 10, 1000, 0), [1, 10, 100]);
        assert_eq!(times_of_ray(1, 3, 243, 0), [1, 3, 9, 27, 81]);
        assert_eq!(times_of_ray(1, 4, 100, 1), [4, 16, 64]);
    }

    #[test]
    fn infinities_leave_a_cutoff_in_the_exact_form() {
        let values = [f64::INFINITY, f64::INFINITY, 0.5];
        let cut = |compatibility| percentile(&values, 0.75, compatibility).unwrap();
        assert!(cut(Compatibility::Ray).is_nan());
        assert_eq!(cut(Compatibility::Exact), f64::INFINITY);
    }
}
