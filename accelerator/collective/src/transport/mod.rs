//! The transport of a group, by which ranks exchange data and learn who is gone.

mod chunk;
mod deadline;
mod inbox;
mod peer;
mod subset;
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
    shm::{Arena, Hosts, Room, ShmPeers, Spin},
    topology::TransportKind,
};
use accelerator_host::{machine::UsableCores, sync::Mutex};

pub(crate) use crate::wire::{Abort, CHUNK, GroupId};
pub(crate) use chunk::{OpPhase, OutgoingChunk, Tag};
pub(crate) use deadline::{OpDeadline, OpNumber, OpTimeouts, TimeoutKind};
pub(crate) use inbox::{
    ActivityClock, DROPPED, Inbox, MAX_IN_FLIGHT, OpPosition, Poller, RecvChunk,
};
pub(crate) use peer::{LastOp, LeaveKind, Peer, PeerLocation};
pub(crate) use subset::Subset;
pub(crate) use tcp::Tcp;

#[cfg(feature = "fuzzing")]
pub(crate) use tcp::feed;

/// The transport of a group, which exchanges data and learns who is gone: a control plane, and a data path.
///
/// Processes connect a TCP mesh, which is their control plane and moves chunks as well. Over it they agree on
/// the path of data (`group/data_path.rs`), which may be shared memory.
///
/// Groups of some of the ranks have transports of their own, with the same mesh and the same inbox. Peers are numbered
/// as in the world, in what the planes, the inbox and errors say; operations count the members of their group.
pub(crate) struct Transport {
    peers: Arc<[Peer]>,
    /// The members, if these are not all ranks.
    subset: Option<Subset>,
    inbox: Arc<Inbox>,
    control: Arc<dyn ControlPlane>,
    /// The data plane of the mesh; threads have none.
    mesh: Option<Arc<dyn DataPlane>>,
    /// The sleep of operations on the connections of the mesh, if there are some.
    poller: Option<Arc<Poller>>,
    /// The memory that the threads of groups share, if the ranks are threads.
    arenas: Option<Arc<ThreadArenas>>,
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

    fn send(
        &self,
        to: usize,
        chunk: OutgoingChunk<'_>,
        deadline: &mut OpDeadline,
        poller: Option<&Poller>,
    ) -> Result<()>;

    /// Waits until something happens in the inbox that was not counted in `version`, or it is `due`; it
    /// may return earlier. What happens meanwhile wakes the `poller`.
    fn wait_for_arrival(&self, version: u64, due: Instant, poller: Option<&Poller>);

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

    /// Tells the members of a group other than the world that this rank leaves it.
    fn leave_group(&self, group: &Subset, kind: LeaveKind) {
        let _ = (group, kind);
    }

    /// The time at which a peer last showed that it works outside of operations.
    fn last_activity(&self, rank: usize) -> Option<Instant>;

