//! Recording by a schedule: the profiler, and the cycles that the program gets.

use core::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use accelerator_collective::ProcessGroup;
use accelerator_host::sync::Mutex;

use super::clock::ClockSync;
use super::profiler_schedule::{ProfilerSchedule, SchedulePhase};
use super::recorder::{RecordMode, Recorder, Recording};
use super::summary::StepSummary;
use super::trace::{RankTrace, TraceStart};
use super::trace_file;
use super::{Timeline, TraceFile, put};
use crate::core::error::{Error, Result};

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

/// The steps that one cycle of a [`ProfilerSchedule`] kept on this rank.
#[derive(Debug)]
#[non_exhaustive]
pub struct Cycle {
    /// The number of the cycle, from 0.
    pub number: u64,
    /// The number of optimizer steps that this process had done before the first that is kept.
    pub first_step: u64,
    /// The summary of the kept steps. If recording was ended early, they may be fewer than the schedule's.
    pub summary: StepSummary,
    ranks: usize,
    trace: RankTrace,
}

impl Cycle {
    /// Writes a trace of this rank's kept steps, which [Perfetto](https://ui.perfetto.dev) opens. With the path
    /// `trace.json`, the file is `trace.cycle0.json`, or with several ranks `trace.cycle0.rank1.json`. Times are on
    /// rank 0's clock, from the start of rank 0; clocks are compared when the schedule begins. Files that an earlier run
    /// left under other names stay.
    ///
    /// # Errors
    ///
    /// [`Error::is_io`] if the file cannot be written.
    pub fn write_trace(&self, path: impl AsRef<Path>) -> Result<()> {
        let mut path = trace_file::of_cycle(path.as_ref(), self.number);
        if self.ranks > 1 {
            path = trace_file::of_rank(&path, self.trace.rank);
        }
        put(&path, core::slice::from_ref(&self.trace), TraceStart::Rank0)
    }
}

/// The program's closure, which is called at the end of each cycle.
pub(super) type OnCycle = Box<dyn FnMut(&Cycle) + Send>;

/// The schedule in progress.
#[derive(Default)]
pub(super) struct Profiling {
    /// Set while a schedule runs: every step reads it, without a lock.
    runs: AtomicBool,
    state: Mutex<ProfilerState>,
}

#[derive(Default)]
struct ProfilerState {
    begun: u64,
    current: Option<Profile>,
}

struct Profile {
    /// The number of cycles so far.
    cycles: u64,
    /// The number of optimizer steps before it.
    first: u64,
    /// The number of optimizer steps before those that are kept.
    kept_from: u64,
    number: u64,
    on_cycle: OnCycle,
    schedule: ProfilerSchedule,
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

    /// Notes the end of an optimizer step, the `done`th of this process.
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

impl Profile {
    /// Switches the recorder for the step after `done`; `before` is the phase of the step before it.
    fn enter(&mut self, recorder: &Recorder, done: u64, before: SchedulePhase) {
        let mode = match self.schedule.phase(done.saturating_sub(self.first)) {
            SchedulePhase::Idle => RecordMode::Off,
            SchedulePhase::WarmUp => RecordMode::Discarded,
            // The cycle continues.
            SchedulePhase::Active | SchedulePhase::Last if before == SchedulePhase::Active => {
                return;
            }
            SchedulePhase::Active | SchedulePhase::Last => {
                self.kept_from = done;
                RecordMode::Kept
            }
        };
        recorder.switch(mode, done);
    }
}

/// Refuses traces of cycles that cannot be written, before there is anything to lose.
pub(crate) fn check_cycles(path: &Path) -> Result<()> {
    let named = path.file_stem().is_some() && !path.is_dir();
    let found = match named {
        true => TraceFile::find(&trace_file::of_cycle(path, 0)).map(drop),
        false => Err(std::io::Error::other("it is a folder: name a file in it")),
    };
    found.map_err(|error| {
        Error::config(format!(
            "the traces of cycles cannot be written beside `{}`: {error}; name a file in a folder that \
             exists and takes files",
            path.display()
        ))
    })
}
