//! One rank's memory that all ranks of the host can reach.

mod allocator;
#[cfg(target_os = "linux")]
mod limits;
mod region;

use std::{
    fmt, io,
    sync::atomic::{AtomicU64, Ordering},
};

use serde::{Deserialize, Serialize};

pub(crate) use region::Region;

#[cfg(target_os = "linux")]
use super::memory::Advice;
use super::{
    free_list::FreeList,
    header::ShmHeader,
    memory::{Atomics, MemoryRange, PAGE, RawMemory},
    seq_counter::SeqCounter,
};
use crate::fingerprint::CollectiveFingerprint;
use accelerator_host::sync::Mutex;
use allocator::ArenaAllocator;
#[cfg(target_os = "linux")]
use limits::{installed, permitted};

/// The identity of an arena, by which other ranks find and recognize it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct ArenaId {
    /// The number of its file in the process that has it.
    pub(crate) file: i32,
    /// The words that are written in it.
    pub(crate) nonce: [u64; 2],
}

/// The memory that a rank shares: its progress, its headers, two slots of data, and the buffers that it has made.
///
/// ```text
/// 0        counter, two headers
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
}

// SAFETY: made of atomics, and padding that nobody reads.
unsafe impl Atomics for ArenaHeader {}

impl Arena {
    /// Memory for one of several threads of this process.
    pub(crate) fn of_thread() -> io::Result<Self> {
        #[cfg(target_os = "linux")]
        return Self::private(installed());
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
    pub(crate) fn of_process(nonce: [u64; 2]) -> io::Result<Self> {
        let arena = Self::in_file(installed())?;
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

    /// The header of a step.
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

    /// The slot that belongs to a step.
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

#[cfg(test)]
mod tests;
