//! What time does to a rendezvous.

use std::time::Instant;

use super::{
    Action, Arrival, LAST_WORDS, Phase, RETURN, Stage, State, TELL_AGAIN, TESTIMONY, beat_every,
    bounded,
};
use crate::error::Seconds;

impl State {
    /// The clock: who is lost, who has waited too long, who wants to hear something.
    pub(super) fn judge(&mut self, now: Instant) -> Vec<Action> {
        if !self.is_meeting() {
            return Vec::new();
        }
        let lost = self.ranks.iter().filter_map(|(rank, arrival)| {
            let at = self.loss_at(arrival).filter(|at| *at <= now)?;
            Some((at, *rank))
        });
        if let Some((_, rank)) = lost.min() {
            let arrival = &self.ranks[&rank];
            let cause = match (&arrival.ended, arrival.gone) {
                (Some((text, _)), _) => text.clone(),
                (None, Some(_)) => {
                    "its connection to the store ended: the process died, or the network \
                            broke"
                        .to_owned()
                }
                (None, None) => format!(
                    "it has been silent for {}: stopped, swapped out, or cut off from the network",
                    Seconds(now - arrival.heard)
                ),
            };
            return self.lose(rank, &cause);
        }
        if !matches!(self.phase, Phase::Gathering) {
            return self.beat(now);
        }
        if self.ranks.values().any(|arrival| arrival.deadline <= now) {
            let error = self.overdue(now);
            return self.fail(error);
        }
        let missing = self.missing();
        let mut actions = self.beat(now);
        for arrival in self.ranks.values_mut() {
            if let Some(connection) = arrival.connection
                && arrival.tell_at <= now
            {
                arrival.tell_at = now + TELL_AGAIN;
                let missing = missing.clone();
                actions.push(Action::Tell {
                    connection,
                    missing,
                });
            }
        }
        actions
    }

    pub(super) fn beat(&mut self, now: Instant) -> Vec<Action> {
        if self.beat_at > now {
            return Vec::new();
        }
        self.beat_at = now + beat_every(self.liveness());
        let connections = self.connections(|x| x.stage == Stage::Waiting);
        vec![Action::Beat { connections }]
    }

    /// The time passed without anybody watching: whoever is judged gets a fresh period.
    pub(super) fn forgive(&mut self, now: Instant) -> Vec<Action> {
        for arrival in self.ranks.values_mut() {
            arrival.heard = now;
            arrival.gone = arrival.gone.map(|_| now);
            arrival.ended = arrival.ended.take().map(|(text, _)| (text, now));
        }
        Vec::new()
    }

    /// When a rank counts as lost, should nothing happen.
    pub(super) fn loss_at(&self, arrival: &Arrival) -> Option<Instant> {
        if !self.is_meeting() || arrival.stage != Stage::Waiting {
            return None;
        }
        if let Some((_, at)) = arrival.ended {
            // The end of the line comes behind everything that the rank has said.
            return Some(arrival.gone.unwrap_or(at + LAST_WORDS));
        }
        Some(match (arrival.gone, &self.phase) {
            (Some(gone), Phase::Gathering) => gone + RETURN,
            // Nobody can come again. The launcher may still say how the process ended.
            (Some(gone), _) => gone + TESTIMONY,
            (None, _) => {
                // A rank that is more patient beats less often.
                let own = 4 * beat_every(bounded(arrival.registration.liveness));
                arrival.heard + self.liveness().max(own)
            }
        })
    }
}
