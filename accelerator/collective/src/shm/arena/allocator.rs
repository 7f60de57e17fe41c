//! The allocator of an arena, which puts memory behind addresses.

#[cfg(target_os = "linux")]
use crate::shm::memory::Advice;
use crate::shm::{free_list::FreeList, memory::RawMemory};
use accelerator_host::sync::{Mutex, MutexGuard};

pub(super) struct ArenaAllocator {
    pub(super) free_list: Mutex<FreeList>,
    #[cfg(target_os = "linux")]
    pub(super) file: Option<std::os::fd::OwnedFd>,
}

impl ArenaAllocator {
    /// Puts memory behind a range of addresses.
    #[cfg(target_os = "linux")]
    pub(super) fn provide(&self, memory: &RawMemory, offset: usize, len: usize) -> bool {
        use rustix::{
            fs::{FallocateFlags, fallocate},
            io::retry_on_intr,
        };

        if let Some(file) = &self.file {
            // Now rather than when it is touched: then the system could only kill the process.
            let flags = FallocateFlags::empty();
            let outcome = retry_on_intr(|| fallocate(file, flags, offset as u64, len as u64));
            if let Err(error) = outcome {
                tracing::debug!(%error, len, "no shared memory for a buffer; it lies on the heap");
                return false;
            }
        }
        if len >= LARGE {
            memory.advise(offset, len, Advice::Large);
        }
        memory.advise(offset, len, Advice::Touch);
        true
    }

    /// Gives the memory behind a range of addresses back to the system, and says whether it did:
    /// then the range is zeroes again.
    #[cfg(target_os = "linux")]
    pub(super) fn take_back(&self, memory: &RawMemory, offset: usize, len: usize) -> bool {
        use rustix::{
            fs::{FallocateFlags, fallocate},
            io::retry_on_intr,
        };

        match &self.file {
            Some(file) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                retry_on_intr(|| fallocate(file, flags, offset as u64, len as u64)).is_ok()
            }
            None => memory.advise(offset, len, Advice::Forget),
        }
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn provide(&self, _memory: &RawMemory, _offset: usize, _len: usize) -> bool {
        false
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn take_back(&self, _memory: &RawMemory, _offset: usize, _len: usize) -> bool {
        false
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, FreeList> {
        // A panic among them leaves a range neither free nor used.
        self.free_list.lock()
    }
}

/// The size from which on memory comes in large pages, if the system has them.
pub(super) const LARGE: usize = 2 * 1024 * 1024;
