//! The store as a pure state machine.

mod clock;
mod event;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use event::{JoinStage, Participant};

use super::{FailureReport, Report, locality::local_places};
use crate::{
    error::{Error, Kind, Seconds, list_ranks},
    liveness::{MAX_TIMEOUT, bounded, suspended_for},
    wire::message::{RankStatus, Registration},
};

pub(crate) use event::{
    Connection, NextPlaceVariables, RankMessage, Severity, StoreAction, StoreInput,
};

/// The ranks that have come to a rendezvous, their states, and the actions that follow from them.
///
/// ```text
/// gathering ── the last rank comes ──► connecting ── all are connected ──► together
///     │                                    │
///     └── deadline, contradiction,         └── a death, silence,
///         a death, silence ────► failed ◄───── a rank that gives up
/// ```
///
/// A rank that comes after the table is complete is refused, and changes nothing for the ranks in the table. Deaths and
/// silence are judged in [`StoreInput::Tick`] only, so that the timekeeper can first report that it was
/// [suspended](StoreInput::Suspended).
#[derive(Debug)]
pub(crate) struct StoreState {
    world_size: usize,
    ranks: BTreeMap<usize, Participant>,
    /// The shortest liveness timeout of all ranks that have registered.
    liveness: Duration,
    /// The time at which the first rank came.
    started: Option<Instant>,
    heartbeat_at: Instant,
    /// Other events, which the error lists if the rendezvous fails.
    notes: Vec<String>,
    /// The places in the next group of ranks that are not connected yet.
    next_places: BTreeMap<usize, NextPlaceVariables>,
    /// True once the table of addresses is complete.
    has_table: bool,
    phase: Phase,
    /// The actions that follow from the current event.
    actions: Vec<StoreAction>,
}

impl StoreState {
    pub(crate) fn new(world_size: usize) -> Self {
        Self {
            world_size,
            ranks: BTreeMap::new(),
            liveness: MAX_TIMEOUT,
            started: None,
            heartbeat_at: Instant::now(),
            notes: Vec::new(),
            next_places: BTreeMap::new(),
            has_table: false,
            phase: Phase::Gathering,
            actions: Vec::new(),
        }
    }

    /// Handles an event and returns the actions that follow from it.
    pub(crate) fn step(&mut self, event: StoreInput, now: Instant) -> Vec<StoreAction> {
        match event {
            StoreInput::Closing { host } => self.closing(host),
            StoreInput::Gone { connection } => self.gone(connection, now),
            StoreInput::Suspended => self.grant_fresh_period(now),
            StoreInput::Registered {
                connection,
                registration,
            } => self.registered(connection, registration, now),
            StoreInput::Message { rank, message } => self.on_message(rank, message, now),
            StoreInput::Rejected { note } => self.rejected(note),
            StoreInput::ExitNotice { rank, text } => self.exit_notice(rank, text, now),
            StoreInput::NextPlace { rank, place } => {
                self.next_places.insert(rank, place);
                self.tell_next_place(rank);
            }
            StoreInput::Tick => self.on_tick(now),
        }
        std::mem::take(&mut self.actions)
    }

    pub(crate) fn due(&self) -> Option<Instant> {
        if !self.is_meeting() {
            return None;
        }
        let gathering = matches!(self.phase, Phase::Gathering);
        let each = self.ranks.values().flat_map(|participant| {
            [
                gathering.then_some(participant.deadline),
                (gathering && participant.is_present()).then_some(participant.tell_at),
                self.loss_at(participant),
            ]
        });
        let beat = (!self.ranks.is_empty()).then_some(self.heartbeat_at);
        each.chain([beat]).flatten().min()
    }

    /// Checks if [`StoreInput::Tick`], which was `due`, comes so late that [`StoreInput::Suspended`] must precede it.
    pub(crate) fn was_suspended(&self, due: Option<Instant>, now: Instant) -> bool {
        let judging = self.is_meeting() && !self.ranks.is_empty();
        judging && suspended_for(due, now, self.liveness).is_some()
    }

    /// The ranks that the next [`StoreInput::Tick`] finds silent, with their connections.
    pub(crate) fn silent(&self, now: Instant) -> Vec<(usize, Connection)> {
        let ranks = self.ranks.iter().filter_map(|(rank, participant)| {
            self.loss_at(participant).filter(|at| *at <= now)?;
            Some((*rank, participant.connection?))
        });
        ranks.collect()
    }

