//! A mesh of TCP connections between processes: a control plane, and a data plane.

mod frame_reader;
mod link;
mod mesh;
mod peer_liveness;
mod planes;
mod reader;
mod unsent;

use std::{
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use super::{ControlPlane, Inbox, Peer, PeerLocation, Transport, waker::Waker};
use crate::{
    error::{Error, Result},
    rendezvous::{MAX_WAIT, Meeting},
    topology::Topology,
};
use accelerator_host::{machine::UsableCores, sync::Mutex};
use link::Link;
use reader::ReaderHandoff;
#[cfg(feature = "fuzzing")]
pub(crate) use reader::feed;

/// One rank in a mesh of connections. Waiting operations read incoming data; while none waits, one
/// thread per peer does, so a peer that sends never waits for this rank's engine for long.
#[derive(Debug)]
pub(crate) struct Tcp {
    rank: usize,
    peers: Arc<[Peer]>,
    links: Vec<Option<Link>>,
    inbox: Arc<Inbox>,
    handoff: Arc<ReaderHandoff>,
    /// The time for which a waiting operation keeps its core.
    busy: Duration,
    /// The time within which the others must complete their connections.
    connect_timeout: Duration,
    round_due: Mutex<Option<Instant>>,
    /// Set to corrupt the next chunk, as a fault.
    corrupt_next: AtomicBool,
}

impl Tcp {
    /// Connects to all ranks of a meeting.
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
                    reader::spawn(&link, peer.rank, inbox, handoff)?;
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
            connect_timeout,
            round_due: Mutex::default(),
            corrupt_next: AtomicBool::new(false),
        })
    }

    /// Makes this mesh both planes of a group.
    pub(crate) fn into_transport(self) -> Transport {
        let (peers, inbox) = (Arc::clone(&self.peers), Arc::clone(&self.inbox));
        let mesh = Arc::new(self);
        let control: Arc<dyn ControlPlane> = mesh.clone();
        Transport::new(peers, inbox, control, Some(mesh))
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

#[cfg(test)]
mod tests;
