//! Recording by a schedule: the profiler, and the cycles that the program gets.

use core::fmt;
use core::str::FromStr;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use accelerator_host::sync::Mutex;

use super::recorder::{RecordMode, Recorder};
use super::summary::StepSummary;
use super::trace::{self, RankTrace, TraceFile, TraceStart};
use crate::core::error::{Error, Result};

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
    pub(super) ranks: usize,
    pub(super) trace: RankTrace,
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
        let mut path = trace::of_cycle(path.as_ref(), self.number);
        if self.ranks > 1 {
            path = trace::of_rank(&path, self.trace.rank);
        }
        trace::put(&path, core::slice::from_ref(&self.trace), TraceStart::Rank0)
    }
}

pub(super) type OnCycle = Box<dyn FnMut(&Cycle) + Send>;

#[derive(Default)]
pub(super) struct Profiling {
    /// Set while a schedule runs: every step reads it, without a lock.
    pub(super) runs: AtomicBool,
    pub(super) state: Mutex<ProfilerState>,
}

#[derive(Default)]
pub(super) struct ProfilerState {
    pub(super) begun: u64,
    pub(super) current: Option<Profile>,
}

pub(super) struct Profile {
    pub(super) cycles: u64,
    /// The number of optimizer steps before it.
    pub(super) first: u64,
    /// The number of optimizer steps before those that are kept.
    pub(super) kept_from: u64,
    pub(super) number: u64,
    pub(super) on_cycle: OnCycle,
    pub(super) schedule: ProfilerSchedule,
}

impl Profile {
    /// Switches the recorder for the step after `done`; `before` is the phase of the step before it.
    pub(super) fn enter(&mut self, recorder: &Recorder, done: u64, before: SchedulePhase) {
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
        true => TraceFile::find(&trace::of_cycle(path, 0)).map(drop),
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

/// The steps that are recorded, in cycles: some wait, some warm up, and some are kept.
///
/// The steps are the optimizer's, counted from where recording is asked for. The first
/// [`skip_first`](Self::with_skip_first) are let go by, once; then each cycle has
/// [`wait`](Self::with_wait) steps that cost next to nothing, [`warm_up`](Self::with_warm_up) steps that
/// are recorded and thrown away, and `active` ones that are kept. After [`repeat`](Self::with_repeat)
/// cycles there is nothing more; 0 is without end. These are the rules of `torch.profiler.schedule`.
///
/// As text it reads `active=3,wait=1,warm_up=1,repeat=2,skip_first=10`, in any order; all but `active`
/// may be left out.
///
/// ```
/// use accelerator::timeline::ProfilerSchedule;
///
/// let schedule = ProfilerSchedule::new(2).with_wait(1).with_warm_up(1).with_repeat(1).with_skip_first(1);
/// assert_eq!("active=2,wait=1,warm_up=1,repeat=1,skip_first=1".parse(), Ok(schedule));
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[must_use]
pub struct ProfilerSchedule {
    active: u64,
    repeat: u64,
    skip_first: u64,
    wait: u64,
    warm_up: u64,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum SchedulePhase {
    /// The step is not looked at. Torch calls it `NONE`.
    Idle,
    /// The step is recorded, and thrown away: what is slow the first time is slow here. `WARMUP`.
    WarmUp,
    /// The step is recorded and kept. `RECORD`.
    Active,
    /// The last of the active ones: the cycle is complete when it ends. `RECORD_AND_SAVE`.
    Last,
}

impl ProfilerSchedule {
    /// Cycles of so many active steps, with nothing between them, without end. There must be at least
    /// one.
    pub fn new(active: u64) -> Self {
        Self {
            active,
            repeat: 0,
            skip_first: 0,
            wait: 0,
            warm_up: 0,
        }
    }

    /// Sets the number of cycles; 0, the default, is without end.
    pub fn with_repeat(self, repeat: u64) -> Self {
        Self { repeat, ..self }
    }

    /// Sets how many steps go before the first cycle. Default: 0.
    pub fn with_skip_first(self, skip_first: u64) -> Self {
        Self { skip_first, ..self }
    }

    /// Sets how many idle steps begin each cycle. Default: 0.
    pub fn with_wait(self, wait: u64) -> Self {
        Self { wait, ..self }
    }

    /// Sets how many steps of each cycle are recorded and thrown away. Default: 0.
    pub fn with_warm_up(self, warm_up: u64) -> Self {
        Self { warm_up, ..self }
    }

    /// Returns the phase of the step that comes after `step` others.
    pub(super) fn phase(&self, step: u64) -> SchedulePhase {
        let Some(step) = step.checked_sub(self.skip_first) else {
            return SchedulePhase::Idle;
        };
        let length = self.length();
        if self.active == 0 || (self.repeat > 0 && step / length >= self.repeat) {
            return SchedulePhase::Idle;
        }
        match step % length {
            place if place < self.wait => SchedulePhase::Idle,
            place if place < self.wait.saturating_add(self.warm_up) => SchedulePhase::WarmUp,
            place if place < length - 1 => SchedulePhase::Active,
            _ => SchedulePhase::Last,
        }
    }

    fn cycles(&self, steps: u64) -> u64 {
        if self.active == 0 {
            return 0;
        }
        let cycles = steps.saturating_sub(self.skip_first) / self.length();
        match self.repeat {
            0 => cycles,
            repeat => cycles.min(repeat),
        }
    }

    pub(super) fn is_over(&self, steps: u64) -> bool {
        self.repeat > 0 && self.cycles(steps) == self.repeat
    }

    /// Refuses one that records nothing.
    pub(crate) fn check(&self) -> Result<()> {
        match self.active {
            0 => Err(Error::config(
                "the schedule of the trace has 0 active steps; expected at least 1",
            )),
            _ => Ok(()),
        }
    }

    fn length(&self) -> u64 {
        let before = self.wait.saturating_add(self.warm_up);
        before.saturating_add(self.active).max(1)
    }
}

impl fmt::Display for ProfilerSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            active,
            repeat,
            skip_first,
            wait,
            warm_up,
        } = self;
        write!(
            f,
            "active={active},wait={wait},warm_up={warm_up},repeat={repeat},skip_first={skip_first}"
        )
    }
}

