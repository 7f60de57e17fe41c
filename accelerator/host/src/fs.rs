//! Files that are replaced whole.
//!
//! [`Replace`] writes a draft beside a file and renames it, so that readers find the old contents or the new ones and
//! never a part. [`place`] gives a complete file or folder its name.

use std::collections::hash_map::RandomState;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The prefix of the hidden names of drafts.
pub const DRAFT_PREFIX: &str = ".accel-";

/// The events that a replaced file survives.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Durability {
    /// The end of the process. A power cut may lose the file, or leave an empty one.
    Cached,
    /// A power cut, too: the bytes are on the disk before the file gets its name, and the name before the call returns.
    Flushed,
}

/// A replacement of a file, all or nothing.
///
/// ```
/// use std::io::Write;
///
/// use accelerator_host::fs::{Durability, Replace};
///
/// # let folder = tempfile::tempdir().unwrap();
/// let path = folder.path().join("state.json");
/// Replace::new(&path, Durability::Flushed).write(|file| file.write_all(b"{}"))?;
/// assert_eq!(std::fs::read(&path)?, b"{}");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Replace<'a> {
    target: &'a Path,
    draft: Option<PathBuf>,
    #[cfg_attr(not(unix), expect(dead_code, reason = "only Unix has modes"))]
    mode: u32,
    durability: Durability,
}

impl<'a> Replace<'a> {
    /// Replaces the file `target`, or creates it, with the user's default permissions for files.
    ///
    /// A symbolic link is replaced, not followed.
    #[must_use]
    pub fn new(target: &'a Path, durability: Durability) -> Self {
        Self {
            target,
            draft: None,
            mode: 0o666,
            durability,
        }
    }

    /// Makes the file readable and writable by its owner only.
    #[must_use]
    pub fn private(self) -> Self {
        Self {
            mode: 0o600,
            ..self
        }
    }

    /// Writes the draft at `path`, on the same file system, instead of under a random hidden name beside the target.
    ///
    /// A draft that a killed process left there is overwritten, so none accumulate. Only one process at a time may
    /// replace the file.
    #[must_use]
    pub fn draft(self, path: PathBuf) -> Self {
        Self {
            draft: Some(path),
            ..self
        }
    }

    /// Replaces the file by the output of `content`, which is buffered.
    ///
    /// # Errors
    ///
    /// I/O errors, and the error of `content`. The file then keeps its old contents, unless only flushing its name
    /// failed, and the draft is removed.
    pub fn write(
        self,
        content: impl FnOnce(&mut BufWriter<Draft>) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut file = BufWriter::new(self.begin()?);
        content(&mut file)?;
        let draft = file.into_inner();
        draft.map_err(|error| error.into_error())?.publish()
    }

    /// Begins a draft that the caller writes and [publishes](Draft::publish).
    ///
    /// # Errors
    ///
    /// I/O errors.
    pub fn begin(self) -> io::Result<Draft> {
        let mut options = OpenOptions::new();
        options.write(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, self.mode);
        let (file, path) = match self.draft {
            Some(path) => {
                // A new file, so that the writer of an earlier draft cannot touch this one. If the old one cannot be
                // removed, opening it reports the error.
                let _ = fs::remove_file(&path);
                (options.create(true).truncate(true).open(&path)?, path)
            }
            None => create_hidden(options.create_new(true), folder_of(self.target))?,
        };
        Ok(Draft {
            file,
            path: Some(path),
            target: self.target.to_owned(),
            durability: self.durability,
        })
    }
}

/// A file that is written under another name until it is [published](Self::publish). Dropping it earlier removes it.
#[derive(Debug)]
pub struct Draft {
    file: File,
    /// `None` once it is published.
    path: Option<PathBuf>,
    target: PathBuf,
    durability: Durability,
}

impl Draft {
    /// Gives the file its name, in place of the file that has it; does nothing if that is done already. Later writes
    /// continue at the end of the file.
    ///
    /// # Errors
    ///
    /// I/O errors. The draft can be published again if it could not be flushed or renamed. If only the new name could
    /// not be flushed, the file is in its place.
    pub fn publish(&mut self) -> io::Result<()> {
        let Some(path) = &self.path else {
            return Ok(());
        };
        if self.durability == Durability::Flushed {
            self.file.sync_all()?;
        }
        if !is_at(&self.file, path) {
            // Renaming would publish a part of another's file.
            return Err(io::Error::other(format!(
                "another process replaces `{}` at the same time",
                self.target.display()
            )));
        }
        fs::rename(path, &self.target)?;
        self.path = None;
        flush_name(&self.target, self.durability)
    }
}

