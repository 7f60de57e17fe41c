//! What a running group of processes is, what may happen to it, and what is then to be done.
//!
//! A pure state machine: it sees events and the time and answers with actions, so that
//! every order of events can be tested without a process. `README.md` beside this file
//! shows its states.

use std::time::{Duration, Instant};

use signal_hook::consts::signal;

/// How long after a first failing exit code the launcher waits for a death by signal.
///
/// A killed rank's sockets are closed by the kernel an instant before its end can be
/// observed, so another rank that fails because of it can be seen first. Within this time a
/// rank that was killed is taken for the culprit.
const SETTLE: Duration = Duration::from_millis(50);

/// The exit code of a Rust program whose `main` returned an error: what a rank ends with that
/// lost another.
const ERROR: i32 = 1;

/// How long the launcher waits where the first failing exit code was [`ERROR`].
///
/// A rank that panics leaves its group while it unwinds, a little before its process ends, so a
/// rank that lost it can end first. Within this time any other failing code takes the blame.
const SETTLE_ERROR: Duration = Duration::from_millis(250);

/// How long the group may take to end before the launcher says whom it waits for.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long a process may outlive SIGKILL (a device driver can hold it) before it is left.
const ABANDON: Duration = Duration::from_secs(10);

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// It exited with this code.
    Code(i32),
    /// It was killed by this signal.
    Signal(i32),
}

impl End {
    /// The exit code a shell would report: the code itself, or 128 + signal.
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            // The kernel keeps eight bits of an exit code.
            Self::Code(code) => (code & 0xff) as u8,
            Self::Signal(signal) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
        }
    }

    fn is_success(self) -> bool {
        self == Self::Code(0)
    }
}

impl std::fmt::Display for End {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(formatter, "exit code {code}"),
            Self::Signal(signal) => match signal_hook::low_level::signal_name(*signal) {
                Some(name) => write!(formatter, "killed by {name}"),
                None => write!(formatter, "killed by signal {signal}"),
            },
        }
    }
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A process of the group ended.
    Ended {
        /// Its place in the group.
        rank: usize,
        /// How it ended.
        end: End,
    },
    /// The launcher received a signal that asks it to end.
    Signal(i32),
    /// Nobody reads the launcher's output any more.
    OutputClosed,
    /// Nothing; time has passed.
    Tick,
}

/// What is to be done about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Send this signal to the process group of every member.
    Signal(i32),
    /// Say that these ranks have not ended yet.
    Waiting(Vec<usize>),
}

/// Why a group was ended, when it did not end by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// This rank failed first.
    Failure(usize),
    /// The launcher was told to end by this signal.
    Signal(i32),
    /// The launcher's output was closed.
    OutputClosed,
}

/// A group of processes from its start to the end of its last member.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    ends: Vec<Option<End>>,
    /// The ranks that had ended when the launcher first signalled the group.
    ended_by_themselves: Vec<bool>,
    phase: Phase,
    grace: Duration,
}

impl Job {
    /// A group of `size` running processes; `grace` lies between SIGTERM and SIGKILL.
    pub(crate) fn new(size: usize, grace: Duration) -> Self {
        Self {
            ends: vec![None; size],
            ended_by_themselves: vec![false; size],
            phase: Phase::Running,
            grace,
        }
    }

