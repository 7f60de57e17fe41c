use core::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use accelerator_collective::{Observed, Runner};

use super::clock::Meeting;
use super::event::{Detail, Event, Kind, Operation, Part, Thread};
use super::interval::Intervals;
use super::ring::Ring;
use super::summary::StepSummary;
use super::tally::{Tally, Times};

/// How many events a trace holds, for each rank: thousands of steps, in some megabytes.
const EVENTS: usize = 1 << 16;

/// Where [`Kind::Reduce`] lies among the phases.
const WAITING: usize = 4;

/// What is recorded.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum Recording {
    /// Steps, and everything that a trace shows.
    Events,
    #[default]
    Nothing,
    /// What steps come to.
    Steps,
}

impl fmt::Display for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Events => "a trace",
            Self::Nothing => "nothing",
            Self::Steps => "step times",
        })
    }
}

/// What becomes of events while a schedule runs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Mode {
    /// They are kept, from here on.
    Kept,
    /// They are not noted.
    Off,
    /// They are noted, at the price that this has, and thrown away.
    Discarded,
}

/// Notes what a rank does, in memory that is taken beforehand.
pub(super) struct Recorder {
    anchor: Instant,
    notes: Mutex<Notes>,
    /// Whether anything is noted.
    on: AtomicBool,
}

struct Notes {
    clocks: Vec<Meeting>,
    /// The steps of the cycle under way, where a schedule keeps them.
    cycle: Option<Tally>,
    events: Ring<Event>,
    /// Whether events are noted.
    noting: bool,
    open: Open,
    /// How many steps were done before.
    step: u64,
    /// All steps, where they are to be added up.
    whole: Option<Tally>,
    /// When the last operation of each runner ended: a trace shows one after the other.
    last_operation: [u64; 2],
}

/// The step that is under way.
#[derive(Default)]
struct Open {
    /// When it began; unknown until its first batch is asked for.
    begun: Option<u64>,
    /// Since when the forward pass runs.
    mark: u64,
    state: State,
    /// The phases that the main thread is in, the innermost last.
    within: Vec<Within>,
    times: Times,
    /// When operations of the communication thread were under way, and when the main thread waited
    /// for them: since `backward` was called.
    operations: Intervals,
    waits: Intervals,
}

/// A phase that has not ended.
#[derive(Clone, Copy, Debug)]
struct Within {
    kind: Kind,
    /// The time of those within it.
    inner: u64,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum State {
    /// No `backward` of the step was called.
    #[default]
    New,
    InBackward,
    /// Another micro-step may come, or the optimizer.
    Between,
}

impl Recorder {
    pub(super) fn new(recording: Recording) -> Self {
        let (events, whole) = match recording {
            Recording::Events => (EVENTS, Some(Tally::new())),
            Recording::Nothing => (0, None),
            Recording::Steps => (0, Some(Tally::new())),
        };
        Self {
            anchor: Instant::now(),
            on: AtomicBool::new(whole.is_some()),
            notes: Mutex::new(Notes {
                clocks: Vec::with_capacity(2),
                cycle: None,
                events: Ring::new(events),
                noting: events > 0,
                open: Open {
                    within: Vec::with_capacity(8),
                    operations: Intervals::new(),
                    waits: Intervals::new(),
                    ..Open::default()
                },
                step: 0,
                whole,
                last_operation: [0; 2],
            }),
        }
    }

    /// When all times begin.
    pub(super) fn anchor(&self) -> Instant {
        self.anchor
    }

    /// Whether there is anything to note.
    pub(super) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Takes the memory for a schedule's events.
    pub(super) fn begin_schedule(&self) {
        self.notes().events = Ring::new(EVENTS);
    }

    /// Gives it back.
    pub(super) fn end_schedule(&self) {
        let mut notes = self.notes();
        notes.events = Ring::new(0);
        notes.noting = false;
        notes.cycle = None;
        self.on.store(notes.whole.is_some(), Ordering::Relaxed);
    }

