use core::fmt;

use super::event::Kind;
use super::ring::Ring;
use super::summary::StepSummary;

/// Over how many of the newest steps medians are taken.
const STEPS: usize = 1 << 12;

/// What steps came to together.
#[derive(Debug)]
pub(super) struct Tally {
    steps: Ring<Times>,
    /// Over all steps.
    sums: Times,
    count: u64,
}

impl Tally {
    pub(super) fn new() -> Self {
        Self {
            steps: Ring::new(STEPS),
            sums: Times::default(),
            count: 0,
        }
    }

    pub(super) fn add(&mut self, times: Times) {
        self.sums.add(&times);
        self.steps.push(times);
        self.count += 1;
    }

    pub(super) fn clear(&mut self) {
        self.steps.clear();
        self.sums = Times::default();
        self.count = 0;
    }

    pub(super) fn summary(&self) -> Option<StepSummary> {
        StepSummary::of(self.count, &self.sums, self.steps.items())
    }
}

/// What a step came to, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    /// From its first batch to the end of its optimizer.
    pub(super) total: u64,
    /// As [`Kind::PHASES`]; they share out a part of the total.
    pub(super) phases: [u64; Kind::PHASES.len()],
    /// How long operations were under way, on whichever thread.
    pub(super) communicating: u64,
    /// How much of that the main thread stood still for.
    pub(super) exposed: u64,
    pub(super) bytes: u64,
}

impl Times {
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

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let milliseconds = |nanoseconds| nanoseconds as f64 / 1e6;
        write!(f, "{:.3} ms", milliseconds(self.total))?;
        for (kind, time) in Kind::PHASES.into_iter().zip(self.phases) {
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
