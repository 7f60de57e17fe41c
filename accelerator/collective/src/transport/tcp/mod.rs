//! A mesh of TCP connections between processes: a control plane, and a data plane; and the thread that reads what peers
//! send while no operation does, with the handoff to it. See the README.

mod frame_reader;
mod heartbeats;
mod link;
mod local_heartbeats;
mod mesh;
mod peer_liveness;
mod planes;
#[cfg(target_os = "linux")]
mod readable;

#[cfg(feature = "fuzzing")]
use std::io::Read;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_host::machine::UsableCores;
use accelerator_host::sync::{Condvar, Mutex};

#[cfg(feature = "fuzzing")]
use self::frame_reader::{FrameReader, Stages};
use self::frame_reader::{READER_PANICKED, ReadOutcome};
use self::link::{Links, ROOM_CHECK_INTERVAL};
use self::local_heartbeats::LocalHeartbeats;
use super::{ControlPlane, GroupId, Inbox, Peer, PeerLocation, Poller, Transport, new_poller};
use crate::error::{Error, Result};
use crate::rendezvous::{MAX_WAIT, Meeting};
use crate::topology::Topology;

/// One rank in a mesh of connections. Waiting operations read incoming data; while none waits, a
/// thread does, so a peer that sends never waits for this rank's engine for long.
#[derive(Debug)]
pub(crate) struct Tcp {
    rank: usize,
    peers: Arc<[Peer]>,
    links: Arc<Links>,
    inbox: Arc<Inbox>,
    /// The poller of operations of the world.
    poller: Arc<Poller>,
    handoff: Arc<ReaderHandoff>,
    /// The time for which a waiting operation keeps its core.
    busy: Duration,
    /// The time within which the others must complete their connections.
    connect_timeout: Duration,
    /// The time at which the next round is due; the first one is when the connections are made.
    round_due: Mutex<Instant>,
    /// Set when heartbeats are enabled; holds the heartbeats in shared memory if this rank shares memory with others.
    heartbeats: OnceLock<Option<LocalHeartbeats>>,
    corrupt_next: AtomicBool,
}

impl Tcp {
    pub(crate) fn connect(
        topology: &Topology,
        meeting: Meeting,
        connect_timeout: Duration,
    ) -> Result<Self> {
        let rank = topology.rank();
        let streams = mesh::connect(
            rank,
            &meeting,
            Instant::now() + connect_timeout.min(MAX_WAIT),
        )?;
        let peers: Arc<[Peer]> = meeting
            .ranks
            .into_iter()
            .map(|x| Peer {
                rank: x.rank,
                location: PeerLocation::Process {
                    host: x.host,
                    pid: x.pid,
                },
            })
            .collect();
        let inbox = Arc::new(Inbox::new(peers.len()));
        let poller = new_poller(&inbox, GroupId::WORLD)?;
        let handoff = Arc::new(ReaderHandoff::new());
        // Silence counts from here on, and so does the time in which this process is suspended.
        let round_due = Instant::now();
        let links = Arc::new(Links::new(streams, &inbox)?);
        spawn_reader(&links, &inbox, &handoff)?;
        Ok(Self {
            rank,
            busy: busy(&peers, rank),
            peers,
            links,
            inbox,
            poller,
            handoff,
            connect_timeout,
            round_due: Mutex::new(round_due),
            heartbeats: OnceLock::new(),
            corrupt_next: AtomicBool::new(false),
        })
    }

    /// Makes this mesh both planes of a group.
    pub(crate) fn into_transport(self) -> Transport {
        let (peers, inbox) = (Arc::clone(&self.peers), Arc::clone(&self.inbox));
        let poller = Arc::clone(&self.poller);
        let mesh = Arc::new(self);
        let control: Arc<dyn ControlPlane> = mesh.clone();
        Transport::new(peers, inbox, control, Some(mesh)).with_poller(poller)
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        // Usually the final message has been sent; a second end of the sending side does nothing.
        self.inbox.close();
        self.handoff.end();
        for (_, link) in self.links.iter() {
            link.hang_up();
        }
    }
}

/// The time for which a waiting operation may keep its core: zero if the ranks of this host
/// outnumber the cores, since the one that is waited for may need it.
fn busy(peers: &[Peer], rank: usize) -> Duration {
    let here = |peer: &Peer| match (&peer.location, &peers[rank].location) {
        (PeerLocation::Process { host, pid }, PeerLocation::Process { host: mine, .. })
            if host == mine =>
        {
            Some(*pid)
        }
        _ => None,
    };
    let ranks = peers.iter().filter_map(here).count();
    let cores = UsableCores::of_this_process().count_with(peers.iter().filter_map(here));
    match ranks <= cores {
        true => SPIN_TIME,
        false => Duration::ZERO,
    }
}

/// Longer than two switches to and from sleep.
const SPIN_TIME: Duration = Duration::from_micros(100);

/// The longest time that the final messages may take, to all peers together.
const FINAL_MESSAGES_TIMEOUT: Duration = Duration::from_secs(1);