    /// What holds from the next step on, before which `step` steps were done.
    pub(super) fn switch(&self, mode: Mode, step: u64) {
        let now = self.at(Instant::now());
        let mut notes = self.notes();
        if !self.is_on() {
            notes.reset(now);
        }
        notes.step = step;
        notes.noting = mode != Mode::Off;
        if mode == Mode::Kept {
            notes.events.clear();
            notes.cycle.get_or_insert_with(Tally::new).clear();
        } else {
            notes.cycle = None;
        }
        let on = mode != Mode::Off || notes.whole.is_some();
        self.on.store(on, Ordering::Relaxed);
    }

    /// What the steps of this cycle came to; `None` where none are kept, or none was done.
    pub(super) fn cycle(&self) -> Option<StepSummary> {
        self.notes().cycle.as_ref()?.summary()
    }

    /// Whether a schedule keeps events here, and there are some.
    pub(super) fn keeps_some(&self) -> bool {
        let notes = self.notes();
        notes.cycle.is_some() && !notes.events.items().is_empty()
    }

    pub(super) fn met(&self, meeting: Meeting) {
        self.notes().clocks.push(meeting);
    }

    pub(super) fn batch_came(&self, start: Instant, end: Instant) {
        let (start, end) = (self.at(start), self.at(end));
        let mut notes = self.notes();
        if notes.open.state == State::New {
            // What lies before belongs to no step: an evaluation, for example.
            notes.open.begun = Some(start);
            notes.open.times = Times::default();
        }
        notes.open.mark = end;
        notes.phase(Kind::Data, start, end, end - start, Detail::NONE);
    }

    pub(super) fn backward_begins(&self) {
        let now = self.at(Instant::now());
        let mut notes = self.notes();
        let start = notes.open.mark.min(now);
        if notes.open.state == State::New && notes.open.begun.is_none() {
            notes.open.begun = Some(start);
        }
        notes.open.state = State::InBackward;
        notes.phase(Kind::Forward, start, now, now - start, Detail::NONE);
    }

    pub(super) fn backward_ends(&self) {
        let now = self.at(Instant::now());
        let mut notes = self.notes();
        notes.open.state = State::Between;
        notes.open.mark = now;
        // All operations that were started have ended.
        notes.open.settle();
    }

    pub(super) fn step_failed(&self) {
        let now = self.at(Instant::now());
        self.notes().reset(now);
    }

    pub(super) fn step_ends(&self) -> Times {
        let now = self.at(Instant::now());
        let mut notes = self.notes();
        let begun = notes.open.begun.unwrap_or(notes.open.mark).min(now);
        let mut times = notes.open.times;
        times.total = now - begun;
        notes.event(
            Kind::Step,
            Thread::Main,
            begun,
            now,
            Detail {
                bytes: times.bytes,
                part: Part::Whole,
            },
        );
        let Notes { cycle, whole, .. } = &mut *notes;
        for tally in [cycle, whole].into_iter().flatten() {
            tally.add(times);
        }
        notes.step += 1;
        notes.reset(now);
        times
    }

    /// The main thread enters a phase.
    pub(super) fn enter(&self, kind: Kind) -> Instant {
        self.notes().open.within.push(Within { kind, inner: 0 });
        Instant::now()
    }

    /// The main thread leaves the phase that it entered at `start`; with its bytes and number.
    pub(super) fn leave(&self, kind: Kind, start: Instant, detail: Detail) {
        let (start, end) = (self.at(start), self.at(Instant::now()));
        let mut notes = self.notes();
        let inner = notes.open.within.pop().map_or(0, |phase| phase.inner);
        if let Some(outer) = notes.open.within.last_mut() {
            outer.inner += end - start;
        }
        let own = (end - start).saturating_sub(inner);
        if kind == Kind::Reduce && notes.open.state == State::InBackward {
            notes.open.waits.push(start, end);
        }
        notes.phase(kind, start, end, own, detail);
    }

    pub(super) fn loaded(&self, worker: usize, start: Instant) {
        let (start, end) = (self.at(start), self.at(Instant::now()));
        let worker = u16::try_from(worker).unwrap_or(u16::MAX);
        self.notes()
            .event(Kind::Load, Thread::Loader(worker), start, end, Detail::NONE);
    }

