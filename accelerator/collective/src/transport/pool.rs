//! Reused memory for parts that arrive.

use std::{fmt, sync::Arc};

use crate::buffer::Storage;
use accelerator_host::sync::{Mutex, MutexGuard};

/// Memory that arrived parts give back when they are dropped.
#[derive(Default)]
pub(crate) struct Pool {
    free: Mutex<Vec<Storage>>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} free)", self.lock().len())
    }
}

impl Pool {
    /// A chunk of `len` bytes whose content is whatever was there before.
    pub(crate) fn chunk(self: &Arc<Self>, len: usize) -> PooledBuffer {
        if len == 0 {
            return PooledBuffer::default();
        }
        let free = self.lock().pop();
        let mut storage = free.unwrap_or_default();
        storage.grow(len);
        PooledBuffer {
            storage,
            len,
            pool: Some(Arc::clone(self)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Storage>> {
        self.free.lock()
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
            let mut free = pool.lock();
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
