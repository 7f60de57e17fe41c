//! What a running group of processes is, what may happen to it, and what is then to be done.
//!
//! A pure state machine: it sees events and the time and answers with actions, so that
//! every order of events can be tested without a process. `README.md` beside this file
//! shows its states.

mod event;

use std::time::{Duration, Instant};

use signal_hook::consts::signal;

use crate::blame::{Evidence, Verdict};
pub(crate) use event::{Action, Cause, End, Event};

/// How long to wait, when a rank fails, for word that others have joined the job: what has not is
/// ended at once, and what has may end by itself.
const JOINING: Duration = Duration::from_millis(200);

/// How long the group may take to end before the launcher says whom it waits for.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long a process may outlive SIGKILL (a device driver can hold it) before it is left.
const ABANDON: Duration = Duration::from_secs(10);

/// A group of processes from its start to the end of its last member.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    members: Vec<Member>,
    evidence: Evidence,
    phase: Phase,
    grace: Duration,
    /// The first signal that asked the launcher to end, whatever came before.
    asked: Option<i32>,
    /// The rank whose failing end was seen first.
    first_failure: Option<usize>,
}

impl Job {
    /// A group of `size` running processes; `grace` lies between SIGTERM and SIGKILL, and is what
    /// the survivors of a failure have to end by themselves.
    pub(crate) fn new(size: usize, grace: Duration) -> Self {
        Self {
            members: vec![Member::default(); size],
            evidence: Evidence::default(),
            phase: Phase::Running,
            grace,
            asked: None,
            first_failure: None,
        }
    }

