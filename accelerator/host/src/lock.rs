//! Locks of files and folders between processes.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Seek, Write};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::fs::is_at;

/// An advisory lock of a file or folder (`flock`), released when it is dropped or the process ends.
///
/// It locks the file that has the name at the end of the wait, not one that was removed or replaced meanwhile. Folders
/// can be locked on nearly every file system, since the kernel keeps such locks local: even NFS forwards only locks of
/// files.
#[derive(Debug)]
pub struct FileLock(File);

impl FileLock {
    /// Locks a file, which is created if it does not exist. Returns `None` if others keep it locked for longer than
    /// `wait`.
    ///
    /// Wait for at least a few milliseconds: a process that only [looks](Self::is_held) for the holder shares the lock
    /// for a moment.
    ///
    /// # Errors
    ///
    /// I/O errors, such as a file system without locks.
    pub fn create(path: &Path, mode: LockMode, wait: Duration) -> io::Result<Option<Self>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        Self::take(path, &options, mode, wait)
    }

    /// Locks a file or folder that exists, for which reading it is permission enough, except on NFS, which locks files
    /// exclusively only for those who may write. Returns `None` if others keep it locked for longer than `wait`.
    ///
    /// # Errors
    ///
    /// I/O errors, such as a file system without locks.
    pub fn open(path: &Path, mode: LockMode, wait: Duration) -> io::Result<Option<Self>> {
        Self::take(path, OpenOptions::new().read(true), mode, wait)
    }

    /// Returns `true` if a process holds a file exclusively. Nobody holds a file that does not exist.
    ///
    /// # Errors
    ///
    /// I/O errors.
    pub fn is_held(path: &Path) -> io::Result<bool> {
        let file = match File::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            opened => opened?,
        };
        // Shared, so that processes that look at the same time do not take each other for the holder.
        match file.try_lock_shared() {
            Ok(()) => {
                drop(Self(file));
                Ok(false)
            }
            Err(TryLockError::WouldBlock) => Ok(true),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Replaces the text of the locked file, such as the name of its holder. Readers may see part of it.
    ///
    /// # Errors
    ///
    /// I/O errors.
    pub fn write(&mut self, text: &[u8]) -> io::Result<()> {
        self.0.set_len(0)?;
        self.0.rewind()?;
        self.0.write_all(text)
    }

    fn take(
        path: &Path,
        options: &OpenOptions,
        mode: LockMode,
        wait: Duration,
    ) -> io::Result<Option<Self>> {
        let begun = Instant::now();
        let mut replaced = 0;
        loop {
            let file = options.open(path)?;
            let locked = match mode {
                LockMode::Shared => file.try_lock_shared(),
                LockMode::Exclusive => file.try_lock(),
            };
            match locked {
                Ok(()) if is_at(&file, path) => return Ok(Some(Self(file))),
                Ok(()) if replaced < REPLACED => {
                    replaced += 1;
                    continue;
                }
                Ok(()) => {
                    return Err(io::Error::other(format!(
                        "`{}` is another file each time that it is opened: the file system may not number its files",
                        path.display()
                    )));
                }
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(error),
            }
            if begun.elapsed() >= wait {
                return Ok(None);
            }
            thread::sleep(PAUSE);
        }
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Closing is not enough: a process that another thread starts has the file open, too, until it has become
        // another program.
        let _ = self.0.unlock();
    }
}

/// The other holders that a lock allows.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum LockMode {
    /// Holders that share it, too.
    Shared,
    /// No other holder.
    Exclusive,
}

/// The number of times that a file may be replaced while it is being locked.
const REPLACED: usize = 100;

