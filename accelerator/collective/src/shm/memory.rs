//! Memory that other ranks write to, from creation to the end of its last user, and a rank's declaration of an
//! operation in words of it.

use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fmt, io, slice};

use crate::fingerprint::{CollectiveFingerprint, SEED, mix};

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

/// One rank's header of one operation, and where its data lie.
///
/// | word | content |
/// |---|---|
/// | 0 | operation, reduction, element type, length of the file name (a byte each), root |
/// | 1 | number of elements |
/// | 2 | sequence number of the operation |
/// | 3 | offset of the data in the rank's arena, or all ones |
/// | 4 | a checksum of what the operation is for |
/// | 5 | a checksum of the words before |
/// | 6.. | line of the call and length of the purpose, file of the call, purpose |
///
/// Ranks that agree read the first six words, which lie in one cache line.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct ShmHeader {
    words: [AtomicU64; WORDS],
}

// SAFETY: atomic integers, and padding that nobody reads.
unsafe impl Atomics for ShmHeader {}

impl ShmHeader {
    /// Writes the header, and says how the others will read it. What is read meanwhile is
    /// garbage: the protocol says when to read.
    pub(crate) fn write(
        &self,
        sequence: u64,
        fingerprint: &CollectiveFingerprint,
        data: Option<usize>,
    ) -> HeaderDigest {
        let mut words = [0; WORDS];
        let (bytes, len) = fingerprint.encode();
        let (fixed, texts) = bytes[..len].split_at(CollectiveFingerprint::FIXED);
        let word = |range: std::ops::Range<usize>| {
            let mut word = [0; 8];
            word[..range.len()].copy_from_slice(&fixed[range]);
            u64::from_le_bytes(word)
        };
        words[0] = word(0..8);
        words[1] = word(8..16);
        words[2] = sequence;
        words[3] = data.map_or(u64::MAX, |offset| offset as u64);
        words[4] = fingerprint.purpose.words().fold(SEED, mix);
        words[CHECK] = words[..CHECK].iter().copied().fold(SEED, mix);
        words[6] = word(16..24);
        for (target, source) in words[TEXTS..].iter_mut().zip(texts.chunks(8)) {
            let mut word = [0; 8];
            word[..source.len()].copy_from_slice(source);
            *target = u64::from_le_bytes(word);
        }
        // What is behind the texts, nobody reads.
        let used = TEXTS + texts.len().div_ceil(8);
        for (target, word) in self.words.iter().zip(words).take(used) {
            target.store(word, Ordering::Relaxed);
        }
        HeaderDigest::of(&words)
    }

    /// Makes it wrong, as a fault.
    pub(crate) fn inject_corruption(&self) {
        self.words[2].fetch_xor(1, Ordering::Relaxed);
    }

    /// Reads what matters to ranks that agree; `None` if the check is wrong.
    pub(crate) fn read(&self) -> Option<HeaderDigest> {
        let words: [u64; CHECK + 1] = std::array::from_fn(|i| self.word(i));
        if words[..CHECK].iter().copied().fold(SEED, mix) != words[CHECK] {
            return None;
        }
        Some(HeaderDigest::of(&words))
    }

    /// Reads everything; `None` if it is no header.
    pub(crate) fn fingerprint(&self) -> Option<CollectiveFingerprint> {
        let mut bytes = [0; CollectiveFingerprint::BOUND];
        bytes[..8].copy_from_slice(&self.word(0).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.word(1).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.word(6).to_le_bytes());
        for (target, word) in bytes[CollectiveFingerprint::FIXED..]
            .chunks_mut(8)
            .zip(TEXTS..)
        {
            target.copy_from_slice(&self.word(word).to_le_bytes()[..target.len()]);
        }
        let end = CollectiveFingerprint::FIXED + usize::from(bytes[3]) + usize::from(bytes[20]);
        CollectiveFingerprint::decode(bytes.get(..end)?)
    }

    fn word(&self, index: usize) -> u64 {
        self.words[index].load(Ordering::Relaxed)
    }
}

/// The part of a header that matters to ranks that agree.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct HeaderDigest {
    /// Operation, reduction, element type and root.
    pub(crate) kind: u64,
    /// The number of elements.
    pub(crate) len: u64,
    pub(crate) sequence: u64,
    /// A checksum of what the operation is for.
    pub(crate) purpose: u64,
    /// The offset of the data in the rank's arena.
    pub(crate) data: Option<u64>,
}

impl HeaderDigest {
    fn of(words: &[u64]) -> Self {
        Self {
            // Without the length of the file name, in which ranks may differ.
            kind: words[0] & !(0xff << 24),
            len: words[1],
            sequence: words[2],
            purpose: words[4],
            data: (words[3] != u64::MAX).then_some(words[3]),
        }
    }
}

const CHECK: usize = 5;
const TEXTS: usize = 7;
const WORDS: usize = 24;

const _: () = assert!(
    CollectiveFingerprint::BOUND - CollectiveFingerprint::FIXED <= 8 * (WORDS - TEXTS),
    "a fingerprint fits its header"
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::{DType, ReduceOp};
    use crate::fingerprint::{CallSite, OpKind, Purpose};

    fn header() -> ShmHeader {
        ShmHeader {
            words: Default::default(),
        }
    }

    #[test]
    fn fingerprints_survive_the_header() {
        let header = header();
        assert_eq!(header.read(), None, "nobody has written it");
        for path in ["", "main.rs", &format!("{}/train.rs", "x".repeat(100))] {
            let fingerprint =
                CollectiveFingerprint::new(OpKind::AllReduce, CallSite::new(path, 77))
                    .with_op(ReduceOp::Mean)
                    .with_data(DType::BF16, 1 << 33)
                    .with_purpose(Purpose::new(path));
            header.write(5, &fingerprint, Some(4096));
            let digest = header.read().unwrap();
            assert_eq!((digest.len, digest.sequence), (1 << 33, 5));
            assert_eq!(digest.data, Some(4096));
            let back = header.fingerprint().unwrap();
            assert_eq!(back.to_string(), fingerprint.to_string());
        }
    }

    #[test]
    fn ranks_that_mean_the_same_write_the_same() {
        let (one, two) = (header(), header());
        let declare = |header: &ShmHeader, path, root| {
            let fingerprint = CollectiveFingerprint::new(OpKind::Broadcast, CallSite::new(path, 1))
                .with_data(DType::F32, 3)
                .with_root(root);
            header.write(0, &fingerprint, None);
            header.read().unwrap()
        };
        let gather = CollectiveFingerprint::new(OpKind::GatherObject, CallSite::new("a.rs", 1));
        let named = |name| {
            one.write(0, &gather.with_purpose(Purpose::new(name)), None);
            one.read().unwrap()
        };
        assert_ne!(named("a metric"), named("a trace"));
        assert_eq!(declare(&one, "a.rs", 1), declare(&two, "other.rs", 1));
        assert_ne!(declare(&one, "a.rs", 1), declare(&two, "a.rs", 2));
    }

    #[test]
    fn a_corrupted_header_is_noticed() {
        let header = header();
        header.write(
            0,
            &CollectiveFingerprint::new(OpKind::Barrier, CallSite::new("a.rs", 1)),
            None,
        );
        assert!(header.read().is_some());
        header.inject_corruption();
        assert_eq!(header.read(), None);
    }
}
