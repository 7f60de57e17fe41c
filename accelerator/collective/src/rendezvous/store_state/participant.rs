//! A rank that has come.

use std::time::Instant;

use super::Connection;
use crate::wire::message::Registration;

#[derive(Debug)]
pub(super) struct Participant {
    /// The connection, while it lasts.
    pub(super) connection: Option<Connection>,
    pub(super) registration: Registration,
    /// When it gives up waiting for the others.
    pub(super) deadline: Instant,
    /// When it was last heard.
    pub(super) heard: Instant,
    /// Since when the connection is gone.
    pub(super) gone: Option<Instant>,
    /// How its process ended, and when that was told, as long as its own words may yet come.
    pub(super) ended: Option<(String, Instant)>,
    /// When it is next told whom it is waiting for.
    pub(super) tell_at: Instant,
    pub(super) stage: JoinStage,
}

impl Participant {
    pub(super) fn is_present(&self) -> bool {
        self.gone.is_none()
    }
}

/// How far a rank has come.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum JoinStage {
    /// For the table, or for its connections.
    Waiting,
    Connected,
    /// It has left in good order.
    Closed,
}
