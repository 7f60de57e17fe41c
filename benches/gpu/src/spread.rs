//! Medians and quartiles.

use serde::{Deserialize, Serialize};

/// The median of a sample, and the quartiles around it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Spread {
    /// A quarter of the numbers lie below.
    pub(crate) lower: f64,
    /// Half of the numbers lie below.
    pub(crate) median: f64,
    /// A quarter of the numbers lie above.
    pub(crate) upper: f64,
}

impl Spread {
    /// Computes quantiles by linear interpolation between the numbers, like NumPy's default; NaN without numbers.
    pub(crate) fn of(numbers: impl IntoIterator<Item = f64>) -> Self {
        let mut numbers: Vec<f64> = numbers.into_iter().collect();
        numbers.sort_unstable_by(f64::total_cmp);
        let at = |share: f64| {
            let place = share * numbers.len().saturating_sub(1) as f64;
            let value = |index: f64| numbers.get(index as usize).copied().unwrap_or(f64::NAN);
            let (below, above) = (value(place.floor()), value(place.ceil()));
            below + (above - below) * place.fract()
        };
        Self {
            lower: at(0.25),
            median: at(0.5),
            upper: at(0.75),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_are_those_of_numpy() {
        // numpy.percentile([1, 2, 3, 4], [25, 50, 75])
        let spread = Spread::of([4.0, 1.0, 3.0, 2.0]);
        let found = [spread.lower, spread.median, spread.upper];
        assert_eq!(found, [1.75, 2.5, 3.25]);
    }

    #[test]
    fn one_number_is_all_there_is_and_none_is_nothing() {
        assert_eq!(Spread::of([7.0]).upper, 7.0);
        assert!(Spread::of([]).median.is_nan());
    }
}
