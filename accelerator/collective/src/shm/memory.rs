//! Memory that other ranks write to, from creation to the end of its last user.

use std::{alloc::Layout, fmt, io, ptr::NonNull, slice};

/// A piece of memory that several ranks know, in this process or in others.
///
/// It only hands out pointers and copies: who may touch which bytes when is the protocol's business
/// (the README of this folder). It never moves, and lives until it is dropped.
pub(super) struct RawMemory {
    base: NonNull<u8>,
    len: usize,
    origin: MemoryOrigin,
}

enum MemoryOrigin {
    /// The allocator, with what it was asked for.
    Heap(Layout),
    /// The system: a mapping of a file, or of nothing.
    #[cfg(target_os = "linux")]
    Mapping,
}

// SAFETY: it owns its bytes as a `Box<[Cell<u8>]>` would, and gives access through raw pointers
// only, whose users prove that they do not race.
unsafe impl Send for RawMemory {}
// SAFETY: as above.
unsafe impl Sync for RawMemory {}

impl RawMemory {
    /// Zeroes from the allocator, aligned to a page.
    pub(super) fn heap(len: usize) -> io::Result<Self> {
        let layout = Layout::from_size_align(len.max(1), PAGE)
            .map_err(|error| io::Error::new(io::ErrorKind::OutOfMemory, error))?;
        // SAFETY: the layout's size is not zero.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        match NonNull::new(base) {
            Some(base) => Ok(Self {
                base,
                len,
                origin: MemoryOrigin::Heap(layout),
            }),
            None => Err(io::ErrorKind::OutOfMemory.into()),
        }
    }

    /// Zeroes that take no room until they are touched.
    #[cfg(target_os = "linux")]
    pub(super) fn anonymous(len: usize) -> io::Result<Self> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

        // SAFETY: without an address the system chooses one where nothing is mapped.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        Self::mapped(base, len)
    }

    /// The first `len` bytes of a file in memory, which must never become shorter.
    #[cfg(target_os = "linux")]
    pub(super) fn of_file(file: impl std::os::fd::AsFd, len: usize) -> io::Result<Self> {
        use rustix::mm::{MapFlags, ProtFlags, mmap};

        // SAFETY: without an address the system chooses one where nothing is mapped.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                file,
                0,
            )
        };
        Self::mapped(base, len)
    }

    #[cfg(target_os = "linux")]
    fn mapped(base: rustix::io::Result<*mut std::ffi::c_void>, len: usize) -> io::Result<Self> {
        match NonNull::new(base?.cast()) {
            Some(base) => Ok(Self {
                base,
                len,
                origin: MemoryOrigin::Mapping,
            }),
            None => Err(io::Error::other("the system mapped memory at address zero")),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns the beginning of a range; `None` if it does not lie within.
    pub(super) fn at(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let end = offset.checked_add(len)?;
        if end > self.len {
            return None;
        }
        // SAFETY: the offset lies within the allocation, or one past its end.
        Some(unsafe { self.base.add(offset) })
    }

    /// A view of a structure of atomics.
    ///
    /// # Panics
    ///
    /// Panics if it does not lie within, aligned.
    pub(super) fn structure<T: Atomics>(&self, offset: usize) -> &T {
        let place = self.at(offset, size_of::<T>()).map(NonNull::cast::<T>);
        match place {
            Some(place) if place.is_aligned() => {
                // SAFETY: in bounds and aligned, zeroed or written by the same program; `T` is made
                // of atomics, for which any bytes are valid and others may write at any time.
                unsafe { place.as_ref() }
            }
            _ => panic!("a structure at {offset} does not lie within {self:?}"),
        }
    }

    /// Gives the system advice about whole pages, and returns `true` if the system accepts it.
    #[cfg(target_os = "linux")]
    pub(super) fn advise(&self, offset: usize, len: usize, advice: Advice) -> bool {
        use rustix::mm;

        let Some(place) = self.at(offset, len) else {
            return false;
        };
        let advice = match advice {
            Advice::Large => mm::Advice::LinuxHugepage,
            Advice::Touch => mm::Advice::LinuxPopulateWrite,
            Advice::Forget => mm::Advice::LinuxDontNeed,
        };
        // SAFETY: the range is mapped; its content changes only where it is to be forgotten, which
        // the caller owns then.
        unsafe { mm::madvise(place.as_ptr().cast(), len, advice) }.is_ok()
    }
}

/// The advice that can be given about pages.
#[cfg(target_os = "linux")]
#[derive(Clone, Copy, Debug)]
pub(super) enum Advice {
    /// The pages are better large.
    Large,
    /// The pages are written soon.
    Touch,
    /// The pages' content is not needed any more: private pages are zeroes again.
    Forget,
}

/// # Safety
///
/// The type consists of atomics alone, and any bytes are valid for it.
pub(super) unsafe trait Atomics {}

impl fmt::Debug for RawMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RawMemory({} bytes)", self.len)
    }
}

impl Drop for RawMemory {
    fn drop(&mut self) {
        match self.origin {
            // SAFETY: allocated with this layout, and nobody uses it any more.
            MemoryOrigin::Heap(layout) => unsafe {
                std::alloc::dealloc(self.base.as_ptr(), layout)
            },
            #[cfg(target_os = "linux")]
            MemoryOrigin::Mapping => {
                // SAFETY: mapped by this value, and nobody uses it any more.
                let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
            }
        }
    }
}

/// A pointer into memory that lives elsewhere, for lists that operations use again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryRange {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a pointer is a number; who dereferences it proves that it may.
unsafe impl Send for MemoryRange {}
// SAFETY: as above.
unsafe impl Sync for MemoryRange {}

impl MemoryRange {
    pub(super) fn new(start: NonNull<u8>, len: usize) -> Self {
        Self { start, len }
    }

    pub(crate) fn start(self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// A part of it.
    ///
    /// # Panics
    ///
    /// Panics if that does not lie within.
    pub(crate) fn part(self, at: usize, len: usize) -> Self {
        assert!(
            at <= self.len && len <= self.len - at,
            "{len} bytes at {at} do not lie within {} bytes",
            self.len
        );
        Self {
            // SAFETY: within, or one past the end.
            start: unsafe { self.start.add(at) },
            len,
        }
    }

    /// # Safety
    ///
    /// The memory lives and nobody writes to it for as long as the result is used.
    pub(crate) unsafe fn bytes<'a>(self) -> &'a [u8] {
        // SAFETY: by the caller's promise.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

pub(super) const PAGE: usize = 4096;
