//! The events of a rendezvous that time brings about.

use std::time::Instant;

use super::{
    EXIT_NOTICE_WAIT, FINAL_MESSAGE_WAIT, JoinStage, Participant, Phase, RECONNECT_TIME,
    StoreAction, StoreState, TELL_AGAIN,
};
use crate::{
    error::Seconds,
    liveness::{bounded, store_interval},
};

impl StoreState {
    /// The clock: who is lost, who has waited too long, who wants to hear something.
    pub(super) fn on_tick(&mut self, now: Instant) {
        if !self.is_meeting() {
            return;
        }
        let lost = self.ranks.iter().filter_map(|(rank, participant)| {
            let at = self.loss_at(participant).filter(|at| *at <= now)?;
            Some((at, *rank))
        });
        if let Some((_, rank)) = lost.min() {
            let participant = &self.ranks[&rank];
            let cause = match (&participant.ended, participant.gone) {
                (Some((text, _)), _) => text.clone(),
                (None, Some(_)) => {
                    "its connection to the store ended: the process died, or the network \
                            broke"
                        .to_owned()
                }
                (None, None) => format!(
                    "it has been silent for {}: stopped, swapped out, or cut off from the network",
                    Seconds(now - participant.heard)
                ),
            };
            self.lose(rank, &cause);
            return;
        }
        if !matches!(self.phase, Phase::Gathering) {
            self.heartbeats(now);
            return;
        }
        if self
            .ranks
            .values()
            .any(|participant| participant.deadline <= now)
        {
            let error = self.overdue(now);
            self.fail(error);
            return;
        }
        let missing = self.missing();
        self.heartbeats(now);
        for participant in self.ranks.values_mut() {
            if let Some(connection) = participant.connection
                && participant.tell_at <= now
            {
                participant.tell_at = now + TELL_AGAIN;
                let missing = missing.clone();
                self.actions.push(StoreAction::ReportMissing {
                    connection,
                    missing,
                });
            }
        }
    }

    fn heartbeats(&mut self, now: Instant) {
        if self.heartbeat_at > now {
            return;
        }
        self.heartbeat_at = now + store_interval(self.liveness);
        let connections = self.connections(|x| x.stage == JoinStage::Waiting);
        self.actions.push(StoreAction::Heartbeat { connections });
    }

    /// The time passed without anybody watching: whoever is judged gets a fresh period.
    pub(super) fn grant_fresh_period(&mut self, now: Instant) {
        for participant in self.ranks.values_mut() {
            participant.heard = now;
            participant.gone = participant.gone.map(|_| now);
            participant.ended = participant.ended.take().map(|(text, _)| (text, now));
        }
    }

    /// The time at which a rank counts as lost if nothing happens before.
    pub(super) fn loss_at(&self, participant: &Participant) -> Option<Instant> {
        if !self.is_meeting() || participant.stage != JoinStage::Waiting {
            return None;
        }
        if let Some((_, at)) = participant.ended {
            // The end of the connection comes behind everything that the rank has said.
            return Some(participant.gone.unwrap_or(at + FINAL_MESSAGE_WAIT));
        }
        Some(match (participant.gone, &self.phase) {
            (Some(gone), Phase::Gathering) => gone + RECONNECT_TIME,
            // Nobody can come again. The launcher may still say how the process ended.
            (Some(gone), _) => gone + EXIT_NOTICE_WAIT,
            (None, _) => {
                // A rank with a longer liveness timeout sends heartbeats less often.
                let own = 4 * store_interval(bounded(participant.registration.liveness));
                participant.heard + self.liveness.max(own)
            }
        })
    }
}
