use core::fmt;

use super::event::EventKind;
use super::ring::RingBuffer;
use super::summary::StepSummary;

/// The number of the newest steps over which medians are taken.
const STEPS: usize = 1 << 12;

/// The statistics of several steps.
#[derive(Debug)]
pub(super) struct StepStats {
    steps: RingBuffer<StepTimes>,
    /// The sums over all steps.
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
