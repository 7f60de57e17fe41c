//! The ranks of a store, with their connections.

use std::{
    collections::HashMap,
    sync::{Arc, mpsc},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    Report,
    outbox::Outbox,
    store_state::{Connection, StoreState},
};
use crate::wire::message::{Message, Nonce};

/// The state machine with the connections of the ranks.
pub(super) struct Registry {
    pub(super) state: StoreState,
    pub(super) connections: HashMap<Connection, RankConnection>,
    /// The channel to the observer.
    pub(super) reports: Option<mpsc::Sender<Report>>,
}

/// The store's end of a connection to a rank.
pub(super) struct RankConnection {
    pub(super) outbox: Arc<Outbox>,
    /// The nonces of its challenge, for the proof of the answer.
    pub(super) nonces: [Nonce; 2],
}

impl Registry {
    /// Checks if bytes wait to be read. The end of a connection counts too; its thread reports it.
    pub(super) fn has_unread(&self, connection: Connection) -> bool {
        let Some(rank) = self.connections.get(&connection) else {
            return false;
        };
        let mut polled = [PollFd::new(rank.outbox.stream(), PollFlags::IN)];
        poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    pub(super) fn send(&self, connections: &[Connection], message: &Message) {
        let message = message.encode();
        for rank in self.of(connections) {
            rank.outbox.push(&message);
        }
    }

    pub(super) fn of(&self, connections: &[Connection]) -> impl Iterator<Item = &RankConnection> {
        let rank = |connection| self.connections.get(connection);
        connections.iter().filter_map(rank)
    }
}
