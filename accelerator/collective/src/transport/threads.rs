//! Ranks as threads of one process.

use std::{io, sync::Arc, time::Instant};

use super::{ControlPlane, DataPath, FinalMessage, Inbox, Peer, PeerLocation, Transport};
use crate::{
    error::{Error, Result},
    shm::{Arena, ShmPeers, Spin},
};
use accelerator_host::machine::UsableCores;

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

fn peers(world_size: usize) -> Arc<[Peer]> {
    let peer = |rank| Peer {
        rank,
        location: PeerLocation::Thread,
    };
    (0..world_size).map(peer).collect()
}