    /// The registrations of all ranks that have come, with their states: a rank that may answer is silent until it does.
    pub(crate) fn participants(
        &self,
    ) -> impl Iterator<Item = (&Registration, RankStatus, Option<Connection>)> {
        self.ranks.values().map(|participant| {
            let state = match (participant.stage, participant.connection) {
                (JoinStage::Closed, _) | (_, None) => RankStatus::Gone,
                (JoinStage::Waiting, _) => RankStatus::Meeting,
                (JoinStage::Connected, _) => RankStatus::Silent,
            };
            (&participant.registration, state, participant.connection)
        })
    }

    /// Checks if this is the connection of a rank that was not refused.
    pub(crate) fn knows(&self, connection: Connection) -> bool {
        let mut ranks = self.ranks.values();
        ranks.any(|participant| participant.connection == Some(connection))
    }

    fn registered(&mut self, connection: Connection, registration: Registration, now: Instant) {
        let refusal = match &self.phase {
            Phase::Connecting | Phase::Together => {
                let first = self.ranks.get(&registration.rank).map(|x| &x.registration);
                match first.filter(|first| is_one_process(first, &registration)) {
                    Some(first) => Some(joined_already(first)),
                    None => Some(Error::about(
                        Kind::Rendezvous,
                        vec![registration.rank],
                        format!(
                            "rank {} comes too late: all {} ranks of this job have met already; is an \
                             old process still running, or another job using this port?",
                            registration.rank, self.world_size
                        ),
                    )),
                }
            }
            Phase::Failed(error) => Some(error.clone()),
            Phase::Gathering => None,
        };
        if let Some(error) = refusal {
            self.actions.push(StoreAction::Refuse { connection, error });
            return;
        }
        if let Err(error) = self.check(&registration) {
            let refused = error.clone();
            self.actions.push(StoreAction::Refuse {
                connection,
                error: refused,
            });
            self.fail(error);
            return;
        }
        if self.ranks.is_empty() {
            self.started.get_or_insert(now);
            self.heartbeat_at = now;
        }
        let Registration {
            rank, host, pid, ..
        } = registration.clone();
        let participant = Participant {
            connection: Some(connection),
            deadline: now + registration.connect_timeout.min(MAX_WAIT),
            heard: now,
            gone: None,
            ended: None,
            tell_at: now + TELL_AFTER,
            stage: JoinStage::Waiting,
            registration,
        };
        self.ranks.insert(rank, participant);
        let timeouts = self.ranks.values().map(|x| x.registration.liveness);
        self.liveness = bounded(timeouts.min().unwrap_or(MAX_TIMEOUT));
        self.report(Report::Joined { rank, host, pid });
        if !self.missing().is_empty() {
            return;
        }
        let ranks = self.ranks.values();
        let ranks: Vec<_> = ranks.map(|x| x.registration.clone()).collect();
        if let Err(error) = local_places(&ranks) {
            self.fail(error);
            return;
        }
        self.phase = Phase::Connecting;
        self.has_table = true;
        self.report(Report::Met);
        let connections = self.connections(|_| true);
        self.actions
            .push(StoreAction::Welcome { connections, ranks });
    }

    /// Fails if a registration contradicts what is known. It can never become right, so the rendezvous fails for
    /// everyone at once, with the contradiction as the reason.
    fn check(&self, new: &Registration) -> Result<(), Error> {
        if new.world_size != self.world_size {
            return Err(Error::about(
                Kind::Rendezvous,
                vec![new.rank],
                format!(
                    "rank {} (process {} on {}) came with a world size of {}, but this job has \
                     {}; WORLD_SIZE must be the same for every process",
                    new.rank, new.pid, new.host, new.world_size, self.world_size
                ),
            ));
        }
        if new.rank >= self.world_size {
            return Err(Error::about(
                Kind::Rendezvous,
                vec![new.rank],
                format!(
                    "process {} on {} came as rank {}, but the ranks of this job are 0 to {}",
                    new.pid,
                    new.host,
                    new.rank,
                    self.world_size - 1
                ),
            ));
        }
        if let Some(participant) = self.ranks.get(&new.rank)
            && participant.is_present()
        {
            let old = &participant.registration;
            if is_one_process(old, new) {
                return Err(joined_already(old));
            }
            return Err(Error::about(
                Kind::Rendezvous,
                vec![new.rank],
                format!(
                    "two processes came as rank {}: process {} on {} and process {} on {}; RANK \
                     must differ from process to process",
                    new.rank, old.pid, old.host, new.pid, new.host
                ),
            ));
        }
        let mut others = self
            .ranks
            .values()
            .filter(|participant| participant.is_present());
        match others.find(|participant| participant.registration.transport != new.transport) {
            Some(odd) => Err(differing_transports(&odd.registration, new)),
            None => Ok(()),
        }
    }

