use core::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use accelerator_collective::ProcessGroup;
use accelerator_host::sync::Mutex;

use super::clock::{ClockSync, PURPOSE};
use super::profiler_schedule::{ProfilerSchedule, SchedulePhase};
use super::recorder::{RecordMode, Recorder, Recording};
use super::summary::StepSummary;
use super::trace::RankTrace;
use super::trace_file;
use super::{Timeline, TraceFile, put};
use crate::core::error::{Error, Result};
use crate::core::user_message;

/// Records by a [`ProfilerSchedule`] for as long as it lives; see
/// [`Accelerator::profile`](crate::Accelerator::profile).
///
/// ```
/// use accelerator::prelude::*;
/// use accelerator::timeline::ProfilerSchedule;
/// # use burn::optim::SgdConfig;
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn::tensor::Tensor;
/// # let accelerator = Accelerator::new()?;
/// # let device = accelerator.device();
/// # let model: Linear = accelerator.prepare(LinearConfig::new(2, 1).init(&device))?;
/// # let (mut model, mut optimizer) = (model, accelerator.prepare(SgdConfig::new().init())?);
///
/// let schedule = ProfilerSchedule::new(2).with_wait(1);
/// let profiler = accelerator.profile_with(schedule, |cycle| {
///     assert_eq!(cycle.first_step, 3 * cycle.number + 1);
///     assert_eq!(cycle.summary.steps, 2);
/// })?;
/// for _ in 0..6 {
///     let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
///     let gradients = accelerator.backward(loss, &model, 4)?;
///     model = optimizer.step(0.1, model, gradients);
/// }
/// assert_eq!(profiler.cycles(), 2);
/// # drop(profiler);
/// # Ok::<(), Error>(())
/// ```
#[must_use = "recording ends when this is dropped"]
pub struct Profiler {
    timeline: Timeline,
    number: u64,
}

impl Profiler {
    /// Returns the number of cycles that are complete, or were cut off in the end.
    pub fn cycles(&self) -> u64 {
        let state = self.timeline.profiling().state.lock();
        match &state.current {
            Some(profile) if profile.number == self.number => profile.cycles,
            _ => state
                .last
                .filter(|last| last.0 == self.number)
                .map_or(0, |last| last.1),
        }
    }
}

impl Drop for Profiler {
    fn drop(&mut self) {
        self.timeline.end(Some(self.number), CycleValue::Steps);
    }
}

impl fmt::Debug for Profiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Profiler")
            .field("cycles", &self.cycles())
            .finish_non_exhaustive()
    }
}

/// The steps that one cycle of a [`ProfilerSchedule`] kept on this rank, with their summary.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Cycle {
    /// The number of the cycle, from 0.
    pub number: u64,
    /// The number of optimizer steps that this process had done before the first that is kept.
    pub first_step: u64,
    /// The summary of the kept steps. If recording was ended early, they may be fewer than the schedule's.
    pub summary: StepSummary,
}

/// The destination of cycles.
pub(crate) enum Output {
    Call(Box<dyn FnMut(&Cycle) + Send>),
    /// Writes each cycle beside this file.
    Trace(PathBuf),
}

/// The condition under which a cycle that is not complete is worth keeping.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum CycleValue {
    /// Any event will do, since each rank writes its own.
    Events,
    /// A step is needed, which all ranks have done alike.
    Steps,
}

/// The schedule that runs, and what it has left to write.
#[derive(Default)]
pub(super) struct Profiling {
    /// Set while a schedule runs, or while a trace waits: looked at in every step, without a lock.
    runs: AtomicBool,
    waits: AtomicBool,
    state: Mutex<ProfilerState>,
}

#[derive(Default)]
struct ProfilerState {
    begun: u64,
    current: Option<Profile>,
    /// The number of the profile that ended last, and its cycles.
    last: Option<(u64, u64)>,
    /// The last comparison of the clocks.
    met: ClockSync,
    ready: Vec<FinishedCycle>,
}

