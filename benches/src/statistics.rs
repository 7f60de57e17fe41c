use core::fmt;

use serde::Serialize;

/// The median of a sample, with a confidence interval for the median of its distribution.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// The lower end.
    pub low: f64,
    /// The median of the sample.
    pub median: f64,
    /// The upper end.
    pub high: f64,
}

impl Interval {
    /// Returns the interval that contains the median of the distribution with a probability of at least 95 %, whatever
    /// the distribution: its ends are order statistics, whose ranks are binomial. Fewer than six numbers give no such
    /// interval; then it spans all of them. NaN without numbers.
    ///
    /// ```
    /// use accelerator_benches::Interval;
    ///
    /// let interval = Interval::of((1..=20).map(f64::from).collect());
    /// assert_eq!((interval.low, interval.median, interval.high), (6.0, 10.5, 15.0));
    /// ```
    pub fn of(mut numbers: Vec<f64>) -> Self {
        numbers.sort_unstable_by(f64::total_cmp);
        let count = numbers.len();
        let at = |index: usize| numbers.get(index).copied().unwrap_or(f64::NAN);
        let skip = skipped(count);
        Self {
            low: at(skip),
            median: f64::midpoint(at(count.saturating_sub(1) / 2), at(count / 2)),
            high: at(count.wrapping_sub(1 + skip)),
        }
    }

    /// Returns the interval of the numbers of one side over those of another, pair by pair.
    pub fn of_ratios(side: &[f64], other: &[f64]) -> Self {
        Self::of(side.iter().zip(other).map(|(a, b)| a / b).collect())
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(3);
        let Self { low, median, high } = self;
        write!(f, "{median:.digits$} [{low:.digits$}, {high:.digits$}]")
    }
}

/// Returns the median of the numbers; NaN without numbers.
pub fn middle(numbers: Vec<f64>) -> f64 {
    Interval::of(numbers).median
}

/// Returns how many of the smallest and of the largest of `count` numbers to leave out: the most for which the tails of
/// Binomial(count, 1/2) hold at most 2.5 % each.
fn skipped(count: usize) -> usize {
    let mut term = 0.5_f64.powi(i32::try_from(count).unwrap_or(i32::MAX));
    let mut tail = term;
    let mut skip = 0;
    while tail <= 0.025 && skip < count / 2 {
        skip += 1;
        term *= (count - skip + 1) as f64 / skip as f64;
        tail += term;
    }
    // `tail` exceeds the bound at `skip`, so the interval starts one before it.
    skip.saturating_sub(1).min(count.saturating_sub(1) / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_are_those_of_the_tables() {
        // Conover, Practical Nonparametric Statistics: n, and the lower rank, counted from 1.
        for (count, rank) in [(6, 1), (9, 2), (12, 3), (15, 4), (20, 6), (25, 8)] {
            assert_eq!(skipped(count) + 1, rank, "{count}");
        }
    }

    #[test]
    fn few_numbers_bound_nothing_less_than_themselves() {
        let interval = Interval::of(vec![3.0, 1.0, 2.0]);
        assert_eq!((interval.low, interval.high), (1.0, 3.0));
        assert!(Interval::of(Vec::new()).median.is_nan());
    }
}