impl Write for Draft {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if let Some(path) = &self.path
            && is_at(&self.file, path)
        {
            // If this fails, its name marks it as a leftover.
            let _ = fs::remove_file(path);
        }
    }
}

/// Writes a file that the user named: replaces a regular file whole, and writes into anything else, such as a pipe or a
/// device.
///
/// # Errors
///
/// I/O errors, and the error of `content`.
pub fn write_output(
    path: &Path,
    content: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        let mut file = BufWriter::new(OpenOptions::new().write(true).open(path)?);
        content(&mut file)?;
        return file.flush();
    }
    Replace::new(path, Durability::Cached).write(|file| content(file))
}

/// Gives a complete file or folder its name, in place of the file or empty folder that has it.
///
/// [`Durability::Flushed`] flushes the name only: the caller has to flush the contents first.
///
/// # Errors
///
/// I/O errors. `from` then stays, unless only flushing the name failed.
pub fn place(from: &Path, to: &Path, durability: Durability) -> io::Result<()> {
    fs::rename(from, to)?;
    flush_name(to, durability)
}

/// Flushes the names in a folder to the disk. Does nothing on a file system that cannot flush folders, and in a folder
/// that this process may not read.
///
/// # Errors
///
/// I/O errors.
#[cfg(unix)]
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder).and_then(|folder| folder.sync_all()) {
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::InvalidInput | ErrorKind::PermissionDenied | ErrorKind::Unsupported
            ) =>
        {
            Ok(())
        }
        result => result,
    }
}

/// Does nothing: only Unix can open and flush a folder.
///
/// # Errors
///
/// None.
#[cfg(not(unix))]
pub fn sync_folder(_folder: &Path) -> io::Result<()> {
    Ok(())
}

/// Returns the folder that contains a path: `.` for a bare name.
#[must_use]
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Returns `true` if `path` leads to the open file.
#[cfg(unix)]
pub(crate) fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let place = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    match (file.metadata(), fs::metadata(path)) {
        (Ok(held), Ok(found)) => place(held) == place(found),
        _ => false,
    }
}

#[cfg(not(unix))]
pub(crate) fn is_at(_file: &File, path: &Path) -> bool {
    path.exists()
}

/// Flushes the name of a file or folder that was renamed, if it is to survive a power cut.
fn flush_name(path: &Path, durability: Durability) -> io::Result<()> {
    match durability {
        Durability::Cached => Ok(()),
        Durability::Flushed => sync_folder(folder_of(path)),
    }
}

