//! The state machine of a running group of processes.
//!
//! It is pure: it takes events and the time and returns actions, so that every order of events can be tested without a
//! process. `../README.md` shows its states.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use signal_hook::consts::signal;

use super::root_cause::{Evidence, FailureClass, RootCause};
use super::signals::is_job_control;
use crate::event::Event;
use crate::process::End;

/// The time to wait, when a rank fails, for notices that others have joined the job: ranks that have not are ended at
/// once, ranks that have get the grace period.
const JOIN_DELAY: Duration = Duration::from_millis(200);

/// The time that the group may take to end before the launcher names the ranks that it waits for.
const WAITING_NOTICE_AFTER: Duration = Duration::from_secs(1);

/// The time for which a process may outlive SIGKILL (a device driver can hold it) before it is abandoned.
const ABANDON_AFTER: Duration = Duration::from_secs(10);

/// The time between the loss of a rank and the recovery of the others. They do not continue at once, because ranks of
/// one host are lost one after the other.
const LOSS_SETTLE: Duration = Duration::from_millis(50);

/// The time for which the others wait until a rank that was killed has ended.
const LOST_ENDS_WITHIN: Duration = Duration::from_secs(5);

/// The time within which all survivors must form the next group. It is long because a rank learns of the loss only at
/// the end of its step.
const RECOVER_TIMEOUT: Duration = Duration::from_secs(600);

/// An action for the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Send this signal to the process groups of these members.
    Signal {
        signal: i32,
        /// The members, of whom some may have ended: they can have left children.
        ranks: Vec<usize>,
    },
    /// Report that these ranks have not ended yet.
    Waiting(Vec<usize>),
}

/// The cause for which a group was ended, when it did not end by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// This rank failed first.
    Failure(usize),
    /// The launcher received this signal.
    Signal(i32),
    /// The launcher's output was closed.
    OutputClosed,
    /// All ranks were preempted: they have saved, and ended with the exit code for it.
    Preempted,
}

/// The recovery of a group from a loss.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Recovery {
    /// More ranks may turn out to be lost.
    Settling,
    /// These ranks form the next group.
    Of(Vec<usize>),
}

/// A group of processes from its start to the end of its last member.
#[derive(Clone, Debug)]
pub(super) struct GroupMachine {
    members: Vec<Member>,
    evidence: Evidence,
    phase: Phase,
    grace: Duration,
    /// The first signal that asked the launcher to end, whatever came before.
    asked: Option<i32>,
    /// The rank whose failing end was seen first.
    first_failure: Option<usize>,
    /// True if a launcher of the job received a signal that it forwarded.
    has_forwarded: bool,
    /// The class of the failure that the group is ended for.
    class: Option<FailureClass>,
    /// The smallest number of ranks that may continue after a loss; `None` if the group does not continue.
    least_survivors: Option<NonZeroUsize>,
}

impl GroupMachine {
    /// A group of `size` running processes; `grace` lies between SIGTERM and SIGKILL, and is what
    /// the survivors of a failure have to end by themselves.
    pub(super) fn new(size: usize, grace: Duration) -> Self {
        Self {
            members: vec![Member::default(); size],
            evidence: Evidence::default(),
            phase: Phase::Running,
            grace,
            asked: None,
            first_failure: None,
            has_forwarded: false,
            class: None,
            least_survivors: None,
        }
    }

    /// Lets the other members continue after a loss if at least `least_survivors` are left.
    pub(super) fn with_survivors(self, least_survivors: Option<NonZeroUsize>) -> Self {
        Self {
            least_survivors,
            ..self
        }
    }