struct Profile {
    /// The number of cycles so far.
    cycles: u64,
    /// The optimizer steps before it.
    first: u64,
    /// The optimizer steps before those that are kept.
    kept_from: u64,
    number: u64,
    output: Output,
    schedule: ProfilerSchedule,
}

/// A trace of this rank that all are to make one of.
struct FinishedCycle {
    path: PathBuf,
    trace: RankTrace,
}

impl Timeline {
    /// Begins to record by a schedule, and gives its number; every rank does. Where clocks are to be
    /// compared, the ranks communicate.
    #[track_caller]
    pub(crate) fn begin(
        &self,
        group: &ProcessGroup,
        schedule: ProfilerSchedule,
        output: Output,
    ) -> Result<u64> {
        // Of a schedule before, whose times lie between other meetings.
        self.deliver(group)?;
        let recorder = self.recorder_of(group, Recording::Nothing)?;
        let met = match output {
            Output::Call(_) => ClockSync::default(),
            Output::Trace(_) => ClockSync::hold(group, recorder.anchor())?,
        };
        recorder.begin_schedule();
        let done = self.steps();
        let mut state = self.profiling().state.lock();
        state.met = met;
        state.begun += 1;
        let mut profile = Profile {
            cycles: 0,
            first: done,
            kept_from: done,
            number: state.begun,
            output,
            schedule,
        };
        profile.enter(recorder, done, SchedulePhase::Idle);
        let number = profile.number;
        state.current = Some(profile);
        self.profiling().runs.store(true, Ordering::Relaxed);
        Ok(number)
    }

    /// An optimizer step has ended, the `done`th of this process.
    pub(super) fn advance(&self, done: u64) {
        let profiling = self.profiling();
        if !profiling.runs.load(Ordering::Relaxed) {
            return;
        }
        let Some(recorder) = self.any_recorder() else {
            return;
        };
        // Out of the lock: a closure of the program may be called.
        let Some(mut profile) = profiling.state.lock().current.take() else {
            return;
        };
        let steps = done.saturating_sub(profile.first);
        let before = profile.schedule.phase(steps.saturating_sub(1));
        if before == SchedulePhase::Last {
            self.cut(&mut profile, recorder, CycleValue::Steps);
        }
        if profile.schedule.is_over(steps) {
            self.retire((profile.number, profile.cycles), recorder);
        } else {
            profile.enter(recorder, done, before);
            profiling.state.lock().current = Some(profile);
        }
    }

    /// Ends the schedule of that number, or whichever runs; what it has kept is to be written.
    pub(super) fn end(&self, number: Option<u64>, worth: CycleValue) {
        let mut state = self.profiling().state.lock();
        let runs = state.current.as_ref().map(|profile| profile.number);
        if number.is_some() && number != runs {
            return;
        }
        let taken = state.current.take();
        drop(state);
        if let (Some(mut profile), Some(recorder)) = (taken, self.any_recorder()) {
            self.cut(&mut profile, recorder, worth);
            self.retire((profile.number, profile.cycles), recorder);
        }
    }

    /// Ends the schedule that runs, and writes the rest.
    #[track_caller]
    pub(crate) fn finish(&self, group: &ProcessGroup) -> Result<()> {
        self.end(None, CycleValue::Steps);
        self.deliver(group)
    }

    /// Gathers the cycles that are complete, and lets rank 0 write them; nothing, in one branch, where
    /// there are none. If ranks are missing, this one writes its own.
    #[track_caller]
    pub(crate) fn deliver(&self, group: &ProcessGroup) -> Result<()> {
        let profiling = self.profiling();
        if !profiling.waits.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (ready, before, recorder) = {
            let mut state = profiling.state.lock();
            profiling.waits.store(false, Ordering::Relaxed);
            let ready = std::mem::take(&mut state.ready);
            (ready, state.met, self.any_recorder())
        };
        let Some(recorder) = recorder else {
            return Ok(());
        };
        let mut lost = None;
        let met = match ClockSync::hold(group, recorder.anchor()) {
            Ok(met) => met,
            Err(error) => {
                lost = Some(error);
                before
            }
        };
        profiling.state.lock().met = met;
        for mut one in ready {
            one.trace.clocks = vec![before, met];
            if lost.is_none() {
                match group.for_purpose(PURPOSE).gather_object(&one.trace, 0) {
                    Ok(None) => continue,
                    Ok(Some(ranks)) => {
                        trace_file::clear_parts(&one.path);
                        keep(&one.path, &ranks);
                        continue;
                    }
                    Err(error) => lost = Some(error.into()),
                }
            }
            keep(
                &trace_file::of_rank(&one.path, one.trace.rank),
                &[one.trace],
            );
        }
        lost.map_or(Ok(()), Err)
    }