    /// Takes in one event and says what to do.
    pub(crate) fn step(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::Ended { rank, end } => self.end_of(rank, end, now, &mut actions),
            Event::Signal(signal) => self.signal(signal, now, &mut actions),
            Event::OutputClosed => {
                if !matches!(self.phase, Phase::Ending { .. }) {
                    self.begin_ending(Cause::OutputClosed, signal::SIGTERM, now, &mut actions);
                }
            }
            Event::Tick => {}
        }
        self.pass_time(now, &mut actions);
        actions
    }

    /// When [`Job::step`] wants to be called again, if nothing happens before.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Running => None,
            Phase::Settling { until, .. } => Some(*until),
            Phase::Ending {
                kill_at,
                report_at,
                abandon_at,
                ..
            } => [*kill_at, *report_at, *abandon_at]
                .into_iter()
                .flatten()
                .min(),
            Phase::Abandoned { .. } => None,
        }
    }

    /// Whether every process has ended, or is given up.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Abandoned { .. }) || self.ends.iter().all(Option::is_some)
    }

    /// Why the group ended, if not every rank succeeded by itself.
    pub(crate) fn cause(&self) -> Option<Cause> {
        match self.phase {
            Phase::Running => None,
            Phase::Settling { first, .. } => Some(Cause::Failure(first)),
            Phase::Ending { cause, .. } | Phase::Abandoned { cause } => Some(cause),
        }
    }

    /// How `rank` ended, if it did.
    pub(crate) fn end(&self, rank: usize) -> Option<End> {
        self.ends.get(rank).copied().flatten()
    }

    /// Whether `rank` ended before the launcher signalled the group.
    pub(crate) fn ended_by_itself(&self, rank: usize) -> bool {
        match self.phase {
            Phase::Running | Phase::Settling { .. } => self.end(rank).is_some(),
            _ => self.ended_by_themselves.get(rank).copied().unwrap_or(false),
        }
    }

    /// Whether SIGKILL has been sent to the group.
    pub(crate) fn was_killed(&self) -> bool {
        matches!(
            self.phase,
            Phase::Ending { kill_at: None, .. } | Phase::Abandoned { .. }
        )
    }

    /// The exit code of the whole: the culprit's, 128 + signal, or 0.
    pub(crate) fn exit_code(&self) -> u8 {
        match self.cause() {
            None => 0,
            Some(Cause::Failure(rank)) => self.end(rank).map_or(1, End::exit_code),
            Some(Cause::Signal(signal)) => End::Signal(signal).exit_code(),
            Some(Cause::OutputClosed) => End::Signal(signal::SIGPIPE).exit_code(),
        }
    }

    fn end_of(&mut self, rank: usize, end: End, now: Instant, actions: &mut Vec<Action>) {
        let Some(slot) = self.ends.get_mut(rank) else {
            return;
        };
        if slot.is_some() {
            return;
        }
        *slot = Some(end);
        if end.is_success() {
            return;
        }
        match (&self.phase, end) {
            (Phase::Running, End::Code(code)) => {
                let settle = if code == ERROR { SETTLE_ERROR } else { SETTLE };
                self.phase = Phase::Settling {
                    first: rank,
                    until: now + settle,
                };
            }
            (&Phase::Settling { first, until }, End::Code(code))
                if code != ERROR && self.end(first) == Some(End::Code(ERROR)) =>
            {
                self.phase = Phase::Settling { first: rank, until };
            }
            (Phase::Running | Phase::Settling { .. }, End::Signal(_)) => {
                self.begin_ending(Cause::Failure(rank), signal::SIGTERM, now, actions);
            }
            _ => {}
        }
    }

    fn signal(&mut self, signal: i32, now: Instant, actions: &mut Vec<Action>) {
        match &mut self.phase {
            Phase::Running => self.begin_ending(Cause::Signal(signal), signal, now, actions),
            Phase::Settling { first, .. } => {
                let cause = Cause::Failure(*first);
                self.begin_ending(cause, signal, now, actions);
            }
            // Asked again, the launcher waits no longer.
            Phase::Ending { kill_at, .. } => {
                if kill_at.is_some() {
                    *kill_at = Some(now);
                }
            }
            Phase::Abandoned { .. } => {}
        }
    }

    fn pass_time(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.is_over() {
            return;
        }
        if let Phase::Settling { first, until } = self.phase
            && now >= until
        {
            self.begin_ending(Cause::Failure(first), signal::SIGTERM, now, actions);
        }
        let alive: Vec<usize> = (0..self.ends.len())
            .filter(|&rank| self.ends[rank].is_none())
            .collect();
        let Phase::Ending {
            cause,
            kill_at,
            report_at,
            abandon_at,
        } = &mut self.phase
        else {
            return;
        };
        if kill_at.is_some_and(|at| now >= at) {
            actions.push(Action::Signal(signal::SIGKILL));
            *kill_at = None;
            *abandon_at = Some(now + ABANDON);
        }
        if report_at.is_some_and(|at| now >= at) {
            actions.push(Action::Waiting(alive));
            *report_at = None;
        }
        if abandon_at.is_some_and(|at| now >= at) {
            self.phase = Phase::Abandoned { cause: *cause };
        }
    }

    fn begin_ending(&mut self, cause: Cause, signal: i32, now: Instant, actions: &mut Vec<Action>) {
        for (by_itself, end) in self.ended_by_themselves.iter_mut().zip(&self.ends) {
            *by_itself = end.is_some();
        }
        actions.push(Action::Signal(signal));
        self.phase = Phase::Ending {
            cause,
            kill_at: Some(now + self.grace),
            report_at: (cause != Cause::OutputClosed).then_some(now + PATIENCE),
            abandon_at: None,
        };
    }
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// Nothing has failed.
    Running,
    /// A rank failed by its exit code; a death by signal may still turn up.
    Settling { first: usize, until: Instant },
    /// The group was signalled; `kill_at` is `None` once SIGKILL has been sent.
    Ending {
        cause: Cause,
        kill_at: Option<Instant>,
        report_at: Option<Instant>,
        abandon_at: Option<Instant>,
    },
    /// A process did not end on SIGKILL.
    Abandoned { cause: Cause },
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(5);

    fn job(size: usize) -> (Job, Instant) {
        (Job::new(size, GRACE), Instant::now())
    }

    fn ended(rank: usize, end: End) -> Event {
        Event::Ended { rank, end }
    }

    #[test]
    fn success_of_all_is_success() {
        let (mut job, now) = job(2);
        assert_eq!(job.step(ended(1, End::Code(0)), now), []);
        assert!(!job.is_over());
        assert_eq!(job.deadline(), None);
        assert_eq!(job.step(ended(0, End::Code(0)), now), []);
        assert!(job.is_over());
        assert_eq!((job.exit_code(), job.cause()), (0, None));
    }

    #[test]
    fn first_failure_ends_the_group_and_gives_the_code() {
        let (mut job, now) = job(3);
        assert_eq!(job.step(ended(1, End::Code(7)), now), []);
        assert_eq!(job.deadline(), Some(now + SETTLE));
        let later = now + SETTLE;
        assert_eq!(
            job.step(Event::Tick, later),
            [Action::Signal(signal::SIGTERM)]
        );
        job.step(ended(0, End::Signal(signal::SIGTERM)), later);
        job.step(ended(2, End::Code(1)), later);
        assert!(job.is_over());
        assert_eq!((job.exit_code(), job.cause()), (7, Some(Cause::Failure(1))));
        assert!(job.ended_by_itself(1));
        assert!(!job.ended_by_itself(0));
    }

    #[test]
    fn a_death_by_signal_just_after_a_failing_exit_is_the_culprit() {
        let (mut job, now) = job(2);
        job.step(ended(0, End::Code(1)), now);
        let actions = job.step(ended(1, End::Signal(signal::SIGSEGV)), now + SETTLE / 2);
        assert_eq!(actions, [Action::Signal(signal::SIGTERM)]);
        assert!(job.is_over());
        assert_eq!(
            (job.exit_code(), job.cause()),
            (139, Some(Cause::Failure(1)))
        );
    }

    #[test]
    fn another_code_just_after_an_error_is_the_culprit() {
        // Rank 0 lost rank 1, which panicked and ended a little later.
        let (mut job, now) = job(3);
        job.step(ended(0, End::Code(ERROR)), now);
        assert_eq!(job.step(ended(1, End::Code(101)), now + SETTLE), []);
        assert_eq!(job.deadline(), Some(now + SETTLE_ERROR));
        // The first such code stays.
        job.step(ended(2, End::Code(9)), now + SETTLE);
        assert_eq!(
            (job.exit_code(), job.cause()),
            (101, Some(Cause::Failure(1)))
        );
    }

    #[test]
    fn a_death_by_our_own_signal_is_not_the_culprit() {
        let (mut job, now) = job(2);
        job.step(ended(0, End::Code(3)), now);
        job.step(Event::Tick, now + SETTLE);
        job.step(ended(1, End::Signal(signal::SIGTERM)), now + SETTLE);
        assert_eq!(job.exit_code(), 3);
    }

    #[test]
    fn all_failing_at_once_needs_no_settling() {
        let (mut job, now) = job(2);
        job.step(ended(1, End::Code(4)), now);
        job.step(ended(0, End::Code(5)), now);
        assert!(job.is_over());
        assert_eq!(job.exit_code(), 4);
        assert!(job.ended_by_itself(0));
    }

    #[test]
    fn grace_then_kill_then_abandon() {
        let (mut job, now) = job(1);
        assert_eq!(
            job.step(Event::Signal(signal::SIGINT), now),
            [Action::Signal(signal::SIGINT)]
        );
        assert_eq!(job.deadline(), Some(now + PATIENCE));
        assert_eq!(
            job.step(Event::Tick, now + PATIENCE),
            [Action::Waiting(vec![0])]
        );
        assert_eq!(job.deadline(), Some(now + GRACE));
        assert_eq!(
            job.step(Event::Tick, now + GRACE),
            [Action::Signal(signal::SIGKILL)]
        );
        assert!(job.was_killed());
        assert!(!job.is_over());
        assert_eq!(job.step(Event::Tick, now + GRACE + ABANDON), []);
        assert!(job.is_over());
        assert_eq!(job.exit_code(), 130);
    }

    #[test]
    fn a_second_signal_kills_at_once() {
        let (mut job, now) = job(2);
        job.step(Event::Signal(signal::SIGTERM), now);
        assert_eq!(
            job.step(Event::Signal(signal::SIGINT), now),
            [Action::Signal(signal::SIGKILL)]
        );
        assert_eq!(job.step(Event::Signal(signal::SIGINT), now), []);
        assert_eq!(job.exit_code(), 143);
    }

    #[test]
    fn ranks_that_succeed_on_a_signal_do_not_change_the_code() {
        let (mut job, now) = job(1);
        job.step(Event::Signal(signal::SIGTERM), now);
        job.step(ended(0, End::Code(0)), now);
        assert_eq!(job.exit_code(), 143);
    }

    #[test]
    fn closed_output_ends_quietly() {
        let (mut job, now) = job(1);
        assert_eq!(
            job.step(Event::OutputClosed, now),
            [Action::Signal(signal::SIGTERM)]
        );
        assert_eq!(job.step(Event::OutputClosed, now), []);
        assert_eq!(job.step(Event::Tick, now + PATIENCE), []);
        assert_eq!(job.exit_code(), 141);
    }

    #[test]
    fn no_grace_kills_in_the_same_step() {
        let mut job = Job::new(1, Duration::ZERO);
        let actions = job.step(Event::Signal(signal::SIGINT), Instant::now());
        assert_eq!(
            actions,
            [
                Action::Signal(signal::SIGINT),
                Action::Signal(signal::SIGKILL)
            ]
        );
    }
}
