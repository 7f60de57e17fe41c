use core::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use accelerator_collective::internal::{ExecThread, OpEvent};
use accelerator_host::sync::Mutex;
use tracing::span::EnteredSpan;

use super::clock::ClockSync;
use super::event::{Detail, Event, EventKind, EventSubject, Phase, Thread};
use super::open_step::OpenStep;
use super::summary::{RingBuffer, StepStats, StepSummary, StepTimes};

/// The number of events that a trace holds per rank: thousands of steps, in some megabytes.
const EVENTS: usize = 1 << 16;

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum Recording {
    /// Steps, and everything that a trace shows.
    Events,
    #[default]
    Nothing,
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

/// The treatment of events while a schedule runs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum RecordMode {
    Kept,
    Off,
    /// Notes them, at the usual price, and throws them away.
    Discarded,
}

/// Notes what a rank does, in memory that is taken beforehand.
pub(super) struct Recorder {
    anchor: Instant,
    notes: Mutex<RecorderNotes>,
    /// Set while anything is noted.
    on: AtomicBool,
}

struct RecorderNotes {
    clocks: Vec<ClockSync>,
    /// The steps of the cycle under way, where a schedule keeps them.
    cycle: Option<StepStats>,
    events: RingBuffer<Event>,
    /// Set while events are noted.
    noting: bool,
    open: OpenStep,
    step: u64,
    /// The sums of all steps, if asked for.
    whole: Option<StepStats>,
    /// The end of the last operation of each runner: a trace shows one after the other.
    last_operation: [u64; 2],
}

impl Recorder {
    pub(super) fn new(recording: Recording) -> Self {
        let (events, whole) = match recording {
            Recording::Events => (EVENTS, Some(StepStats::new())),
            Recording::Nothing => (0, None),
            Recording::Steps => (0, Some(StepStats::new())),
        };
        Self {
            anchor: Instant::now(),
            on: AtomicBool::new(whole.is_some()),
            notes: Mutex::new(RecorderNotes {
                clocks: Vec::with_capacity(2),
                cycle: None,
                events: RingBuffer::new(events),
                noting: events > 0,
                open: OpenStep::new(),
                step: 0,
                whole,
                last_operation: [0; 2],
            }),
        }
    }

    pub(super) fn anchor(&self) -> Instant {
        self.anchor
    }

    pub(super) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Takes the memory for a schedule's events.
    pub(super) fn begin_schedule(&self) {
        let now = self.at(Instant::now());
        let mut notes = self.notes.lock();
        notes.events = RingBuffer::new(EVENTS);
        // The time of the program's closure, if one ran, is no part of a step.
        notes.open.reset(now);
    }

    /// Gives it back.
    pub(super) fn end_schedule(&self) {
        let mut notes = self.notes.lock();
        notes.events = RingBuffer::new(0);
        notes.noting = false;
        notes.cycle = None;
        self.on.store(notes.whole.is_some(), Ordering::Relaxed);
    }

    /// Switches the mode from the next step on, before which `step` steps were done.
    pub(super) fn switch(&self, mode: RecordMode, step: u64) {
        let now = self.at(Instant::now());
        let mut notes = self.notes.lock();
        if !self.is_on() {
            notes.open.reset(now);
        }
        notes.step = step;
        notes.noting = mode != RecordMode::Off;
        if mode == RecordMode::Kept {
            notes.events.clear();
            notes.cycle.get_or_insert_with(StepStats::new).clear();
        } else {
            notes.cycle = None;
        }
        let on = mode != RecordMode::Off || notes.whole.is_some();
        self.on.store(on, Ordering::Relaxed);
    }

    pub(super) fn cycle(&self) -> Option<StepSummary> {
        self.notes.lock().cycle.as_ref()?.summary()
    }

    pub(super) fn met(&self, meeting: ClockSync) {
        self.notes.lock().clocks.push(meeting);
    }

    pub(super) fn batch_came(&self, start: Instant, end: Instant) {
        let (start, end) = (self.at(start), self.at(end));
        let mut notes = self.notes.lock();
        notes.open.batch_came(start, end);
        notes.open.spend(EventKind::Data, end - start);
        notes.event(EventKind::Data, Thread::Main, start, end, Detail::NONE);
    }

