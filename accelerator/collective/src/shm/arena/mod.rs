//! One rank's memory that all ranks of the host can reach.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fmt, io, slice};

use accelerator_host::sync::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

use super::heartbeat::SharedHeartbeat;
#[cfg(target_os = "linux")]
use super::memory::Advice;
use super::memory::{Atomics, MemoryRange, PAGE, RawMemory, ShmHeader};
use super::seq_counter::SeqCounter;
use crate::fingerprint::CollectiveFingerprint;

/// The identity of an arena, by which other ranks find and recognize it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct ArenaId {
    /// The number of its file in the process that has it.
    pub(crate) file: i32,
    /// The words that are written in it.
    pub(crate) nonce: [u64; 2],
}

/// The memory that a rank shares: its progress, its headers, its heartbeat, two slots of data, and the
/// buffers that it has made.
///
/// ```text
/// 0        random number, counter, headers, heartbeat
/// 4 KiB    two slots
/// CONTROL  buffers
/// ```
///
/// The room for buffers is address space, as much as the machine has memory: a page of it becomes
/// memory when a buffer is made, and is given back when it is dropped.
pub(crate) struct Arena {
    memory: RawMemory,
    /// Present in the process that made the arena, which alone can make buffers in it.
    allocator: Option<ArenaAllocator>,
}

#[repr(C)]
struct ArenaHeader {
    /// The words by which the others know that it is the one that was meant.
    nonce: [AtomicU64; 2],
    counter: SeqCounter,
    headers: [ShmHeader; SLOTS],
    heartbeat: SharedHeartbeat,
}

// SAFETY: made of atomics, and padding that nobody reads.
unsafe impl Atomics for ArenaHeader {}

impl Arena {
    /// Memory for one of several threads of this process.
    pub(crate) fn of_thread(room: Room) -> io::Result<Self> {
        #[cfg(target_os = "linux")]
        return Self::private(room.bytes());
        #[cfg(not(target_os = "linux"))]
        return Ok(Self {
            memory: RawMemory::heap(CONTROL)?,
            allocator: Some(ArenaAllocator {
                free_list: Mutex::new(FreeList::new(0..0)),
            }),
        });
    }

    #[cfg(target_os = "linux")]
    fn private(room: usize) -> io::Result<Self> {
        // Where address space is scarce, buffers are made elsewhere.
        let memory = RawMemory::anonymous(CONTROL + room).or_else(|_| RawMemory::heap(CONTROL))?;
        Ok(Self {
            allocator: Some(ArenaAllocator {
                free_list: Mutex::new(FreeList::new(CONTROL..memory.len())),
                file: None,
            }),
            memory,
        })
    }

    /// Memory in a file of its own, which other processes can open as long as this value lives.
    #[cfg(target_os = "linux")]
    pub(crate) fn of_process(nonce: [u64; 2], room: Room) -> io::Result<Self> {
        let arena = Self::in_file(room.bytes())?;
        for (target, word) in arena.head().nonce.iter().zip(nonce) {
            target.store(word, Ordering::Release);
        }
        Ok(arena)
    }

    #[cfg(target_os = "linux")]
    fn in_file(room: usize) -> io::Result<Self> {
        use rustix::fs::{
            FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate,
            memfd_create,
        };
        use rustix::io::retry_on_intr;

        let room = room.min(permitted()?);
        let file = memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let attempt = |room: usize| {
            ftruncate(&file, (CONTROL + room) as u64)?;
            RawMemory::of_file(&file, CONTROL + room)
        };
        // Where address space is scarce, buffers are made elsewhere.
        let memory = attempt(room).or_else(|_| attempt(0))?;
        // From here on nobody can take the file's end away from those that map it.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        retry_on_intr(|| fallocate(&file, FallocateFlags::empty(), 0, CONTROL as u64))?;
        memory.advise(0, CONTROL, Advice::Touch);
        Ok(Self {
            allocator: Some(ArenaAllocator {
                free_list: Mutex::new(FreeList::new(CONTROL..memory.len())),
                file: Some(file),
            }),
            memory,
        })
    }

