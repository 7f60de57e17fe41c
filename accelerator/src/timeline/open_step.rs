//! The step in progress: the times of its phases, and the intervals of its communication.

use super::event::{EventKind, Thread};
use super::summary::StepTimes;

/// The place of [`EventKind::Reduce`] among the phases.
const WAITING: usize = 4;

/// The step that is under way: what it comes to so far. Times are nanoseconds since the recorder's beginning.
#[derive(Default)]
pub(super) struct OpenStep {
    /// The time at which it began; unknown until its first batch is asked for.
    begun: Option<u64>,
    /// The time at which the forward pass began.
    ticket: u64,
    state: OpenStepState,
    /// The phases that the main thread is in, the innermost last.
    within: Vec<OpenPhase>,
    times: StepTimes,
    /// The times in which operations of the communication thread were under way, and in which the main thread waited
    /// for them: since `backward` was called.
    operations: Intervals,
    waits: Intervals,
}

#[derive(Clone, Copy, Debug)]
struct OpenPhase {
    kind: EventKind,
    /// The time of those within it.
    inner: u64,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum OpenStepState {
    /// No `backward` of the step was called.
    #[default]
    New,
    InBackward,
    /// Another micro-step may come, or the optimizer.
    Between,
}

impl OpenStep {
    /// Makes a step with memory for its notes.
    pub(super) fn new() -> Self {
        Self {
            within: Vec::with_capacity(8),
            operations: Intervals::new(),
            waits: Intervals::new(),
            ..Self::default()
        }
    }

    /// Forgets what was noted: the next step may begin.
    pub(super) fn reset(&mut self, now: u64) {
        self.begun = None;
        self.ticket = now;
        self.state = OpenStepState::New;
        self.times = StepTimes::default();
        self.operations.clear();
        self.waits.clear();
    }

    pub(super) fn batch_came(&mut self, start: u64, end: u64) {
        if self.state == OpenStepState::New {
            // What lies before belongs to no step: an evaluation, for example.
            self.begun = Some(start);
            self.times = StepTimes::default();
        }
        self.ticket = end;
    }

    /// Tells when the forward pass before it began.
    pub(super) fn backward_begins(&mut self, now: u64) -> u64 {
        let start = self.ticket.min(now);
        if self.state == OpenStepState::New && self.begun.is_none() {
            self.begun = Some(start);
        }
        self.state = OpenStepState::InBackward;
        start
    }

    pub(super) fn backward_ends(&mut self, now: u64) {
        self.state = OpenStepState::Between;
        self.ticket = now;
        // All operations that were started have ended.
        self.times.communicating += self.operations.length();
        self.times.exposed += self.operations.common(&self.waits);
        self.operations.clear();
        self.waits.clear();
    }

    /// Ends the step, and returns when it began and its times. The next step may begin.
    pub(super) fn ends(&mut self, now: u64) -> (u64, StepTimes) {
        let begun = self.begun.unwrap_or(self.ticket).min(now);
        let mut times = self.times;
        times.total = now - begun;
        self.reset(now);
        (begun, times)
    }

    pub(super) fn enter(&mut self, kind: EventKind) {
        self.within.push(OpenPhase { kind, inner: 0 });
    }

    pub(super) fn leave(&mut self, kind: EventKind, start: u64, end: u64) {
        let inner = self.within.pop().map_or(0, |phase| phase.inner);
        if let Some(outer) = self.within.last_mut() {
            outer.inner += end - start;
        }
        if kind == EventKind::Reduce && self.state == OpenStepState::InBackward {
            self.waits.push(start, end);
        }
        self.spend(kind, (end - start).saturating_sub(inner));
    }

    /// The main thread spent time on that, and on nothing within it.
    pub(super) fn spend(&mut self, kind: EventKind, time: u64) {
        if let Some(phase) = EventKind::PHASES
            .into_iter()
            .position(|phase| phase == kind)
        {
            self.times.phases[phase] += time;
        }
    }

    /// An operation was under way. It counts where it is one of `backward`.
    pub(super) fn communicated(&mut self, thread: Thread, start: u64, end: u64, bytes: u64) {
        if self.state != OpenStepState::InBackward {
            return;
        }
        self.times.bytes += bytes;
        match thread {
            Thread::Communication => self.operations.push(start, end),
            // One that blocks the main thread is hidden by nothing. No other is under way meanwhile.
            _ => {
                let time = end - start;
                self.times.communicating += time;
                self.times.exposed += time;
                // What is not waited for in a phase of its own, such as an agreement.
                if !self
                    .within
                    .iter()
                    .any(|phase| phase.kind == EventKind::Reduce)
                {
                    self.times.phases[WAITING] += time;
                    if let Some(outer) = self.within.last_mut() {
                        outer.inner += time;
                    }
                }
            }
        }
    }
}

/// Times in which something was under way, without overlaps, in order.
#[derive(Debug, Default)]
pub(super) struct Intervals(Vec<(u64, u64)>);

impl Intervals {
    pub(super) fn new() -> Self {
        Self(Vec::with_capacity(64))
    }

