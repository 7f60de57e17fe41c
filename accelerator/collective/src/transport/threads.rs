//! Ranks as threads of one process.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{Farewell, Inbox, Parcel, Part, Peer, Place, Transport, TransportKind, Watch};
use crate::error::Result;

/// One rank among the threads of a process: sending copies a part into the receiver's inbox.
///
/// A thread cannot fall silent alone, lose its connections or send a spoilt part, so such faults
/// do nothing here. It can panic, leave early and be slow.
#[derive(Debug)]
pub(crate) struct Threads {
    rank: usize,
    hub: Arc<Hub>,
}

impl Threads {
    /// The only rank of a world of one.
    pub(crate) fn alone() -> Self {
        Self {
            rank: 0,
            hub: Arc::new(Hub::new(1)),
        }
    }

    /// The ranks of a new world, in rank order.
    pub(crate) fn world(world_size: usize) -> impl Iterator<Item = Self> {
        let hub = Arc::new(Hub::new(world_size));
        (0..world_size).map(move |rank| Self {
            rank,
            hub: Arc::clone(&hub),
        })
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

    fn send(&self, to: usize, part: Part<'_>, watch: &mut Watch<'_>) -> Result<()> {
        let target = &self.hub.inboxes[to];
        loop {
            let due = Instant::now() + PAUSE;
            if target.has_room(self.rank, PAUSE) {
                break;
            }
            watch.woke(due, Instant::now());
            self.inbox().check(to, self.peers(), watch)?;
            watch.tick(|| vec![to])?;
        }
        let mut chunk = target.chunk(part.payload.len());
        chunk.bytes_mut().copy_from_slice(part.payload);
        target.deposit(
            self.rank,
            Parcel {
                tag: part.tag,
                contract: part.contract.copied(),
                chunk,
            },
        );
        Ok(())
    }

    fn farewell(&self, farewell: &Farewell) {
        self.inbox().close();
        for (rank, inbox) in self.hub.inboxes.iter().enumerate() {
            if rank == self.rank {
                continue;
            }
            match farewell {
                Farewell::Abort(abort) => inbox.aborted(self.rank, abort.clone()),
                Farewell::Goodbye(parting) => inbox.left(self.rank, *parting),
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
                    place: Place::Thread,
                })
                .collect(),
        }
    }
}

const PAUSE: Duration = Duration::from_millis(20);