/// The pause between two tries to take a lock.
const PAUSE: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read};
    use std::process::{Child, ChildStdin, Command, Stdio};
    use std::{env, fs};

    use super::*;

    #[test]
    fn a_lock_excludes_others_in_its_mode() {
        use LockMode::{Exclusive, Shared};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let try_lock = |mode| FileLock::create(&path, mode, Duration::ZERO).unwrap();
        assert!(!FileLock::is_held(&path).unwrap());
        let mut lock = try_lock(Exclusive).unwrap();
        assert!(FileLock::is_held(&path).unwrap());
        assert!(try_lock(Exclusive).is_none() && try_lock(Shared).is_none());
        lock.write(b"a long text").unwrap();
        lock.write(b"text").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"text");
        drop(lock);
        assert!(!FileLock::is_held(&path).unwrap());
        let shared = [(); 2].map(|()| try_lock(Shared).unwrap());
        assert!(try_lock(Exclusive).is_none() && !FileLock::is_held(&path).unwrap());
        drop(shared);
        assert!(try_lock(Exclusive).is_some());
        // The text stays for the next holder.
        assert_eq!(fs::read(&path).unwrap(), b"text");
    }

    #[test]
    fn a_lock_is_waited_for_as_long_as_it_is_allowed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let lock = FileLock::create(&path, LockMode::Exclusive, Duration::ZERO).unwrap();
        let begun = Instant::now();
        let wait = PAUSE * 4;
        let taken = FileLock::open(&path, LockMode::Shared, wait).unwrap();
        assert!(taken.is_none() && begun.elapsed() >= wait);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| FileLock::open(&path, LockMode::Exclusive, Duration::MAX));
            thread::sleep(PAUSE * 4);
            assert!(!waiting.is_finished());
            drop(lock);
            assert!(waiting.join().unwrap().unwrap().is_some());
        });
    }

    #[test]
    fn a_lock_holds_for_what_has_the_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let try_lock = || FileLock::open(&path, LockMode::Exclusive, Duration::ZERO);
        assert_eq!(try_lock().unwrap_err().kind(), ErrorKind::NotFound);
        fs::create_dir(&path).unwrap();
        let lock = try_lock().unwrap().unwrap();
        assert!(try_lock().unwrap().is_none());
        fs::remove_dir(&path).unwrap();
        assert!(!is_at(&lock.0, &path));
        fs::create_dir(&path).unwrap();
        assert!(!is_at(&lock.0, &path));
        assert!(try_lock().unwrap().is_some());
    }

    #[cfg(unix)]
    #[test]
    fn who_waits_for_a_file_that_is_replaced_locks_the_new_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let old = FileLock::create(&path, LockMode::Exclusive, Duration::ZERO).unwrap();
        thread::scope(|scope| {
            let waiting =
                scope.spawn(|| FileLock::create(&path, LockMode::Exclusive, Duration::MAX));
            thread::sleep(PAUSE * 4);
            fs::remove_file(&path).unwrap();
            let new = waiting.join().unwrap().unwrap().unwrap();
            assert!(is_at(&new.0, &path));
        });
        drop(old);
    }

    /// The part of [`a_lock_excludes_other_processes_until_its_own_ends`] that another process runs.
    #[test]
    fn hold_a_lock_until_told() {
        let Some(path) = env::var_os(HELD) else {
            return;
        };
        let lock = FileLock::create(path.as_ref(), LockMode::Exclusive, Duration::ZERO).unwrap();
        println!("\n{}", if lock.is_some() { "held" } else { "refused" });
        // Until the test writes to this process, or kills it.
        let _ = io::stdin().read(&mut [0]);
        drop(lock);
        println!("\nreleased");
        let _ = io::stdin().read(&mut [0]);
    }

    const HELD: &str = "TEST_HELD_LOCK";

    /// A process that holds a lock.
    struct Holder {
        process: Child,
        input: ChildStdin,
        lines: io::Lines<BufReader<std::process::ChildStdout>>,
    }

    impl Holder {
        fn start(path: &Path) -> Self {
            let mut process = Command::new(env::current_exe().unwrap())
                .args([
                    "--exact",
                    "--nocapture",
                    "lock::tests::hold_a_lock_until_told",
                ])
                .env(HELD, path)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            Self {
                input: process.stdin.take().unwrap(),
                lines: BufReader::new(process.stdout.take().unwrap()).lines(),
                process,
            }
        }

        /// Waits for the line.
        fn says(&mut self, expected: &str) {
            let said = self.lines.by_ref().map(|line| line.unwrap());
            let mut said = said.filter(|line| ["held", "refused", "released"].contains(&&**line));
            assert_eq!(said.next().as_deref(), Some(expected));
        }
    }

    impl Drop for Holder {
        fn drop(&mut self) {
            self.process.kill().unwrap();
            self.process.wait().unwrap();
        }
    }

    #[test]
    fn a_lock_excludes_other_processes_until_its_own_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let take = |wait| FileLock::create(&path, LockMode::Exclusive, wait).unwrap();
        let mut first = Holder::start(&path);
        first.says("held");
        Holder::start(&path).says("refused");
        assert!(FileLock::is_held(&path).unwrap() && take(PAUSE * 4).is_none());
        first.input.write_all(b"x").unwrap();
        first.says("released");
        let mine = take(Duration::ZERO).unwrap();
        Holder::start(&path).says("refused");
        drop(mine);

        let mut killed = Holder::start(&path);
        killed.says("held");
        assert!(take(Duration::ZERO).is_none());
        drop(killed);
        assert!(take(Duration::ZERO).is_some());
    }
}