    /// The memory of another process of this host, which lives.
    #[cfg(target_os = "linux")]
    pub(crate) fn of_peer(pid: u32, key: ArenaId) -> io::Result<Self> {
        use rustix::fs::{Mode, OFlags, open};

        let path = format!("/proc/{pid}/fd/{}", key.file);
        // Where processes are numbered otherwise there, this is some other file, which is better not
        // opened.
        let target = std::fs::read_link(&path)?;
        if !target.to_string_lossy().contains(NAME) {
            return Err(unknown(format!("{path} is {}", target.display())));
        }
        let file = open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let arena = Self::in_file_of_peer(&file)?;
        let nonce = arena.head().nonce.each_ref();
        if nonce.map(|x| x.load(Ordering::Acquire)) != key.nonce {
            return Err(unknown(format!("{path} is that of another process")));
        }
        Ok(arena)
    }

    #[cfg(target_os = "linux")]
    fn in_file_of_peer(file: impl std::os::fd::AsFd) -> io::Result<Self> {
        use rustix::fs::{SealFlags, fcntl_get_seals, fstat};

        let file = file.as_fd();
        let len = usize::try_from(fstat(file)?.st_size).unwrap_or(0);
        if len < CONTROL || !fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
            return Err(unknown(format!("{len} bytes, or not sealed")));
        }
        let memory = RawMemory::of_file(file, len)?;
        memory.advise(0, CONTROL, Advice::Touch);
        Ok(Self {
            memory,
            allocator: None,
        })
    }

    /// The file in which it lies.
    #[cfg(target_os = "linux")]
    pub(crate) fn file(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        use std::os::fd::AsFd;

        self.allocator.as_ref()?.file.as_ref().map(AsFd::as_fd)
    }

    pub(crate) fn counter(&self) -> &SeqCounter {
        &self.head().counter
    }

    pub(crate) fn heartbeat(&self) -> &SharedHeartbeat {
        &self.head().heartbeat
    }

    pub(crate) fn header(&self, step: u32) -> &ShmHeader {
        &self.head().headers[step as usize % SLOTS]
    }

    /// Returns the latest operation whose header its rank has written, for messages: the rank may be writing the next.
    pub(crate) fn last_op(&self) -> Option<(u64, CollectiveFingerprint)> {
        let headers = self.head().headers.iter();
        let written = headers.filter_map(|header| {
            let before = header.read()?;
            let fingerprint = header.fingerprint()?;
            let is_whole = header.read() == Some(before);
            is_whole.then_some((before.sequence, fingerprint))
        });
        written.max_by_key(|(sequence, _)| *sequence)
    }

    pub(crate) fn slot(&self, step: u32) -> MemoryRange {
        let offset = PAGE + step as usize % SLOTS * SLOT;
        match self.memory.at(offset, SLOT) {
            Some(start) => MemoryRange::new(start, SLOT),
            None => unreachable!("every arena holds at least {CONTROL} bytes"),
        }
    }

    /// Returns the memory of a buffer; `None` if no buffer can lie there.
    pub(crate) fn buffer(&self, offset: u64, len: usize) -> Option<MemoryRange> {
        let offset = usize::try_from(offset).ok()?;
        if offset < CONTROL || !offset.is_multiple_of(PAGE) {
            return None;
        }
        Some(MemoryRange::new(self.memory.at(offset, len)?, len))
    }

    fn head(&self) -> &ArenaHeader {
        self.memory.structure(0)
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("len", &self.memory.len())
            .field("counter", self.counter())
            .finish_non_exhaustive()
    }
}

