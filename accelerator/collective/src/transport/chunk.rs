//! Chunks on their way from rank to rank, and the reused memory for those that arrive.

use std::{fmt, sync::Arc};

use accelerator_host::sync::Mutex;

use crate::buffer::Storage;
use crate::fingerprint::CollectiveFingerprint;
use crate::wire::{FrameKind, GroupId, Head};

/// One outgoing chunk: at most [`CHUNK`](crate::wire::CHUNK) bytes, and the part that they belong to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutgoingChunk<'a> {
    pub(crate) tag: Tag,
    /// The sender's fingerprint, on the first chunk of an operation.
    pub(crate) fingerprint: Option<&'a CollectiveFingerprint>,
    pub(crate) payload: &'a [u8],
}

impl OutgoingChunk<'_> {
    /// The header of its frame, behind which its fingerprint is sent as the preamble.
    pub(crate) fn head(&self, preamble: &[u8]) -> Head {
        let Tag {
            group,
            sequence,
            phase,
            index,
        } = self.tag;
        let kind = match phase {
            OpPhase::Header => FrameKind::Header,
            OpPhase::Reduce => FrameKind::Reduce,
            OpPhase::Gather => FrameKind::Gather,
        };
        Head::new(kind, sequence, index, preamble, self.payload).in_group(group)
    }
}

/// The position of a part: its operation, phase and chunk.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Tag {
    pub(crate) group: GroupId,
    pub(crate) sequence: u64,
    pub(crate) phase: OpPhase,
    /// The number of the chunk within its phase.
    pub(crate) index: u32,
}

/// The phases of an operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum OpPhase {
    Header,
    /// A chunk for the rank that reduces it.
    Reduce,
    /// A chunk for a rank that keeps it.
    Gather,
}

/// Memory that arrived parts give back when they are dropped.
#[derive(Default)]
pub(crate) struct Pool {
    free: Mutex<Vec<Storage>>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} free)", self.free.lock().len())
    }
}

impl Pool {
    /// A chunk of `len` bytes whose content is whatever was there before.
    pub(crate) fn chunk(self: &Arc<Self>, len: usize) -> PooledBuffer {
        if len == 0 {
            return PooledBuffer::default();
        }
        let free = self.free.lock().pop();
        let mut storage = free.unwrap_or_default();
        storage.grow(len);
        PooledBuffer {
            storage,
            len,
            pool: Some(Arc::clone(self)),
        }
    }
}

/// Bytes that are aligned for every element type.
#[derive(Default)]
pub(crate) struct PooledBuffer {
    storage: Storage,
    len: usize,
    pool: Option<Arc<Pool>>,
}

impl PooledBuffer {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.storage.bytes()[..self.len]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.storage.bytes_mut()[..self.len]
    }
}

impl fmt::Debug for PooledBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PooledBuffer({} bytes)", self.len)
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            let mut free = pool.free.lock();
            if free.len() < MAX_FREE_CHUNKS {
                free.push(std::mem::take(&mut self.storage));
            }
        }
    }
}

/// The most chunks that are kept: with the largest parts, 16 MiB.
const MAX_FREE_CHUNKS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back() {
        let pool = Arc::new(Pool::default());
        let mut chunk = pool.chunk(100);
        chunk.bytes_mut().fill(7);
        let address = chunk.bytes().as_ptr();
        drop(chunk);
        let chunk = pool.chunk(60);
        assert_eq!(chunk.bytes().as_ptr(), address);
        assert_eq!(chunk.bytes().len(), 60);
        assert!(pool.chunk(0).bytes().is_empty());
    }
}
