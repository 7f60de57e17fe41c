//! Summaries of steps, from sums and from the newest times.

use core::fmt;

use serde::{Deserialize, Serialize};

use super::event::EventKind;

/// A summary of where the time of this rank's steps went, on average; from
/// [`Accelerator::step_summary`](crate::Accelerator::step_summary).
///
/// A step begins when its first batch is asked for (or, for data that is no
/// [`Epoch`](crate::data::Epoch)'s, where the step before ended), and ends when the optimizer has moved
/// the model. What lies between steps, such as an evaluation, belongs to none.
///
/// `data`, `forward`, `backward`, `recomputing`, `copying`, `waiting` and `optimizer` share out the time of the thread
/// that trains, without overlap; the rest of the `step` is `other`. `communicating` runs beside them, or
/// within `waiting`. Times are in seconds. They are those of the program: a device that works beside it
/// (a GPU) shows its time where the program waits for it.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[non_exhaustive]
pub struct StepSummary {
    /// The number of steps. Means are over all of them, medians over the newest 4096.
    pub steps: u64,
    /// The time of a whole step.
    pub step: Figure,
    /// The wait for batches, or their making if the loader has no workers.
    pub data: Figure,
    /// The time from a batch's arrival to the call of `backward`.
    pub forward: Figure,
    /// Burn's backward pass.
    pub backward: Figure,
    /// The second run of the model's [blocks](crate::nn::Unit) that are recomputed, within backward.
    #[serde(default)]
    pub recomputing: Figure,
    /// Moving gradients into buckets and out of them.
    pub copying: Figure,
    /// The wait until the gradients of all ranks are there. That is more than `exposed` by what it
    /// takes until another thread begins to communicate, and until this one wakes.
    pub waiting: Figure,
    /// Burn's optimizer.
    pub optimizer: Figure,
    /// Everything else, from the schedule to what the loop itself does.
    pub other: Figure,
    /// The time for which collectives of `backward` were under way, hidden or not: each from its start to its
    /// end, with waiting for ranks that come late. Several at once count once.
    pub communicating: Figure,
    /// The part of `communicating` that nothing hid: the thread that trains stood still meanwhile.
    pub exposed: Figure,
    /// The ranks that the others had to wait for, the most frequent one first.
    #[serde(default)]
    pub stragglers: Vec<Straggler>,
    /// The number of bytes that this rank gave to the collectives of `backward`: all buckets, as they travel,
    /// and the few numbers that go with them.
    pub bytes: Figure,
}

/// A rank that was slower than the others, which had to wait for it; from
/// [`Accelerator::stragglers`](crate::Accelerator::stragglers).
///
/// Ranks (up to 512) compare medians over intervals of 16 steps. A rank is slow in an interval if its own work took
/// more than 1.2 times the median of the other ranks, and over 0.1 ms longer. Intervals in which the median of the
/// others is at most 0.1 ms are ignored. Waiting for other ranks does not count as work. On a GPU, which runs
/// asynchronously, this measures the host program, including any time that it blocks on the device.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Straggler {
    /// The rank.
    pub rank: usize,
    /// The time of its own work over the median of the others, in the last interval in which it was slow.
    pub ratio: f64,
    /// The seconds of its own work per step, in that interval.
    pub busy: f64,
    /// The part of it that was the wait for data.
    pub data: f64,
    /// The number of intervals in which it was slow.
    pub slow_intervals: u64,
    /// The number of intervals so far.
    pub intervals: u64,
}

impl Straggler {
    /// Returns `true` if it was slow in at least two intervals, and in at least half of them.
    pub fn is_chronic(&self) -> bool {
        self.slow_intervals >= 2 && 2 * self.slow_intervals >= self.intervals
    }
}

impl fmt::Display for Straggler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let chronic = match self.is_chronic() {
            true => "chronic",
            false => "occasional",
        };
        write!(
            f,
            "rank {} was slow in {} of {} intervals ({chronic}): its own work took {:.2} ms per step, {:.2} times the median of \
             the others",
            self.rank,
            self.slow_intervals,
            self.intervals,
            1e3 * self.busy,
            self.ratio
        )
    }
}

/// A time in seconds, or a number of bytes.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Figure {
    /// The mean.
    pub mean: f64,
    /// The median: half of the steps had less.
    pub median: f64,
}

impl StepSummary {
    /// Returns the part of the communication that was hidden behind computation, from 0 to 1; `None` if
    /// there was no communication. Of means.
    pub fn hidden(&self) -> Option<f64> {
        let all = self.communicating.mean;
        (all > 0.0).then(|| 1.0 - self.exposed.mean / all)
    }

