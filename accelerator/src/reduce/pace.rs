//! The pace of the ranks: which one the others wait for.
//!
//! Every rank measures its own work: the time from one window of gradients to the next, without the time for which it
//! waits in collectives. Every [`INTERVAL`] windows, each rank adds its median to the control vector, so that all
//! ranks learn all medians without an extra message. A rank is slow if its median is [`LIMIT`] times that of the
//! others. One slow interval may be chance (another program, a checkpoint). If steps are short and the cores are
//! busy, even several slow intervals in a row may be. The main process therefore warns only about a rank that is slow in
//! at least two intervals in a row and has cost the others at least [`WORTH_A_WARNING`] in them.

use core::array;
use core::time::Duration;
use std::time::Instant;

use accelerator_collective::ProcessGroup;
use accelerator_host::sync::Mutex;

use crate::core::error;
use crate::timeline::{Straggler, Timeline, median};

/// The number of windows in an interval. A rank that is slow in two consecutive intervals is named within 50 steps.
const INTERVAL: usize = 16;

/// The ratio to the median of the other ranks above which a rank is slow.
const LIMIT: f64 = 1.2;

/// The difference in seconds above which a rank is slow; smaller ones are noise of the scheduler. If the median of the
/// others is shorter than this, ranks are not compared.
const SHORTEST: f64 = 100e-6;

/// The seconds that a rank costs the others, in intervals in a row, before the main process warns of it: several time
/// slices of the scheduler.
const WORTH_A_WARNING: f64 = 50e-3;

/// The maximum number of ranks to compare. It limits the size of the control vector.
const MAX_RANKS: usize = 512;

/// The numbers that each rank has in the control vector: the seconds of its own work, and of waiting for data within.
pub(super) const NUMBERS: usize = 2;

/// The length of the paces in a control vector.
pub(super) fn length(ranks: usize) -> usize {
    match ranks {
        2..=MAX_RANKS => NUMBERS * ranks,
        _ => 0,
    }
}

/// The paces of all ranks, as this rank knows them.
#[derive(Debug, Default)]
pub(crate) struct Pace(Mutex<PaceState>);

#[derive(Debug, Default)]
struct PaceState {
    /// The end of the last window.
    last: Option<Mark>,
    /// The times of the windows since the last report, in nanoseconds.
    samples: [Vec<u64>; NUMBERS],
    reports: u64,
    ranks: Vec<RankPace>,
}

/// The sums of a rank at the end of a window.
#[derive(Clone, Copy, Debug)]
struct Mark {
    at: Instant,
    waited: Duration,
    waited_for_data: Duration,
}

/// The reports of one rank, as far as they matter.
#[derive(Clone, Copy, Debug, Default)]
struct RankPace {
    /// The number of intervals in which it was slow.
    slow: u64,
    /// The number of the latest intervals in a row in which it was slow.
    in_a_row: u64,
    /// The seconds that it has cost the others in these intervals.
    cost: f64,
    warned: bool,
    /// The ratio and the times in the last interval in which it was slow.
    ratio: f64,
    busy: f64,
    data: f64,
}

impl Pace {
    /// Ends a window of this rank, and writes its report into the control vector if one is due.
    pub(super) fn send(&self, group: &ProcessGroup, timeline: &Timeline, paces: &mut [f64]) {
        if paces.is_empty() {
            return;
        }
        paces.fill(0.0);
        let mark = Mark {
            at: Instant::now(),
            waited: group.time_waited(),
            waited_for_data: timeline.time_waited_for_data(),
        };
        let own = self.0.lock().end_window(mark);
        let place = paces.get_mut(NUMBERS * group.rank()..);
        if let (Some(own), Some(place)) = (own, place) {
            place
                .iter_mut()
                .zip(own)
                .for_each(|(place, own)| *place = own);
        }
    }

