//! Ranks as processes, connected each with each by TCP.

mod frame_reader;
mod heartbeat_round;
mod link;
mod mesh;
mod peer_liveness;
mod poll_loop;
mod reader_handoff;
mod reader_thread;
mod unsent;

use std::{
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    FinalMessage, Inbox, LeaveKind, MAX_IN_FLIGHT, OpDeadline, OutgoingChunk, Peer, PeerLocation,
    Stage, Transport, TransportKind, waker::Waker,
};
use crate::{
    error::{Certainty, Error, Result},
    rendezvous::{LONGEST, Meeting},
    shm::{Hosts, SharedMemory, ShmPeers, cores},
    topology::Topology,
    wire::frame::{FrameKind, Head},
};
use heartbeat_round::RoundClock;
use link::Link;
use reader_handoff::ReaderHandoff;
#[cfg(feature = "fuzzing")]
pub(crate) use reader_thread::feed;

/// One rank in a mesh of connections. Operations that wait read what comes; where there is none, a
/// thread for each peer does, so a peer that sends never waits for this rank's engine for long.
#[derive(Debug)]
pub(crate) struct Tcp {
    rank: usize,
    peers: Vec<Peer>,
    links: Vec<Option<Link>>,
    inbox: Arc<Inbox>,
    handoff: Arc<ReaderHandoff>,
    /// How long an operation that waits keeps its core.
    busy: Duration,
    /// How long the others may take to complete their connections.
    patience: Duration,
    clock: Mutex<RoundClock>,
    /// Whether the next part is to be spoilt.
    spoilt: AtomicBool,
    /// What operations go through instead of the connections, which then tell who is gone.
    arrangement: OnceLock<SharedMemory>,
}

impl Tcp {
    /// Connects to all ranks of a meeting.
    pub(crate) fn connect(
        topology: &Topology,
        meeting: Meeting,
        patience: Duration,
    ) -> Result<Self> {
        let rank = topology.rank();
        let streams = mesh::connect(rank, &meeting, Instant::now() + patience.min(LONGEST))?;
        let peers: Vec<Peer> = meeting
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
        let waker = Waker::new()
            .map_err(|error| Error::io("there is no pair of sockets to wake a thread", error))?;
        let inbox = Arc::new(Inbox::with_waker(peers.len(), waker));
        let handoff = Arc::new(ReaderHandoff::new());
        let mut links = Vec::with_capacity(peers.len());
        for (peer, stream) in peers.iter().zip(streams) {
            let link = match stream {
                None => None,
                Some(stream) => {
                    let link = Link::new(stream, peer.rank, &inbox)?;
                    let (inbox, handoff) = (Arc::clone(&inbox), Arc::clone(&handoff));
                    reader_thread::spawn(&link, peer.rank, inbox, handoff)?;
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
            handoff,
            patience,
            clock: Mutex::default(),
            spoilt: AtomicBool::new(false),
            arrangement: OnceLock::new(),
        })
    }

    /// The head of a part as bytes; one of them is wrong where a fault asks for it.
    fn sealed(&self, head: Head) -> [u8; Head::LEN] {
        let mut bytes = head.encode();
        if self.spoilt.load(Ordering::Relaxed) && self.spoilt.swap(false, Ordering::Relaxed) {
            bytes[8] ^= 1;
        }
        bytes
    }

    fn others(&self) -> impl Iterator<Item = (usize, &Link)> {
        let links = self.links.iter().enumerate();
        links.filter_map(|(rank, link)| Some((rank, link.as_ref()?)))
    }
}

impl Transport for Tcp {
    fn kind(&self) -> TransportKind {
        match self.arrangement.get() {
            Some(SharedMemory::OneHost(_)) => TransportKind::Shm,
            Some(SharedMemory::Hosts(_)) => TransportKind::Hierarchical,
            None => TransportKind::Tcp,
        }
    }

    fn peers(&self) -> &[Peer] {
        &self.peers
    }

    fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    fn send(&self, to: usize, part: OutgoingChunk<'_>, deadline: &mut OpDeadline) -> Result<()> {
        let Some(link) = &self.links[to] else {
            return Err(deadline.protocol(&self.peers[self.rank], "it sent a part to itself"));
        };
        let declaration = part.fingerprint.map(|fingerprint| fingerprint.encode());
        let preamble = match &declaration {
            Some((bytes, len)) => &bytes[..*len],
            None => &[],
        };
        let kind = match part.tag.stage {
            Stage::Begin => FrameKind::Begin,
            Stage::Inward => FrameKind::Inward,
            Stage::Outward => FrameKind::Outward,
        };
        let (sequence, index) = (part.tag.sequence, part.tag.index);
        let head = Head::new(kind, sequence, index, preamble, part.payload);
        // After a failure the time to complete the frame is short; the failure is told then.
        let mut failure: Option<(Error, Instant)> = None;
        let mut stuck: Option<(usize, Instant)> = None;
        let outcome = link.write(&self.sealed(head), preamble, part.payload, |written| {
            let now = Instant::now();
            let mut due = match stuck {
                Some((at, due)) if at == written => due,
                _ => now + link::TICK,
            };
            if written > stuck.map_or(0, |(at, _)| at) {
                deadline.on_progress(now);
            }
            self.inbox.await_rank(Some(to));
            let was_calm = self.inbox.has_no_failures();
            if failure.is_none() && (now >= due || !was_calm) {
                deadline.compensate(due, now);
                due = now + link::TICK;
                let check = self.inbox.check(to, &self.peers, deadline);
                let check = check.and_then(|()| {
                    let roots = |deadline: &OpDeadline| self.inbox.roots(vec![to], deadline);
                    deadline.tick(roots, |rank| self.active(rank)).map(drop)
                });
                if let Err(error) = check {
                    // Who is lost takes nothing more.
                    let linger = match error.is_peer_lost() && error.ranks().contains(&to) {
                        true => Duration::ZERO,
                        false => LINGER,
                    };
                    failure = Some((error, now + linger));
                }
            }
            stuck = Some((written, due));
            if let Some((_, until)) = &failure {
                if written == 0 || now >= *until {
                    return false;
                }
                due = *until;
            }
            // What has been told is not told again.
            self.poll_until_writable(link, due, || was_calm && !self.inbox.has_no_failures());
            true
        });
        if stuck.is_some() {
            self.inbox.await_rank(None);
        }
        match (failure, outcome) {
            (Some((error, _)), _) => Err(error),
            (None, Ok(())) => {
                deadline.restart();
                Ok(())
            }
            (None, Err(error)) => {
                // The peer, or another one, has said why; else the broken connection is why.
                self.inbox.wait_for_cause(to, &self.peers, deadline)?;
                let why = format!("its connection broke: {error}");
                Err(deadline.lost(&self.peers[to], &why, Certainty::Guessed))
            }
        }
    }