    fn on_message(&mut self, rank: usize, message: RankMessage, now: Instant) {
        let Some(participant) = self.ranks.get_mut(&rank) else {
            return;
        };
        participant.heard = now;
        match message {
            RankMessage::ReportFailure(error) => {
                let report = FailureReport::new(rank, &error);
                let self_reported = report.is_self_reported();
                let text = report.text.clone();
                self.report(Report::Failed(report));
                match self.phase {
                    Phase::Connecting => {
                        self.report_loss(rank, format!("it gave up: {text}"));
                        self.fail_except(error, Some(rank));
                    }
                    Phase::Together if self_reported => {
                        self.report_exit(rank, format!("it said: {text}"), Severity::ExitInfo);
                    }
                    _ => {}
                }
            }
            RankMessage::Connected => {
                if !matches!(self.phase, Phase::Connecting)
                    || participant.stage != JoinStage::Waiting
                {
                    return;
                }
                participant.stage = JoinStage::Connected;
                let ended = participant.ended.take();
                let mut ranks = self.ranks.values();
                if ranks.all(|participant| participant.stage != JoinStage::Waiting) {
                    self.phase = Phase::Together;
                }
                self.tell_next_place(rank);
                if let Some((text, _)) = ended {
                    self.report_loss(rank, text);
                }
            }
            RankMessage::Leave => match (participant.stage, &self.phase) {
                (JoinStage::Waiting, Phase::Connecting) => {
                    participant.stage = JoinStage::Closed;
                    self.lose(rank, "it left");
                }
                // There is no group to leave.
                (JoinStage::Waiting, _) => {}
                _ => {
                    participant.stage = JoinStage::Closed;
                    self.report(Report::Closed { rank });
                }
            },
            RankMessage::Heartbeat => {}
        }
    }

    /// Tells a rank its place in the next group, if the place is known and the rank is connected to the others. Before
    /// it is connected, the rank expects the table.
    fn tell_next_place(&mut self, rank: usize) {
        if self.has_connected(rank)
            && let Some(connection) = self.ranks[&rank].connection
            && let Some(place) = self.next_places.remove(&rank)
        {
            self.actions
                .push(StoreAction::TellNextPlace { connection, place });
        }
    }

    fn gone(&mut self, connection: Connection, now: Instant) {
        let mut ranks = self.ranks.values_mut();
        let Some(participant) = ranks.find(|x| x.connection == Some(connection)) else {
            return;
        };
        participant.connection = None;
        participant.gone = Some(now);
        if matches!(self.phase, Phase::Gathering) {
            let name = name(&participant.registration);
            self.note(format!("{name} came and went away again"));
        }
    }

    /// Handles the exit notice of an observer that saw a rank end. The rank's own final message may still be on its
    /// way, and may blame another rank; the notice then waits for it.
    fn exit_notice(&mut self, rank: usize, text: String, now: Instant) {
        if rank >= self.world_size {
            return;
        }
        if let Some(participant) = self.ranks.get_mut(&rank)
            && matches!(self.phase, Phase::Connecting)
            && participant.stage == JoinStage::Waiting
            && participant.connection.is_some()
        {
            participant.ended.get_or_insert((text, now));
            return;
        }
        match self.phase {
            Phase::Gathering => self.lose(rank, &text),
            Phase::Connecting if !self.has_connected(rank) => self.lose(rank, &text),
            // An end after a leave is no loss.
            _ if self.has_closed(rank) => self.report_exit(rank, text, Severity::ExitInfo),
            _ => self.report_loss(rank, text),
        }
    }

