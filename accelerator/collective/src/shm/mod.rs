//! Memory that the ranks of one host share: its layout, and the rules of who may touch what.

#![expect(
    unsafe_code,
    reason = "memory that other ranks write to has no references; see the README of this folder"
)]

mod arena;
mod heartbeat;
mod memory;
mod seq_counter;

use std::{fmt, ops::Range, sync::Arc};

use seq_counter::SeqCounter;

pub(crate) use arena::{Arena, ArenaId, Region, Room, SHM_CHUNK};
pub(crate) use heartbeat::HeartbeatWords;
pub(crate) use memory::{HeaderDigest, MemoryRange};
pub(crate) use seq_counter::Spin;

/// One rank's view of the hosts: the memory of its own, and the ranks of each.
#[derive(Debug)]
pub(crate) struct Hosts {
    peers: ShmPeers,
    ranks: Vec<Range<usize>>,
    host: usize,
    lanes: usize,
}

impl Hosts {
    /// The ranks of each host, and the memory of the one on which this rank is.
    pub(crate) fn new(peers: ShmPeers, ranks: Vec<Range<usize>>) -> Self {
        let me = peers.group_rank(peers.rank());
        let host = ranks.iter().position(|ranks| ranks.contains(&me));
        let lanes = ranks.iter().map(ExactSizeIterator::len).min();
        Self {
            peers,
            host: host.unwrap_or(0),
            lanes: lanes.unwrap_or(1),
            ranks,
        }
    }

    /// Returns the memory that the ranks of this host share.
    pub(crate) fn peers(&self) -> &ShmPeers {
        &self.peers
    }

    pub(crate) fn len(&self) -> usize {
        self.ranks.len()
    }

    pub(crate) fn host(&self) -> usize {
        self.host
    }

    /// Returns the number of ranks per host that exchange data with other hosts: as many as the smallest host holds.
    pub(crate) fn lanes(&self) -> usize {
        self.lanes
    }

    /// This rank's lane, if it has one.
    pub(crate) fn lane(&self) -> Option<usize> {
        Some(self.peers.rank()).filter(|place| *place < self.lanes)
    }

    /// The rank of a host that has this lane.
    pub(crate) fn rank(&self, host: usize, lane: usize) -> usize {
        self.ranks[host].start + lane
    }

    /// The other hosts, from the next one round.
    pub(crate) fn ring(&self) -> impl Iterator<Item = usize> + use<> {
        let (host, hosts) = (self.host, self.ranks.len());
        (1..hosts).map(move |step| (host + step) % hosts)
    }
}

/// One rank's view of the ranks of its host: their arenas, in rank order.
#[derive(Clone)]
pub(crate) struct ShmPeers {
    rank: usize,
    arenas: Arc<[Arc<Arena>]>,
    /// The number of the first of them in the group; the others follow.
    first: usize,
    spin: Spin,
}

impl ShmPeers {
    /// `rank` is the place of this rank's arena among `arenas`, whose first belongs to the rank
    /// `first` of the whole group.
    pub(crate) fn new(rank: usize, arenas: Arc<[Arc<Arena>]>, first: usize, spin: Spin) -> Self {
        Self {
            rank,
            arenas,
            first,
            spin,
        }
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.arenas.len()
    }

    /// Returns the number in the group of the peer that has this place here.
    pub(crate) fn group_rank(&self, place: usize) -> usize {
        self.first + place
    }

    /// Returns the place here of the member of this number, if it has one.
    pub(crate) fn place(&self, rank: usize) -> Option<usize> {
        rank.checked_sub(self.first)
            .filter(|place| *place < self.size())
    }

    pub(crate) fn spin(&self) -> Spin {
        self.spin
    }

    pub(crate) fn own(&self) -> &Arc<Arena> {
        &self.arenas[self.rank]
    }

    pub(crate) fn arena(&self, rank: usize) -> &Arena {
        &self.arenas[rank]
    }

    pub(crate) fn counter(&self, rank: usize) -> &SeqCounter {
        self.arenas[rank].counter()
    }
}

impl fmt::Debug for ShmPeers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShmPeers")
            .field("rank", &self.rank)
            .field("arenas", &self.arenas)
            .finish_non_exhaustive()
    }
}
