//! Files that are copied: which there are, and whether they stay as they are meanwhile.

use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use accelerator_manifest::ContentHash;

use crate::error::{Error, Kind, Result};

/// A file that was read from its begin to its end, and did not change meanwhile.
#[derive(Clone, Debug)]
pub(crate) struct SourceFile {
    path: PathBuf,
    pub(crate) hash: ContentHash,
    pub(crate) bytes: u64,
    stamp: Stamp,
}

impl SourceFile {
    /// Reads a file.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        Self::pass(path, &mut io::sink())
    }

    /// Reads it again, and writes it to `to`.
    ///
    /// It is an error where it is not what was read before. What was written is then of no use.
    pub(crate) fn copy(&self, to: &Path) -> Result<()> {
        let mut target = File::create_new(to).map_err(|error| Error::io("create", to, error))?;
        let mut checked = Named {
            path: to,
            file: &mut target,
        };
        let again = Self::pass(&self.path, &mut checked)?;
        if (again.hash, again.stamp) != (self.hash, self.stamp) {
            return Err(changed(&self.path));
        }
        Ok(())
    }

    /// Fails where the file has been changed since it was read.
    pub(crate) fn check_unchanged(&self) -> Result<()> {
        let metadata =
            fs::metadata(&self.path).map_err(|error| Error::io("read", &self.path, error))?;
        if Stamp::of(&metadata) == self.stamp {
            Ok(())
        } else {
            Err(changed(&self.path))
        }
    }

    fn pass(path: &Path, target: &mut dyn Write) -> Result<Self> {
        let unreadable = |error| Error::io("read", path, error);
        // Opening a pipe would wait.
        expect_plain(path, &fs::metadata(path).map_err(unreadable)?)?;
        let mut file = File::open(path).map_err(unreadable)?;
        let before = file.metadata().map_err(unreadable)?;
        expect_plain(path, &before)?;
        let mut hash = blake3::Hasher::new();
        let mut bytes = 0;
        let mut buffer = vec![0; 1 << 18];
        loop {
            let read = match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(unreadable(error)),
            };
            hash.update(&buffer[..read]);
            bytes += read as u64;
            target
                .write_all(&buffer[..read])
                .map_err(|error| match error.downcast::<Error>() {
                    Ok(error) => error,
                    Err(error) => Error::io("write a copy of", path, error),
                })?;
        }
        let stamp = Stamp::of(&before);
        if bytes != before.len() || Stamp::of(&file.metadata().map_err(unreadable)?) != stamp {
            return Err(changed(path));
        }
        Ok(Self {
            path: path.to_owned(),
            hash: hash.finalize().into(),
            bytes,
            stamp,
        })
    }
}

/// The files below a folder, by their paths in it with `/`, sorted. Empty folders are none.
///
/// Links to files are followed. Links to folders, which may lead in a circle, and what is neither a file nor a folder
/// are errors.
pub(crate) fn files_below(root: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut files = Vec::new();
    let mut folders = vec![(String::new(), root.to_owned())];
    while let Some((prefix, folder)) = folders.pop() {
        let unreadable = |error| Error::io("list the folder", &folder, error);
        for entry in fs::read_dir(&folder).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            let path = entry.path();
            let Ok(name) = entry.file_name().into_string() else {
                return Err(Error::new(
                    Kind::Misuse,
                    format!(
                        "the name of {} is no text in UTF-8; rename it",
                        path.display()
                    ),
                ));
            };
            let name = format!("{prefix}{name}");
            let kind = entry.file_type().map_err(unreadable)?;
            if kind.is_dir() {
                folders.push((format!("{name}/"), path));
                continue;
            }
            let metadata = fs::metadata(&path).map_err(|error| Error::io("read", &path, error))?;
            if metadata.is_dir() {
                return Err(Error::new(
                    Kind::Misuse,
                    format!(
                        "{} is a link to a folder, which is not followed; add that folder itself",
                        path.display()
                    ),
                ));
            }
            expect_plain(&path, &metadata)?;
            files.push((name, path));
        }
    }
    files.sort();
    Ok(files)
}

/// Fails where this is no file, or link to one.
pub(crate) fn expect_plain(path: &Path, metadata: &Metadata) -> Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    let found = if metadata.is_dir() {
        "a folder"
    } else {
        "something that is neither a file nor a folder, as a pipe or a device"
    };
    Err(Error::new(
        Kind::Misuse,
        format!("expected a file at {}, found {found}", path.display()),
    ))
}

/// What changes with a file.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Stamp {
    bytes: u64,
    modified: Option<SystemTime>,
    /// Device and number: another file may be renamed into its place.
    place: (u64, u64),
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        #[cfg(unix)]
        let place = {
            use std::os::unix::fs::MetadataExt;
            (metadata.dev(), metadata.ino())
        };
        #[cfg(not(unix))]
        let place = (0, 0);
        Self {
            bytes: metadata.len(),
            modified: metadata.modified().ok(),
            place,
        }
    }
}

/// A file whose errors say where it is.
struct Named<'a> {
    path: &'a Path,
    file: &'a mut File,
}

impl Write for Named<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes);
        written.map_err(|error| match error.kind() {
            io::ErrorKind::Interrupted => error,
            kind => io::Error::new(kind, Error::io("write", self.path, error)),
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn changed(path: &Path) -> Error {
    Error::new(
        Kind::Conflict,
        format!(
            "{} changed while it was read, so that nothing was stored; wait until it is written, and try again",
            path.display()
        ),
    )
}
