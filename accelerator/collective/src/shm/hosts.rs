//! Ranks on several hosts, some of which hold several.

use std::ops::Range;

use super::peers::ShmPeers;

/// One rank's view of the hosts: the memory of its own, and the ranks of each.
#[derive(Debug)]
pub(crate) struct Hosts {
    peers: ShmPeers,
    /// The ranks of each host, which follow one another.
    ranks: Vec<Range<usize>>,
    /// This rank's host.
    host: usize,
    lanes: usize,
}

impl Hosts {
    /// The ranks of each host, and the memory of the one on which this rank is.
    pub(crate) fn new(peers: ShmPeers, ranks: Vec<Range<usize>>) -> Self {
        let me = peers.global_rank(peers.rank());
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

    /// The number of hosts.
    pub(crate) fn len(&self) -> usize {
        self.ranks.len()
    }

    /// The number of this rank's host.
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
