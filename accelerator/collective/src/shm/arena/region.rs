//! A buffer in an arena.

use std::{fmt, ptr::NonNull, slice, sync::Arc};

use super::{Arena, allocator::LARGE};
use crate::shm::memory::PAGE;

/// A buffer in an arena, at the beginning of a page.
pub(crate) struct Region {
    arena: Arc<Arena>,
    start: NonNull<u8>,
    offset: usize,
    /// The length, rounded up to pages.
    len: usize,
    /// Set if another rank may still write to it.
    abandoned: bool,
}

// SAFETY: a region is the only one of its bytes, as a `Box<[u8]>` is.
unsafe impl Send for Region {}
// SAFETY: as above: through a shared reference it can only be read.
unsafe impl Sync for Region {}

impl Region {
    /// Zeroes; `None` if there is no room or no memory.
    pub(crate) fn new(arena: &Arc<Arena>, len: usize) -> Option<Self> {
        let allocator = arena.allocator.as_ref()?;
        let len = len.max(1).checked_next_multiple_of(PAGE)?;
        let align = if len < LARGE { PAGE } else { LARGE };
        let range = allocator.lock().take(len, align)?;
        let start = match arena.memory.at(range.start, len) {
            Some(start) if allocator.provide(&arena.memory, range.start, len) => start,
            _ => {
                allocator.lock().free(range);
                return None;
            }
        };
        Some(Self {
            arena: Arc::clone(arena),
            start,
            offset: range.start,
            len,
            abandoned: false,
        })
    }

    /// Returns the offset at which it begins in its arena.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    /// Returns `true` if it lies in this arena.
    pub(crate) fn is_in(&self, arena: &Arc<Arena>) -> bool {
        Arc::ptr_eq(&self.arena, arena)
    }

    /// The bytes that it takes, which may be more than were asked for.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the range lies within the arena, which lives as long as this value; no other
        // region has it. Other ranks write to it only during an operation that holds the only
        // reference to this value, or after it was abandoned, which needs the value itself.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and through `&mut self` nobody else reads it.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Leaves the memory to whoever still writes to it; it is not used again while the arena
    /// lives.
    pub(crate) fn abandon(mut self) {
        self.abandoned = true;
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} bytes)", self.len)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(allocator) = &self.arena.allocator
            && !self.abandoned
            && allocator.take_back(&self.arena.memory, self.offset, self.len)
        {
            allocator.lock().free(self.offset..self.offset + self.len);
        }
    }
}
