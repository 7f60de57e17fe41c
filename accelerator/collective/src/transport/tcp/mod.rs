//! Ranks as processes, connected each with each by TCP.

mod ear;
mod intake;
mod link;
mod mesh;
mod pulse;
mod reader;
mod tend;
mod tending;
mod unsent;

use std::{
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    FLIGHTS, Farewell, Inbox, OutgoingChunk, Parting, Peer, Place, Stage, Transport, TransportKind,
    Watch, bell::Bell,
};
use crate::{
    error::{Certainty, Error, Result},
    rendezvous::{LONGEST, Meeting},
    shared::{Arrangement, Hosts, World, cores},
    topology::Topology,
    wire::frame::{FrameKind, Head},
};
use link::Link;
use pulse::Pace;
#[cfg(feature = "fuzzing")]
pub(crate) use reader::feed;
use tending::Tending;

/// One rank in a mesh of connections. Operations that wait read what comes; where there is none, a
/// thread for each peer does, so a peer that sends never waits for this rank's engine for long.
#[derive(Debug)]
pub(crate) struct Tcp {
    rank: usize,
    peers: Vec<Peer>,
    links: Vec<Option<Link>>,
    inbox: Arc<Inbox>,
    tending: Arc<Tending>,
    /// How long an operation that waits keeps its core.
    busy: Duration,
    /// How long the others may take to complete their connections.
    patience: Duration,
    pace: Mutex<Pace>,
    /// Whether the next part is to be spoilt.
    spoilt: AtomicBool,
    /// What operations go through instead of the connections, which then tell who is gone.
    arrangement: OnceLock<Arrangement>,
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
                place: Place::Process {
                    host: x.host,
                    pid: x.pid,
                },
            })
            .collect();
        let bell = Bell::new()
            .map_err(|error| Error::io("there is no pair of sockets to wake a thread", error))?;
        let inbox = Arc::new(Inbox::with_bell(peers.len(), bell));
        let tending = Arc::new(Tending::new());
        let mut links = Vec::with_capacity(peers.len());
        for (peer, stream) in peers.iter().zip(streams) {
            let link = match stream {
                None => None,
                Some(stream) => {
                    let link = Link::new(stream, peer.rank, &inbox)?;
                    let (inbox, tending) = (Arc::clone(&inbox), Arc::clone(&tending));
                    reader::spawn(&link, peer.rank, inbox, tending)?;
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
            tending,
            patience,
            pace: Mutex::default(),
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
            Some(Arrangement::OneHost(_)) => TransportKind::Shm,
            Some(Arrangement::Hosts(_)) => TransportKind::Hierarchical,
            None => TransportKind::Tcp,
        }
    }

    fn peers(&self) -> &[Peer] {
        &self.peers
    }

    fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    fn send(&self, to: usize, part: OutgoingChunk<'_>, watch: &mut Watch) -> Result<()> {
        let Some(link) = &self.links[to] else {
            return Err(watch.protocol(&self.peers[self.rank], "it sent a part to itself"));
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
                watch.moved(now);
            }
            self.inbox.await_rank(Some(to));
            let was_calm = self.inbox.is_calm();
            if failure.is_none() && (now >= due || !was_calm) {
                watch.woke(due, now);
                due = now + link::TICK;
                let check = self.inbox.check(to, &self.peers, watch);
                let check = check.and_then(|()| {
                    let roots = |watch: &Watch| self.inbox.roots(vec![to], watch);
                    watch.tick(roots, |rank| self.active(rank)).map(drop)
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
            self.tend_until_writable(link, due, || was_calm && !self.inbox.is_calm());
            true
        });
        if stuck.is_some() {
            self.inbox.await_rank(None);
        }
        match (failure, outcome) {
            (Some((error, _)), _) => Err(error),
            (None, Ok(())) => {
                watch.restart();
                Ok(())
            }
            (None, Err(error)) => {
                // The peer, or another one, has said why; else the broken connection is why.
                self.inbox.verdict(to, &self.peers, watch)?;
                let why = format!("its connection broke: {error}");
                Err(watch.lost(&self.peers[to], &why, Certainty::Guessed))
            }
        }
    }

    fn await_news(&self, version: u64, due: Instant, _: &Watch) -> Result<()> {
        self.tend(version, due);
        Ok(())
    }

    fn lanes(&self) -> usize {
        match self.kind() {
            TransportKind::Tcp => FLIGHTS,
            _ => 1,
        }
    }

    fn farewell(&self, farewell: &Farewell) {
        self.inbox.close();
        self.tending.end();
        let (head, preamble) = match farewell {
            Farewell::Abort(abort) => {
                let preamble = abort.encode();
                let head = Head::new(FrameKind::Abort, abort.sequence, 0, &preamble, &[]);
                (head.encode(), preamble)
            }
            Farewell::Goodbye(parting) => {
                let parting = match parting {
                    Parting::Closed => 0,
                    Parting::Dropped => 1,
                };
                let head = Head::new(FrameKind::Goodbye, 0, parting, &[], &[]);
                (head.encode(), Vec::new())
            }
        };
        // Who is lost is told last, so that nobody else waits for it.
        let (mut hearers, lost): (Vec<_>, Vec<_>) = self
            .others()
            .partition(|(rank, _)| self.inbox.may_hear(*rank));
        // Nor for one that broke the protocol, and may take nothing.
        hearers.sort_by_key(|(rank, _)| !self.inbox.is_present(*rank));
        let until = Instant::now() + LINGER;
        for (_, link) in &hearers {
            link.part(&head, &preamble, until);
        }
        let now = Instant::now();
        for (_, link) in lost {
            link.part(&head, &preamble, now);
        }
        // The program may end next.
        let hearers: Vec<&Link> = hearers.into_iter().map(|(_, link)| link).collect();
        self.clear(&hearers, until);
    }

    fn pulse(&self, liveness: Duration) -> Option<Duration> {
        // A moment is whole at every moment.
        let mut pace = self.pace.lock().unwrap_or_else(PoisonError::into_inner);
        Some(self.round(&mut pace, liveness))
    }

    fn silent(&self, silence: Duration) -> Vec<usize> {
        let now = Instant::now();
        self.others()
            .filter(|(rank, link)| {
                self.inbox.is_present(*rank)
                    && link.ear.is_known()
                    && link.ear.silence(now) >= silence
                    && !link.has_news()
            })
            .map(|(rank, _)| rank)
            .collect()
    }

    fn testify(&self, rank: usize, text: &str) -> bool {
        if let Some(link) = &self.links[rank]
            && self.inbox.is_present(rank)
        {
            if link.ear.is_shut() || link.has_news() {
                return false;
            }
            self.inbox.lost(rank, text, Certainty::Settled);
        }
        true
    }

    fn shared(&self) -> Option<&World> {
        match self.arrangement.get() {
            Some(Arrangement::OneHost(world)) => Some(world),
            _ => None,
        }
    }

    fn hosts(&self) -> Option<&Hosts> {
        match self.arrangement.get() {
            Some(Arrangement::Hosts(hosts)) => Some(hosts),
            _ => None,
        }
    }

    fn share(&self, arrangement: Arrangement) {
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
        self.tending.end();
        for (_, link) in self.others() {
            link.hang_up();
        }
    }
}

/// How long an operation may keep its core while it waits: not at all where the ranks of this host
/// outnumber the cores, since the one that is waited for may need it.
fn busy(peers: &[Peer], rank: usize) -> Duration {
    let here = |peer: &Peer| match (&peer.place, &peers[rank].place) {
        (Place::Process { host, pid }, Place::Process { host: mine, .. }) if host == mine => {
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