    pub(super) fn communicated(&self, operation: &Observed) {
        let (start, end) = (self.at(operation.started), self.at(operation.ended));
        let mut notes = self.notes();
        let (thread, last) = match operation.runner {
            Runner::Caller => (Thread::Main, 0),
            Runner::Communication => (Thread::Communication, 1),
        };
        let bytes = operation.bytes as u64;
        if notes.open.state == State::InBackward {
            notes.open.communicated(thread, start, end);
            notes.open.times.bytes += bytes;
        }
        // Those that are under way at once end in their order.
        let start = start.max(notes.last_operation[last]).min(end);
        notes.last_operation[last] = end;
        let detail = Detail {
            bytes,
            part: Part::Operation(operation.sequence),
        };
        let kind = Kind::Operation(Operation::of(operation.name));
        notes.event(kind, thread, start, end, detail);
    }

    pub(super) fn summary(&self) -> Option<StepSummary> {
        self.notes().whole.as_ref()?.summary()
    }

    /// The events by their beginning, with how many older ones are gone, and how this rank's clock
    /// compared with rank 0's.
    pub(super) fn events(&self) -> (Vec<Event>, u64, Vec<Meeting>) {
        let notes = self.notes();
        let mut events = notes.events.items().to_vec();
        // Outer ones first.
        events.sort_by_key(|event| (event.start, core::cmp::Reverse(event.end)));
        (events, notes.events.dropped(), notes.clocks.clone())
    }