    fn rejected(&mut self, note: String) {
        self.note(note.clone());
        self.report(Report::Rejected { note });
    }

    /// Handles the end of the store: `host` is the rank that hosts it, or `None` if the launcher does.
    fn closing(&mut self, host: Option<usize>) {
        match (&self.phase, host) {
            (Phase::Gathering, _) => self.fail(Error::about(
                Kind::Rendezvous,
                host.into_iter().collect(),
                format!(
                    "the store was closed when {} of {} ranks had come; missing: {}",
                    self.present(),
                    self.world_size,
                    list_ranks(&self.missing())
                ),
            )),
            (Phase::Connecting, Some(rank)) if !self.has_connected(rank) => {
                self.lose(rank, "it ended, and the store with it,");
            }
            _ => {
                let mut ranks = self.ranks.iter();
                let ended = ranks.find_map(|(rank, x)| Some((*rank, x.ended.clone()?.0)));
                if let Some((rank, text)) = ended {
                    self.lose(rank, &text);
                }
                let connections = self.connections(|_| true);
                self.actions.push(StoreAction::CloseStore { connections });
            }
        }
    }

    fn report(&mut self, report: Report) {
        self.actions.push(StoreAction::Report(report));
    }

    fn note(&mut self, note: String) {
        if matches!(self.phase, Phase::Gathering) && self.notes.len() < MAX_NOTES {
            self.notes.push(note);
        }
    }

    fn connections(&self, which: impl Fn(&Participant) -> bool) -> Vec<Connection> {
        let ranks = self.ranks.values().filter(|participant| which(participant));
        ranks
            .filter_map(|participant| participant.connection)
            .collect()
    }

    fn missing(&self) -> Vec<usize> {
        let present = |rank: &usize| self.ranks.get(rank).is_some_and(Participant::is_present);
        (0..self.world_size).filter(|rank| !present(rank)).collect()
    }

    fn present(&self) -> usize {
        self.world_size - self.missing().len()
    }

    fn has_connected(&self, rank: usize) -> bool {
        let participant = self.ranks.get(&rank);
        participant.is_some_and(|participant| participant.stage != JoinStage::Waiting)
    }

    fn has_closed(&self, rank: usize) -> bool {
        let participant = self.ranks.get(&rank);
        participant.is_some_and(|participant| participant.stage == JoinStage::Closed)
    }

    fn is_meeting(&self) -> bool {
        matches!(self.phase, Phase::Gathering | Phase::Connecting)
    }
}

#[derive(Debug)]
enum Phase {
    Gathering,
    Connecting,
    Together,
    Failed(Error),
}

/// The longest wait to compute with, so that adding it to a point in time cannot overflow.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(365 * 24 * 3600);

/// The time within which a rank whose connection ended may come again.
pub(crate) const RECONNECT_TIME: Duration = Duration::from_millis(500);

/// The time that the launcher has to report how a process ended, counted from the end of the process's connection.
const EXIT_NOTICE_WAIT: Duration = Duration::from_millis(250);

/// The time that a process's final message has to arrive, counted from the launcher's report of the process's end.
const FINAL_MESSAGE_WAIT: Duration = Duration::from_millis(500);

/// The time after which the store first tells a waiting rank which ranks are missing.
const TELL_AFTER: Duration = Duration::from_secs(5);
/// The time between later messages of that kind.
const TELL_AGAIN: Duration = Duration::from_secs(30);

const MAX_NOTES: usize = 8;

impl StoreState {
    /// Handles the loss of a rank before the ranks are connected.
    fn lose(&mut self, rank: usize, cause: &str) {
        let error = self.lost(rank, cause);
        if let Some(participant) = self.ranks.get_mut(&rank) {
            participant.ended = None;
        }
        self.report_loss(rank, cause.to_owned());
        self.fail(error);
    }