    /// Takes in one event and says what to do.
    pub(crate) fn step(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::Ended { rank, end } => self.end_of(rank, end),
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
            Event::Accused { rank, mut accused } => {
                accused.retain(|&rank| rank < self.members.len());
                // What a rank says that was told to end proves nothing.
                if self
                    .members
                    .get(rank)
                    .is_some_and(|member| !member.signalled)
                {
                    self.evidence.accused(rank, &accused);
                }
            }
            Event::Signal(signal) => self.signal(signal, now, &mut actions),
            Event::OutputClosed => {
                if !matches!(self.phase, Phase::Parting { .. } | Phase::Ending { .. }) {
                    let cause = self.cause().unwrap_or(Cause::OutputClosed);
                    self.end_all(cause, signal::SIGTERM, now, &mut actions);
                }
            }
            Event::Tick => {}
        }
        self.settle(now);
        self.pass_time(now, &mut actions);
        actions
    }

    /// When [`Job::step`] wants to be called again, if nothing happens before.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Running | Phase::Abandoned { .. } => None,
            Phase::Settling { until, .. } => Some(*until),
            Phase::Parting {
                until, report_at, ..
            } => [Some(*until), *report_at].into_iter().flatten().min(),
            Phase::Ending {
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

    /// Whether every process has ended, or is given up.
    ///
    /// What ranks have told the store can arrive behind their ends, and is waited for.
    pub(crate) fn is_over(&self) -> bool {
        let has_ended = self.members.iter().all(|member| member.end.is_some());
        let may_hear = self.members.len() > 1
            && self.members.iter().any(|member| member.has_joined)
            && matches!(self.phase, Phase::Settling { .. })
            && self.cause().is_some();
        matches!(self.phase, Phase::Abandoned { .. }) || (has_ended && !may_hear)
    }

    /// Why the group ended, if not every rank succeeded by itself.
    ///
    /// Where every rank succeeded after all there is none, whatever they said of each other.
    pub(crate) fn cause(&self) -> Option<Cause> {
        let has_succeeded =
            |member: &Member| member.by_itself && member.end.is_some_and(End::is_success);
        if self.members.iter().all(has_succeeded) {
            return None;
        }
        match self.phase {
            Phase::Running => None,
            Phase::Settling { verdict, .. } => Some(Cause::Failure(verdict.rank)),
            Phase::Parting { cause, .. }
            | Phase::Ending { cause, .. }
            | Phase::Abandoned { cause } => Some(cause),
        }
    }

    /// The first signal that asked the launcher to end, whatever the group ended of.
    pub(crate) fn asked_to_end(&self) -> Option<i32> {
        self.asked
    }

    /// How `rank` ended, if it did.
    pub(crate) fn end(&self, rank: usize) -> Option<End> {
        self.members.get(rank)?.end
    }

    /// Whether `rank` ended before the launcher signalled it.
    pub(crate) fn ended_by_itself(&self, rank: usize) -> bool {
        self.members
            .get(rank)
            .is_some_and(|member| member.end.is_some() && member.by_itself)
    }

    /// Whether SIGKILL has been sent to the group.
    pub(crate) fn was_killed(&self) -> bool {
        matches!(
            self.phase,
            Phase::Ending { kill_at: None, .. } | Phase::Abandoned { .. }
        )
    }

    /// The exit code of the whole: the culprit's, 128 + signal, or 0.
    ///
    /// A culprit that only the launcher ended, or that left with code 0, has none of its own: then
    /// it is that of the first rank that failed because of it.
    pub(crate) fn exit_code(&self) -> u8 {
        match self.cause() {
            None => 0,
            Some(Cause::Failure(culprit)) => {
                let own = |rank| {
                    let end = self.end(rank).filter(|_| self.ended_by_itself(rank))?;
                    (!end.is_success()).then_some(end.exit_code())
                };
                own(culprit)
                    .or_else(|| self.first_failure.and_then(own))
                    .unwrap_or(1)
            }
            Some(Cause::Signal(signal)) => End::Signal(signal).exit_code(),
            Some(Cause::OutputClosed) => End::Signal(signal::SIGPIPE).exit_code(),
        }
    }

    fn end_of(&mut self, rank: usize, end: End) {
        let Some(member) = self.members.get_mut(rank) else {
            return;
        };
        if member.end.is_some() {
            return;
        }
        member.end = Some(end);
        member.by_itself = !member.signalled;
        if member.by_itself {
            self.evidence.ended(rank, end);
            if !end.is_success() {
                self.first_failure.get_or_insert(rank);
            }
        }
    }

    fn signal(&mut self, signal: i32, now: Instant, actions: &mut Vec<Action>) {
        self.asked.get_or_insert(signal);
        match &mut self.phase {
            Phase::Running => self.end_all(Cause::Signal(signal), signal, now, actions),
            Phase::Settling { verdict, .. } => {
                let cause = Cause::Failure(verdict.rank);
                self.end_all(cause, signal, now, actions);
            }
            Phase::Parting { cause, .. } => {
                let cause = *cause;
                self.end_all(cause, signal, now, actions);
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

    /// Goes by the evidence as long as nobody was signalled.
    fn settle(&mut self, now: Instant) {
        let since = match self.phase {
            Phase::Running => now,
            Phase::Settling { since, .. } => since,
            _ => return,
        };
        let is_joined = self.members.iter().any(|member| member.has_joined);
        for (rank, member) in self.members.iter().enumerate() {
            if member.end == Some(End::Code(0)) {
                let is_missed = is_joined && !member.has_joined;
                self.evidence.missed(rank, is_missed);
                let has_deserted = member.has_joined && !member.has_closed;
                self.evidence.deserted(rank, has_deserted);
            }
        }
        // Of ranks that are joining, some can be known to have joined and others not yet.
        let are_joining = is_joined
            && self
                .members
                .iter()
                .any(|member| member.end.is_none() && !member.has_joined);
        let joining = if are_joining { JOINING } else { Duration::ZERO };
        self.phase = match self.evidence.verdict() {
            Some(verdict) => Phase::Settling {
                since,
                verdict,
                until: since + verdict.patience().max(joining),
            },
            None => Phase::Running,
        };
    }

    fn pass_time(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.is_over() {
            return;
        }
        if let Phase::Settling { verdict, until, .. } = self.phase
            && now >= until
        {
            self.part(verdict.rank, now, actions);
        }
        if let Phase::Parting { cause, until, .. } = self.phase
            && (now >= until || self.survivors().is_empty())
        {
            self.end_survivors(cause, until, now, actions);
        }
        let alive: Vec<usize> = (0..self.members.len())
            .filter(|&rank| self.members[rank].end.is_none())
            .collect();
        let all = self.all();
        if let Phase::Parting { report_at, .. } | Phase::Ending { report_at, .. } = &mut self.phase
            && report_at.is_some_and(|at| now >= at)
        {
            actions.push(Action::Waiting(alive));
            *report_at = None;
        }
        let Phase::Ending {
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
            *abandon_at = Some(now + ABANDON);
        }
        if abandon_at.is_some_and(|at| now >= at) {
            self.phase = Phase::Abandoned { cause: *cause };
        }
    }

    /// Ends all but those that learn of the failure from the store: they may end by themselves.
    fn part(&mut self, culprit: usize, now: Instant, actions: &mut Vec<Action>) {
        let survives = |rank: usize, member: &Member| {
            member.has_joined && member.end.is_none() && rank != culprit
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
        self.phase = Phase::Parting {
            cause: Cause::Failure(culprit),
            until: now + self.grace,
            report_at: Some(now + PATIENCE),
        };
    }

    /// Ends the survivors that did not end by themselves; what was told before is killed then.
    fn end_survivors(
        &mut self,
        cause: Cause,
        until: Instant,
        now: Instant,
        actions: &mut Vec<Action>,
    ) {
        let survivors = self.survivors();
        let report_at = match self.phase {
            Phase::Parting { report_at, .. } => report_at,
            _ => None,
        };
        let kill_at = if survivors.is_empty() {
            until
        } else {
            let told = self
                .all()
                .into_iter()
                .filter(|rank| !survivors.contains(rank));
            actions.push(Action::Signal {
                signal: signal::SIGKILL,
                ranks: told.collect(),
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
        self.phase = Phase::Ending {
            cause,
            kill_at: Some(kill_at),
            report_at,
            abandon_at: None,
        };
    }

    fn end_all(&mut self, cause: Cause, signal: i32, now: Instant, actions: &mut Vec<Action>) {
        for member in &mut self.members {
            member.signalled = true;
        }
        actions.push(Action::Signal {
            signal,
            ranks: self.all(),
        });
        self.phase = Phase::Ending {
            cause,
            kill_at: Some(now + self.grace),
            report_at: (cause != Cause::OutputClosed).then_some(now + PATIENCE),
            abandon_at: None,
        };
    }

    /// The ranks that run and were not told to end.
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
    /// Whether it has been sent a signal.
    signalled: bool,
    /// Whether it ended before.
    by_itself: bool,
    /// Whether the store knows it.
    has_joined: bool,
    /// Whether it took leave of the store.
    has_closed: bool,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// Nothing has failed.
    Running,
    /// Something has failed; who was first may still turn up.
    Settling {
        since: Instant,
        verdict: Verdict,
        until: Instant,
    },
    /// A rank failed; those that the store told of it may end by themselves, the others are told.
    Parting {
        cause: Cause,
        until: Instant,
        report_at: Option<Instant>,
    },
    /// The whole group was signalled; `kill_at` is `None` once SIGKILL has been sent.
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
mod tests;
