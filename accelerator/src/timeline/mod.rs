//! The time of a step, by its parts.
//!
//! Turn it on when the accelerator is built, and read the [`StepSummary`]; or write a
//! [trace](crate::AcceleratorBuilder::trace) of all ranks and look at it. In a long training, record
//! some steps now and then, by a [`ProfilerSchedule`]: with [`Accelerator::profile`](crate::Accelerator::profile),
//! or by `ACCEL_TRACE_SCHEDULE`.

mod clock;
mod event;
mod open_step;
mod profiler;
mod recorder;
mod summary;
mod trace;

use core::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use accelerator_collective::ProcessGroup;

pub(crate) use self::event::{EventSubject, Phase};
pub(crate) use self::profiler::check_cycles;
pub use self::profiler::{Cycle, ProfilerSchedule};
pub(crate) use self::recorder::{Recording, Span};
pub(crate) use self::summary::median;
pub use self::summary::{Figure, StepSummary, Straggler};
pub(crate) use self::trace::{TraceFile, clear_traces};

use self::clock::{ClockSync, PURPOSE};
use self::profiler::{OnCycle, Profile, Profiling, SchedulePhase};
use self::recorder::Recorder;
use self::trace::{RankTrace, TraceStart, put};
use crate::core::error::{Error, Result};

/// The notes of one rank about its steps: a handle, clones of which note in one place.
///
/// If nothing is recorded, each method costs a branch or an addition.
#[derive(Clone)]
pub(crate) struct Timeline(Arc<TimelineState>);

struct TimelineState {
    profiling: Profiling,
    rank: usize,
    /// The recorder, made when something is recorded for the first time.
    recorder: OnceLock<Arc<Recorder>>,
    recording: Recording,
    steps: AtomicU64,
    /// In nanoseconds; the only time that is measured always.
    waited_for_data: AtomicU64,
    world_size: usize,
    written: AtomicBool,
}

impl Timeline {
    #[track_caller]
    pub(crate) fn new(group: &ProcessGroup, recording: Recording) -> Result<Self> {
        let timeline = Self(Arc::new(TimelineState {
            profiling: Profiling::default(),
            rank: group.rank(),
            recorder: OnceLock::new(),
            recording,
            steps: AtomicU64::new(0),
            waited_for_data: AtomicU64::new(0),
            world_size: group.world_size(),
            written: AtomicBool::new(false),
        }));
        if recording != Recording::Nothing {
            timeline.recorder_of(group, recording)?;
        }
        if recording == Recording::Events {
            timeline.sync_clocks(group)?;
        }
        Ok(timeline)
    }