    /// Handles one event; returns the actions that follow.
    pub(super) fn step(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::Ended { rank, end } => self.record_end(rank, end),
            Event::Joined(rank) => {
                if let Some(member) = self.members.get_mut(rank) {
                    member.has_joined = true;
                }
            }
            Event::Closed(rank) => {
                if let Some(member) = self.members.get_mut(rank) {
                    member.has_closed = true;
                }
            }
            Event::FailureReported { rank, mut blamed } => {
                blamed.retain(|&rank| rank < self.members.len());
                // A report from a rank that was already signalled proves nothing.
                if self
                    .members
                    .get(rank)
                    .is_some_and(|member| !member.signalled)
                {
                    self.evidence.blamed(rank, &blamed);
                }
            }
            Event::Signal(signal) => self.signal(signal, now, &mut actions),
            Event::OutputClosed => {
                if !matches!(self.phase, Phase::Grace { .. } | Phase::Terminating { .. }) {
                    let cause = self.cause().unwrap_or(Cause::OutputClosed);
                    self.terminate_all(cause, signal::SIGTERM, now, &mut actions);
                }
            }
            Event::ForwardSignal(signal) if is_job_control(signal) => {}
            Event::ForwardSignal(_) | Event::ForwardedElsewhere => self.has_forwarded = true,
            Event::Drained | Event::Message | Event::Tick => {}
        }
        self.diagnose(now);
        self.apply_timeouts(now, &mut actions);
        actions
    }

    /// Returns `true` if nothing has failed or asks the group to end, and some process runs.
    pub(super) fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running)
            && self.members.iter().any(|member| member.end.is_none())
    }

    /// Returns how the group continues after a loss; `None` if no rank was lost or the group does not continue.
    pub(super) fn recovery(&self) -> Option<Recovery> {
        match self.phase {
            Phase::Recovering { ready_at: None, .. } => Some(Recovery::Of(self.survivors())),
            Phase::Recovering { .. } => Some(Recovery::Settling),
            Phase::Diagnosing { .. } if self.least_survivors.is_some() => Some(Recovery::Settling),
            _ => None,
        }
    }

    /// Counts survivors as lost, which the caller kills.
    pub(super) fn lose(&mut self, ranks: &[usize]) {
        for rank in ranks {
            if let Some(member) = self.members.get_mut(*rank) {
                member.signalled = true;
                member.is_survivor = false;
            }
        }
    }

    /// Ends the group with the next step: its survivors cannot continue.
    pub(super) fn abandon_recovery(&mut self) {
        if let Phase::Recovering { until, .. } = &mut self.phase {
            *until = Instant::now();
        }
    }

    /// Returns the time of the next call of [`GroupMachine::step`], if nothing happens before.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Running | Phase::Abandoned { .. } => None,
            Phase::Diagnosing { until, .. } => Some(*until),
            Phase::Recovering {
                ready_at, until, ..
            } => Some(ready_at.unwrap_or(*until)),
            Phase::Grace {
                until, report_at, ..
            } => [Some(*until), *report_at].into_iter().flatten().min(),
            Phase::Terminating {
                kill_at,
                report_at,
                abandon_at,
                ..
            } => [*kill_at, *report_at, *abandon_at]
                .into_iter()
                .flatten()
                .min(),
        }
    }

    /// Returns `true` if every process has ended or been abandoned, and late failure reports need not be awaited.
    pub(super) fn is_over(&self) -> bool {
        let has_ended = self.members.iter().all(|member| member.end.is_some());
        let may_hear = self.members.len() > 1
            && self.members.iter().any(|member| member.has_joined)
            && matches!(self.phase, Phase::Diagnosing { .. })
            && matches!(self.cause(), Some(Cause::Failure(_)));
        matches!(self.phase, Phase::Abandoned { .. }) || (has_ended && !may_hear)
    }

    /// Returns the cause for which the group ended, if not every rank succeeded by itself.
    ///
    /// Returns `None` if every rank succeeded after all, whatever they reported about each other.
    pub(super) fn cause(&self) -> Option<Cause> {
        let has_succeeded =
            |member: &Member| member.by_itself && member.end.is_some_and(End::is_success);
        if self.members.iter().all(has_succeeded) {
            return None;
        }
        // Also where a signal of the launcher told them to.
        let is_preempted = |member: &Member| member.end == Some(End::PREEMPTED);
        if self.members.iter().all(is_preempted) {
            return Some(Cause::Preempted);
        }
        match self.phase {
            Phase::Running => None,
            Phase::Diagnosing { root_cause, .. } => Some(Cause::Failure(root_cause.rank)),
            Phase::Recovering { failed_rank, .. } => Some(Cause::Failure(failed_rank)),
            Phase::Grace { cause, .. }
            | Phase::Terminating { cause, .. }
            | Phase::Abandoned { cause } => Some(cause),
        }
    }

    /// The first signal that asked the launcher to end, whatever the group ended of.
    pub(super) fn asked_to_end(&self) -> Option<i32> {
        self.asked
    }

    /// Returns `true` if the launcher itself was notified that the job is to end: by a signal that asked it to, or by
    /// one that it forwarded.
    pub(super) fn was_notified(&self) -> bool {
        self.asked.is_some() || self.has_forwarded
    }

    pub(super) fn end(&self, rank: usize) -> Option<End> {
        self.members.get(rank)?.end
    }

    /// Returns `true` if `rank` ended before the launcher signalled it.
    pub(super) fn ended_by_itself(&self, rank: usize) -> bool {
        self.members
            .get(rank)
            .is_some_and(|member| member.end.is_some() && member.by_itself)
    }

    /// Returns `true` if SIGKILL has been sent to the group.
    pub(super) fn was_killed(&self) -> bool {
        matches!(
            self.phase,
            Phase::Terminating { kill_at: None, .. } | Phase::Abandoned { .. }
        )
    }

    /// The exit code of the job: that of the rank that failed first, 128 + signal, or 0.
    ///
    /// If only the launcher ended that rank, or it ended with code 0, it has no failing code: then
    /// it is that of the first rank that failed because of it.
    pub(super) fn exit_code(&self) -> u8 {
        match self.cause() {
            None => 0,
            Some(Cause::Failure(failed_rank)) => {
                let own = |rank| {
                    let end = self.end(rank).filter(|_| self.ended_by_itself(rank))?;
                    (!end.is_success()).then_some(end.exit_code())
                };
                own(failed_rank)
                    .or_else(|| self.first_failure.and_then(own))
                    .unwrap_or(1)
            }
            Some(Cause::Signal(signal)) => End::Signal(signal).exit_code(),
            Some(Cause::OutputClosed) => End::Signal(signal::SIGPIPE).exit_code(),
            Some(Cause::Preempted) => End::PREEMPTED.exit_code(),
        }
    }

    fn record_end(&mut self, rank: usize, end: End) {
        let Some(member) = self.members.get_mut(rank) else {
            return;
        };
        if member.end.is_some() {
            return;
        }
        member.end = Some(end);
        // No signal takes a host away.
        member.by_itself = !member.signalled || end == End::Lost;
        if member.by_itself {
            self.evidence.ended(rank, end);
            if !end.is_success() {
                self.first_failure.get_or_insert(rank);
            }
        }
        if end == End::Lost {
            self.revise(rank);
        }
    }

    /// Makes the loss of the host of `rank` the cause, if the group is being ended because ranks were silent or blamed
    /// others: ranks can find out about the silence of a host before the launcher does.
    fn revise(&mut self, rank: usize) {
        let follows = matches!(
            self.class,
            Some(
                FailureClass::BlamedSilent
                    | FailureClass::MutuallyBlamed
                    | FailureClass::ErrorExit
                    | FailureClass::Secondary
            )
        );
        match &mut self.phase {
            Phase::Recovering { failed_rank, .. } if follows => *failed_rank = rank,
            Phase::Grace { cause, .. } | Phase::Terminating { cause, .. }
                if follows && matches!(cause, Cause::Failure(_)) =>
            {
                *cause = Cause::Failure(rank);
            }
            _ => return,
        }
        self.class = Some(FailureClass::HostLost);
    }

    fn signal(&mut self, signal: i32, now: Instant, actions: &mut Vec<Action>) {
        self.asked.get_or_insert(signal);
        match &mut self.phase {
            Phase::Running => self.terminate_all(Cause::Signal(signal), signal, now, actions),
            Phase::Diagnosing { root_cause, .. } => {
                let cause = Cause::Failure(root_cause.rank);
                self.terminate_all(cause, signal, now, actions);
            }
            // The loss would have been survived.
            Phase::Recovering { .. } => {
                self.terminate_all(Cause::Signal(signal), signal, now, actions);
            }
            Phase::Grace { cause, .. } => {
                let cause = *cause;
                self.terminate_all(cause, signal, now, actions);
            }
            // Asked again, the launcher waits no longer.
            Phase::Terminating { kill_at, .. } => {
                if kill_at.is_some() {
                    *kill_at = Some(now);
                }
            }
            Phase::Abandoned { .. } => {}
        }
    }

    /// Updates the root cause, as long as no rank was signalled.
    fn diagnose(&mut self, now: Instant) {
        let since = match self.phase {
            Phase::Running => now,
            Phase::Diagnosing { since, .. } => since,
            _ => return,
        };
        let is_joined = self.members.iter().any(|member| member.has_joined);
        for (rank, member) in self.members.iter().enumerate() {
            if member.end == Some(End::Code(0)) {
                let is_awaited = is_joined && !member.has_joined;
                self.evidence.awaited(rank, is_awaited);
                let left_unclosed = member.has_joined && !member.has_closed;
                self.evidence.left_unclosed(rank, left_unclosed);
            }
        }
        // While ranks join, some can be known to have joined and others not yet.
        let are_joining = is_joined
            && self
                .members
                .iter()
                .any(|member| member.end.is_none() && !member.has_joined);
        let joining = if are_joining {
            JOIN_DELAY
        } else {
            Duration::ZERO
        };
        let root_cause = self.evidence.root_cause();
        self.class = root_cause.map(|root_cause| root_cause.class);
        self.phase = match root_cause {
            Some(root_cause) => Phase::Diagnosing {
                since,
                root_cause,
                until: since + root_cause.max_wait().max(joining),
            },
            None => Phase::Running,
        };
    }

    fn apply_timeouts(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.is_over() {
            return;
        }
        if let Phase::Diagnosing {
            root_cause, until, ..
        } = self.phase
            && now >= until
        {
            match self.may_recover(root_cause.rank) {
                true => self.start_recovery(root_cause.rank, now, actions),
                false => self.start_grace(root_cause.rank, now, actions),
            }
        }
        self.check_recovery(now, actions);
        if let Phase::Grace { cause, until, .. } = self.phase
            && (now >= until || self.survivors().is_empty())
        {
            self.terminate_survivors(cause, until, now, actions);
        }
        let alive: Vec<usize> = (0..self.members.len())
            .filter(|&rank| self.members[rank].end.is_none())
            .collect();
        let all = self.all();
        if let Phase::Grace { report_at, .. } | Phase::Terminating { report_at, .. } =
            &mut self.phase
            && report_at.is_some_and(|at| now >= at)
        {
            actions.push(Action::Waiting(alive));
            *report_at = None;
        }
        let Phase::Terminating {
            cause,
            kill_at,
            abandon_at,
            ..
        } = &mut self.phase
        else {
            return;
        };
        if kill_at.is_some_and(|at| now >= at) {
            actions.push(Action::Signal {
                signal: signal::SIGKILL,
                ranks: all,
            });
            *kill_at = None;
            *abandon_at = Some(now + ABANDON_AFTER);
        }
        if abandon_at.is_some_and(|at| now >= at) {
            self.phase = Phase::Abandoned { cause: *cause };
        }
    }

    /// Returns `true` if the others can continue without the rank that failed first and those that ended with it.
    fn may_recover(&self, failed_rank: usize) -> bool {
        let Some(least) = self.least_survivors else {
            return false;
        };
        let has_left = |member: &Member| member.has_closed || member.end == Some(End::Code(0));
        let others = self.members.iter().enumerate();
        let alive = others.filter(|(rank, member)| *rank != failed_rank && member.end.is_none());
        let alive: Vec<&Member> = alive.map(|(_, member)| member).collect();
        self.class != Some(FailureClass::Preempted)
            && alive.len() >= least.get()
            && alive
                .iter()
                .all(|member| member.has_joined && !member.signalled)
            && !self.members.iter().any(has_left)
    }

    fn start_recovery(&mut self, failed_rank: usize, now: Instant, actions: &mut Vec<Action>) {
        for (rank, member) in self.members.iter_mut().enumerate() {
            member.signalled |= rank == failed_rank;
            member.is_survivor = member.end.is_none() && !member.signalled;
        }
        // A rank that only hangs must not come back.
        let lost = self.members.iter().enumerate();
        let lost = lost.filter_map(|(rank, member)| (!member.is_survivor).then_some(rank));
        actions.push(Action::Signal {
            signal: signal::SIGKILL,
            ranks: lost.collect(),
        });
        self.phase = Phase::Recovering {
            failed_rank,
            ready_at: Some(now + LOSS_SETTLE),
            waits_for_lost: false,
            until: now + RECOVER_TIMEOUT,
        };
    }

    /// Ends the group if its survivors do not continue after all.
    fn check_recovery(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let least = self.least_survivors.map_or(0, NonZeroUsize::get);
        let are_enough = self.survivors().len() >= least;
        let gave_up =
            |member: &Member| member.is_survivor && matches!(member.end, Some(End::Code(_)));
        let has_given_up = self.members.iter().any(gave_up);
        let is_lost = |member: &&Member| !member.is_survivor;
        let mut lost = self.members.iter().filter(is_lost);
        let are_lost_ended = lost.all(|member| member.end.is_some());
        let Phase::Recovering {
            failed_rank,
            ready_at,
            waits_for_lost,
            until,
        } = &mut self.phase
        else {
            return;
        };
        if ready_at.is_some_and(|at| now >= at) {
            // What it holds, such as the lock of a run, is free when it has ended.
            *ready_at = match are_lost_ended || *waits_for_lost {
                true => None,
                false => Some(now + LOST_ENDS_WITHIN),
            };
            *waits_for_lost = true;
        } else if *waits_for_lost && are_lost_ended {
            *ready_at = None;
        }
        if !are_enough || has_given_up || now >= *until {
            let failed_rank = *failed_rank;
            self.start_grace(failed_rank, now, actions);
        }
    }

    /// Ends all but the ranks that learn of the failure from the store: those get the grace period.
    fn start_grace(&mut self, failed_rank: usize, now: Instant, actions: &mut Vec<Action>) {
        let survives = |rank: usize, member: &Member| {
            member.has_joined && member.end.is_none() && rank != failed_rank
        };
        let ranks: Vec<usize> = (0..self.members.len())
            .filter(|&rank| !survives(rank, &self.members[rank]))
            .collect();
        for &rank in &ranks {
            self.members[rank].signalled = true;
        }
        actions.push(Action::Signal {
            signal: signal::SIGTERM,
            ranks,
        });
        self.phase = Phase::Grace {
            cause: Cause::Failure(failed_rank),
            until: now + self.grace,
            report_at: Some(now + WAITING_NOTICE_AFTER),
        };
    }

    /// Sends SIGTERM to survivors that did not end by themselves, and SIGKILL to those that had it before.
    fn terminate_survivors(
        &mut self,
        cause: Cause,
        until: Instant,
        now: Instant,
        actions: &mut Vec<Action>,
    ) {
        let survivors = self.survivors();
        let report_at = match self.phase {
            Phase::Grace { report_at, .. } => report_at,
            _ => None,
        };
        let kill_at = if survivors.is_empty() {
            until
        } else {
            let signalled = self
                .all()
                .into_iter()
                .filter(|rank| !survivors.contains(rank));
            actions.push(Action::Signal {
                signal: signal::SIGKILL,
                ranks: signalled.collect(),
            });
            for &rank in &survivors {
                self.members[rank].signalled = true;
            }
            actions.push(Action::Signal {
                signal: signal::SIGTERM,
                ranks: survivors,
            });
            now + self.grace
        };
        self.phase = Phase::Terminating {
            cause,
            kill_at: Some(kill_at),
            report_at,
            abandon_at: None,
        };
    }

    fn terminate_all(
        &mut self,
        cause: Cause,
        signal: i32,
        now: Instant,
        actions: &mut Vec<Action>,
    ) {
        for member in &mut self.members {
            member.signalled = true;
        }
        actions.push(Action::Signal {
            signal,
            ranks: self.all(),
        });
        self.phase = Phase::Terminating {
            cause,
            kill_at: Some(now + self.grace),
            report_at: (cause != Cause::OutputClosed).then_some(now + WAITING_NOTICE_AFTER),
            abandon_at: None,
        };
    }

    /// The ranks that run and were not signalled.
    fn survivors(&self) -> Vec<usize> {
        let survives = |member: &Member| member.end.is_none() && !member.signalled;
        (0..self.members.len())
            .filter(|&rank| survives(&self.members[rank]))
            .collect()
    }

    fn all(&self) -> Vec<usize> {
        (0..self.members.len()).collect()
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Member {
    end: Option<End>,
    /// True if it has been sent a signal.
    signalled: bool,
    /// True if it ended before.
    by_itself: bool,
    /// True if it has joined the store.
    has_joined: bool,
    /// True if it has closed its group.
    has_closed: bool,
    /// True if it is to continue after the loss of another member.
    is_survivor: bool,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// Nothing has failed.
    Running,
    /// Something has failed; more evidence may arrive.
    Diagnosing {
        since: Instant,
        root_cause: RootCause,
        until: Instant,
    },
    /// A rank was lost, and the others are to form a group without it; `ready_at` is `None` once they can get places.
    Recovering {
        failed_rank: usize,
        ready_at: Option<Instant>,
        /// True if that moment has passed before, and the lost ranks had not ended.
        waits_for_lost: bool,
        until: Instant,
    },
    /// A rank failed; ranks that learned of it from the store may end by themselves, the others got SIGTERM.
    Grace {
        cause: Cause,
        until: Instant,
        report_at: Option<Instant>,
    },
    /// The whole group was signalled; `kill_at` is `None` once SIGKILL has been sent.
    Terminating {
        cause: Cause,
        kill_at: Option<Instant>,
        report_at: Option<Instant>,
        abandon_at: Option<Instant>,
    },
    /// A process did not end on SIGKILL.
    Abandoned { cause: Cause },
}

#[cfg(test)]
mod tests;