    pub(super) fn backward_begins(&self) {
        let now = self.at(Instant::now());
        let mut notes = self.notes.lock();
        let start = notes.open.backward_begins(now);
        notes.open.spend(EventKind::Forward, now - start);
        notes.event(EventKind::Forward, Thread::Main, start, now, Detail::NONE);
    }

    pub(super) fn backward_ends(&self) {
        let now = self.at(Instant::now());
        self.notes.lock().open.backward_ends(now);
    }

    pub(super) fn step_failed(&self) {
        let now = self.at(Instant::now());
        self.notes.lock().open.reset(now);
    }

    pub(super) fn step_ends(&self) -> StepTimes {
        let now = self.at(Instant::now());
        let mut notes = self.notes.lock();
        let (begun, times) = notes.open.ends(now);
        let detail = Detail {
            bytes: times.bytes,
            part: EventSubject::Whole,
        };
        notes.event(EventKind::Step, Thread::Main, begun, now, detail);
        let RecorderNotes { cycle, whole, .. } = &mut *notes;
        for tally in [cycle, whole].into_iter().flatten() {
            tally.add(times);
        }
        notes.step += 1;
        times
    }

    pub(super) fn enter(&self, kind: EventKind) -> Instant {
        self.notes.lock().open.enter(kind);
        Instant::now()
    }

    /// The main thread leaves the phase that it entered at `start`; with its bytes and number.
    pub(super) fn leave(&self, kind: EventKind, start: Instant, detail: Detail) {
        let (start, end) = (self.at(start), self.at(Instant::now()));
        let mut notes = self.notes.lock();
        notes.open.leave(kind, start, end);
        notes.event(kind, Thread::Main, start, end, detail);
    }

    pub(super) fn loaded(&self, worker: usize, start: Instant) {
        let (start, end) = (self.at(start), self.at(Instant::now()));
        let worker = u16::try_from(worker).unwrap_or(u16::MAX);
        self.notes.lock().event(
            EventKind::Load,
            Thread::Loader(worker),
            start,
            end,
            Detail::NONE,
        );
    }

    pub(super) fn communicated(&self, operation: &OpEvent) {
        let (start, end) = (self.at(operation.started), self.at(operation.ended));
        let mut notes = self.notes.lock();
        let (thread, last) = match operation.thread {
            ExecThread::Caller => (Thread::Main, 0),
            ExecThread::Communication => (Thread::Communication, 1),
        };
        let bytes = operation.bytes as u64;
        notes.open.communicated(thread, start, end, bytes);
        // Those that are under way at once end in their order.
        let start = start.max(notes.last_operation[last]).min(end);
        notes.last_operation[last] = end;
        let detail = Detail {
            bytes,
            part: EventSubject::Operation(operation.sequence),
        };
        let kind = EventKind::Operation(operation.kind);
        notes.event(kind, thread, start, end, detail);
    }

    pub(super) fn summary(&self) -> Option<StepSummary> {
        self.notes.lock().whole.as_ref()?.summary()
    }

    /// The events by their beginning, with how many older ones are gone, and how this rank's clock
    /// compared with rank 0's.
    pub(super) fn events(&self) -> (Vec<Event>, u64, Vec<ClockSync>) {
        let notes = self.notes.lock();
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
}

impl RecorderNotes {
    fn event(&mut self, kind: EventKind, thread: Thread, start: u64, end: u64, detail: Detail) {
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
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder")
            .field("steps", &self.notes.lock().step)
            .finish_non_exhaustive()
    }
}

/// A phase of the main thread, as long as it lives; for `tracing` as well, at the level `debug`.
pub(crate) struct Span<'a> {
    _entered: EnteredSpan,
    noted: Option<(&'a Recorder, Instant)>,
    phase: Phase,
}

impl<'a> Span<'a> {
    pub(super) fn enter(
        phase: Phase,
        rank: usize,
        step: u64,
        recorder: Option<&'a Recorder>,
    ) -> Self {
        let span = match phase {
            Phase::Backward => tracing::debug_span!("backward", rank, step),
            Phase::Copy(part) => tracing::debug_span!("copy_gradients", rank, step, %part),
            Phase::Optimizer => tracing::debug_span!("optimizer_step", rank, step),
            Phase::Recompute => tracing::debug_span!("recompute", rank, step),
            Phase::Reduce { part, bytes } => {
                tracing::debug_span!("all_reduce", rank, step, %part, bytes)
            }
        };
        Self {
            _entered: span.entered(),
            noted: recorder.map(|recorder| (recorder, recorder.enter(phase.kind()))),
            phase,
        }
    }
}

impl Drop for Span<'_> {
    fn drop(&mut self) {
        if let Some((recorder, start)) = self.noted {
            recorder.leave(self.phase.kind(), start, self.phase.detail());
        }
    }
}