/// Creates a file with a random hidden name.
fn create_hidden(options: &OpenOptions, folder: &Path) -> io::Result<(File, PathBuf)> {
    loop {
        let random = RandomState::new().build_hasher().finish();
        let path = folder.join(format!("{DRAFT_PREFIX}{random:016x}"));
        match options.open(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            opened => return Ok((opened?, path)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
        Replace::new(path, Durability::Cached).write(|file| file.write_all(text))
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = folder.read_dir().unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_created_and_replaced_with_either_durability() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        for (text, durability) in [
            ("long text", Durability::Cached),
            ("text", Durability::Flushed),
            ("", Durability::Flushed),
        ] {
            let replace = Replace::new(&path, durability);
            replace
                .write(|file| file.write_all(text.as_bytes()))
                .unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            assert_eq!(names(folder.path()), ["a"]);
        }
    }

    #[test]
    fn failures_leave_the_old_file_and_no_draft() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        replace(&path, b"old").unwrap();
        for draft in [None, Some(folder.path().join("a.new"))] {
            let mut new = Replace::new(&path, Durability::Flushed);
            if let Some(draft) = draft {
                new = new.draft(draft);
            }
            let failed = new.clone().write(|file| {
                file.write_all(&[b'x'; 1 << 16])?;
                Err(ErrorKind::StorageFull.into())
            });
            assert_eq!(failed.unwrap_err().kind(), ErrorKind::StorageFull);
            assert_eq!(
                (names(folder.path()), fs::read(&path).unwrap()),
                (vec!["a".to_owned()], b"old".to_vec())
            );

            let mut begun = new.begin().unwrap();
            begun.write_all(b"new").unwrap();
            assert_eq!(names(folder.path()).len(), 2);
            drop(begun);
            assert_eq!(names(folder.path()), ["a"]);
        }
        // A folder is not replaced by a file.
        let taken = folder.path().join("b");
        fs::create_dir(&taken).unwrap();
        replace(&taken, b"new").unwrap_err();
        assert_eq!(names(folder.path()), ["a", "b"]);
        // There is no folder for the draft.
        replace(&folder.path().join("c/d"), b"new").unwrap_err();
        assert_eq!(fs::read(&path).unwrap(), b"old");
    }

    #[test]
    fn readers_never_see_part_of_a_file_that_many_replace() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        replace(&path, &[b'a'; 1]).unwrap();
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let readers = [(); 2].map(|()| {
                scope.spawn(|| {
                    let mut read = 0;
                    while !is_over.load(Ordering::Relaxed) {
                        let text = fs::read(&path).unwrap();
                        // The length identifies the writer.
                        let letter = text[0];
                        assert_eq!(text.len(), length(letter));
                        assert!(text == vec![letter; text.len()]);
                        read += 1;
                    }
                    read
                })
            });
            let writers = [b'b', b'c', b'd'].map(|letter| {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..100 {
                        let write = |file: &mut BufWriter<Draft>| {
                            // Many writes for one file.
                            for _ in 0..length(letter) {
                                file.write_all(&[letter])?;
                            }
                            Ok(())
                        };
                        Replace::new(path, Durability::Cached).write(write).unwrap();
                    }
                })
            });
            for writer in writers {
                writer.join().unwrap();
            }
            is_over.store(true, Ordering::Relaxed);
            for reader in readers {
                assert_ne!(reader.join().unwrap(), 0);
            }
        });
        assert_eq!(names(folder.path()), ["a"]);
    }

    fn length(letter: u8) -> usize {
        1 + usize::from(letter - b'a') * 10_000
    }

    #[test]
    fn a_named_draft_overwrites_what_a_killed_process_left() {
        let folder = tempfile::tempdir().unwrap();
        let (path, draft) = (folder.path().join("a"), folder.path().join("a.new"));
        fs::write(&draft, "what a killed process left").unwrap();
        let new = Replace::new(&path, Durability::Cached).draft(draft);
        let mut earlier = new.clone().begin().unwrap();
        let mut later = new.begin().unwrap();
        // A draft that is given up late does no harm.
        earlier.write_all(b"old").unwrap();
        drop(earlier);
        later.write_all(b"new").unwrap();
        later.publish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["a"]);
    }

    #[test]
    fn a_published_draft_is_written_in_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, "old").unwrap();
        let mut draft = Replace::new(&path, Durability::Flushed).begin().unwrap();
        let hidden = names(folder.path()).remove(0);
        assert!(hidden.starts_with(DRAFT_PREFIX), "{hidden}");
        draft.write_all(b"one ").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        draft.publish().unwrap();
        draft.write_all(b"two").unwrap();
        draft.publish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"one two");
        drop(draft);
        assert_eq!(names(folder.path()), ["a"]);
    }

    #[cfg(unix)]
    #[test]
    fn files_are_as_others_or_private() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let [path, plain] = ["a", "b"].map(|name| folder.path().join(name));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        fs::write(&plain, "").unwrap();
        replace(&path, b"").unwrap();
        assert_eq!(mode(&path), mode(&plain));
        let private = Replace::new(&path, Durability::Cached).private();
        private.write(|_| Ok(())).unwrap();
        assert_eq!(mode(&path), 0o600);
    }

    #[cfg(unix)]
    #[test]
    fn a_link_is_replaced_and_a_device_is_written_to() {
        let folder = tempfile::tempdir().unwrap();
        let [path, link] = ["a", "b"].map(|name| folder.path().join(name));
        fs::write(&path, "old").unwrap();
        std::os::unix::fs::symlink("a", &link).unwrap();
        write_output(&link, |file| file.write_all(b"new")).unwrap();
        assert!(!link.is_symlink());
        assert_eq!(fs::read(&link).unwrap(), b"new");
        assert_eq!(fs::read(&path).unwrap(), b"old");
        write_output(Path::new("/dev/null"), |file| file.write_all(b"new")).unwrap();
        write_output(folder.path(), |file| file.write_all(b"new")).unwrap_err();
        assert_eq!(names(folder.path()), ["a", "b"]);
    }

    #[test]
    fn a_folder_is_placed_unless_another_one_with_files_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let [new, to] = ["new", "to"].map(|name| folder.path().join(name));
        let begin = || {
            fs::create_dir(&new).unwrap();
            fs::write(new.join("file"), "new").unwrap();
        };
        begin();
        place(&new, &to, Durability::Flushed).unwrap();
        assert_eq!(fs::read(to.join("file")).unwrap(), b"new");
        begin();
        place(&new, &to, Durability::Cached).unwrap_err();
        assert_eq!(names(folder.path()), ["new", "to"]);
    }

    #[test]
    fn the_folder_of_a_lone_name_is_the_working_folder() {
        for (path, folder) in [("a", "."), ("a/b", "a"), ("/a", "/"), ("/", "."), ("", ".")] {
            assert_eq!(folder_of(Path::new(path)), Path::new(folder), "{path}");
        }
    }
}
