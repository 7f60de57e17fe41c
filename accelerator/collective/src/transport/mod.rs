//! The transport of a group, by which ranks exchange data and learn who is gone.

mod chunk;
mod deadline;
mod inbox;
mod peer;
mod tcp;
#[cfg(test)]
pub(crate) mod tests;

use std::{
    fmt, io,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use crate::{
    buffer::Buffer,
    element::DType,
    error::{Error, Result},
    shm::{Arena, Hosts, ShmPeers, Spin},
    topology::TransportKind,
};
use accelerator_host::machine::UsableCores;

pub(crate) use crate::wire::{Abort, CHUNK};
pub(crate) use chunk::{OpPhase, OutgoingChunk, Tag};
pub(crate) use deadline::{OpDeadline, OpTimeouts, TimeoutKind};
pub(crate) use inbox::{ActivityClock, Inbox, MAX_IN_FLIGHT, OpPosition, RecvChunk};
pub(crate) use peer::{LastOp, LeaveKind, Peer, PeerLocation};
pub(crate) use tcp::Tcp;

#[cfg(feature = "fuzzing")]
pub(crate) use tcp::feed;

/// The transport of a group, which exchanges data and learns who is gone: a control plane, and a data path.
///
/// Processes connect a TCP mesh, which is their control plane and moves chunks as well. Over it they agree on
/// the path of data (`group/data_path.rs`), which may be shared memory.
pub(crate) struct Transport {
    peers: Arc<[Peer]>,
    inbox: Arc<Inbox>,
    control: Arc<dyn ControlPlane>,
    /// The data plane of the mesh; threads have none.
    mesh: Option<Arc<dyn DataPlane>>,
    path: OnceLock<DataPath>,
}

/// Moves tagged chunks between ranks; knows nothing of reductions.
///
/// The algorithms of the group rely on this:
/// - Between two ranks, chunks arrive in the inbox of the receiver in the order in which they were sent.
/// - [`send`](Self::send) waits for room at the receiver, and receives meanwhile, so that two ranks may
///   send to each other at the same time.
pub(crate) trait DataPlane: fmt::Debug + Send + Sync {
    fn kind(&self) -> TransportKind;

    fn send(&self, to: usize, chunk: OutgoingChunk<'_>, deadline: &mut OpDeadline) -> Result<()>;

    /// Waits until something happens in the inbox that was not counted in `version`, or it is `due`; it
    /// may return earlier.
    fn wait_for_arrival(&self, version: u64, due: Instant);

    /// The number of operations that may be under way at once. More than one requires that chunks arrive in the inbox.
    fn max_in_flight(&self) -> usize {
        1
    }

    fn inject_corruption(&self) {}
}

/// Knows which ranks live: heartbeats, aborts and goodbyes.
///
/// A rank that is gone is reported to the inbox of every other rank, and an [`Abort`] of a rank arrives before
/// the notice that this rank is gone.
pub(crate) trait ControlPlane: fmt::Debug + Send + Sync {
    /// Sends the final message to every peer, without waiting for any of them for long. Nothing is sent
    /// afterwards.
    fn leave(&self, message: &FinalMessage);

    /// The time at which a peer last showed that it works outside of operations.
    fn last_activity(&self, rank: usize) -> Option<Instant>;

    /// Sends heartbeats, and reports peers to the inbox that were silent for the `liveness` timeout. Says
    /// when to call it again; `None` where a peer cannot fall silent.
    fn heartbeat(&self, liveness: Duration) -> Option<Duration> {
        let _ = liveness;
        None
    }

    /// The peers that were silent for so long and sent no final message.
    fn silent(&self, silence: Duration) -> Vec<usize> {
        let _ = silence;
        Vec::new()
    }

    /// Takes the store's report that a rank has ended, and says whether that settles the matter; it does not
    /// while the rank's own final message may be on its way.
    fn report_exit(&self, rank: usize, text: &str) -> bool {
        let _ = (rank, text);
        true
    }

    fn inject_disconnect(&self) {}
}

/// The path that the data of operations take, where it is not the mesh.
#[derive(Debug)]
pub(crate) enum DataPath {
    /// Memory that the processes of one host share.
    Shm(ShmPeers),
    /// Memory that the processes of each host share, and chunks between hosts.
    Hierarchical(Hosts),
    /// The memory of the one process whose threads the ranks are.
    Threads(ShmPeers),
}

impl Transport {
    pub(crate) fn new(
        peers: Arc<[Peer]>,
        inbox: Arc<Inbox>,
        control: Arc<dyn ControlPlane>,
        mesh: Option<Arc<dyn DataPlane>>,
    ) -> Self {
        Self {
            peers,
            inbox,
            control,
            mesh,
            path: OnceLock::new(),
        }
    }

    /// Lets the data of operations take this path from here on. The first call counts.
    pub(crate) fn set_path(&self, path: DataPath) {
        let _ = self.path.set(path);
    }

    /// The same, for a transport that is being made.
    fn with_path(self, path: DataPath) -> Self {
        self.set_path(path);
        self
    }

    pub(crate) fn kind(&self) -> TransportKind {
        match self.path.get() {
            Some(DataPath::Shm(_)) => TransportKind::Shm,
            Some(DataPath::Hierarchical(_)) => TransportKind::Hierarchical,
            Some(DataPath::Threads(_)) => TransportKind::Threads,
            None => match &self.mesh {
                Some(plane) => plane.kind(),
                None => TransportKind::Threads,
            },
        }
    }

    pub(crate) fn peers(&self) -> &[Peer] {
        &self.peers
    }

    /// The inbox, which holds the chunks that arrive for this rank and the state of its peers.
    pub(crate) fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    pub(crate) fn control(&self) -> &dyn ControlPlane {
        &*self.control
    }

    /// The memory that all ranks share: where there is some, operations go through it, and no chunk is
    /// [sent](Self::send).
    pub(crate) fn shared(&self) -> Option<&ShmPeers> {
        match self.path.get() {
            Some(DataPath::Shm(peers) | DataPath::Threads(peers)) => Some(peers),
            _ => None,
        }
    }

    /// The hosts, where several ranks of one share memory and those of others do not.
    pub(crate) fn hosts(&self) -> Option<&Hosts> {
        match self.path.get() {
            Some(DataPath::Hierarchical(hosts)) => Some(hosts),
            _ => None,
        }
    }

    /// See [`DataPlane::send`].
    pub(crate) fn send(
        &self,
        to: usize,
        chunk: OutgoingChunk<'_>,
        deadline: &mut OpDeadline,
    ) -> Result<()> {
        match &self.mesh {
            Some(plane) => plane.send(to, chunk, deadline),
            None => Err(self.no_data_plane(deadline)),
        }
    }

    /// See [`DataPlane::wait_for_arrival`].
    pub(crate) fn wait_for_arrival(
        &self,
        version: u64,
        due: Instant,
        deadline: &OpDeadline,
    ) -> Result<()> {
        match &self.mesh {
            Some(plane) => {
                plane.wait_for_arrival(version, due);
                Ok(())
            }
            None => Err(self.no_data_plane(deadline)),
        }
    }

    /// See [`DataPlane::max_in_flight`].
    pub(crate) fn max_in_flight(&self) -> usize {
        match (self.path.get(), &self.mesh) {
            (None, Some(plane)) => plane.max_in_flight(),
            _ => 1,
        }
    }

    /// See [`DataPlane::inject_corruption`].
    pub(crate) fn inject_corruption(&self) {
        if let Some(plane) = &self.mesh {
            plane.inject_corruption();
        }
    }

    /// A buffer that this transport reduces without further copies.
    pub(crate) fn buffer(&self, dtype: DType, len: usize) -> Buffer {
        match self.shared() {
            Some(peers) => Buffer::placed(dtype, len, peers.own()),
            None => Buffer::zeroed(dtype, len),
        }
    }

    #[cold]
    fn no_data_plane(&self, deadline: &OpDeadline) -> Error {
        let me = &self.peers[deadline.rank];
        deadline.protocol(me, "it exchanges chunks, which threads do not")
    }
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transport")
            .field("kind", &self.kind())
            .finish_non_exhaustive()
    }
}

/// The final message of a rank.
#[derive(Clone, Debug)]
pub(crate) enum FinalMessage {
    Abort(Abort),
    Goodbye(LeaveKind),
}

/// The control plane of one rank among the threads of a process, which share its memory.
///
/// A thread cannot fall silent alone, lose its connections or corrupt what it sends, so such faults do
/// nothing here. It can panic, leave early and be slow.
#[derive(Debug)]
pub(crate) struct Threads {
    rank: usize,
    inboxes: Arc<[Arc<Inbox>]>,
}

impl Threads {
    /// The only rank of a world of one.
    pub(crate) fn alone() -> Transport {
        Self {
            rank: 0,
            inboxes: inboxes(1),
        }
        .into_transport(peers(1))
    }

    /// The ranks of a new world, in rank order.
    pub(crate) fn world(world_size: usize) -> Result<Vec<Transport>> {
        if world_size == 1 {
            return Ok(vec![Self::alone()]);
        }
        let arenas: io::Result<Arc<[_]>> = (0..world_size)
            .map(|_| Arena::of_thread().map(Arc::new))
            .collect();
        let arenas = arenas
            .map_err(|error| Error::io("there is no memory that threads can share", error))?;
        let (inboxes, peers) = (inboxes(world_size), peers(world_size));
        let cores = UsableCores::of_this_process().count().get();
        let spin = Spin::for_ranks(world_size, cores);
        let ranks = (0..world_size).map(|rank| {
            let control = Self {
                rank,
                inboxes: Arc::clone(&inboxes),
            };
            let memory = ShmPeers::new(rank, Arc::clone(&arenas), 0, spin);
            control
                .into_transport(Arc::clone(&peers))
                .with_path(DataPath::Threads(memory))
        });
        Ok(ranks.collect())
    }

    fn into_transport(self, peers: Arc<[Peer]>) -> Transport {
        let inbox = Arc::clone(&self.inboxes[self.rank]);
        Transport::new(peers, inbox, Arc::new(self), None)
    }
}

impl ControlPlane for Threads {
    fn leave(&self, message: &FinalMessage) {
        self.inboxes[self.rank].close();
        for (rank, inbox) in self.inboxes.iter().enumerate() {
            if rank == self.rank {
                continue;
            }
            match message {
                FinalMessage::Abort(abort) => inbox.aborted(self.rank, abort.clone()),
                FinalMessage::Goodbye(kind) => inbox.left(self.rank, *kind),
            }
        }
    }

    fn last_activity(&self, rank: usize) -> Option<Instant> {
        self.inboxes.get(rank)?.activity().last()
    }
}

fn inboxes(world_size: usize) -> Arc<[Arc<Inbox>]> {
    (0..world_size)
        .map(|_| Arc::new(Inbox::new(world_size)))
        .collect()
}

/// The ranks of a world whose ranks are threads.
pub(crate) fn peers(world_size: usize) -> Arc<[Peer]> {
    let peer = |rank| Peer {
        rank,
        location: PeerLocation::Thread,
    };
    (0..world_size).map(peer).collect()
}