    /// Adds one that ends after those before; what they cover already is cut off.
    pub(super) fn push(&mut self, start: u64, end: u64) {
        let covered = self.0.last().map_or(0, |last| last.1);
        let start = start.max(covered);
        if start < end {
            self.0.push((start, end));
        }
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn length(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }

    pub(super) fn common(&self, other: &Self) -> u64 {
        let (mut mine, mut theirs) = (self.0.iter().peekable(), other.0.iter().peekable());
        let mut sum = 0;
        while let (Some(a), Some(b)) = (mine.peek(), theirs.peek()) {
            sum += a.1.min(b.1).saturating_sub(a.0.max(b.0));
            // The one that ends first meets nothing more.
            if a.1 <= b.1 {
                mine.next();
            } else {
                theirs.next();
            }
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_between_steps_belongs_to_none() {
        let mut step = OpenStep::new();
        let batch = |step: &mut OpenStep, start, end| {
            step.batch_came(start, end);
            step.spend(EventKind::Data, end - start);
        };
        // An evaluation reads batches and calls no `backward`.
        for start in [0, 10, 20] {
            batch(&mut step, start, start + 5);
        }
        assert_eq!(step.backward_begins(27), 25);
        assert_eq!(step.times.phases[0], 5, "of the last batch alone");
        // A micro-step's batch is a part of the step.
        step.backward_ends(28);
        batch(&mut step, 30, 36);
        let (begun, times) = step.ends(40);
        assert_eq!((begun, times.total, times.phases[0]), (20, 20, 11));
    }

    #[test]
    fn only_waiting_while_something_is_under_way_is_exposed() {
        let mut step = OpenStep::new();
        step.backward_begins(5);
        // Two are under way at once; the first one is hidden by backward.
        step.communicated(Thread::Communication, 10, 16, 100);
        step.communicated(Thread::Communication, 12, 20, 100);
        // The loop waits before the thread has begun, and wakes late.
        let wait = |step: &mut OpenStep, start, end| {
            step.enter(EventKind::Reduce);
            step.leave(EventKind::Reduce, start, end);
        };
        wait(&mut step, 18, 23);
        step.communicated(Thread::Communication, 25, 26, 100);
        wait(&mut step, 24, 31);
        let waited = step.times.phases[WAITING];
        assert_eq!(waited, 5 + 7);
        // The loop communicates itself.
        step.communicated(Thread::Main, 40, 43, 100);
        assert_eq!(EventKind::PHASES[WAITING], EventKind::Reduce);
        let waited = step.times.phases[WAITING] - waited;
        assert_eq!(waited, 3, "no phase was entered for it");
        step.backward_ends(50);
        // What comes now is not of `backward`.
        step.communicated(Thread::Main, 51, 52, 100);
        let (_, times) = step.ends(60);
        assert_eq!(times.communicating, 10 + 1 + 3);
        assert_eq!(times.exposed, 2 + 1 + 3);
        assert_eq!(times.bytes, 400);
        // The next step begins with nothing.
        step.backward_begins(60);
        step.backward_ends(61);
        assert_eq!(step.ends(62).1.communicating, 0);
    }

    #[test]
    fn a_phase_within_another_counts_once() {
        let mut step = OpenStep::new();
        step.backward_begins(0);
        step.enter(EventKind::Backward);
        step.enter(EventKind::Copy);
        step.leave(EventKind::Copy, 3, 7);
        step.leave(EventKind::Backward, 1, 11);
        step.backward_ends(11);
        let (_, times) = step.ends(12);
        let [_, _, backward, copy, ..] = times.phases;
        assert_eq!((backward, copy), (6, 4));
    }

    fn of(times: &[(u64, u64)]) -> Intervals {
        let mut intervals = Intervals::new();
        for (start, end) in times {
            intervals.push(*start, *end);
        }
        intervals
    }

    #[test]
    fn what_is_covered_twice_counts_once() {
        assert_eq!(of(&[(1, 4), (2, 6), (6, 6), (8, 9)]).length(), 6);
        assert_eq!(of(&[(2, 6), (3, 5)]).length(), 4);
    }

    #[test]
    fn common_time_is_that_of_both() {
        let long = of(&[(0, 100)]);
        let short = of(&[(10, 20), (30, 35), (90, 120)]);
        assert_eq!((long.common(&short), short.common(&long)), (25, 25));
        assert_eq!(of(&[(0, 5), (10, 15)]).common(&of(&[(5, 10), (15, 20)])), 0);
        assert_eq!(of(&[(0, 5), (6, 9)]).common(&of(&[(4, 7)])), 2);
        assert_eq!(long.common(&of(&[])), 0);
    }
}