impl FromStr for ProfilerSchedule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |what: String| {
            format!(
                "{what}; expected for example `active=3,wait=1,warm_up=1,repeat=2,skip_first=10`"
            )
        };
        let mut schedule = Self::new(0);
        let mut named: Vec<&str> = Vec::new();
        for part in text.split(',') {
            let (name, number) = part
                .split_once('=')
                .ok_or_else(|| wrong(format!("found `{part}`")))?;
            let (name, number) = (name.trim(), number.trim());
            let number: u64 = number
                .parse()
                .map_err(|_| wrong(format!("`{name}` is `{number}`, and no whole number")))?;
            let place = match name {
                "active" => &mut schedule.active,
                "repeat" => &mut schedule.repeat,
                "skip_first" => &mut schedule.skip_first,
                "wait" => &mut schedule.wait,
                "warm_up" => &mut schedule.warm_up,
                _ => return Err(wrong(format!("`{name}` is not known"))),
            };
            *place = number;
            if named.contains(&name) {
                return Err(wrong(format!("`{name}` is there twice")));
            }
            named.push(name);
        }
        match schedule.active {
            0 => Err(wrong("there is no active step".to_owned())),
            _ => Ok(schedule),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::profiler::SchedulePhase::{Active, Idle, Last, WarmUp};

    /// `N`, `W`, `R` and `S` for torch's `NONE`, `WARMUP`, `RECORD` and `RECORD_AND_SAVE`.
    fn letters(schedule: ProfilerSchedule, steps: u64) -> String {
        let letter = |step| match schedule.phase(step) {
            Idle => 'N',
            WarmUp => 'W',
            Active => 'R',
            Last => 'S',
        };
        (0..steps).map(letter).collect()
    }

    /// Compares with the answers of `torch.profiler.schedule`, worked out from its rules by hand.
    #[test]
    fn c24_phases_are_those_of_torch() {
        let all = |active, wait, warm_up, repeat, skip_first| {
            ProfilerSchedule::new(active)
                .with_wait(wait)
                .with_warm_up(warm_up)
                .with_repeat(repeat)
                .with_skip_first(skip_first)
        };
        for (schedule, expected) in [
            (all(3, 1, 1, 2, 0), "NWRRSNWRRSNNNN"),
            (all(3, 1, 1, 0, 0), "NWRRSNWRRSNWRR"),
            (all(2, 1, 1, 2, 1), "NNWRSNWRSNNNNN"),
            (all(1, 0, 0, 0, 0), "SSSSSSSSSSSSSS"),
            (all(1, 0, 0, 3, 2), "NNSSSNNNNNNNNN"),
            (all(2, 0, 0, 1, 0), "RSNNNNNNNNNNNN"),
            (all(1, 0, 2, 0, 3), "NNNWWSWWSWWSWW"),
            (all(2, 3, 0, 1, 0), "NNNRSNNNNNNNNN"),
            (all(4, 0, 1, 1, 12), "NNNNNNNNNNNNWR"),
        ] {
            assert_eq!(letters(schedule, 14), expected, "{schedule}");
        }
    }

    /// Accelerate's own test counts the calls of `on_trace_ready`.
    #[test]
    fn c24_the_schedule_counts_as_accelerates_test_does() {
        for (wait, warm_up, active, repeat, skip_first) in [
            (1, 1, 2, 1, 0),
            (2, 2, 2, 2, 0),
            (0, 1, 3, 3, 1),
            (3, 2, 1, 0, 2),
            (1, 0, 1, 0, 1),
        ] {
            let schedule = ProfilerSchedule::new(active)
                .with_wait(wait)
                .with_warm_up(warm_up)
                .with_repeat(repeat)
                .with_skip_first(skip_first);
            for steps in 0..100 {
                let cycles = u64::max(steps, skip_first) - skip_first;
                let cycles = cycles / (wait + warm_up + active);
                let expected = if repeat > 0 {
                    cycles.min(repeat)
                } else {
                    cycles
                };
                let saved = (0..steps).filter(|step| schedule.phase(*step) == Last);
                assert_eq!(saved.count() as u64, expected, "{schedule} at {steps}");
                assert_eq!(schedule.cycles(steps), expected);
                let over = (steps..steps + 50).all(|step| schedule.phase(step) == Idle);
                assert_eq!(schedule.is_over(steps), over, "{schedule} at {steps}");
            }
        }
    }

    #[test]
    fn a_schedule_is_read_as_it_is_written() {
        let schedule = ProfilerSchedule::new(3).with_wait(1).with_repeat(2);
        assert_eq!(schedule.to_string().parse(), Ok(schedule));
        assert_eq!("repeat = 2, active=3, wait=1".parse(), Ok(schedule));
        for wrong in [
            "",
            "3",
            "active=0",
            "wait=1",
            "active=x",
            "active=1,active=2",
            "active=1,on=2",
        ] {
            let error = wrong.parse::<ProfilerSchedule>().unwrap_err();
            assert!(error.contains("active=3,wait=1"), "{error}");
        }
        assert!(ProfilerSchedule::new(0).check().unwrap_err().is_config());
        // No number is too large.
        let long = ProfilerSchedule::new(u64::MAX)
            .with_wait(u64::MAX)
            .with_warm_up(u64::MAX);
        assert_eq!(long.with_repeat(u64::MAX).phase(u64::MAX), Idle);
        assert_eq!(
            (
                ProfilerSchedule::new(0).phase(3),
                ProfilerSchedule::new(0).cycles(9)
            ),
            (Idle, 0)
        );
    }
}
