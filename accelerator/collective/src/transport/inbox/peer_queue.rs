//! The parts from one sender, and what is known of it.

use std::{collections::VecDeque, time::Instant};

use crate::{
    fingerprint::CollectiveFingerprint,
    kernel::ReduceInput,
    transport::{CHUNK, LastOp, Tag, pool::PooledBuffer},
};

/// The position of an operation among those of its rank that are under way.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum OpPosition {
    /// All before it are done.
    First,
    Later,
}

/// A part that has arrived.
#[derive(Debug)]
pub(crate) struct RecvChunk {
    pub(crate) tag: Tag,
    pub(crate) fingerprint: Option<CollectiveFingerprint>,
    pub(crate) payload: PooledBuffer,
}

impl RecvChunk {
    /// The room that it takes in its queue: its content, and the overhead of keeping it. A peer that
    /// sends parts without content fills its queue too.
    pub(super) fn weight(&self) -> usize {
        const CHUNK_OVERHEAD: usize = 512;
        self.payload.bytes().len() + CHUNK_OVERHEAD
    }
}

/// The parts that have arrived from each rank, as inputs of a reduction; `None` for the rank itself.
impl ReduceInput for Option<RecvChunk> {
    fn bytes(&self) -> Option<&[u8]> {
        self.as_ref().map(|chunk| chunk.payload.bytes())
    }
}

#[derive(Debug, Default)]
pub(super) struct PeerQueue {
    pub(super) chunks: VecDeque<RecvChunk>,
    pub(super) bytes: usize,
    pub(super) state: PeerState,
    /// The rank that this one last said it waits for, and the time of that.
    pub(super) awaited: Option<(usize, Instant)>,
    /// The latest operation that the peer has begun, as far as the parts that arrived show.
    pub(super) last: Option<LastOp>,
    /// The time at which this rank last showed that it works outside of operations.
    pub(super) active: Option<Instant>,
    /// Set once another rank blames this one.
    pub(super) blamed: bool,
}

impl PeerQueue {
    pub(super) fn is_gone(&self) -> bool {
        let by_itself = match self.state {
            PeerState::Broken | PeerState::Dropped | PeerState::Left | PeerState::Lost => true,
            PeerState::Aborted | PeerState::Present => false,
        };
        by_itself || self.blamed
    }

    /// The next part of an operation. A part that has no place there is given too, for an error
    /// to be made of it: that of an operation which is over, and that of one which the peer
    /// begins only when it is done with this one.
    pub(super) fn pop(&mut self, place: OpPosition, sequence: u64) -> Option<RecvChunk> {
        let belongs = |chunk: &RecvChunk| {
            let found = chunk.tag.sequence;
            match place {
                OpPosition::First => found <= sequence || found >= sequence + MAX_IN_FLIGHT as u64,
                OpPosition::Later => found == sequence,
            }
        };
        let index = self.chunks.iter().position(belongs)?;
        let chunk = self.chunks.remove(index)?;
        self.bytes -= chunk.weight();
        Some(chunk)
    }

    pub(super) fn holds(&self, sequence: u64) -> bool {
        self.chunks
            .iter()
            .any(|chunk| chunk.tag.sequence == sequence)
    }
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum PeerState {
    /// The peer sent what the protocol does not allow, and still runs.
    Broken,
    Dropped,
    /// The group of the peer failed, and not by its own fault: it may still run.
    Aborted,
    Left,
    Lost,
    #[default]
    Present,
}

/// The most operations of one rank that are under way.
pub(crate) const MAX_IN_FLIGHT: usize = 4;

/// The bytes at which the queue of one sender is full. A peer sends at most 16 chunks of a reduction
/// ahead of this rank, for each operation under way, so only a broadcast to a slow rank ever gets
/// there: a part that is needed never waits behind a full queue of parts that are not.
pub(super) const QUEUE_BYTES: usize = 128 * CHUNK;
