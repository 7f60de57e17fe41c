//! A rank that has come.

use std::time::Instant;

use super::Connection;
use crate::wire::message::Registration;

#[derive(Debug)]
pub(super) struct Participant {
    /// The connection, while it lasts.
    pub(super) connection: Option<Connection>,
    pub(super) registration: Registration,
    /// The time at which the rank gives up waiting for the others.
    pub(super) deadline: Instant,
    /// The time at which the rank was last heard.
    pub(super) heard: Instant,
    /// The time at which the connection ended.
    pub(super) gone: Option<Instant>,
    /// The end of its process, and the time at which it was reported; kept while the rank's own message may still come.
    pub(super) ended: Option<(String, Instant)>,
    /// The time at which the rank is next told whom it is waiting for.
    pub(super) tell_at: Instant,
    pub(super) stage: JoinStage,
}

impl Participant {
    pub(super) fn is_present(&self) -> bool {
        self.gone.is_none()
    }
}

/// The stage of a rank on its way into the group.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum JoinStage {
    /// The rank waits for the table or for its connections.
    Waiting,
    Connected,
    /// The rank has left in good order.
    Closed,
}