/// A worker that loads a batch.
pub(super) struct LoadSpan<'a> {
    noted: Option<(&'a Recorder, Instant)>,
    worker: usize,
}

impl<'a> LoadSpan<'a> {
    pub(super) fn begin(worker: usize, recorder: Option<&'a Recorder>) -> Self {
        Self {
            noted: recorder.map(|recorder| (recorder, Instant::now())),
            worker,
        }
    }
}

impl Drop for LoadSpan<'_> {
    fn drop(&mut self) {
        if let Some((recorder, start)) = self.noted {
            recorder.loaded(self.worker, start);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_lie_within_each_other_and_the_outermost_comes_first() {
        let recorder = Recorder::new(Recording::Events);
        let start = recorder.anchor();
        recorder.batch_came(start, start);
        recorder.backward_begins();
        let outer = recorder.enter(EventKind::Backward);
        let inner = recorder.enter(EventKind::Copy);
        recorder.leave(EventKind::Copy, inner, Detail::NONE);
        recorder.leave(EventKind::Backward, outer, Detail::NONE);
        recorder.backward_ends();
        let times = recorder.step_ends();
        assert!(times.phases.iter().sum::<u64>() <= times.total);
        let (events, dropped, _) = recorder.events();
        assert_eq!(dropped, 0);
        assert_eq!(events[0].kind, EventKind::Step);
        let of = |kind| events.iter().find(|event| event.kind == kind).unwrap();
        let (whole, part) = (of(EventKind::Backward), of(EventKind::Copy));
        assert!(whole.start <= part.start && part.end <= whole.end);
    }

    #[test]
    fn an_operation_has_the_name_of_the_method_that_starts_it() {
        let (sender, seen) = std::sync::mpsc::channel();
        let group = accelerator_collective::ProcessGroup::single();
        group
            .observe(move |operation| sender.send(*operation).unwrap())
            .unwrap();
        group.barrier().unwrap();
        let recorder = Recorder::new(Recording::Events);
        recorder.communicated(&seen.recv().unwrap());
        let (events, _, _) = recorder.events();
        assert_eq!(events[0].kind.name(), "barrier");
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
        recorder.switch(RecordMode::Discarded, 7);
        step();
        assert!(recorder.is_on() && recorder.cycle().is_none());
        recorder.switch(RecordMode::Kept, 8);
        step();
        step();
        assert_eq!(recorder.cycle().unwrap().steps, 2);
        let steps: Vec<_> = recorder.events().0.iter().map(|event| event.step).collect();
        assert!(steps.iter().all(|step| [8, 9].contains(step)), "{steps:?}");
        recorder.switch(RecordMode::Off, 10);
        assert!(!recorder.is_on() && recorder.cycle().is_none());
        recorder.switch(RecordMode::Kept, 12);
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
        let recorder = Recorder::new(Recording::Events);
        recorder.backward_begins();
        let failed = recorder.at(Instant::now());
        recorder.step_failed();
        assert!(recorder.summary().is_none());
        recorder.backward_begins();
        recorder.backward_ends();
        recorder.step_ends();
        assert_eq!(recorder.summary().unwrap().steps, 1);
        let (events, ..) = recorder.events();
        let step = events.iter().find(|event| event.kind == EventKind::Step);
        assert!(
            step.unwrap().start >= failed,
            "the next one begins behind it"
        );
    }

    #[test]
    fn a_summary_alone_keeps_no_events() {
        let recorder = Recorder::new(Recording::Steps);
        recorder.backward_begins();
        recorder.backward_ends();
        recorder.step_ends();
        assert!(recorder.events().0.is_empty());
        assert_eq!(recorder.summary().unwrap().steps, 1);
    }
}
