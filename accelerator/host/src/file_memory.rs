//! Memory backed by files, which the kernel can write to disk when it runs short of RAM, or which several processes map.

#![expect(
    unsafe_code,
    reason = "a file mapping is valid memory only while nobody truncates the file"
)]

use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::Path;
#[cfg(target_os = "linux")]
use std::path::PathBuf;

use memmap2::MmapMut;

/// Memory backed by an unnamed file. The operating system frees the file's blocks when the memory is dropped or the
/// process ends, however it ends.
#[derive(Debug)]
pub struct FileMemory(MmapMut);

impl FileMemory {
    /// Creates `len` zeroed bytes in a file in a folder. The disk space is reserved if the file system supports it, so that
    /// a full disk is an error here and not a SIGBUS on a later write.
    ///
    /// # Errors
    ///
    /// If no file can be created in the folder, if the disk has too little space, or if `len` is 0.
    pub fn new(folder: &Path, len: usize) -> io::Result<Self> {
        if len == 0 {
            return Err(ErrorKind::InvalidInput.into());
        }
        let file = tempfile::tempfile_in(folder)?;
        reserve(&file, len as u64)?;
        // SAFETY: the file has no name, and no descriptor of it leaves this function, so nobody else can write to it or
        // truncate it.
        Ok(Self(unsafe { MmapMut::map_mut(&file) }?))
    }

    /// Takes over a file of this process: maps its content and unlinks it. Nobody may have the file open.
    ///
    /// # Errors
    ///
    /// If the file cannot be opened, unlinked or mapped, or if it is empty.
    pub fn take(path: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(path)?;
        std::fs::remove_file(path)?;
        if file.metadata()?.len() == 0 {
            return Err(ErrorKind::InvalidInput.into());
        }
        // SAFETY: the file has no name any more, and by the contract above nobody else has it open.
        Ok(Self(unsafe { MmapMut::map_mut(&file) }?))
    }

    /// Returns the bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the bytes mutably.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// Bytes that no process can change, which the processes of a user on a host map without copying them.
#[cfg(target_os = "linux")]
#[derive(Debug)]
pub struct SharedBytes(File);

#[cfg(target_os = "linux")]
impl SharedBytes {
    /// Writes the bytes that `write` emits, at most `len`, to memory that has no name, and seals it.
    ///
    /// # Errors
    ///
    /// If a file of this process may not have that many bytes (`ulimit -f`), if the memory does not suffice, or if `write`
    /// fails.
    pub fn new(len: u64, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<Self> {
        use rustix::fs::{MemfdFlags, fcntl_add_seals, memfd_create};

        let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize);
        if limit.current.is_some_and(|limit| limit < len) {
            // A write beyond it would end the process.
            return Err(ErrorKind::FileTooLarge.into());
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file = File::from(memfd_create("shared bytes", flags)?);
        write(&mut file)?;
        fcntl_add_seals(&file, Self::SEALS)?;
        Ok(Self(file))
    }

    /// Opens the bytes of another process by the [path](Self::path) there.
    ///
    /// # Errors
    ///
    /// If the process does not exist any more or belongs to another user, or if the bytes are not sealed.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        match rustix::fs::fcntl_get_seals(&file)?.contains(Self::SEALS) {
            true => Ok(Self(file)),
            false => Err(io::Error::other("the file is not sealed")),
        }
    }

    /// Returns the path by which other processes open the bytes while this exists.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        let fd = std::os::fd::AsRawFd::as_raw_fd(&self.0);
        format!("/proc/{}/fd/{fd}", std::process::id()).into()
    }

    /// Maps `len` bytes from `offset` on, a multiple of the page size. Pages that this process writes to become its own.
    ///
    /// # Errors
    ///
    /// If the bytes end before, or cannot be mapped.
    pub fn map(&self, offset: u64, len: usize) -> io::Result<FileMemory> {
        if len == 0 || self.0.metadata()?.len() < offset.saturating_add(len as u64) {
            return Err(ErrorKind::InvalidInput.into());
        }
        let mut options = memmap2::MmapOptions::new();
        // SAFETY: the file is sealed, so nobody can write to it or truncate it.
        let memory = unsafe { options.offset(offset).len(len).map_copy(&self.0) };
        Ok(FileMemory(memory?))
    }

    const SEALS: rustix::fs::SealFlags = rustix::fs::SealFlags::SHRINK
        .union(rustix::fs::SealFlags::GROW)
        .union(rustix::fs::SealFlags::WRITE);
}