    fn await_news(&self, version: u64, due: Instant, _: &OpDeadline) -> Result<()> {
        self.poll_until_news(version, due);
        Ok(())
    }

    fn max_in_flight(&self) -> usize {
        match self.kind() {
            TransportKind::Tcp => MAX_IN_FLIGHT,
            _ => 1,
        }
    }

    fn leave(&self, leave: &FinalMessage) {
        self.inbox.close();
        self.handoff.end();
        let (head, preamble) = match leave {
            FinalMessage::Abort(abort) => {
                let preamble = abort.encode();
                let head = Head::new(FrameKind::Abort, abort.sequence, 0, &preamble, &[]);
                (head.encode(), preamble)
            }
            FinalMessage::Goodbye(parting) => {
                let parting = match parting {
                    LeaveKind::Closed => 0,
                    LeaveKind::Dropped => 1,
                };
                let head = Head::new(FrameKind::Goodbye, 0, parting, &[], &[]);
                (head.encode(), Vec::new())
            }
        };
        // Who is lost is told last, so that nobody else waits for it.
        let (mut receivers, lost): (Vec<_>, Vec<_>) = self
            .others()
            .partition(|(rank, _)| self.inbox.can_receive(*rank));
        // Nor for one that broke the protocol, and may take nothing.
        receivers.sort_by_key(|(rank, _)| !self.inbox.is_present(*rank));
        let until = Instant::now() + LINGER;
        for (_, link) in &receivers {
            link.part(&head, &preamble, until);
        }
        let now = Instant::now();
        for (_, link) in lost {
            link.part(&head, &preamble, now);
        }
        // The program may end next.
        let receivers: Vec<&Link> = receivers.into_iter().map(|(_, link)| link).collect();
        self.drain_until_sent(&receivers, until);
    }

    fn heartbeat(&self, liveness: Duration) -> Option<Duration> {
        // A moment is whole at every moment.
        let mut clock = self.clock.lock().unwrap_or_else(PoisonError::into_inner);
        Some(self.round(&mut clock, liveness))
    }

    fn silent(&self, silence: Duration) -> Vec<usize> {
        let now = Instant::now();
        self.others()
            .filter(|(rank, link)| {
                self.inbox.is_present(*rank)
                    && link.liveness.has_spoken()
                    && link.liveness.silence(now) >= silence
                    && !link.has_news()
            })
            .map(|(rank, _)| rank)
            .collect()
    }

    fn report_exit(&self, rank: usize, text: &str) -> bool {
        if let Some(link) = &self.links[rank]
            && self.inbox.is_present(rank)
        {
            if link.liveness.is_paused() || link.has_news() {
                return false;
            }
            self.inbox.lost(rank, text, Certainty::Settled);
        }
        true
    }

    fn shared(&self) -> Option<&ShmPeers> {
        match self.arrangement.get() {
            Some(SharedMemory::OneHost(world)) => Some(world),
            _ => None,
        }
    }

    fn hosts(&self) -> Option<&Hosts> {
        match self.arrangement.get() {
            Some(SharedMemory::Hosts(hosts)) => Some(hosts),
            _ => None,
        }
    }

    fn share(&self, arrangement: SharedMemory) {
        // It is told once, when the ranks have found out.
        let _ = self.arrangement.set(arrangement);
    }

    fn cut(&self) {
        for (_, link) in self.others() {
            link.cut();
        }
    }

    fn spoil(&self) {
        self.spoilt.store(true, Ordering::Relaxed);
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        // Usually the last word has been said; a second end of the sending side does nothing.
        self.inbox.close();
        self.handoff.end();
        for (_, link) in self.others() {
            link.hang_up();
        }
    }
}

/// How long an operation may keep its core while it waits: not at all where the ranks of this host
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
    match ranks <= cores(peers.iter().filter_map(here)) {
        true => BUSY,
        false => Duration::ZERO,
    }
}

/// Longer than two switches to and from sleep.
const BUSY: Duration = Duration::from_micros(100);

/// How long the last words take at most, to all peers together.
const LINGER: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
