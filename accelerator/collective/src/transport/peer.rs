//! The identities of the other ranks.

use std::{fmt, time::Instant};

use crate::{
    error::{Certainty, Culprit, Seconds},
    fingerprint::CollectiveFingerprint,
};

/// The identity of a rank, for messages.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Peer {
    pub(crate) rank: usize,
    pub(crate) location: PeerLocation,
}

/// The place where a rank runs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum PeerLocation {
    Process { host: String, pid: u32 },
    Thread,
}

impl Peer {
    /// The peer as the one to blame.
    pub(crate) fn culprit(&self, cause: impl Into<String>, certainty: Certainty) -> Culprit {
        let (host, pid) = match &self.location {
            PeerLocation::Process { host, pid } => (host.clone(), Some(*pid)),
            PeerLocation::Thread => ("this process".to_owned(), None),
        };
        Culprit {
            rank: self.rank,
            host,
            pid,
            cause: cause.into(),
            certainty,
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.location {
            PeerLocation::Process { host, pid } => {
                write!(f, "rank {} (process {pid} on {host})", self.rank)
            }
            PeerLocation::Thread => write!(f, "rank {} (a thread of this process)", self.rank),
        }
    }
}

/// The latest collective in which a rank was seen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastOp {
    pub(crate) sequence: u64,
    pub(crate) fingerprint: CollectiveFingerprint,
    /// The time at which a sign of it arrived, if that is known.
    pub(crate) at: Option<Instant>,
}

impl fmt::Display for LastOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "collective #{}, {}", self.sequence, self.fingerprint)?;
        match self.at {
            Some(at) => write!(f, ", {} ago", Seconds(at.elapsed())),
            None => Ok(()),
        }
    }
}

/// The way in which a rank leaves that has not failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum LeaveKind {
    /// The rank left in good order.
    Closed,
    /// The last handle of the rank was dropped, and nobody said why.
    Dropped,
}