    fn at(&self, instant: Instant) -> u64 {
        let since = instant.saturating_duration_since(self.anchor);
        // Enough for centuries.
        since.as_nanos() as u64
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Notes {
    fn phase(&mut self, kind: Kind, start: u64, end: u64, own: u64, detail: Detail) {
        if let Some(phase) = Kind::PHASES.into_iter().position(|phase| phase == kind) {
            self.open.times.phases[phase] += own;
        }
        self.event(kind, Thread::Main, start, end, detail);
    }

    fn event(&mut self, kind: Kind, thread: Thread, start: u64, end: u64, detail: Detail) {
        if !self.noting {
            return;
        }
        let Detail { bytes, part } = detail;
        self.events.push(Event {
            kind,
            thread,
            start,
            end,
            step: self.step,
            bytes,
            part,
        });
    }

    fn reset(&mut self, now: u64) {
        self.open.begun = None;
        self.open.mark = now;
        self.open.state = State::New;
        self.open.times = Times::default();
        self.open.operations.clear();
        self.open.waits.clear();
    }
}

impl Open {
    /// An operation was under way.
    fn communicated(&mut self, thread: Thread, start: u64, end: u64) {
        match thread {
            Thread::Communication => self.operations.push(start, end),
            // One that blocks the main thread is hidden by nothing. No other is under way meanwhile.
            _ => {
                let time = end - start;
                self.times.communicating += time;
                self.times.exposed += time;
                // What is not waited for in a phase of its own, such as an agreement.
                if !self.within.iter().any(|phase| phase.kind == Kind::Reduce) {
                    self.times.phases[WAITING] += time;
                    if let Some(outer) = self.within.last_mut() {
                        outer.inner += time;
                    }
                }
            }
        }
    }

    /// Adds up the operations and waits that are complete.
    fn settle(&mut self) {
        self.times.communicating += self.operations.length();
        self.times.exposed += self.operations.common(&self.waits);
        self.operations.clear();
        self.waits.clear();
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder")
            .field("steps", &self.notes().step)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_phase_within_another_counts_once() {
        let recorder = Recorder::new(Recording::Events);
        let start = recorder.anchor();
        recorder.batch_came(start, start);
        recorder.backward_begins();
        let outer = recorder.enter(Kind::Backward);
        let inner = recorder.enter(Kind::Copy);
        std::thread::sleep(2 * MS);
        recorder.leave(Kind::Copy, inner, Detail::NONE);
        recorder.leave(Kind::Backward, outer, Detail::NONE);
        recorder.backward_ends();
        let times = recorder.step_ends();
        let [_, _, backward, copy, ..] = times.phases;
        assert!(copy >= 2_000_000);
        let (events, dropped, _) = recorder.events();
        assert_eq!(dropped, 0);
        let whole = events.iter().find(|event| event.kind == Kind::Backward);
        let whole = whole.map(|event| event.end - event.start).unwrap();
        assert!(backward + copy <= whole, "{backward} {copy} {whole}");
        assert!(times.phases.iter().sum::<u64>() <= times.total);
        assert_eq!(events[0].kind, Kind::Step, "the outermost comes first");
    }

    #[test]
    fn what_lies_between_steps_belongs_to_none() {
        let recorder = Recorder::new(Recording::Steps);
        let start = recorder.anchor();
        // An evaluation reads batches and calls no `backward`.
        for batch in 0..3 {
            recorder.batch_came(start + 10 * batch * MS, start + (10 * batch + 5) * MS);
        }
        recorder.backward_begins();
        let [data, ..] = recorder.notes().open.times.phases;
        assert_eq!(data, 5_000_000, "of the last batch alone");
        // A micro-step's batch is a part of the step.
        recorder.backward_ends();
        recorder.batch_came(start + 30 * MS, start + 36 * MS);
        let [data, ..] = recorder.notes().open.times.phases;
        assert_eq!(data, 11_000_000);
        assert_eq!(recorder.events().0.len(), 0, "only steps are recorded");
    }

    #[test]
    fn only_waiting_while_something_is_under_way_is_exposed() {
        let recorder = Recorder::new(Recording::Steps);
        let at = |time: u64| time * 1_000_000;
        recorder.backward_begins();
        {
            let mut notes = recorder.notes();
            let open = &mut notes.open;
            // Two are under way at once; the first one is hidden by backward.
            open.communicated(Thread::Communication, at(10), at(16));
            open.communicated(Thread::Communication, at(12), at(20));
            // The loop waits before the thread has begun, and wakes late.
            open.waits.push(at(18), at(23));
            open.communicated(Thread::Communication, at(25), at(26));
            open.waits.push(at(24), at(31));
            // The loop communicates itself.
            open.communicated(Thread::Main, at(40), at(43));
        }
        recorder.backward_ends();
        let times = recorder.step_ends();
        assert_eq!(times.communicating, at(10 + 1 + 3));
        assert_eq!(times.exposed, at(2 + 1 + 3));
        assert_eq!(Kind::PHASES[WAITING], Kind::Reduce);
        assert_eq!(times.phases[WAITING], at(3), "no phase was entered for it");
        // The next step begins with nothing.
        recorder.backward_begins();
        recorder.backward_ends();
        assert_eq!(recorder.step_ends().communicating, 0);
    }

    #[test]
    fn a_schedule_keeps_the_events_of_its_cycles_alone() {
        let recorder = Recorder::new(Recording::Nothing);
        let step = || {
            recorder.backward_begins();
            recorder.backward_ends();
            recorder.step_ends();
        };
        assert!(!recorder.is_on() && recorder.summary().is_none());
        recorder.begin_schedule();
        recorder.switch(Mode::Discarded, 7);
        step();
        assert!(recorder.is_on() && recorder.cycle().is_none() && !recorder.keeps_some());
        recorder.switch(Mode::Kept, 8);
        assert!(!recorder.keeps_some());
        step();
        step();
        assert_eq!(recorder.cycle().unwrap().steps, 2);
        let steps: Vec<_> = recorder.events().0.iter().map(|event| event.step).collect();
        assert!(steps.iter().all(|step| [8, 9].contains(step)), "{steps:?}");
        recorder.switch(Mode::Off, 10);
        assert!(!recorder.is_on() && recorder.cycle().is_none());
        recorder.switch(Mode::Kept, 12);
        assert!(
            recorder.cycle().is_none(),
            "nothing is left of the cycle before"
        );
        recorder.end_schedule();
        assert!(!recorder.is_on() && recorder.events().0.is_empty());
        assert!(recorder.summary().is_none());
    }

    #[test]
    fn a_step_that_failed_leaves_nothing() {
        let recorder = Recorder::new(Recording::Steps);
        recorder.backward_begins();
        recorder.step_failed();
        assert!(recorder.summary().is_none());
        assert_eq!(recorder.notes().open.times.phases, [0; 6]);
    }
}
