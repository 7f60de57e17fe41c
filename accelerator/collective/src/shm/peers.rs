//! The ranks that share memory.

use std::{fmt, sync::Arc};

use super::{
    arena::Arena,
    seq_counter::{SeqCounter, Spin},
};
/// One rank's view of the ranks of its host: their arenas, in rank order.
#[derive(Clone)]
pub(crate) struct ShmPeers {
    rank: usize,
    arenas: Arc<[Arc<Arena>]>,
    /// The rank of the first of them in the whole group; the others follow.
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

    /// This rank's place.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub(crate) fn size(&self) -> usize {
        self.arenas.len()
    }

    /// Returns the rank, in the whole group, of the peer that has this place here.
    pub(crate) fn global_rank(&self, place: usize) -> usize {
        self.first + place
    }

    /// Returns the place here of a rank of the whole group, if it has one.
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
