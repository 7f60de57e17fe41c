//! The objective of a search: a metric to maximize or to minimize.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

/// The direction in which values of a metric are better.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Smaller is better: a loss.
    Min,
    /// Larger is better: an accuracy.
    Max,
}

impl Mode {
    /// Returns true if `value` is strictly better than `than`. NaN is worse than every number.
    pub(crate) fn is_better(self, value: f64, than: f64) -> bool {
        self.compare(value, than) == Ordering::Greater
    }

    /// The best of some that have a value each; the first of equals. `None` where there are only NaN.
    pub(crate) fn best<T>(self, scored: impl IntoIterator<Item = (T, f64)>) -> Option<(T, f64)> {
        let numbers = scored.into_iter().filter(|(_, value)| !value.is_nan());
        numbers.reduce(|best, other| match self.is_better(other.1, best.1) {
            true => other,
            false => best,
        })
    }

    /// Orders values from the worst to the best. NaN is the worst.
    pub(crate) fn compare(self, left: f64, right: f64) -> Ordering {
        right.is_nan().cmp(&left.is_nan()).then_with(|| {
            let order = left.partial_cmp(&right).unwrap_or(Ordering::Equal);
            match self {
                Self::Max => order,
                Self::Min => order.reverse(),
            }
        })
    }
}

/// The metric that a search optimizes, and in which direction.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Objective {
    /// The metric's name, as trials report it.
    pub metric: String,
    /// Its direction.
    pub mode: Mode,
}

impl Objective {
    /// Creates the objective of that metric.
    #[must_use]
    pub fn new(metric: impl Into<String>, mode: Mode) -> Self {
        Self {
            metric: metric.into(),
            mode,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_is_worse_than_every_number() {
        for mode in [Mode::Min, Mode::Max] {
            assert!(mode.is_better(0.1, f64::NAN));
            assert!(!mode.is_better(f64::NAN, 0.1) && !mode.is_better(f64::NAN, f64::NAN));
        }
        assert!(Mode::Max.is_better(0.9, 0.8) && Mode::Min.is_better(0.8, 0.9));
    }
}