/// Starts to read from all peers into the inbox. The thread ends with the connections, or some time
/// after the inbox is closed: the peers' final messages must be taken off the wire, or closing would
/// cut off our own.
fn spawn_reader(
    links: &Arc<Links>,
    inbox: &Arc<Inbox>,
    handoff: &Arc<ReaderHandoff>,
) -> Result<()> {
    let reader = ReaderThread {
        links: Arc::clone(links),
        inbox: Arc::clone(inbox),
        handoff: Arc::clone(handoff),
    };
    thread::Builder::new()
        .name("from-peers".to_owned())
        .stack_size(256 * 1024)
        .spawn(move || reader.run())
        .map_err(|error| Error::io("a reading thread cannot be started", error))?;
    Ok(())
}

/// Reads bytes as if a peer had sent them, until they end.
#[cfg(feature = "fuzzing")]
pub(crate) fn feed(source: impl Read, peer: Peer, inbox: Arc<Inbox>) {
    let liveness = Arc::new(peer_liveness::PeerLiveness::new());
    let stages = Arc::new(Stages::default());
    let mut reader = FrameReader::new(source, peer.rank, Arc::clone(&inbox), liveness, stages);
    loop {
        match reader.read_frames() {
            ReadOutcome::Frames | ReadOutcome::Nothing => {}
            ReadOutcome::Full => drop(inbox.has_room(peer.rank, CLOSE_CHECK_INTERVAL)),
            ReadOutcome::Ended => return,
        }
    }
}

struct ReaderThread {
    links: Arc<Links>,
    inbox: Arc<Inbox>,
    handoff: Arc<ReaderHandoff>,
}

impl Drop for ReaderThread {
    fn drop(&mut self) {
        if thread::panicking() {
            self.inbox.failed(READER_PANICKED);
        }
    }
}

impl ReaderThread {
    fn run(&self) {
        let mut closed = None;
        loop {
            self.handoff.wait_for_turn();
            match self.links.read_frames() {
                ReadOutcome::Frames => {}
                ReadOutcome::Nothing => self.links.poll([], CLOSE_CHECK_INTERVAL),
                // No event tells of room.
                ReadOutcome::Full => self.links.poll([], ROOM_CHECK_INTERVAL),
                ReadOutcome::Ended => return,
            }
            if self.inbox.is_closed() {
                let closed = *closed.get_or_insert_with(Instant::now);
                if closed.elapsed() >= DRAIN {
                    return;
                }
            }
        }
    }
}

/// The interval at which a waiting reader checks if the inbox is closed.
const CLOSE_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The time that a closed inbox leaves the peer to finish.
const DRAIN: Duration = Duration::from_secs(2);

/// Tracks if an operation of this rank reads the connections, or did a moment ago.
#[derive(Debug)]
struct ReaderHandoff {
    since: Instant,
    /// The number of threads that read for operations.
    inside: AtomicUsize,
    /// The time at which the last one left, in milliseconds after `since`, plus one; zero before the first.
    left: AtomicU64,
    /// Set once no operation will read any more.
    is_over: Mutex<bool>,
    /// The reading thread may read.
    wakeup: Condvar,
}

impl ReaderHandoff {
    fn new() -> Self {
        Self {
            since: Instant::now(),
            inside: AtomicUsize::new(0),
            left: AtomicU64::new(0),
            is_over: Mutex::new(false),
            wakeup: Condvar::new(),
        }
    }

    /// Lets this thread read until the guard is dropped, and some time longer.
    fn enter(&self) -> PollingGuard<'_> {
        self.inside.fetch_add(1, Ordering::Relaxed);
        PollingGuard(self)
    }

    /// Leaves the connections to the reading thread for good.
    fn end(&self) {
        *self.is_over.lock() = true;
        self.wakeup.notify_all();
    }

    /// Waits until the reading thread may read. It looks from time to time: operations, which come and go all the
    /// time, need not tell it.
    fn wait_for_turn(&self) {
        let mut is_over = self.is_over.lock();
        while !*is_over && let Some(nap) = self.nap() {
            is_over = self.wakeup.wait_timeout(is_over, nap);
        }
    }

    /// The time for which the reading thread leaves the connections alone before it checks again.
    fn nap(&self) -> Option<Duration> {
        if self.inside.load(Ordering::Relaxed) > 0 {
            return Some(NAP);
        }
        let left = self.left.load(Ordering::Relaxed).checked_sub(1)?;
        let due = self.since + Duration::from_millis(left) + NAP;
        let nap = due.saturating_duration_since(Instant::now());
        (!nap.is_zero()).then_some(nap)
    }
}

/// Somebody reads.
struct PollingGuard<'a>(&'a ReaderHandoff);

impl Drop for PollingGuard<'_> {
    fn drop(&mut self) {
        let handoff = self.0;
        let left = handoff.since.elapsed().as_millis() as u64 + 1;
        handoff.left.store(left, Ordering::Relaxed);
        handoff.inside.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The time after an operation's last read for which the reading thread expects the next one. A peer
/// whose socket is full waits at most this much longer.
const NAP: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests;