    /// Takes the reports of all ranks, if the window has brought any.
    pub(super) fn receive(&self, group: &ProcessGroup, paces: &[f64]) {
        if paces.iter().all(|number| *number == 0.0) {
            return;
        }
        let (paces, _) = paces.as_chunks::<NUMBERS>();
        let newly_slow = self.0.lock().report(paces);
        if group.rank() == 0 {
            for (rank, slow) in newly_slow {
                error::warn(&format!(
                    "{} is slowing down the other ranks: its own work takes {:.2} ms per step ({:.2} times the median of the \
                     others), of which it spends {:.2} ms waiting for data; look for other processes on its cores, a \
                     throttled device, or slower storage",
                    group.describe(rank),
                    1e3 * slow.busy,
                    slow.ratio,
                    1e3 * slow.data
                ));
            }
        }
    }

    /// The ranks that were slow in a report, the most frequent one first.
    pub(crate) fn stragglers(&self) -> Vec<Straggler> {
        let state = self.0.lock();
        let slow = (0..).zip(&state.ranks).filter(|(_, pace)| pace.slow > 0);
        let straggler = |(rank, pace): (usize, &RankPace)| Straggler {
            rank,
            ratio: pace.ratio,
            busy: pace.busy,
            data: pace.data,
            slow_intervals: pace.slow,
            intervals: state.reports,
        };
        let mut all: Vec<_> = slow.map(straggler).collect();
        all.sort_by_key(|straggler| core::cmp::Reverse(straggler.slow_intervals));
        all
    }
}

impl PaceState {
    /// Notes the window that ends, and returns the medians of the interval if it ends with it.
    fn end_window(&mut self, mark: Mark) -> Option<[f64; NUMBERS]> {
        let last = self.last.replace(mark)?;
        let whole = mark.at.saturating_duration_since(last.at);
        let own = whole.saturating_sub(mark.waited.saturating_sub(last.waited));
        // A loader may wait for other ranks, too, which is no work.
        let data = mark
            .waited_for_data
            .saturating_sub(last.waited_for_data)
            .min(own);
        for (samples, time) in self.samples.iter_mut().zip([own, data]) {
            // Enough for centuries.
            samples.push(time.as_nanos() as u64);
        }
        if self.samples[0].len() < INTERVAL {
            return None;
        }
        // A report of zeros would be none.
        let seconds = |nanoseconds: f64| (nanoseconds / 1e9).max(f64::MIN_POSITIVE);
        let medians = array::from_fn(|at| seconds(median(&mut self.samples[at])));
        Some(medians)
    }

    /// Takes a report of all ranks; returns the ranks to warn of.
    fn report(&mut self, paces: &[[f64; NUMBERS]]) -> Vec<(usize, RankPace)> {
        // All ranks begin the next interval together, even if one of them has missed a window.
        self.samples.iter_mut().for_each(Vec::clear);
        if paces.iter().any(|pace| pace[0] == 0.0) {
            return Vec::new();
        }
        self.reports += 1;
        self.ranks.resize(paces.len(), RankPace::default());
        let mut sorted: Vec<_> = paces.iter().map(|[busy, _]| *busy).collect();
        sorted.sort_unstable_by(f64::total_cmp);
        let mut newly_slow = Vec::new();
        for (pace, &[busy, data]) in self.ranks.iter_mut().zip(paces) {
            let usual = median_without(&sorted, busy);
            if usual <= SHORTEST || busy <= LIMIT * usual || busy - usual <= SHORTEST {
                (pace.in_a_row, pace.cost) = (0, 0.0);
                newly_slow.push(None);
                continue;
            }
            pace.slow += 1;
            pace.in_a_row += 1;
            pace.cost += INTERVAL as f64 * (busy - usual);
            (pace.ratio, pace.busy, pace.data) = (busy / usual, busy, data);
            let is_worth_it = pace.in_a_row >= 2 && pace.cost >= WORTH_A_WARNING;
            let is_due = is_worth_it && !core::mem::replace(&mut pace.warned, true);
            newly_slow.push(is_due.then_some(*pace));
        }
        let ranks = newly_slow.into_iter().enumerate();
        ranks
            .filter_map(|(rank, pace)| Some((rank, pace?)))
            .collect()
    }
}