    /// Enables heartbeats: through `memory` to the ranks that share it, and over connections to all others. Until then,
    /// peers allow this rank the connect timeout in addition, as if it were still connecting.
    fn enable_heartbeats(&self, memory: Option<&ShmPeers>) {
        let _ = memory;
    }

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
            subset: None,
            inbox,
            control,
            mesh,
            poller: None,
            arenas: None,
            path: OnceLock::new(),
        }
    }

    /// The transport of a group of some of the ranks, of which this one is member number `rank`. The inbox has to take
    /// in the chunks of the group.
    pub(crate) fn of_subset(&self, subset: Subset, rank: usize) -> Result<Self> {
        let memory = match &self.arenas {
            // A rank alone exchanges nothing.
            Some(arenas) if subset.members.len() > 1 => Some(arenas.of_group(&subset, rank)?),
            _ => None,
        };
        let poller = match &self.poller {
            Some(_) => Some(new_poller(&self.inbox, subset.id)?),
            None => None,
        };
        let transport = Self {
            peers: Arc::clone(&self.peers),
            subset: Some(subset),
            inbox: Arc::clone(&self.inbox),
            control: Arc::clone(&self.control),
            mesh: self.mesh.clone(),
            poller,
            arenas: self.arenas.clone(),
            path: OnceLock::new(),
        };
        if let Some(memory) = memory {
            transport.set_path(DataPath::Threads(memory));
        }
        Ok(transport)
    }

    /// Forgets a group that is not made after all.
    pub(crate) fn forget(&self, group: GroupId) {
        if let Some(arenas) = &self.arenas {
            arenas.forget(group);
        }
    }

    /// Lets operations sleep on the connections of the mesh.
    fn with_poller(mut self, poller: Arc<Poller>) -> Self {
        self.poller = Some(poller);
        self
    }

    /// Lets the data of operations take this path from here on. The first call counts.
    pub(crate) fn set_path(&self, path: DataPath) {
        let _ = self.path.set(path);
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

    /// All ranks of the world.
    pub(crate) fn peers(&self) -> &[Peer] {
        &self.peers
    }

    pub(crate) fn subset(&self) -> Option<&Subset> {
        self.subset.as_ref()
    }

    /// The number of members of the group.
    pub(crate) fn size(&self) -> usize {
        match &self.subset {
            Some(subset) => subset.members.len(),
            None => self.peers.len(),
        }
    }

    /// The rank, in the world, of the member of this number.
    pub(crate) fn member(&self, number: usize) -> usize {
        match &self.subset {
            Some(subset) => subset.members[number],
            None => number,
        }
    }

    /// The number of a rank of the world among the members.
    pub(crate) fn number_of(&self, rank: usize) -> Option<usize> {
        match &self.subset {
            Some(subset) => subset.members.iter().position(|member| *member == rank),
            None => Some(rank).filter(|rank| *rank < self.peers.len()),
        }
    }

    /// The member of this number.
    pub(crate) fn peer(&self, number: usize) -> &Peer {
        &self.peers[self.member(number)]
    }

    /// The number of an operation of the group.
    pub(crate) fn op_number(&self, sequence: u64) -> OpNumber {
        OpNumber {
            group: self.group_id(),
            sequence,
            subset: self.subset.clone(),
        }
    }

    pub(crate) fn group_id(&self) -> GroupId {
        let subset = self.subset.as_ref();
        subset.map_or(GroupId::WORLD, |subset| subset.id)
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

    /// Sends to the member of this number; see [`DataPlane::send`].
    pub(crate) fn send(
        &self,
        to: usize,
        chunk: OutgoingChunk<'_>,
        deadline: &mut OpDeadline,
    ) -> Result<()> {
        match &self.mesh {
            Some(plane) => plane.send(self.member(to), chunk, deadline, self.poller.as_deref()),
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
                plane.wait_for_arrival(version, due, self.poller.as_deref());
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

    /// Enables heartbeats. The ranks must have agreed on the data path.
    pub(crate) fn enable_heartbeats(&self) {
        let memory = match self.path.get() {
            Some(DataPath::Hierarchical(hosts)) => Some(hosts.peers()),
            _ => self.shared(),
        };
        self.control.enable_heartbeats(memory);
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

impl Drop for Transport {
    fn drop(&mut self) {
        if let Some(poller) = &self.poller {
            self.inbox.remove_poller(poller);
        }
        if let Some(subset) = &self.subset {
            self.inbox.close_group(subset.id);
        }
    }
}

/// Makes a poller that wakes whenever something happens in the inbox.
fn new_poller(inbox: &Inbox, group: GroupId) -> Result<Arc<Poller>> {
    let poller = Poller::new(group)
        .map_err(|error| Error::io("there is no pair of sockets to wake a thread", error))?;
    let poller = Arc::new(poller);
    inbox.add_poller(Arc::clone(&poller));
    Ok(poller)
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

/// The memory of groups of threads, from when the first member asks for it until the last one has.
#[derive(Debug, Default)]
pub(crate) struct ThreadArenas(Mutex<Vec<GroupArenas>>);

#[derive(Debug)]
struct GroupArenas {
    group: Subset,
    arenas: Arc<[Arc<Arena>]>,
    /// The number of members that have not asked yet.
    awaited: usize,
}

impl ThreadArenas {
    /// The memory of a group, for its member number `rank`. Every member asks once.
    fn of_group(&self, group: &Subset, rank: usize) -> Result<ShmPeers> {
        let size = group.members.len();
        let mut groups = self.0.lock();
        let found = groups
            .iter()
            .position(|other| other.group.id == group.id && other.group.members == group.members);
        let index = match found {
            Some(index) => index,
            None => {
                groups.push(GroupArenas {
                    group: group.clone(),
                    arenas: thread_arenas(size, Room::Group(size))?,
                    awaited: size,
                });
                groups.len() - 1
            }
        };
        let entry = &mut groups[index];
        entry.awaited -= 1;
        let arenas = Arc::clone(&entry.arenas);
        if entry.awaited == 0 {
            groups.swap_remove(index);
        }
        Ok(ShmPeers::new(rank, arenas, 0, thread_spin(size)))
    }
}

impl ThreadArenas {
    /// Drops what members of groups of this number have not asked for.
    fn forget(&self, group: GroupId) {
        self.0.lock().retain(|other| other.group.id != group);
    }
}

fn thread_arenas(count: usize, room: Room) -> Result<Arc<[Arc<Arena>]>> {
    let arenas: io::Result<_> = (0..count)
        .map(|_| Arena::of_thread(room).map(Arc::new))
        .collect();
    arenas.map_err(|error| Error::io("there is no memory that threads can share", error))
}

fn thread_spin(ranks: usize) -> Spin {
    Spin::for_ranks(ranks, UsableCores::of_this_process().count().get())
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
        let arenas = thread_arenas(world_size, Room::World(world_size))?;
        let (inboxes, peers) = (inboxes(world_size), peers(world_size));
        let spin = thread_spin(world_size);
        let groups = Arc::new(ThreadArenas::default());
        let ranks = (0..world_size).map(|rank| {
            let control = Self {
                rank,
                inboxes: Arc::clone(&inboxes),
            };
            let memory = ShmPeers::new(rank, Arc::clone(&arenas), 0, spin);
            let mut transport = control.into_transport(Arc::clone(&peers));
            transport.set_path(DataPath::Threads(memory));
            transport.arenas = Some(Arc::clone(&groups));
            transport
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
                FinalMessage::Goodbye(kind) => inbox.left(self.rank, GroupId::WORLD, *kind),
            }
        }
    }

    fn leave_group(&self, group: &Subset, kind: LeaveKind) {
        for member in group.members.iter().filter(|member| **member != self.rank) {
            self.inboxes[*member].left(self.rank, group.id, kind);
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
