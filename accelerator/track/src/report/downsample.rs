//! Fewer points of a series, for a chart.

use serde::Serialize;

use crate::history::Point;
use crate::record::Number;

/// The columns of a series, as a page gets them.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Columns {
    /// Steps.
    s: Vec<u64>,
    /// Epochs, where any was logged.
    #[serde(skip_serializing_if = "Option::is_none")]
    e: Option<Vec<Option<f64>>>,
    /// Milliseconds since the run was created.
    t: Vec<u64>,
    /// Values.
    v: Vec<Number>,
}

impl Columns {
    /// At most `limit` points, by step.
    pub(crate) fn of(points: &[Point], created_ms: u64, limit: usize) -> Self {
        let mut order: Vec<&Point> = points.iter().collect();
        if !points.is_sorted_by_key(|point| point.step) {
            order.sort_by_key(|point| point.step);
        }
        let values: Vec<f64> = order.iter().map(|point| point.value).collect();
        let kept = || downsample(&values, limit).into_iter().map(|at| order[at]);
        let has_epochs = points.iter().any(|point| point.epoch.is_some());
        Self {
            s: kept().map(|point| point.step).collect(),
            e: has_epochs.then(|| kept().map(|point| point.epoch).collect()),
            t: kept()
                .map(|point| point.ms.saturating_sub(created_ms))
                .collect(),
            v: kept().map(|point| Number(point.value)).collect(),
        }
    }
}

/// Which of many values a chart shows, in order: the first and the last, and of each of as many equal parts as fit in
/// `limit` the least, the greatest, and the first that is not finite. Peaks stay, and so do gaps.
///
/// ```
/// use accelerator_track::downsample;
///
/// let mut losses = vec![1.0; 10_000];
/// losses[777] = 9.0;
/// let shown = downsample(&losses, 100);
/// assert!(shown.len() <= 100 && shown.contains(&777));
/// ```
#[must_use]
pub fn downsample(values: &[f64], limit: usize) -> Vec<usize> {
    let limit = limit.max(LEAST_LIMIT);
    if values.len() <= limit {
        return (0..values.len()).collect();
    }
    let last = values.len() - 1;
    let of_each = if values.iter().all(|x| x.is_finite()) {
        2
    } else {
        3
    };
    let parts = (limit - 2) / of_each;
    let edge = |part: usize| 1 + (last - 1) * part / parts;
    let mut kept = vec![0];
    for part in 0..parts {
        let inside = edge(part)..edge(part + 1);
        let finite = || inside.clone().filter(|&at| values[at].is_finite());
        let mut of_part = [
            finite().min_by(|&a, &b| values[a].total_cmp(&values[b])),
            finite().max_by(|&a, &b| values[a].total_cmp(&values[b])),
            inside.clone().find(|&at| !values[at].is_finite()),
        ];
        of_part.sort_unstable();
        kept.extend(of_part.into_iter().flatten());
    }
    kept.push(last);
    kept.dedup();
    kept
}

const LEAST_LIMIT: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_values_are_all_kept() {
        assert!(downsample(&[], 1000).is_empty());
        assert_eq!(downsample(&[1.0, f64::NAN, 3.0], 1000), [0, 1, 2]);
    }

    #[test]
    fn peaks_ends_and_gaps_stay_and_the_limit_holds() {
        let mut values: Vec<f64> = (0..100_000).map(|x| f64::from(x % 97) / 97.0).collect();
        values[12_345] = 50.0;
        values[54_321] = -50.0;
        for limit in [8, 10, 200, 999, 1000] {
            let kept = downsample(&values, limit);
            assert!(kept.len() <= limit, "{} of {limit}", kept.len());
            assert!(kept.len() * 2 > limit);
            assert!(kept.is_sorted_by(|a, b| a < b));
            for at in [0, 12_345, 54_321, 99_999] {
                assert!(kept.contains(&at), "{at} of {limit}");
            }
        }
        values[70_000] = f64::NAN;
        values[80_000] = f64::INFINITY;
        let kept = downsample(&values, 1000);
        assert!(kept.len() <= 1000);
        for at in [12_345, 54_321, 70_000, 80_000] {
            assert!(kept.contains(&at), "{at}");
        }
    }

    #[test]
    fn a_series_without_a_finite_value_is_thinned_too() {
        let kept = downsample(&[f64::NAN; 5000], 100);
        assert!(kept.len() <= 100 && kept.len() > 30, "{}", kept.len());
    }

    #[test]
    fn steps_are_in_order_and_times_are_relative() {
        let point = |step: u64| Point {
            step,
            epoch: (step > 10).then_some(step as f64 / 10.0),
            value: if step == 777 { 9.0 } else { 1.0 },
            count: None,
            ms: 5000 + step,
        };
        let points: Vec<Point> = (0..2000).rev().map(point).collect();
        let columns = Columns::of(&points, 5000, 1000);
        assert!(columns.s.is_sorted() && columns.s.len() <= 1000);
        assert_eq!(columns.t, columns.s, "times are relative");
        assert_eq!(columns.e.unwrap()[0], None);
        assert!(columns.s.contains(&777), "a peak stays");
    }
}