    fn lost(&self, rank: usize, cause: &str) -> Error {
        let participant = self.ranks.get(&rank);
        let name = match participant {
            Some(participant) => name(&participant.registration),
            None => format!("rank {rank}"),
        };
        let when = match (&self.phase, participant) {
            (Phase::Gathering, None) => "before it joined",
            (Phase::Gathering, Some(_)) => "before the ranks had met",
            _ => "before the ranks were connected",
        };
        let end = cause.find([';', ':']).unwrap_or(cause.len());
        let (what, more) = cause.split_at(end);
        let hint = match (participant, what) {
            (None, "it ended with exit code 0") => ": does its program call Accelerator::new?",
            _ => "",
        };
        let message = match what.strip_prefix("it ") {
            Some(what) => format!("{name} {what} {when}{hint}{more}"),
            None => format!("{name} was lost {when}: {cause}"),
        };
        match participant {
            Some(Participant { registration, .. }) => {
                Error::blaming(Kind::PeerLost, registration.culprit(cause), message)
            }
            None => Error::about(Kind::PeerLost, vec![rank], message),
        }
    }

    /// Tells the ranks that have the table that one is lost. Even ranks that the store believes to be waiting are told:
    /// they may be connected already, or become so.
    fn report_loss(&mut self, rank: usize, text: String) {
        if self.has_table {
            self.report_exit(rank, text, Severity::RankLost);
        }
    }

    fn report_exit(&mut self, rank: usize, text: String, severity: Severity) {
        let connections = self.connections(|x| x.registration.rank != rank);
        self.actions.push(StoreAction::ReportExit {
            connections,
            rank,
            text,
            severity,
        });
    }

    fn overdue(&self, now: Instant) -> Error {
        let missing = self.missing();
        let waited = self.started.map_or(Duration::ZERO, |started| now - started);
        let mut message = format!(
            "rendezvous: {} of {} ranks came within {}; missing: {}; start as many processes as \
             WORLD_SIZE says, and check why the missing ones did not come",
            self.present(),
            self.world_size,
            Seconds(waited),
            list_ranks(&missing)
        );
        for note in &self.notes {
            message.push_str("; ");
            message.push_str(note);
        }
        Error::about(Kind::Rendezvous, missing, message)
    }

    fn fail(&mut self, error: Error) {
        self.fail_except(error, None);
    }

    /// Fails the rendezvous: tells all ranks that are not connected, except `teller`, which reported the error.
    fn fail_except(&mut self, error: Error, teller: Option<usize>) {
        // The ends of other ranks no longer decide anything; they are only reported.
        let ranks = self.ranks.iter_mut();
        let ended = ranks.filter_map(|(rank, x)| Some((*rank, x.ended.take()?.0)));
        for (rank, text) in ended.collect::<Vec<_>>() {
            self.report_loss(rank, text);
        }
        for (&rank, participant) in &self.ranks {
            if participant.stage != JoinStage::Waiting || Some(rank) == teller {
                continue;
            }
            let Some(connection) = participant.connection else {
                continue;
            };
            let refusal = error.clone();
            self.actions.push(StoreAction::Refuse {
                connection,
                error: refusal,
            });
            // A rank that learns of its own loss has reported nothing itself.
            if !error.ranks().contains(&rank) {
                let report = FailureReport::new(rank, &error);
                self.actions
                    .push(StoreAction::Report(Report::Failed(report)));
            }
        }
        self.phase = Phase::Failed(error);
    }
}

/// The error of ranks with different transports, which would wait in vain for each other's memory.
fn differing_transports(one: &Registration, two: &Registration) -> Error {
    let (low, high) = match one.rank < two.rank {
        true => (one, two),
        false => (two, one),
    };
    let message = format!(
        "{} was asked to use the transport {}, and {} {}; ACCEL_TRANSPORT, and the transport in the \
         group's options, must be the same for every process",
        name(low),
        low.transport,
        name(high),
        high.transport
    );
    Error::about(Kind::Rendezvous, vec![low.rank, high.rank], message)
}

fn is_one_process(one: &Registration, two: &Registration) -> bool {
    (one.pid, &one.host, &one.boot) == (two.pid, &two.host, &two.boot)
}

/// The error of a process that comes a second time.
fn joined_already(first: &Registration) -> Error {
    let message = format!(
        "process {} on {} has joined this job already, as rank {}, and a process joins a job once, \
         whether or not it has left since; make one `Accelerator` (or `ProcessGroup`) in a process, and \
         clone it, or lend it, to all that need it",
        first.pid, first.host, first.rank
    );
    Error::about(Kind::Rendezvous, vec![first.rank], message)
}

fn name(rank: &Registration) -> String {
    format!("rank {} (process {} on {})", rank.rank, rank.pid, rank.host)
}
