//! The errors and notices for ranks that cannot meet.

use std::time::{Duration, Instant};

use super::{JoinStage, Participant, Phase, Severity, StoreAction, StoreState};
use crate::{
    error::{Error, Kind, Seconds, list_ranks},
    rendezvous::{FailureReport, Report},
    wire::message::Registration,
};

impl StoreState {
    /// Handles the loss of a rank before the ranks are connected.
    pub(super) fn lose(&mut self, rank: usize, cause: &str) -> Vec<StoreAction> {
        let error = self.lost(rank, cause);
        if let Some(participant) = self.ranks.get_mut(&rank) {
            participant.ended = None;
        }
        let mut actions = self.report_exit(rank, cause.to_owned());
        actions.extend(self.fail(error));
        actions
    }

    pub(super) fn lost(&self, rank: usize, cause: &str) -> Error {
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

    /// Tells the ranks that have the table that one is lost. Ranks that are still waiting as far as the
    /// store knows may be connected already, or become so.
    pub(super) fn report_exit(&self, rank: usize, text: String) -> Vec<StoreAction> {
        if !self.complete {
            return Vec::new();
        }
        let connections = self.connections(|x| x.registration.rank != rank);
        vec![StoreAction::ReportExit {
            connections,
            rank,
            text,
            severity: Severity::RankLost,
        }]
    }

    /// Tells the ranks how others ended meanwhile, which no longer decides anything.
    pub(super) fn report_ends(&mut self) -> Vec<StoreAction> {
        let ranks = self.ranks.iter_mut();
        let ends =
            ranks.filter_map(|(rank, participant)| Some((*rank, participant.ended.take()?.0)));
        let ends: Vec<_> = ends.collect();
        let actions = ends.into_iter();
        actions
            .flat_map(|(rank, text)| self.report_exit(rank, text))
            .collect()
    }

    pub(super) fn overdue(&self, now: Instant) -> Error {
        let missing = self.missing();
        let waited = self.started.map_or(Duration::ZERO, |started| now - started);
        let mut message = format!(
            "rendezvous: {} of {} ranks came within {}; missing: {}; start as many processes as \
             WORLD_SIZE says, and see what became of those that did not come",
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

    pub(super) fn fail(&mut self, error: Error) -> Vec<StoreAction> {
        self.fail_but(error, None)
    }

    /// Tells everyone who is not connected, but the one who told us.
    pub(super) fn fail_but(&mut self, error: Error, teller: Option<usize>) -> Vec<StoreAction> {
        let mut actions = self.report_ends();
        for (&rank, participant) in &self.ranks {
            if participant.stage != JoinStage::Waiting || Some(rank) == teller {
                continue;
            }
            let Some(connection) = participant.connection else {
                continue;
            };
            actions.push(StoreAction::Refuse {
                connection,
                error: error.clone(),
            });
            // That a rank hears of its own loss is no said of its own.
            if !error.ranks().contains(&rank) {
                let report = FailureReport::new(rank, &error);
                actions.push(StoreAction::Report(Report::Failed(report)));
            }
        }
        self.phase = Phase::Failed(error);
        actions
    }
}

/// The error of ranks with different transports, which would wait in vain for each other's memory.
pub(super) fn differing_transports(one: &Registration, two: &Registration) -> Error {
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

/// Checks if both registrations came from one process.
pub(super) fn is_one_process(one: &Registration, two: &Registration) -> bool {
    (one.pid, &one.host, &one.boot) == (two.pid, &two.host, &two.boot)
}

/// The error of a process that comes a second time.
pub(super) fn joined_already(first: &Registration) -> Error {
    let message = format!(
        "process {} on {} has joined this job already, as rank {}, and a process joins a job once, \
         whether or not it has left since; make one `Accelerator` (or `ProcessGroup`) in a process, and \
         clone it, or lend it, to all that need it",
        first.pid, first.host, first.rank
    );
    Error::about(Kind::Rendezvous, vec![first.rank], message)
}

pub(super) fn name(rank: &Registration) -> String {
    format!("rank {} (process {} on {})", rank.rank, rank.pid, rank.host)
}