    /// Begins a phase on the thread that trains; it ends when the guard is dropped. Phases may lie
    /// within each other: the time of the inner one counts for it alone.
    pub(crate) fn span(&self, phase: Phase) -> Span<'_> {
        Span::enter(phase, self.0.rank, self.steps(), self.recorder())
    }

    /// Begins to load a batch on a worker's thread; the end is that of the guard.
    pub(crate) fn load(&self, worker: usize) -> impl Drop + use<'_> {
        recorder::LoadSpan::begin(worker, self.recorder())
    }

    /// A batch came, for which the loop had waited since `start`.
    pub(crate) fn batch_came(&self, start: Instant, end: Instant) {
        let waited = end.saturating_duration_since(start);
        // Enough for centuries.
        let waited = waited.as_nanos() as u64;
        self.0.waited_for_data.fetch_add(waited, Ordering::Relaxed);
        if let Some(recorder) = self.recorder() {
            recorder.batch_came(start, end);
        }
    }

    /// The time for which the loop has waited for batches so far.
    pub(crate) fn time_waited_for_data(&self) -> Duration {
        Duration::from_nanos(self.0.waited_for_data.load(Ordering::Relaxed))
    }

    /// The loss is computed, and `backward` was called.
    pub(crate) fn backward_begins(&self) {
        if let Some(recorder) = self.recorder() {
            recorder.backward_begins();
        }
    }

    pub(crate) fn backward_ends(&self) {
        if let Some(recorder) = self.recorder() {
            recorder.backward_ends();
        }
    }

    /// Notes that nothing begun since the last step will become one.
    pub(crate) fn step_failed(&self) {
        if let Some(recorder) = self.recorder() {
            recorder.step_failed();
        }
    }

    /// The optimizer has moved the model.
    pub(crate) fn step_ends(&self) {
        let step = self.0.steps.fetch_add(1, Ordering::Relaxed);
        if let Some(recorder) = self.recorder() {
            let times = recorder.step_ends();
            tracing::debug!(rank = self.0.rank, step, times = %times, "step");
        }
        self.advance(step + 1);
    }

    pub(crate) fn summary(&self) -> Option<StepSummary> {
        self.recorder()?.summary()
    }

    /// Gathers the events of all ranks and lets rank 0 write them to `path`, where a trace is
    /// recorded. A rank that cannot reach rank 0 writes its own beside it.
    #[track_caller]
    pub(crate) fn write(&self, group: &ProcessGroup, path: &Path) -> Result<()> {
        let Some(recorder) = self.recorder() else {
            return Ok(());
        };
        if self.0.written.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let met = self.sync_clocks(group);
        let own = RankTrace::new(self.0.rank, recorder);
        let gathered = match met {
            Ok(()) => {
                let traces = group.for_purpose(PURPOSE).gather_object(&own, 0);
                traces.map_err(Error::from)
            }
            Err(error) => Err(error),
        };
        let (path, ranks) = match gathered {
            Ok(None) => return Ok(()),
            Ok(Some(ranks)) => {
                trace::clear_parts(path);
                (path.to_owned(), ranks)
            }
            Err(error) => {
                let path = trace::of_rank(path, own.rank);
                let shown = path.display();
                tracing::warn!(%error, path = %shown, "ranks are missing: the trace is this rank's alone");
                (path, vec![own])
            }
        };
        put(&path, &ranks, TraceStart::FirstEvent)
    }

    /// Writes what this rank alone noted, where nothing was written before: beside the trace that it
    /// would have been a part of, or as the trace if there is no other rank. Waits for nobody.
    pub(crate) fn write_own(&self, path: &Path) -> Result<()> {
        let Some(recorder) = self.recorder() else {
            return Ok(());
        };
        if self.0.written.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let path = match self.0.world_size {
            1 => path.to_owned(),
            _ => trace::of_rank(path, self.0.rank),
        };
        let own = RankTrace::new(self.0.rank, recorder);
        put(&path, &[own], TraceStart::FirstEvent)
    }

    #[track_caller]
    fn sync_clocks(&self, group: &ProcessGroup) -> Result<()> {
        if let Some(recorder) = self.recorder() {
            let meeting = ClockSync::hold(group, recorder.anchor())?;
            recorder.met(meeting);
        }
        Ok(())
    }

    fn recorder(&self) -> Option<&Recorder> {
        let recorder = self.0.recorder.get()?;
        recorder.is_on().then_some(recorder)
    }

    /// The recorder; made for `recording` if there is none, and told of the group's operations.
    #[track_caller]
    fn recorder_of(&self, group: &ProcessGroup, recording: Recording) -> Result<&Recorder> {
        if self.0.recorder.get().is_none() {
            let recorder = Arc::new(Recorder::new(recording));
            if group.world_size() > 1 {
                let recorder = Arc::clone(&recorder);
                group.observe(move |operation| {
                    if recorder.is_on() {
                        recorder.communicated(operation);
                    }
                })?;
            }
            return Ok(self.0.recorder.get_or_init(|| recorder));
        }
        Ok(self
            .0
            .recorder
            .get_or_init(|| Arc::new(Recorder::new(recording))))
    }

    fn steps(&self) -> u64 {
        self.0.steps.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timeline")
            .field("rank", &self.0.rank)
            .field("recorder", &self.0.recorder.get())
            .finish_non_exhaustive()
    }
}

impl Timeline {
    /// Begins to record by a schedule that all ranks have agreed on, until the [`Profiler`] is dropped. The ranks
    /// compare their clocks.
    #[track_caller]
    pub(crate) fn profile(
        &self,
        group: &ProcessGroup,
        schedule: ProfilerSchedule,
        on_cycle: OnCycle,
    ) -> Result<Profiler> {
        Ok(Profiler {
            number: self.begin(group, schedule, on_cycle)?,
            timeline: self.clone(),
        })
    }