    /// Writes what this rank alone has kept, and waits for nobody.
    pub(crate) fn write_own_cycles(&self, world_size: usize) {
        self.end(None, CycleValue::Events);
        let mut state = self.profiling().state.lock();
        let (ready, met) = (std::mem::take(&mut state.ready), state.met);
        drop(state);
        for mut one in ready {
            one.trace.clocks = vec![met];
            let path = match world_size {
                1 => one.path,
                _ => trace_file::of_rank(&one.path, one.trace.rank),
            };
            keep(&path, &[one.trace]);
        }
    }

    /// Begins a recording that all ranks have agreed on, which ends with what this returns.
    pub(crate) fn begin_profile(
        &self,
        group: &ProcessGroup,
        schedule: ProfilerSchedule,
        output: Output,
    ) -> Result<Profiler> {
        Ok(Profiler {
            number: self.begin(group, schedule, output)?,
            timeline: self.clone(),
        })
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

    /// Takes what the cycle has kept, if it is worth it.
    fn cut(&self, profile: &mut Profile, recorder: &Recorder, worth: CycleValue) {
        let summary = recorder.cycle();
        let number = profile.cycles;
        match &mut profile.output {
            Output::Call(call) => {
                // A panic is on its way already.
                let Some(summary) = summary.filter(|_| !std::thread::panicking()) else {
                    return;
                };
                let _guard = EndOnPanic {
                    last: (profile.number, number),
                    recorder,
                    timeline: self,
                };
                call(&Cycle {
                    number,
                    first_step: profile.kept_from,
                    summary,
                });
            }
            Output::Trace(path) => {
                if summary.is_none() && (worth == CycleValue::Steps || !recorder.keeps_some()) {
                    return;
                }
                let ready = FinishedCycle {
                    path: trace_file::of_cycle(path, number),
                    trace: RankTrace::new(self.0.rank, recorder),
                };
                let mut state = self.profiling().state.lock();
                state.ready.push(ready);
                self.profiling().waits.store(true, Ordering::Relaxed);
            }
        }
        profile.cycles += 1;
    }

    /// Ends recording by the profile of a number, after so many cycles.
    fn retire(&self, last: (u64, u64), recorder: &Recorder) {
        recorder.end_schedule();
        self.profiling().state.lock().last = Some(last);
        self.profiling().runs.store(false, Ordering::Relaxed);
    }

    fn profiling(&self) -> &Profiling {
        &self.0.profiling
    }

    /// The recorder, whether or not it is on.
    fn any_recorder(&self) -> Option<&Recorder> {
        self.0.recorder.get().map(Arc::as_ref)
    }
}

/// Ends recording where a closure of the program panics: its profile is gone with the panic.
struct EndOnPanic<'a> {
    last: (u64, u64),
    recorder: &'a Recorder,
    timeline: &'a Timeline,
}

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.timeline.retire(self.last, self.recorder);
        }
    }
}

impl Profile {
    /// Sets the recorder to the step that comes after `done`, where the one before was in that phase.
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

/// Writes a trace, or says that it is lost: training does not depend on it.
fn keep(path: &Path, ranks: &[RankTrace]) {
    if let Err(error) = put(path, ranks) {
        user_message::warn(&format!("a trace is lost: {error:?}"));
    }
}
