//! Heartbeats through the memory that ranks of a host share.

use std::time::Instant;

use accelerator_host::sync::Mutex;

use crate::shm::{HeartbeatWords, ShmPeers};

/// The heartbeats that this rank exchanges through shared memory.
#[derive(Debug)]
pub(super) struct LocalHeartbeats {
    peers: ShmPeers,
    last_read: Mutex<LastRead>,
}

#[derive(Debug)]
struct LastRead {
    /// The number of the last heartbeat read from each rank, in the order of the arenas.
    seen: Vec<u32>,
    at: Instant,
}

impl LocalHeartbeats {
    pub(super) fn new(peers: ShmPeers) -> Self {
        let last_read = LastRead {
            seen: vec![0; peers.size()],
            at: Instant::now(),
        };
        Self {
            peers,
            last_read: Mutex::new(last_read),
        }
    }

    pub(super) fn includes(&self, rank: usize) -> bool {
        self.peers.place(rank).is_some()
    }

    pub(super) fn publish(&self, words: HeartbeatWords) {
        self.peers.own().heartbeat().publish(words);
    }

    /// Calls `on_heartbeat` for each other rank that has published a heartbeat since the last read, with the time of
    /// that read. At the first read, that is the time at which this rank enabled heartbeats, and a heartbeat may be
    /// older; no operation has begun by then.
    pub(super) fn read_new(&self, mut on_heartbeat: impl FnMut(usize, HeartbeatWords, Instant)) {
        let mut last = self.last_read.lock();
        let now = Instant::now();
        let LastRead { seen, at } = &mut *last;
        for (place, seen) in seen.iter_mut().enumerate() {
            let shared = self.peers.arena(place).heartbeat();
            if let Some(words) = shared.read_new(seen)
                && place != self.peers.rank()
            {
                on_heartbeat(self.peers.group_rank(place), words, *at);
            }
        }
        *at = now;
    }
}