    /// Does the same until [`Timeline::end`], and returns the profile's number.
    #[track_caller]
    pub(crate) fn begin(
        &self,
        group: &ProcessGroup,
        schedule: ProfilerSchedule,
        on_cycle: OnCycle,
    ) -> Result<u64> {
        let recorder = self.recorder_of(group, Recording::Nothing)?;
        recorder.met(ClockSync::hold(group, recorder.anchor())?);
        recorder.begin_schedule();
        let done = self.steps();
        let mut state = self.profiling().state.lock();
        state.begun += 1;
        let mut profile = Profile {
            cycles: 0,
            first: done,
            kept_from: done,
            number: state.begun,
            on_cycle,
            schedule,
        };
        profile.enter(recorder, done, SchedulePhase::Idle);
        let number = profile.number;
        state.current = Some(profile);
        self.profiling().runs.store(true, Ordering::Relaxed);
        Ok(number)
    }

    pub(super) fn advance(&self, done: u64) {
        let profiling = self.profiling();
        if !profiling.runs.load(Ordering::Relaxed) {
            return;
        }
        let Some(recorder) = self.any_recorder() else {
            return;
        };
        let Some(mut profile) = profiling.state.lock().current.take() else {
            return;
        };
        let steps = done.saturating_sub(profile.first);
        let before = profile.schedule.phase(steps.saturating_sub(1));
        if before == SchedulePhase::Last {
            self.hand_over(&mut profile, recorder);
            if profile.schedule.is_over(steps) {
                return;
            }
            recorder.begin_schedule();
            profiling.runs.store(true, Ordering::Relaxed);
        }
        profile.enter(recorder, done, before);
        profiling.state.lock().current = Some(profile);
    }

    /// Ends the profile with this number, or whichever runs.
    pub(crate) fn end(&self, number: Option<u64>) {
        let mut state = self.profiling().state.lock();
        let ends = |profile: &mut Profile| number.is_none_or(|number| number == profile.number);
        let ended = state.current.take_if(ends);
        drop(state);
        if let (Some(mut profile), Some(recorder)) = (ended, self.any_recorder()) {
            self.hand_over(&mut profile, recorder);
        }
    }

    /// Refuses a second recording.
    pub(crate) fn is_free(&self) -> Result<()> {
        let busy = self.profiling().runs.load(Ordering::Relaxed);
        match busy || self.0.recording == Recording::Events {
            true => Err(Error::misuse(
                "a trace is recorded already, by `trace`, ACCEL_TRACE or another profiler; let one of \
                 them end before the next one begins",
            )),
            false => Ok(()),
        }
    }

    /// Ends recording, and hands the cycle to the program. It holds no lock, and nothing is left to end if the
    /// program's closure panics.
    fn hand_over(&self, profile: &mut Profile, recorder: &Recorder) {
        let cycle = recorder.cycle().map(|summary| Cycle {
            number: profile.cycles,
            first_step: profile.kept_from,
            summary,
            ranks: self.0.world_size,
            trace: RankTrace::new(self.0.rank, recorder),
        });
        recorder.end_schedule();
        self.profiling().runs.store(false, Ordering::Relaxed);
        if let Some(cycle) = cycle
            && !std::thread::panicking()
        {
            profile.cycles += 1;
            (profile.on_cycle)(&cycle);
        }
    }

    fn profiling(&self) -> &Profiling {
        &self.0.profiling
    }

    /// The recorder, on or off.
    fn any_recorder(&self) -> Option<&Recorder> {
        self.0.recorder.get().map(Arc::as_ref)
    }
}

/// Records by a [`ProfilerSchedule`] for as long as it lives; see
/// [`Accelerator::profile`](crate::Accelerator::profile).
#[must_use = "recording ends when this is dropped"]
pub struct Profiler {
    timeline: Timeline,
    number: u64,
}

impl Drop for Profiler {
    fn drop(&mut self) {
        self.timeline.end(Some(self.number));
    }
}

impl fmt::Debug for Profiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Profiler").finish_non_exhaustive()
    }
}