/// The median of the sorted values, without one of them.
fn median_without(sorted: &[f64], value: f64) -> f64 {
    let place = sorted.partition_point(|other| other.total_cmp(&value).is_lt());
    let at = |index: usize| sorted[index + usize::from(index >= place)];
    match sorted.len().saturating_sub(1) {
        0 => 0.0,
        others if others % 2 == 1 => at(others / 2),
        others => at(others / 2 - 1).midpoint(at(others / 2)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds windows of this rank, each of which takes `own` and waits as long again.
    fn windows(state: &mut PaceState, count: usize, own: Duration) -> Option<[f64; NUMBERS]> {
        let mut last = state.last.unwrap_or(Mark {
            at: Instant::now(),
            waited: Duration::ZERO,
            waited_for_data: Duration::ZERO,
        });
        let mut report = None;
        for _ in 0..count {
            last.at += 2 * own;
            last.waited += own;
            last.waited_for_data += own / 4;
            report = report.or(state.end_window(last));
        }
        report
    }

    #[test]
    fn an_interval_has_the_medians_of_the_ranks_own_work() {
        let mut state = PaceState::default();
        let ms = Duration::from_millis(8);
        // The first window begins the measurement.
        assert_eq!(windows(&mut state, INTERVAL, ms), None);
        let [busy, data] = windows(&mut state, 1, Duration::from_secs(9)).unwrap();
        assert!((busy - 8e-3).abs() < 1e-9 && (data - 2e-3).abs() < 1e-9);
        state.report(&[[busy, data], [busy, data]]);
        assert_eq!(windows(&mut state, INTERVAL - 1, ms), None);
        assert!(windows(&mut state, 1, ms).is_some());
    }

    #[test]
    fn the_median_of_the_others_is_that_without_one() {
        let sorted = [1.0, 2.0, 2.0, 5.0, 9.0];
        let medians = [1.0, 2.0, 5.0, 9.0].map(|value| median_without(&sorted, value));
        assert_eq!(medians, [3.5, 3.5, 2.0, 2.0]);
        assert_eq!(median_without(&[3.0, 7.0], 7.0), 3.0);
        assert_eq!(median_without(&[3.0], 3.0), 0.0);
    }

    #[test]
    fn a_rank_that_is_slow_twice_in_a_row_is_named_once() {
        let mut state = PaceState::default();
        let usual = [[10e-3, 0.0], [10.5e-3, 0.0], [9.8e-3, 0.0], [10.1e-3, 0.0]];
        let mut slow = usual;
        slow[2] = [13.1e-3, 2e-3];
        assert!(state.report(&slow).is_empty(), "it may be chance");
        assert!(state.report(&usual).is_empty());
        assert!(state.report(&slow).is_empty());
        let named = state.report(&slow);
        assert_eq!(named.len(), 1);
        let (rank, pace) = named[0];
        assert_eq!((rank, pace.slow), (2, 3));
        assert!((pace.ratio - 1.297).abs() < 1e-3, "{pace:?}");
        assert!(state.report(&slow).is_empty());
        // One of two: the other one is the measure.
        let mut two = PaceState::default();
        let paces = [[10e-3, 0.0], [13e-3, 0.0]];
        assert!(two.report(&paces).is_empty());
        assert_eq!(two.report(&paces)[0].0, 1);
        // A rank that loses half a millisecond per step is named after seven such intervals in a row; a fast interval
        // starts the count again.
        let mut short = PaceState::default();
        let paces = [[1e-3, 0.0], [1.5e-3, 0.0]];
        assert!((0..6).all(|_| short.report(&paces).is_empty()));
        assert!(short.report(&[[1e-3, 0.0], [1e-3, 0.0]]).is_empty());
        assert!((0..6).all(|_| short.report(&paces).is_empty()));
        assert_eq!(short.report(&paces)[0].0, 1);
        // Shorter steps differ by chance, and a report that lacks a rank says nothing.
        let mut short = PaceState::default();
        assert!((0..5).all(|_| short.report(&[[50e-6, 0.0], [90e-6, 0.0]]).is_empty()));
        assert!((0..5).all(|_| short.report(&[[0.0, 0.0], [13e-3, 0.0]]).is_empty()));
    }
}