    pub(super) fn of(steps: u64, sums: &StepTimes, newest: &[StepTimes]) -> Option<Self> {
        if steps == 0 {
            return None;
        }
        let mut values = Vec::with_capacity(newest.len());
        let mut figure = |unit: f64, of: &dyn Fn(&StepTimes) -> u64| {
            values.clear();
            values.extend(newest.iter().map(of));
            Figure {
                mean: of(sums) as f64 / steps as f64 / unit,
                median: median(&mut values) / unit,
            }
        };
        let second = 1e9;
        let mut phase = |number: usize| figure(second, &move |times| times.phases[number]);
        // In the order of `Kind::PHASES`.
        let [
            data,
            forward,
            backward,
            copying,
            waiting,
            optimizer,
            recomputing,
        ] = [0, 1, 2, 3, 4, 5, 6].map(&mut phase);
        Some(Self {
            steps,
            step: figure(second, &|times| times.total),
            data,
            forward,
            backward,
            recomputing,
            copying,
            waiting,
            optimizer,
            other: figure(second, &|times| {
                times.total.saturating_sub(times.phases.iter().sum())
            }),
            communicating: figure(second, &|times| times.communicating),
            exposed: figure(second, &|times| times.exposed),
            bytes: figure(1.0, &|times| times.bytes),
            stragglers: Vec::new(),
        })
    }

    pub(crate) fn figures_mut(&mut self) -> [&mut Figure; 12] {
        [
            &mut self.step,
            &mut self.data,
            &mut self.forward,
            &mut self.backward,
            &mut self.recomputing,
            &mut self.copying,
            &mut self.waiting,
            &mut self.optimizer,
            &mut self.other,
            &mut self.communicating,
            &mut self.exposed,
            &mut self.bytes,
        ]
    }
}

impl fmt::Display for StepSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<16}{:>12}{:>12}{:>8}",
            "", "mean ms", "median ms", "share"
        )?;
        let whole = self.step.mean.max(f64::MIN_POSITIVE);
        let mut rows = vec![
            ("step", self.step),
            ("  data", self.data),
            ("  forward", self.forward),
            ("  backward", self.backward),
        ];
        // Most models recompute nothing.
        if self.recomputing.mean > 0.0 {
            rows.push(("  recomputing", self.recomputing));
        }
        rows.extend([
            ("  copying", self.copying),
            ("  waiting", self.waiting),
            ("  optimizer", self.optimizer),
            ("  other", self.other),
        ]);
        for (name, Figure { mean, median }) in rows {
            let (mean, median, share) = (1e3 * mean, 1e3 * median, 100.0 * mean / whole);
            writeln!(f, "{name:<16}{mean:>12.3}{median:>12.3}{share:>7.1}%")?;
        }
        // No share of the step: it runs beside it.
        let beside = [
            ("communicating", self.communicating),
            ("  exposed", self.exposed),
        ];
        for (name, Figure { mean, median }) in beside {
            let (mean, median) = (1e3 * mean, 1e3 * median);
            writeln!(f, "{name:<16}{mean:>12.3}{median:>12.3}")?;
        }
        write!(
            f,
            "{} steps, {:.0} bytes of gradients a step",
            self.steps, self.bytes.median
        )?;
        if let Some(hidden) = self.hidden() {
            write!(f, ", {:.0}% of the communication hidden", 100.0 * hidden)?;
        }
        for straggler in &self.stragglers {
            write!(f, "\n{straggler}")?;
        }
        Ok(())
    }
}

/// The number of the newest steps over which medians are taken.
const STEPS: usize = 1 << 12;

#[derive(Debug)]
pub(super) struct StepStats {
    steps: RingBuffer<StepTimes>,
    sums: StepTimes,
    count: u64,
}

impl StepStats {
    pub(super) fn new() -> Self {
        Self {
            steps: RingBuffer::new(STEPS),
            sums: StepTimes::default(),
            count: 0,
        }
    }

    pub(super) fn add(&mut self, times: StepTimes) {
        self.sums.add(&times);
        self.steps.push(times);
        self.count += 1;
    }

    pub(super) fn clear(&mut self) {
        self.steps.clear();
        self.sums = StepTimes::default();
        self.count = 0;
    }

    pub(super) fn summary(&self) -> Option<StepSummary> {
        StepSummary::of(self.count, &self.sums, self.steps.items())
    }
}