/// Returns `true` if a folder is on a file system in memory, such as tmpfs.
///
/// # Errors
///
/// If the folder does not exist or cannot be queried.
pub fn is_in_memory(folder: &Path) -> io::Result<bool> {
    #[cfg(target_os = "linux")]
    {
        // The magic numbers of tmpfs and ramfs.
        let in_memory = [0x0102_1994, 0x8584_58f6_u32];
        Ok(in_memory.contains(&(rustix::fs::statfs(folder)?.f_type as u32)))
    }
    #[cfg(not(target_os = "linux"))]
    std::fs::metadata(folder).map(|_| false)
}

/// Extends a file to `len` bytes, and allocates its blocks if the file system supports it.
fn reserve(file: &File, len: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{FallocateFlags, fallocate};
        use rustix::io::{Errno, retry_on_intr};

        match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, len)) {
            Err(Errno::OPNOTSUPP) => {}
            reserved => return Ok(reserved?),
        }
    }
    file.set_len(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_memory_leaves_no_file_in_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let mut memory = FileMemory::new(folder.path(), 5000).unwrap();
        assert!(memory.bytes().iter().all(|byte| *byte == 0));
        memory.bytes_mut()[4999] = 7;
        assert_eq!((memory.bytes().len(), memory.bytes()[4999]), (5000, 7));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let path = folder.path().join("file");
        std::fs::write(&path, [1, 2, 3]).unwrap();
        assert_eq!(FileMemory::take(&path).unwrap().bytes(), [1, 2, 3]);
        assert!(!path.exists());
        std::fs::write(&path, []).unwrap();
        assert!(FileMemory::take(&path).is_err());
        assert!(FileMemory::new(folder.path(), 0).is_err());
        assert!(FileMemory::new(&folder.path().join("missing"), 1).is_err());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn shared_bytes_are_mapped_by_their_path_and_written_by_nobody() {
        use std::io::Write;

        let bytes = SharedBytes::new(5000, |file| file.write_all(&[7; 5000])).unwrap();
        let other = SharedBytes::open(&bytes.path()).unwrap();
        let mut one = other.map(0, 5000).unwrap();
        one.bytes_mut()[0] = 1;
        let two = bytes.map(4096, 904).unwrap();
        drop((bytes, other));
        assert_eq!(
            (one.bytes()[..2].to_vec(), two.bytes()),
            (vec![1, 7], &[7; 904][..])
        );
        let bytes = SharedBytes::new(5000, |file| file.write_all(&[7; 5000])).unwrap();
        assert_eq!(bytes.map(0, 1).unwrap().bytes(), [7]);
        assert!(bytes.map(4096, 905).is_err());
        assert!(
            File::options()
                .write(true)
                .open(bytes.path())
                .is_ok_and(|mut file| file.write(&[1]).is_err())
        );
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("file"), [1]).unwrap();
        assert!(SharedBytes::open(&folder.path().join("file")).is_err());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_file_larger_than_the_disk_is_an_error_at_creation() {
        let folder = tempfile::tempdir().unwrap();
        assert!(FileMemory::new(folder.path(), 1 << 50).is_err());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn folders_in_memory_are_detected() {
        assert!(!is_in_memory(Path::new("/proc")).unwrap());
        assert!(is_in_memory(Path::new("/missing")).is_err());
        if Path::new("/dev/shm").is_dir() {
            assert!(is_in_memory(Path::new("/dev/shm")).unwrap());
        }
    }
}
