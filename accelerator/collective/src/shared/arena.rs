//! One rank's memory that all ranks of the host can reach.

use std::{
    fmt, io,
    ptr::NonNull,
    slice,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

#[cfg(target_os = "linux")]
use super::memory::Advice;
use super::{
    card::Card,
    holes::Holes,
    memory::{Atomics, Memory, PAGE, Place},
    signal::Signal,
};
use crate::group::Key;

/// What a rank shares: how far it is, what it declares, two slots of data, and the buffers that it
/// has made.
///
/// ```text
/// 0        signal, two cards
/// 4 KiB    two slots
/// CONTROL  buffers
/// ```
///
/// The room for buffers is address space, as much as the machine has memory: a page of it becomes
/// memory when a buffer is made, and is given back when it is dropped.
pub(crate) struct Arena {
    memory: Memory,
    /// Who has made it can make buffers in it.
    owner: Option<Owner>,
}

struct Owner {
    holes: Mutex<Holes>,
    #[cfg(target_os = "linux")]
    file: Option<std::os::fd::OwnedFd>,
}

#[repr(C)]
struct Head {
    /// By which the others know that it is the one that was meant.
    nonce: [AtomicU64; 2],
    signal: Signal,
    cards: [Card; SLOTS],
}

// SAFETY: made of atomics, and padding that nobody reads.
unsafe impl Atomics for Head {}

impl Arena {
    /// Memory for one of several threads of this process.
    pub(crate) fn of_thread() -> io::Result<Self> {
        #[cfg(target_os = "linux")]
        return Self::private(installed());
        #[cfg(not(target_os = "linux"))]
        return Ok(Self {
            memory: Memory::heap(CONTROL)?,
            owner: Some(Owner {
                holes: Mutex::new(Holes::new(0..0)),
            }),
        });
    }

    #[cfg(target_os = "linux")]
    fn private(room: usize) -> io::Result<Self> {
        // Where address space is scarce, buffers are made elsewhere.
        let memory = Memory::anonymous(CONTROL + room).or_else(|_| Memory::heap(CONTROL))?;
        Ok(Self {
            owner: Some(Owner {
                holes: Mutex::new(Holes::new(CONTROL..memory.len())),
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
            Memory::of_file(&file, CONTROL + room)
        };
        // Where address space is scarce, buffers are made elsewhere.
        let memory = attempt(room).or_else(|_| attempt(0))?;
        // From here on nobody can take the file's end away from those that map it.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        retry_on_intr(|| fallocate(&file, FallocateFlags::empty(), 0, CONTROL as u64))?;
        memory.advise(0, CONTROL, Advice::Touch);
        Ok(Self {
            owner: Some(Owner {
                holes: Mutex::new(Holes::new(CONTROL..memory.len())),
                file: Some(file),
            }),
            memory,
        })
    }

    /// The memory of another process of this host, which lives.
    #[cfg(target_os = "linux")]
    pub(crate) fn of_peer(pid: u32, key: Key) -> io::Result<Self> {
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
        let memory = Memory::of_file(file, len)?;
        memory.advise(0, CONTROL, Advice::Touch);
        Ok(Self {
            memory,
            owner: None,
        })
    }

    /// The file in which it lies.
    #[cfg(target_os = "linux")]
    pub(crate) fn file(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        use std::os::fd::AsFd;

        self.owner.as_ref()?.file.as_ref().map(AsFd::as_fd)
    }

    pub(super) fn signal(&self) -> &Signal {
        &self.head().signal
    }

    /// The declaration that belongs to a step.
    pub(super) fn card(&self, step: u32) -> &Card {
        &self.head().cards[step as usize % SLOTS]
    }

    /// The slot that belongs to a step.
    pub(super) fn slot(&self, step: u32) -> Place {
        let offset = PAGE + step as usize % SLOTS * SLOT;
        match self.memory.at(offset, SLOT) {
            Some(start) => Place::new(start, SLOT),
            None => unreachable!("every arena holds at least {CONTROL} bytes"),
        }
    }

    /// Where a buffer lies; `None` where no buffer can.
    pub(super) fn buffer(&self, offset: u64, len: usize) -> Option<Place> {
        let offset = usize::try_from(offset).ok()?;
        if offset < CONTROL || !offset.is_multiple_of(PAGE) {
            return None;
        }
        Some(Place::new(self.memory.at(offset, len)?, len))
    }

    fn head(&self) -> &Head {
        self.memory.structure(0)
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("len", &self.memory.len())
            .field("signal", self.signal())
            .finish_non_exhaustive()
    }
}

/// A buffer in an arena, at the beginning of a page.
pub(crate) struct Region {
    arena: Arc<Arena>,
    start: NonNull<u8>,
    offset: usize,
    /// Rounded up to pages.
    len: usize,
    /// Whether another rank may still write to it.
    abandoned: bool,
}

// SAFETY: a region is the only one of its bytes, as a `Box<[u8]>` is.
unsafe impl Send for Region {}
// SAFETY: as above: through a shared reference it can only be read.
unsafe impl Sync for Region {}

impl Region {
    /// Zeroes; `None` where there is no room or no memory.
    pub(crate) fn new(arena: &Arc<Arena>, len: usize) -> Option<Self> {
        let owner = arena.owner.as_ref()?;
        let len = len.max(1).checked_next_multiple_of(PAGE)?;
        let align = if len < LARGE { PAGE } else { LARGE };
        let range = owner.lock().take(len, align)?;
        let start = match arena.memory.at(range.start, len) {
            Some(start) if owner.provide(&arena.memory, range.start, len) => start,
            _ => {
                owner.lock().free(range);
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

    /// Where it begins in its arena.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    /// Whether it lies in this arena.
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
        if let Some(owner) = &self.arena.owner
            && !self.abandoned
            && owner.take_back(&self.arena.memory, self.offset, self.len)
        {
            owner.lock().free(self.offset..self.offset + self.len);
        }
    }
}

impl Owner {
    /// Puts memory behind a range of addresses.
    #[cfg(target_os = "linux")]
    fn provide(&self, memory: &Memory, offset: usize, len: usize) -> bool {
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
    fn take_back(&self, memory: &Memory, offset: usize, len: usize) -> bool {
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
    fn provide(&self, _memory: &Memory, _offset: usize, _len: usize) -> bool {
        false
    }

    #[cfg(not(target_os = "linux"))]
    fn take_back(&self, _memory: &Memory, _offset: usize, _len: usize) -> bool {
        false
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Holes> {
        // A panic among them leaves a range neither free nor used.
        self.holes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(target_os = "linux")]
fn unknown(what: String) -> io::Error {
    let text = format!("this is no memory of a rank: {what}");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// The memory of the machine: more buffers than that there cannot be.
#[cfg(target_os = "linux")]
fn installed() -> usize {
    let info = rustix::system::sysinfo();
    let bytes = info.totalram as u64 * u64::from(info.mem_unit.max(1));
    // At most a 64th of the address space, so that the ranks of a large host fit into it.
    bytes.min(1 << 41).next_multiple_of(LARGE as u64) as usize
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

/// The most bytes of a chunk that goes through slots; a multiple of every element size.
pub(crate) const CHUNK: usize = 128 * 1024;

/// A chunk, and one rank's part of the result of another one.
const SLOT: usize = CHUNK + CHUNK / 2 + PAGE;

/// Two, so that the next step can be prepared while this one is read.
const SLOTS: usize = 2;

/// The part of an arena that is not for buffers.
const CONTROL: usize = (PAGE + SLOTS * SLOT).next_multiple_of(PAGE);

/// From this size on, memory comes in large pages where the system has them.
const LARGE: usize = 2 * 1024 * 1024;

const _: () = assert!(size_of::<Head>() <= PAGE, "the head fits before the slots");

/// What the file is called in lists of a process's files.
#[cfg(target_os = "linux")]
pub(super) const NAME: &str = "accelerator-arena";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn buffers_are_zeroes_and_give_their_memory_back() {
        for arena in [Arena::private(1 << 24), Arena::in_file(1 << 24)] {
            let arena = Arc::new(arena.unwrap());
            let mut first = Region::new(&arena, 3 << 20).unwrap();
            assert!(first.bytes().iter().all(|x| *x == 0));
            first.bytes_mut().fill(7);
            let second = Region::new(&arena, 100).unwrap();
            assert_eq!((second.bytes().len(), second.bytes()[99]), (PAGE, 0));
            let place = arena.buffer(first.offset() as u64, 3 << 20).unwrap();
            assert_eq!(place.start().cast_const(), first.bytes().as_ptr());
            assert!(Region::new(&arena, 1 << 24).is_none(), "no room");
            let offset = first.offset();
            drop(first);
            let again = Region::new(&arena, 3 << 20).unwrap();
            assert_eq!(again.offset(), offset);
            assert!(again.bytes().iter().all(|x| *x == 0));
            again.abandon();
            let other = Region::new(&arena, 3 << 20).unwrap();
            assert_ne!(other.offset(), offset, "somebody may still write to it");
        }
    }

    #[test]
    fn only_buffers_are_found_in_an_arena() {
        let arena = Arena::of_thread().unwrap();
        assert!(arena.buffer(0, 10).is_none());
        assert!(arena.buffer(u64::MAX - 1, 10).is_none());
        assert!(arena.buffer(CONTROL as u64, usize::MAX).is_none());
        assert!(arena.buffer(CONTROL as u64 + 8, 8).is_none());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn another_mapping_sees_the_same() {
        let own = Arc::new(Arena::in_file(1 << 20).unwrap());
        let other = Arena::in_file_of_peer(own.file().unwrap()).unwrap();
        own.signal().raise(3);
        assert!(other.signal().reached(3));
        let mut region = Region::new(&own, 1000).unwrap();
        region.bytes_mut()[..3].copy_from_slice(&[1, 2, 3]);
        let place = other.buffer(region.offset() as u64, 3).unwrap();
        // SAFETY: nobody writes to it while it is read.
        assert_eq!(unsafe { place.bytes() }, [1, 2, 3]);
        assert!(Region::new(&Arc::new(other), 10).is_none(), "not its own");
        let file = tempfile::tempfile().unwrap();
        assert!(Arena::in_file_of_peer(&file).is_err());
    }

    /// It runs itself in a process of its own, whose limits it changes.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_limit_of_files_is_kept() {
        use rustix::process::{Resource, getrlimit, setrlimit};

        const ALONE: &str = "ACCEL_TEST_ALONE";
        if std::env::var_os(ALONE).is_none() {
            let output = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "shared::arena::tests::a_limit_of_files_is_kept"])
                .env(ALONE, "1")
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(
                output.status.success() && text.contains("1 passed"),
                "{}: {text}",
                output.status
            );
            return;
        }
        let limit = |bytes: usize| {
            let mut limit = getrlimit(Resource::Fsize);
            limit.current = Some(bytes as u64);
            setrlimit(Resource::Fsize, limit).unwrap();
        };
        for (bytes, pages) in [(CONTROL + 3 * PAGE + 7, 3), (CONTROL, 0)] {
            limit(bytes);
            let arena = Arc::new(Arena::of_process([1, 2]).unwrap());
            assert_eq!(arena.memory.len(), CONTROL + pages * PAGE);
            assert_eq!(Region::new(&arena, 3 * PAGE).is_some(), pages == 3);
            assert!(Region::new(&arena, 4 * PAGE).is_none());
        }
        limit(CONTROL - 1);
        let text = Arena::of_process([1, 2]).unwrap_err().to_string();
        assert!(text.contains("`ulimit -f`"), "{text}");
    }
}
