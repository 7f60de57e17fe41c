//! Ranks as processes, connected each with each by TCP.

mod ear;
mod link;
mod mesh;
mod pulse;
mod reader;

use std::{
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    FLIGHTS, Farewell, Inbox, Part, Parting, Peer, Place, Stage, Transport, TransportKind, Watch,
};
use crate::{
    error::{Certainty, Error, Result},
    rendezvous::{LONGEST, Meeting},
    shared::{Hosts, World},
    topology::Topology,
    wire::frame::{FrameKind, Head},
};
use link::Link;
use pulse::Pace;
#[cfg(feature = "fuzzing")]
pub(crate) use reader::feed;

/// One rank in a mesh of connections. A thread for each peer reads what comes into the inbox, so
/// a peer that sends never waits for this rank's engine.
#[derive(Debug)]
pub(crate) struct Tcp {
    rank: usize,
    peers: Vec<Peer>,
    links: Vec<Option<Link>>,
    inbox: Arc<Inbox>,
    /// How long the others may take to complete their connections.
    patience: Duration,
    pace: Mutex<Pace>,
    /// Whether the next part is to be spoilt.
    spoilt: AtomicBool,
    /// What operations go through instead of the connections, which then tell who is gone.
    memory: OnceLock<World>,
    /// Where reductions go by hosts.
    hosts: OnceLock<Hosts>,
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
        let inbox = Arc::new(Inbox::new(peers.len()));
        let mut links = Vec::with_capacity(peers.len());
        for (peer, stream) in peers.iter().zip(streams) {
            let link = match stream {
                None => None,
                Some(stream) => {
                    let link = Link::new(stream)?;
                    reader::spawn(&link, peer.clone(), Arc::clone(&inbox))?;
                    Some(link)
                }
            };
            links.push(link);
        }
        Ok(Self {
            rank,
            peers,
            links,
            inbox,
            patience,
            pace: Mutex::default(),
            spoilt: AtomicBool::new(false),
            memory: OnceLock::new(),
            hosts: OnceLock::new(),
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
        match (self.memory.get(), self.hosts.get()) {
            (Some(_), _) => TransportKind::Shm,
            (None, Some(_)) => TransportKind::Hierarchical,
            (None, None) => TransportKind::Tcp,
        }
    }

    fn peers(&self) -> &[Peer] {
        &self.peers
    }

    fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    fn send(&self, to: usize, part: Part<'_>, watch: &mut Watch) -> Result<()> {
        let Some(link) = &self.links[to] else {
            return Err(watch.protocol(&self.peers[self.rank], "it sent a part to itself"));
        };
        let declaration = part.contract.map(|contract| contract.encode());
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
        let mut due = Instant::now() + link::TICK;
        let outcome = link.write(&self.sealed(head), preamble, part.payload, |written| {
            let now = Instant::now();
            watch.woke(due, now);
            due = now + link::TICK;
            if failure.is_none() {
                let check = self.inbox.check(to, &self.peers, watch);
                let check = check.and_then(|()| {
                    watch
                        .tick(|| self.inbox.roots(self.rank, vec![to]))
                        .map(drop)
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
            match &failure {
                Some((_, until)) => written > 0 && Instant::now() < *until,
                None => true,
            }
        });
        match (failure, outcome) {
            (Some((error, _)), _) => Err(error),
            (None, Ok(())) => Ok(()),
            (None, Err(error)) => {
                // The peer, or another one, has said why; else the broken connection is why.
                self.inbox.verdict(to, &self.peers, watch)?;
                let why = format!("its connection broke: {error}");
                Err(watch.lost(&self.peers[to], &why, Certainty::Guessed))
            }
        }
    }

    fn lanes(&self) -> usize {
        match self.kind() {
            TransportKind::Tcp => FLIGHTS,
            _ => 1,
        }
    }

    fn farewell(&self, farewell: &Farewell) {
        self.inbox.close();
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
        let (present, lost): (Vec<_>, Vec<_>) = self
            .others()
            .partition(|(rank, _)| self.inbox.is_present(*rank));
        let until = Instant::now() + LINGER;
        for (_, link) in present {
            link.part(&head, &preamble, until);
        }
        let until = Instant::now();
        for (_, link) in lost {
            link.part(&head, &preamble, until);
        }
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
        self.memory.get()
    }

    fn hosts(&self) -> Option<&Hosts> {
        self.hosts.get()
    }

    fn share_by_hosts(&self, hosts: Hosts) {
        // It is told once, when the ranks have found out.
        let _ = self.hosts.set(hosts);
    }

    fn share(&self, world: World) {
        // It is told once, when the ranks have found out.
        let _ = self.memory.set(world);
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
        for (_, link) in self.others() {
            link.hang_up();
        }
    }
}

/// How long the last words take at most, to all peers together.
const LINGER: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
