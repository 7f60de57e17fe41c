//! Ranks as threads of one process.

use std::{io, sync::Arc, time::Instant};

use super::{
    FinalMessage, Inbox, OpDeadline, OutgoingChunk, Peer, PeerLocation, Transport, TransportKind,
};
use crate::{
    error::{Error, Result},
    shm::{Arena, ShmPeers, Spin, cores},
};

/// One rank among the threads of a process, which share its memory.
///
/// A thread cannot fall silent alone, lose its connections or spoil what it says, so such faults do
/// nothing here. It can panic, leave early and be slow.
#[derive(Debug)]
pub(crate) struct Threads {
    rank: usize,
    hub: Arc<Hub>,
    /// None in a world of one.
    world: Option<ShmPeers>,
}

impl Threads {
    /// The only rank of a world of one.
    pub(crate) fn alone() -> Self {
        Self {
            rank: 0,
            hub: Arc::new(Hub::new(1)),
            world: None,
        }
    }

    /// The ranks of a new world, in rank order.
    pub(crate) fn world(world_size: usize) -> Result<Vec<Self>> {
        if world_size == 1 {
            return Ok(vec![Self::alone()]);
        }
        let arenas: io::Result<Arc<[_]>> = (0..world_size)
            .map(|_| Arena::of_thread().map(Arc::new))
            .collect();
        let arenas = arenas
            .map_err(|error| Error::io("there is no memory that threads can share", error))?;
        let hub = Arc::new(Hub::new(world_size));
        let spin = Spin::for_ranks(world_size, cores([]));
        let ranks = (0..world_size).map(|rank| Self {
            rank,
            hub: Arc::clone(&hub),
            world: Some(ShmPeers::new(rank, Arc::clone(&arenas), 0, spin)),
        });
        Ok(ranks.collect())
    }
}

impl Transport for Threads {
    fn kind(&self) -> TransportKind {
        TransportKind::Threads
    }

    fn peers(&self) -> &[Peer] {
        &self.hub.peers
    }

    fn inbox(&self) -> &Inbox {
        &self.hub.inboxes[self.rank]
    }

    fn await_news(&self, _: u64, _: Instant, deadline: &OpDeadline) -> Result<()> {
        let me = &self.hub.peers[self.rank];
        Err(deadline.protocol(me, "it waits for parts, which threads do not send"))
    }

    fn send(&self, to: usize, _part: OutgoingChunk<'_>, deadline: &mut OpDeadline) -> Result<()> {
        // Operations go through the memory that the threads share.
        let me = &self.hub.peers[self.rank];
        Err(deadline.protocol(me, format_args!("it sent a part to rank {to}, a thread")))
    }

    fn active(&self, rank: usize) -> Option<Instant> {
        self.hub.inboxes.get(rank)?.activity().last()
    }

    fn shared(&self) -> Option<&ShmPeers> {
        self.world.as_ref()
    }

    fn leave(&self, leave: &FinalMessage) {
        self.inbox().close();
        for (rank, inbox) in self.hub.inboxes.iter().enumerate() {
            if rank == self.rank {
                continue;
            }
            match leave {
                FinalMessage::Abort(abort) => inbox.aborted(self.rank, abort.clone()),
                FinalMessage::Goodbye(parting) => inbox.left(self.rank, *parting),
            }
        }
    }
}

#[derive(Debug)]
struct Hub {
    inboxes: Vec<Inbox>,
    peers: Vec<Peer>,
}

impl Hub {
    fn new(world_size: usize) -> Self {
        Self {
            inboxes: (0..world_size).map(|_| Inbox::new(world_size)).collect(),
            peers: (0..world_size)
                .map(|rank| Peer {
                    rank,
                    location: PeerLocation::Thread,
                })
                .collect(),
        }
    }
}
