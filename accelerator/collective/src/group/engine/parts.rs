//! How buffers are cut.

use std::ops::Range;

use crate::{
    partition::{self, Partition},
    transport::CHUNK,
};

/// A buffer cut into one part for each rank, and each part into chunks, in bytes.
#[derive(Debug)]
pub(super) struct Parts {
    partition: Partition,
    size: usize,
}

impl Parts {
    pub(super) fn new(len: usize, size: usize, world_size: usize) -> Self {
        Self {
            partition: Partition::new(len, world_size),
            size,
        }
    }

    pub(super) fn part(&self, rank: usize) -> Range<usize> {
        let range = self.partition.range(rank);
        range.start * self.size..range.end * self.size
    }

    /// A chunk of a part; empty behind the last one.
    pub(super) fn chunk(&self, rank: usize, round: usize) -> Range<usize> {
        let part = self.part(rank);
        let chunk = chunk(part.len(), round);
        part.start + chunk.start..part.start + chunk.end
    }

    /// The number of chunks of the largest part.
    pub(super) fn rounds(&self) -> usize {
        (self.partition.largest() * self.size).div_ceil(CHUNK)
    }
}

/// A chunk of `len` bytes; empty behind the last one.
pub(super) fn chunk(len: usize, round: usize) -> Range<usize> {
    partition::chunk(len, round, CHUNK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_parts() {
        let len = 3 * CHUNK + 5;
        let parts = Parts::new(len, 2, 3);
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