/// The times of a step, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StepTimes {
    /// The time from its first batch to the end of its optimizer.
    pub(super) total: u64,
    /// The times of [`EventKind::PHASES`]; they share out a part of the total.
    pub(super) phases: [u64; EventKind::PHASES.len()],
    /// The time for which operations were under way, on whichever thread.
    pub(super) communicating: u64,
    /// The part of that for which the main thread stood still.
    pub(super) exposed: u64,
    pub(super) bytes: u64,
}

impl StepTimes {
    fn add(&mut self, other: &Self) {
        self.total += other.total;
        self.communicating += other.communicating;
        self.exposed += other.exposed;
        self.bytes += other.bytes;
        for (sum, phase) in self.phases.iter_mut().zip(other.phases) {
            *sum += phase;
        }
    }
}

impl fmt::Display for StepTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let milliseconds = |nanoseconds| nanoseconds as f64 / 1e6;
        write!(f, "{:.3} ms", milliseconds(self.total))?;
        for (kind, time) in EventKind::PHASES.into_iter().zip(self.phases) {
            write!(f, ", {} {:.3}", kind.name(), milliseconds(time))?;
        }
        write!(
            f,
            ", communicating {:.3}, exposed {:.3}, {} bytes",
            milliseconds(self.communicating),
            milliseconds(self.exposed),
            self.bytes
        )
    }
}

/// A buffer of the newest items, in memory that is allocated once.
#[derive(Debug)]
pub(super) struct RingBuffer<T> {
    capacity: usize,
    items: Vec<T>,
    count: u64,
}

impl<T: Copy> RingBuffer<T> {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            items: Vec::with_capacity(capacity),
            count: 0,
        }
    }

    pub(super) fn push(&mut self, item: T) {
        if self.items.len() < self.capacity {
            self.items.push(item);
        } else if self.capacity > 0 {
            let oldest = (self.count % self.capacity as u64) as usize;
            self.items[oldest] = item;
        }
        self.count += 1;
    }

    /// Forgets everything, and keeps the memory.
    pub(super) fn clear(&mut self) {
        self.items.clear();
        self.count = 0;
    }

    pub(super) fn dropped(&self) -> u64 {
        self.count - self.items.len() as u64
    }

    /// Returns the items that are there, in no particular order.
    pub(super) fn items(&self) -> &[T] {
        &self.items
    }
}

/// Returns the median; of an even number, the mean of the two in the middle.
pub(crate) fn median(values: &mut [u64]) -> f64 {
    values.sort_unstable();
    let middle = values.len() / 2;
    match values {
        [] => 0.0,
        _ if values.len() % 2 == 1 => values[middle] as f64,
        _ => (values[middle - 1] as f64 + values[middle] as f64) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_means_and_medians_in_seconds() {
        let times = |total| StepTimes {
            total,
            phases: [0, 0, 0, 0, total / 4, 0, 0],
            communicating: total / 2,
            exposed: total / 5,
            bytes: 100,
        };
        let newest = [
            times(4_000_000_000),
            times(1_000_000_000),
            times(1_000_000_000),
        ];
        let sums = StepTimes {
            bytes: 300,
            ..times(6_000_000_000)
        };
        let summary = StepSummary::of(3, &sums, &newest).unwrap();
        assert_eq!((summary.step.mean, summary.step.median), (2.0, 1.0));
        assert_eq!((summary.waiting.mean, summary.other.mean), (0.5, 1.5));
        assert_eq!((summary.bytes.mean, summary.bytes.median), (100.0, 100.0));
        assert_eq!((summary.exposed.mean, summary.hidden()), (0.4, Some(0.6)));
        let table = summary.to_string();
        assert!(
            table.contains("1000.000") && table.contains("25.0%"),
            "{table}"
        );
        let shares = table.lines().filter_map(|line| line.strip_suffix('%'));
        let shares = shares.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        assert_eq!(
            shares.sum::<f64>(),
            200.0,
            "the step, and its parts: {table}"
        );
        assert!(StepSummary::of(0, &sums, &newest).is_none());
        assert_eq!(median(&mut [4, 1]), 2.5);
    }

    #[test]
    fn the_newest_stay() {
        let mut ring = RingBuffer::new(3);
        for item in 0..8 {
            ring.push(item);
        }
        let mut items = ring.items().to_vec();
        items.sort_unstable();
        assert_eq!((items, ring.dropped()), (vec![5, 6, 7], 5));
        ring.clear();
        ring.push(9);
        assert_eq!((ring.items(), ring.dropped()), (&[9][..], 0));
        let mut none = RingBuffer::new(0);
        none.push(1);
        assert_eq!((none.items().len(), none.dropped()), (0, 1));
    }
}