#[cfg(target_os = "linux")]
fn unknown(what: String) -> io::Error {
    let text = format!("this is no memory of a rank: {what}");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// The most bytes of a chunk that goes through slots; a multiple of every element size.
pub(crate) const SHM_CHUNK: usize = 128 * 1024;

/// A chunk, and one rank's part of the result of another one.
const SLOT: usize = SHM_CHUNK + SHM_CHUNK / 2 + PAGE;

/// Two, so that the next step can be prepared while this one is read.
const SLOTS: usize = 2;

/// The part of an arena that is not for buffers.
const CONTROL: usize = (PAGE + SLOTS * SLOT).next_multiple_of(PAGE);

const _: () = assert!(
    size_of::<ArenaHeader>() <= PAGE,
    "the head fits before the slots"
);

/// The file's name in lists of a process's files.
#[cfg(target_os = "linux")]
pub(super) const NAME: &str = "accelerator-arena";

struct ArenaAllocator {
    free_list: Mutex<FreeList>,
    #[cfg(target_os = "linux")]
    file: Option<std::os::fd::OwnedFd>,
}

impl ArenaAllocator {
    /// Puts memory behind a range of addresses.
    #[cfg(target_os = "linux")]
    fn provide(&self, memory: &RawMemory, offset: usize, len: usize) -> bool {
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
    fn take_back(&self, memory: &RawMemory, offset: usize, len: usize) -> bool {
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
    fn provide(&self, _memory: &RawMemory, _offset: usize, _len: usize) -> bool {
        false
    }

    #[cfg(not(target_os = "linux"))]
    fn take_back(&self, _memory: &RawMemory, _offset: usize, _len: usize) -> bool {
        false
    }

    fn lock(&self) -> MutexGuard<'_, FreeList> {
        // A panic among them leaves a range neither free nor used.
        self.free_list.lock()
    }
}

/// The size from which on memory comes in large pages, if the system has them.
const LARGE: usize = 2 * 1024 * 1024;

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

    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

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

/// The memory of the machine: more buffers than that there cannot be.
#[cfg(target_os = "linux")]
fn installed() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram as u64 * u64::from(info.mem_unit.max(1))
}

/// The room for the buffers of one rank. Each rank maps that of all ranks that share memory: together they take a quarter
/// of the address space, and those of a group a 512th, so that there is room for many.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Room {
    /// The room of one of so many ranks of the world on a host.
    World(usize),
    /// The room of one of so many members of a group on a host.
    Group(usize),
}

impl Room {
    #[cfg(target_os = "linux")]
    fn bytes(self) -> usize {
        let most = match self {
            Self::World(ranks) => (1 << 45) / ranks.max(1) as u64,
            Self::Group(ranks) => (1 << 38) / ranks.max(1) as u64,
        };
        installed().min(most).next_multiple_of(LARGE as u64) as usize
    }
}

/// The room for buffers in a file that this process may make: one that is larger than its limit
/// would end it by SIGXFSZ.
#[cfg(target_os = "linux")]
fn permitted() -> io::Result<usize> {
    use rustix::process::{Resource, getrlimit};

    let Some(limit) = getrlimit(Resource::Fsize).current else {
        return Ok(usize::MAX);
    };
    match limit.checked_sub(CONTROL as u64) {
        Some(room) => Ok(usize::try_from(room).unwrap_or(usize::MAX) / PAGE * PAGE),
        None => Err(io::Error::other(format!(
            "it takes a file of {CONTROL} bytes, and files may have {limit} (`ulimit -f`)"
        ))),
    }
}

/// Free ranges, in order, with a gap between any two.
#[derive(Debug)]
struct FreeList(Vec<Range<usize>>);

impl FreeList {
    fn new(all: Range<usize>) -> Self {
        let mut free_list = Self(Vec::new());
        free_list.free(all);
        free_list
    }

    /// Takes the first range of `len` bytes that starts at a multiple of `align`.
    fn take(&mut self, len: usize, align: usize) -> Option<Range<usize>> {
        let fits = |hole: &Range<usize>| {
            let start = hole.start.checked_next_multiple_of(align)?;
            let end = start.checked_add(len)?;
            (end <= hole.end).then_some(start..end)
        };
        let (index, taken) = self
            .0
            .iter()
            .enumerate()
            .find_map(|(index, hole)| Some((index, fits(hole)?)))?;
        let hole = self.0.remove(index);
        // In this order, so that both land where the hole was.
        for rest in [taken.end..hole.end, hole.start..taken.start] {
            if !rest.is_empty() {
                self.0.insert(index, rest);
            }
        }
        Some(taken)
    }

    fn free(&mut self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        let index = self.0.partition_point(|hole| hole.start < range.start);
        self.0.insert(index, range);
        // With what follows, then with what is before.
        for index in [index, index.wrapping_sub(1)] {
            if let Some([left, right]) = self.0.get(index..).and_then(<[_]>::first_chunk)
                && left.end == right.start
            {
                self.0[index].end = right.end;
                self.0.remove(index + 1);
            }
        }
    }
}

#[cfg(test)]
mod tests;
