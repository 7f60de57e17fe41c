//! The inputs of a store's state machine, and the actions that follow from them.

use std::time::Instant;

use crate::{error::Error, rendezvous::Report, wire::message::Registration};

/// Something that happens to a store.
#[derive(Debug)]
pub(crate) enum StoreInput {
    /// The store is about to close; `host` is the rank that hosts it, if one does.
    Closing { host: Option<usize> },
    /// A connection ended.
    Gone { connection: Connection },
    /// Nobody looked at the clock for a while, because the process was stopped or starved.
    Suspended,
    /// A rank has come.
    Registered {
        connection: Connection,
        registration: Registration,
    },
    /// A registered rank said something.
    Message { rank: usize, message: RankMessage },
    /// A connection was rejected.
    Rejected { note: String },
    /// The process that hosts the store saw a rank end.
    ExitNotice { rank: usize, text: String },
    /// The process that hosts the store tells a rank its place in the next group.
    NextPlace {
        rank: usize,
        place: NextPlaceVariables,
    },
    /// Time has passed.
    Tick,
}

/// A message of a registered rank.
#[derive(Debug)]
pub(crate) enum RankMessage {
    /// The group of the rank failed with this error.
    ReportFailure(Error),
    /// The rank is connected to all others.
    Connected,
    /// The rank leaves in good order.
    Leave,
    /// The rank is alive.
    Heartbeat,
}

/// An action of the store.
#[derive(Debug)]
pub(crate) enum StoreAction {
    /// Tells the ranks that the store closes in good order.
    CloseStore { connections: Vec<Connection> },
    /// Sends a heartbeat.
    Heartbeat { connections: Vec<Connection> },
    Refuse {
        connection: Connection,
        error: Error,
    },
    /// Reports to the process that hosts the store.
    Report(Report),
    /// Tells a rank which ranks it is waiting for.
    ReportMissing {
        connection: Connection,
        missing: Vec<usize>,
    },
    /// Tells ranks how another one ended.
    ReportExit {
        connections: Vec<Connection>,
        rank: usize,
        text: String,
        severity: Severity,
    },
    /// Tells a rank its place in the next group.
    TellNextPlace {
        connection: Connection,
        place: NextPlaceVariables,
    },
    /// Sends all ranks the table of all ranks.
    Welcome {
        connections: Vec<Connection>,
        ranks: Vec<Registration>,
    },
}

/// The variables of a place, by name; empty if there is no place.
pub(crate) type NextPlaceVariables = Vec<(String, String)>;

/// The weight of an exit notice.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Severity {
    /// The rank is lost.
    RankLost,
    /// The notice only answers ranks that ask for it.
    ExitInfo,
}

/// The number of a connection to the store.
pub(crate) type Connection = u64;

#[derive(Debug)]
pub(super) struct Participant {
    pub(super) connection: Option<Connection>,
    pub(super) registration: Registration,
    /// The time at which the rank gives up waiting for the others.
    pub(super) deadline: Instant,
    /// The time at which the store last heard from the rank.
    pub(super) heard: Instant,
    /// The time at which the connection ended.
    pub(super) gone: Option<Instant>,
    /// The end of its process, and the time at which it was reported; kept while the rank's own message may still come.
    pub(super) ended: Option<(String, Instant)>,
    /// The time at which the store next tells the rank which ranks it is waiting for.
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
