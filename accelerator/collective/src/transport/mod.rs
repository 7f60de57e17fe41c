//! How parts of buffers get from one rank to another.

mod deadline;
mod inbox;
mod pool;
mod tcp;
mod threads;
mod waker;

use std::{
    fmt,
    time::{Duration, Instant},
};

pub(crate) use deadline::{OpDeadline, OpTimeouts, TimeoutKind};
pub(crate) use inbox::{ActivityClock, Inbox, MAX_IN_FLIGHT, OpPosition, RecvChunk};
pub(crate) use tcp::Tcp;
#[cfg(feature = "fuzzing")]
pub(crate) use tcp::feed;
pub(crate) use threads::Threads;

pub(crate) use crate::{
    transport_kind::TransportKind,
    wire::frame::{Abort, CHUNK},
};

use crate::{
    buffer::Buffer,
    element::DType,
    error::{Certainty, Culprit, Result},
    fingerprint::CollectiveFingerprint,
    shm::{Hosts, SharedMemory, ShmPeers},
};

/// Moves tagged parts between ranks; knows nothing of reductions.
///
/// The algorithms of the group stand on three promises:
/// - between two ranks, parts arrive in the order in which they were sent;
/// - [`send`](Self::send) waits for room in the receiver's inbox, and at most for moments for its
///   engine, so two ranks may send to each other at the same time;
/// - a rank that is gone is reported to the inbox of every other rank, and an [`Abort`] of a rank
///   arrives before the news that this rank is gone.
///
/// Ranks that [share](Self::shared) memory send no parts: the transport then tells who is gone.
pub(crate) trait Transport: fmt::Debug + Send + Sync {
    fn kind(&self) -> TransportKind;

    /// Who the ranks are, in rank order.
    fn peers(&self) -> &[Peer];

    /// Where parts for this rank arrive.
    fn inbox(&self) -> &Inbox;

    /// Waits until something happens in the inbox that was not counted in `version`, or it is
    /// `due`; it may return earlier. Fails where nothing is sent.
    fn await_news(&self, version: u64, due: Instant, deadline: &OpDeadline) -> Result<()>;

    /// Hands one part to a peer.
    fn send(&self, to: usize, part: OutgoingChunk<'_>, deadline: &mut OpDeadline) -> Result<()>;

    /// How many operations may be under way at once. More than one only where parts go through
    /// the inbox alone.
    fn max_in_flight(&self) -> usize {
        1
    }

    /// Says the last word to every peer, without waiting for any of them for long. Nothing is
    /// sent afterwards.
    fn leave(&self, leave: &FinalMessage);

    /// Shows the peers that this rank lives, and gives up those that have shown nothing for
    /// `liveness`: they are reported to the inbox. Says when to call it again; `None` where a
    /// peer cannot fall silent.
    fn heartbeat(&self, liveness: Duration) -> Option<Duration> {
        let _ = liveness;
        None
    }

    /// The peers that have said nothing for so long, and no last word.
    fn silent(&self, silence: Duration) -> Vec<usize> {
        let _ = silence;
        Vec::new()
    }

    /// When a peer showed last that it works outside of operations.
    fn active(&self, rank: usize) -> Option<Instant> {
        self.inbox().active(rank)
    }

    /// Takes a witness's word that a rank has ended, and says whether that settles the matter;
    /// it does not while the rank's own last words may be on their way.
    fn report_exit(&self, rank: usize, text: &str) -> bool {
        let _ = (rank, text);
        true
    }

    /// Cuts all connections, as a fault; nothing where there are none.
    fn cut(&self) {}

    /// Spoils the next part that is sent, as a fault; nothing where parts cannot be spoilt.
    fn spoil(&self) {}

    /// The memory that the ranks share: where there is some, operations go through it, and nothing
    /// is [sent](Self::send).
    fn shared(&self) -> Option<&ShmPeers> {
        None
    }

    /// The hosts, where several ranks of one share memory and those of others do not.
    fn hosts(&self) -> Option<&Hosts> {
        None
    }

    /// Lets operations go through shared memory from here on, where the ranks found some after they
    /// were connected.
    fn share(&self, arrangement: SharedMemory) {
        let _ = arrangement;
    }

    /// A buffer that this transport reduces without further copies.
    fn buffer(&self, dtype: DType, len: usize) -> Buffer {
        match self.shared() {
            Some(world) => Buffer::placed(dtype, len, world.own()),
            None => Buffer::zeroed(dtype, len),
        }
    }
}

/// One part on its way: at most [`CHUNK`] bytes, and where it belongs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutgoingChunk<'a> {
    pub(crate) tag: Tag,
    /// The sender's declaration, on the first part of an operation.
    pub(crate) fingerprint: Option<&'a CollectiveFingerprint>,
    pub(crate) payload: &'a [u8],
}

/// Where a part belongs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Tag {
    /// The number of the operation.
    pub(crate) sequence: u64,
    pub(crate) stage: Stage,
    /// The number of the chunk within its stage.
    pub(crate) index: u32,
}

/// The stages of an operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Stage {
    /// The declaration, with the first data.
    Begin,
    /// Data on its way to the rank that owns its part.
    Inward,
    /// Data on its way from its owner to everyone.
    Outward,
}

/// The last word of a rank.
#[derive(Clone, Debug)]
pub(crate) enum FinalMessage {
    /// The rank failed, or saw another one fail.
    Abort(Abort),
    /// The rank has finished.
    Goodbye(LeaveKind),
}

/// How a rank leaves that has not failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum LeaveKind {
    /// In good order.
    Closed,
    /// Its last handle was dropped, and nobody said why.
    Dropped,
}

/// Who a rank is, for messages.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Peer {
    pub(crate) rank: usize,
    pub(crate) location: PeerLocation,
}

/// Where a rank runs.
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
