//! The split of buffers into chunks.

use std::{ops::Range, sync::Arc};

use crate::{
    buffer::Storage,
    shard_layout::{self, Partition, Runs, ShardLayout},
    transport::CHUNK,
};

/// A part of a buffer for each rank, each part in chunks, in bytes.
#[derive(Debug)]
pub(super) enum ChunkLayout {
    /// One part for each rank, of equal length but for the last ones.
    Even(EvenShards),
    /// The shards of a layout, and the size of an element.
    Sharded(Arc<ShardLayout>, usize),
}

impl ChunkLayout {
    /// A chunk of a part; empty behind the last one.
    pub(super) fn chunk(&self, rank: usize, round: usize) -> ChunkRange<'_> {
        match self {
            Self::Even(parts) => ChunkRange::One(parts.chunk(rank, round)),
            Self::Sharded(shards, size) => {
                let most = CHUNK / size;
                let runs = shards.runs(rank, round * most..(round + 1) * most);
                let size = *size;
                match runs.clone().next() {
                    Some(run) if run.len() < runs.elements() => {
                        ChunkRange::Many(PackedRanges { runs, size })
                    }
                    run => {
                        let run = run.unwrap_or_default();
                        ChunkRange::One(run.start * size..run.end * size)
                    }
                }
            }
        }
    }

    /// The number of chunks of the largest part.
    pub(super) fn rounds(&self) -> usize {
        match self {
            Self::Even(parts) => parts.rounds(),
            Self::Sharded(shards, size) => (shards.largest() * size).div_ceil(CHUNK),
        }
    }

    /// Returns `true` if a chunk of a round travels by itself, rather than with a header or not at all.
    pub(super) fn sends(&self, chunk: &ChunkRange<'_>, round: usize) -> bool {
        match self {
            Self::Even(_) => round > 0 && !chunk.is_empty(),
            // Empty ones too: they show how far a rank is, to which no results come back.
            Self::Sharded(..) => round < self.rounds(),
        }
    }
}

/// A chunk of a buffer: at most [`CHUNK`] bytes.
#[derive(Debug)]
pub(super) enum ChunkRange<'a> {
    One(Range<usize>),
    Many(PackedRanges<'a>),
}

impl ChunkRange<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::One(range) => range.len(),
            Self::Many(pieces) => pieces.len(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Several ranges of bytes that travel as one.
#[derive(Clone, Debug)]
pub(super) struct PackedRanges<'a> {
    runs: Runs<'a>,
    size: usize,
}

impl PackedRanges<'_> {
    /// The pieces of a buffer, one after the other, in memory that is used again.
    pub(super) fn pack<'b>(&self, bytes: &[u8], into: &'b mut Storage) -> &'b mut [u8] {
        into.grow(self.len());
        let packed = &mut into.bytes_mut()[..self.len()];
        let mut at = 0;
        for piece in self.clone() {
            let place = &mut packed[at..at + piece.len()];
            at += piece.len();
            place.copy_from_slice(&bytes[piece]);
        }
        packed
    }

    pub(super) fn unpack(&self, packed: &[u8], bytes: &mut [u8]) {
        let mut at = 0;
        for piece in self.clone() {
            let place = &packed[at..at + piece.len()];
            at += piece.len();
            bytes[piece].copy_from_slice(place);
        }
    }

    fn len(&self) -> usize {
        self.runs.elements() * self.size
    }
}

impl Iterator for PackedRanges<'_> {
    type Item = Range<usize>;

    fn next(&mut self) -> Option<Range<usize>> {
        let run = self.runs.next()?;
        Some(run.start * self.size..run.end * self.size)
    }
}

/// A buffer cut into one part for each rank, and each part into chunks, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct EvenShards {
    partition: Partition,
    size: usize,
    /// The bytes of a chunk.
    chunk: usize,
}

impl EvenShards {
    pub(super) fn new(len: usize, size: usize, world_size: usize) -> Self {
        Self {
            partition: Partition::new(len, world_size),
            size,
            chunk: match world_size {
                0..3 => CHUNK,
                3 | 4 => 2 * SEGMENT,
                _ => SEGMENT,
            },
        }
    }

    pub(super) fn part(&self, rank: usize) -> Range<usize> {
        let range = self.partition.range(rank);
        range.start * self.size..range.end * self.size
    }

    /// A chunk of a part; empty behind the last one.
    pub(super) fn chunk(&self, rank: usize, round: usize) -> Range<usize> {
        let part = self.part(rank);
        let chunk = shard_layout::chunk(part.len(), round, self.chunk);
        part.start + chunk.start..part.start + chunk.end
    }

    /// The number of chunks of the largest part.
    pub(super) fn rounds(&self) -> usize {
        (self.partition.largest() * self.size).div_ceil(self.chunk)
    }
}

/// The bytes of a chunk that, with its head, fits in one of the segments of 64 KiB in which Linux passes data to TCP. If
/// many ranks send to one another in single segments, what is under way stays in the caches.
const SEGMENT: usize = 60 * 1024;
const _: () = assert!(2 * SEGMENT <= CHUNK);

/// A chunk of `len` bytes; empty behind the last one.
pub(super) fn chunk(len: usize, round: usize) -> Range<usize> {
    shard_layout::chunk(len, round, CHUNK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_parts() {
        let len = 3 * CHUNK + 5;
        let parts = EvenShards::new(len, 2, 3);
        let mut next = 0;
        for rank in 0..3 {
            for round in 0..parts.rounds() {
                let chunk = parts.chunk(rank, round);
                assert_eq!(chunk.start, next);
                assert!(chunk.len() <= CHUNK);
                next = chunk.end;
            }
            assert!(parts.chunk(rank, parts.rounds()).is_empty());
        }
        assert_eq!(next, 2 * len);
    }
}
