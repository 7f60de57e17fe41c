//! A mesh of TCP connections between processes: a control plane, and a data plane; and the threads that read what peers
//! send while no operation does, with the handoff to them. See the README.

mod frame_reader;
mod link;
mod mesh;
mod planes;

#[cfg(feature = "fuzzing")]
use std::io::Read;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_host::machine::UsableCores;
use accelerator_host::sync::{Condvar, Mutex};
use rustix::event::PollFlags;

use self::frame_reader::{FrameReader, ReadOutcome, read_frames};
use self::link::Link;
use super::{ControlPlane, Inbox, Peer, PeerLocation, Poller, Transport, new_poller};
use crate::error::{Error, Result};
use crate::rendezvous::{MAX_WAIT, Meeting};
use crate::socket::await_ready;
use crate::topology::Topology;

/// One rank in a mesh of connections. Waiting operations read incoming data; while none waits, one
/// thread per peer does, so a peer that sends never waits for this rank's engine for long.
#[derive(Debug)]
pub(crate) struct Tcp {
    rank: usize,
    peers: Arc<[Peer]>,
    links: Vec<Option<Link>>,
    inbox: Arc<Inbox>,
    /// The poller of operations of all ranks.
    poller: Arc<Poller>,
    handoff: Arc<ReaderHandoff>,
    /// The time for which a waiting operation keeps its core.
    busy: Duration,
    /// The time within which the others must complete their connections.
    connect_timeout: Duration,
    /// The time at which the next round is due; the first one is when the connections are made.
    round_due: Mutex<Instant>,
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
        let poller = new_poller(&inbox)?;
        let handoff = Arc::new(ReaderHandoff::new());
        // Silence counts from here on, and so does the time in which this process is suspended.
        let round_due = Instant::now();
        let mut links = Vec::with_capacity(peers.len());
        for (peer, stream) in peers.iter().zip(streams) {
            let link = match stream {
                None => None,
                Some(stream) => {
                    let link = Link::new(stream, peer.rank, &inbox)?;
                    let (inbox, handoff) = (Arc::clone(&inbox), Arc::clone(&handoff));
                    spawn_reader(&link, peer.rank, inbox, handoff)?;
                    Some(link)
                }
            };
            links.push(link);
        }
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

    fn others(&self) -> impl Iterator<Item = (usize, &Link)> {
        let links = self.links.iter().enumerate();
        links.filter_map(|(rank, link)| Some((rank, link.as_ref()?)))
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        // Usually the final message has been sent; a second end of the sending side does nothing.
        self.inbox.close();
        self.handoff.end();
        for (_, link) in self.others() {
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

/// Starts to read from a peer into the inbox. The thread ends with the connection, or some time
/// after the inbox is closed: the peer's final message must be taken off the wire, or closing would
/// cut off our own.
fn spawn_reader(
    link: &Link,
    rank: usize,
    inbox: Arc<Inbox>,
    handoff: Arc<ReaderHandoff>,
) -> Result<()> {
    let spawned = link.source().and_then(|stream| {
        let reader = ReaderThread {
            stream,
            reader: Arc::clone(&link.reader),
            rank,
            inbox,
            handoff,
        };
        thread::Builder::new()
            .name(format!("from-rank-{rank}"))
            .stack_size(256 * 1024)
            .spawn(move || reader.run())
    });
    match spawned {
        Ok(_) => Ok(()),
        Err(error) => Err(Error::io("a reading thread cannot be started", error)),
    }
}

/// Reads bytes as if a peer had sent them, until they end.
#[cfg(feature = "fuzzing")]
pub(crate) fn feed(source: impl Read, peer: Peer, inbox: Arc<Inbox>) {
    let liveness = Arc::new(frame_reader::PeerLiveness::new());
    let mut reader = FrameReader::new(source, peer.rank, Arc::clone(&inbox), liveness);
    loop {
        match reader.read_frames() {
            ReadOutcome::Frames | ReadOutcome::Nothing => {}
            ReadOutcome::Full => drop(inbox.has_room(peer.rank, CLOSE_CHECK_INTERVAL)),
            ReadOutcome::Ended => return,
        }
    }
}

struct ReaderThread {
    stream: TcpStream,
    reader: Arc<std::sync::Mutex<FrameReader<TcpStream>>>,
    rank: usize,
    inbox: Arc<Inbox>,
    handoff: Arc<ReaderHandoff>,
}

impl ReaderThread {
    fn run(&self) {
        let mut closed = None;
        loop {
            self.handoff.wait_for_turn();
            match read_frames(&self.reader) {
                ReadOutcome::Frames => {}
                ReadOutcome::Nothing => drop(await_ready(
                    &self.stream,
                    PollFlags::IN,
                    CLOSE_CHECK_INTERVAL,
                )),
                ReadOutcome::Full => drop(self.inbox.has_room(self.rank, CLOSE_CHECK_INTERVAL)),
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
    queue: Mutex<WaitingReaders>,
    /// The reading threads may read.
    wakeup: Condvar,
}

/// The reading threads that wait for their turn.
#[derive(Debug, Default)]
struct WaitingReaders {
    /// Set while one of them checks from time to time on behalf of all.
    watched: bool,
    /// Set once no operation will read any more.
    is_over: bool,
}

impl ReaderHandoff {
    fn new() -> Self {
        Self {
            since: Instant::now(),
            inside: AtomicUsize::new(0),
            left: AtomicU64::new(0),
            queue: Mutex::default(),
            wakeup: Condvar::new(),
        }
    }

    /// Lets this thread read until the guard is dropped, and some time longer.
    fn enter(&self) -> PollingGuard<'_> {
        self.inside.fetch_add(1, Ordering::Relaxed);
        PollingGuard(self)
    }

    /// Leaves the connections to the reading threads for good.
    fn end(&self) {
        self.queue.lock().is_over = true;
        self.wakeup.notify_all();
    }

    /// Waits until a reading thread may read. One of those that wait looks from time to time, and
    /// wakes the others: operations, which come and go all the time, need not tell them.
    fn wait_for_turn(&self) {
        let mut queue = self.queue.lock();
        let mut has_watched = false;
        while !queue.is_over
            && let Some(nap) = self.nap()
        {
            if queue.watched {
                let woken = self.wakeup.wait(queue);
                queue = woken;
                continue;
            }
            queue.watched = true;
            let woken = self.wakeup.wait_timeout(queue, nap);
            queue = woken;
            queue.watched = false;
            has_watched = true;
        }
        drop(queue);
        if has_watched {
            self.wakeup.notify_all();
        }
    }

    /// The time for which the reading threads leave the connections alone before one of them checks again.
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

/// The time after an operation's last read for which reading threads expect the next one. A peer
/// whose socket is full waits at most this much longer.
const NAP: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests;
