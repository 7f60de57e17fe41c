//! Checkpoints that are being written.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use accelerator_fault::{Effect, Point, SaveStage, fail_point};
use accelerator_host::lock::FileLock;
use accelerator_host::machine::unix_time;

use crate::checkpoint::{self, Checkpoint, name_of, point_latest};
use crate::error::{Error, Kind, Result};
use crate::manifest::{FileEntry, Manifest, Metadata, Role};
use crate::name::{FileName, MANIFEST};
use crate::staged;
use crate::vfs::{BLOCK, Vfs};

/// A checkpoint that is being written, under a hidden name.
///
/// It becomes a [`Checkpoint`] by [`commit`](Self::commit). Dropped before, it is removed; where
/// its process dies, the next draft in the same folder removes it, that of another host after a day.
///
/// ```
/// # use std::num::NonZeroUsize;
/// use accelerator_manifest::{Metadata, Folder, Role};
///
/// # fn main() -> accelerator_manifest::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// let folder = Folder::create(temporary.path().join("checkpoints/a"))?;
/// let mut draft = folder.begin(0)?;
/// draft.write(&"model.bin".parse()?, Role::Model, |file| file.write_all(b"weights"))?;
///
/// // A writer that wants a path puts its file where the draft lies.
/// std::fs::write(draft.path().join("vocabulary.txt"), "a b c").unwrap();
/// draft.adopt(Role::Other)?;
///
/// let checkpoint = draft.commit(Metadata::new(NonZeroUsize::MIN))?;
/// assert_eq!(checkpoint.manifest()?.files.len(), 2);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Draft {
    folder: PathBuf,
    /// The hidden folder of the draft.
    root: PathBuf,
    number: u64,
    rank: usize,
    vfs: Vfs,
    files: BTreeMap<FileName, FileEntry>,
    /// Set once a first write was done in halves.
    halved: bool,
    is_committed: bool,
    /// Tells others that it is being written.
    _lock: Option<FileLock>,
}

impl Draft {
    /// The number that the checkpoint will have.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The path of the draft, for writers that want one; [`adopt`](Self::adopt) takes in the files that they write
    /// there.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// Writes a file: streams it, sums it up, and flushes it to the disk.
    ///
    /// Writes of `content` are collected to blocks of 1 MiB; it needs no buffer of its own.
    ///
    /// # Errors
    ///
    /// I/O errors, the error of `content`, and [`Error::is_misuse`] for a name that is taken.
    /// Nothing of the file is left then, and the draft can continue.
    pub fn write<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
        &mut self,
        name: &FileName,
        role: Role,
        content: impl FnOnce(&mut dyn Write) -> Result<(), E>,
    ) -> Result<&FileEntry> {
        self.refuse_taken(name)?;
        if let Some(folder) = name.folder() {
            let path = self.root.join(folder);
            match self.vfs.make_folder(&path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(Error::io("make the folder", &path, error));
                }
                _ => {}
            }
        }
        let path = name.at(&self.root);
        let file = self
            .vfs
            .create(&path)
            .map_err(|error| Error::io("create", &path, error))?;
        match self.fill(&path, file, role, content) {
            Ok(entry) => Ok(self.files.entry(name.clone()).or_insert(entry)),
            Err(error) => {
                // The draft is removed with all that is in it at the latest.
                let _ = self.vfs.remove_file(&path);
                Err(error)
            }
        }
    }

    /// Writes a file that is in memory, as [`write`](Self::write) does.
    ///
    /// # Errors
    ///
    /// The errors of [`write`](Self::write).
    pub fn write_bytes(&mut self, name: &FileName, role: Role, bytes: &[u8]) -> Result<&FileEntry> {
        self.write(name, role, |file| file.write_all(bytes))
    }

    /// Takes in what others have put below [`path`](Self::path): files without an entry are read
    /// once for their sum, and flushed. Returns their names.
    ///
    /// # Errors
    ///
    /// [`Error::is_name`] and [`Error::is_misuse`] for names and things that a checkpoint cannot
    /// have, such as links, and I/O errors.
    pub fn adopt(&mut self, role: Role) -> Result<Vec<FileName>> {
        let mut adopted = Vec::new();
        for name in checkpoint::files_of(self.path())? {
            let name = FileName::new(name)?;
            if !self.files.contains_key(&name) {
                self.adopt_file(&name, role)?;
                adopted.push(name);
            }
        }
        Ok(adopted)
    }

    /// Makes the draft a checkpoint: writes the manifest, flushes everything, gives it its name,
    /// and lets `latest` point to it.
    ///
    /// A failure to replace the text file `latest` is logged and is no error: it is a hint for people,
    /// and the checkpoint is complete without it.
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`] for files without an entry ([`adopt`](Self::adopt) them),
    /// [`Error::is_conflict`] where another process was faster with this number, and what the disk
    /// says. The draft is removed then.
    pub fn commit(mut self, metadata: Metadata) -> Result<Checkpoint> {
        self.refuse_strangers()?;
        let manifest = Manifest {
            format: Manifest::FORMAT,
            number: self.number,
            created: unix_time().as_secs(),
            library: env!("CARGO_PKG_VERSION").to_owned(),
            metadata,
            files: std::mem::take(&mut self.files),
        };
        let (vfs, root) = (&self.vfs, &self.root);
        let path = root.join(MANIFEST);
        let write = |bytes: &[u8]| {
            let mut file = vfs.create(&path)?;
            vfs.write(&path, &mut file, bytes)?;
            vfs.sync(&path, &file)
        };
        write(&manifest.to_bytes()?).map_err(|error| Error::io("write", &path, error))?;
        let folders = manifest.files.keys().filter_map(FileName::folder);
        let folders: BTreeSet<_> = folders.collect();
        for path in folders
            .into_iter()
            .map(|x| root.join(x))
            .chain([root.clone()])
        {
            vfs.sync_folder(&path)
                .map_err(|error| Error::io("flush", &path, error))?;
        }
        self.fail_point(SaveStage::Written)
            .map_err(|error| Error::io("write", root, error))?;

        let path = self.folder.join(name_of(self.number));
        vfs.rename(root, &path)
            .map_err(|error| self.rename_error(&path, error))?;
        self.is_committed = true;
        vfs.sync_folder(&self.folder).map_err(|error| {
            let message = format!(
                "{} is complete, but it is not certain that it survives a power cut: cannot flush \
                 {}: {error}",
                path.display(),
                self.folder.display()
            );
            Error::new(Kind::Io, message).with_source(error)
        })?;
        let hint = self
            .fail_point(SaveStage::Renamed)
            .and_then(|()| point_latest(vfs, &self.folder, self.number));
        if let Err(error) = hint {
            tracing::warn!(
                "{} is complete, but `latest` beside it could not be changed: {error}",
                path.display()
            );
        }
        Ok(Checkpoint::committed(path, manifest).with_callback(vfs.progress.clone()))
    }

    /// `folder` exists; the number is free as far as can be seen.
    pub(crate) fn begin(folder: &Path, number: u64, rank: usize, vfs: Vfs) -> Result<Self> {
        let begin = fail_save(rank, number, SaveStage::Begin);
        let (root, lock) = begin
            .and_then(|()| staged::make(&vfs, folder, &name_of(number)))
            .map_err(|error| Error::io("write a checkpoint in", folder, error))?;
        Ok(Self {
            folder: folder.to_owned(),
            root,
            number,
            rank,
            vfs,
            files: BTreeMap::new(),
            halved: false,
            is_committed: false,
            _lock: lock,
        })
    }

    fn refuse_strangers(&self) -> Result<()> {
        let names = checkpoint::files_of(self.path())?;
        let listed = |x: &&String| !self.files.keys().any(|name| name.as_str() == **x);
        match names.iter().find(listed) {
            None => Ok(()),
            Some(name) => {
                let path = self.path().join(name);
                let message = format!(
                    "{} was put into the checkpoint without an entry in its manifest; adopt such \
                     files before the commit",
                    path.display()
                );
                Err(Error::new(Kind::Misuse, message))
            }
        }
    }

    fn rename_error(&self, path: &Path, error: io::Error) -> Error {
        let taken = [
            io::ErrorKind::AlreadyExists,
            io::ErrorKind::DirectoryNotEmpty,
            io::ErrorKind::NotADirectory,
        ];
        if !taken.contains(&error.kind()) {
            return Error::io("give the finished checkpoint its name", path, error);
        }
        let message = format!(
            "{} was written by someone else while this checkpoint of the same number was; expected \
             one writer a folder: give each job its own",
            path.display()
        );
        Error::new(Kind::Conflict, message).with_source(error)
    }

    fn fill<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
        &mut self,
        path: &Path,
        file: File,
        role: Role,
        content: impl FnOnce(&mut dyn Write) -> Result<(), E>,
    ) -> Result<FileEntry> {
        let mut buffer = BufWriter::with_capacity(BLOCK, Summing::new(self, path, file));
        let told = content(&mut buffer);
        let flushed = buffer.flush();
        // What is still in the buffer could not be written.
        let (sum, _) = buffer.into_parts();
        let Summing {
            file,
            hash,
            halved,
            result,
            ..
        } = sum;
        self.halved = halved;
        let failed = |error: io::Error| Error::io("write", path, error);
        // The I/O error comes first: `content` may wrap it, or drop it.
        result.map_err(failed)?;
        told.map_err(|error| {
            let error: Box<dyn std::error::Error + Send + Sync> = error.into();
            let message = format!("cannot write {}: {error}", path.display());
            Error::new(Kind::Io, message).with_source(error)
        })?;
        flushed.map_err(failed)?;
        self.vfs.sync(path, &file).map_err(failed)?;
        Ok(FileEntry {
            bytes: hash.count(),
            blake3: hash.finalize().into(),
            role,
        })
    }

    fn adopt_file(&mut self, name: &FileName, role: Role) -> Result<()> {
        self.refuse_taken(name)?;
        let path = name.at(&self.root);
        let mut hash = blake3::Hasher::new();
        let sum_up = |file: File| {
            let mut reader = BufReader::with_capacity(BLOCK, &file);
            loop {
                let block = reader.fill_buf()?;
                if block.is_empty() {
                    break;
                }
                hash.update(block);
                let read = block.len();
                reader.consume(read);
                self.vfs.progress.tick();
            }
            Ok(file)
        };
        let file = checkpoint::open_file(&path).and_then(sum_up);
        let file = file.map_err(|error| Error::io("read", &path, error))?;
        let synced = self.vfs.sync(&path, &file);
        synced.map_err(|error| Error::io("flush", &path, error))?;
        let entry = FileEntry {
            bytes: hash.count(),
            blake3: hash.finalize().into(),
            role,
        };
        self.files.insert(name.clone(), entry);
        Ok(())
    }

    fn refuse_taken(&self, name: &FileName) -> Result<()> {
        let message = if self.files.contains_key(name) {
            format!("{name} was written to {} before", self.root.display())
        } else if self.files.len() >= Manifest::MOST_FILES {
            format!(
                "expected at most {} files in a checkpoint",
                Manifest::MOST_FILES
            )
        } else {
            return Ok(());
        };
        Err(Error::new(Kind::Misuse, message))
    }

    fn fail_point(&self, stage: SaveStage) -> io::Result<()> {
        fail_save(self.rank, self.number, stage)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.is_committed
            && let Err(error) = self.vfs.remove_folder(self.path())
        {
            tracing::debug!("cannot remove the draft {}: {error}", self.path().display());
        }
    }
}

/// Lets planned faults happen; those that are a failing disk come back as what it would say.
fn fail_save(rank: usize, number: u64, stage: SaveStage) -> io::Result<()> {
    match fail_point(rank, Point::Save(number, stage)) {
        Some(Effect::DiskFull) => Err(io::ErrorKind::StorageFull.into()),
        Some(Effect::FailWrite) => Err(io::Error::other("an injected fault: the write failed")),
        _ => Ok(()),
    }
}

/// Sums up what goes to a file.
struct Summing<'a> {
    draft: &'a Draft,
    path: &'a Path,
    file: File,
    hash: blake3::Hasher,
    halved: bool,
    /// The bytes since the file was flushed last.
    unflushed: usize,
    result: io::Result<()>,
}

impl<'a> Summing<'a> {
    fn new(draft: &'a Draft, path: &'a Path, file: File) -> Self {
        Self {
            draft,
            path,
            file,
            hash: blake3::Hasher::new(),
            halved: draft.halved,
            unflushed: 0,
            result: Ok(()),
        }
    }

    /// The first write is done in halves, so that faults find a torn file on the disk.
    fn put(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        if !self.halved && bytes.len() > 1 {
            self.halved = true;
            let half;
            (half, bytes) = bytes.split_at(bytes.len() / 2);
            self.put_all(half)?;
            self.draft.fail_point(SaveStage::Data)?;
        }
        self.put_all(bytes)
    }

    fn put_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        let vfs = &self.draft.vfs;
        vfs.write(self.path, &mut self.file, bytes)?;
        self.hash.update(bytes);
        // One flush of all of a large file would show no progress for long.
        self.unflushed += bytes.len();
        if self.unflushed >= FLUSHED {
            vfs.sync(self.path, &self.file)?;
            self.unflushed = 0;
        }
        Ok(())
    }
}

impl Write for Summing<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.result.is_err() {
            return Err(io::Error::other("an earlier write to this file failed"));
        }
        // A longer slice is written in several calls.
        let bytes = &bytes[..bytes.len().min(BLOCK)];
        match self.put(bytes) {
            Ok(()) => Ok(bytes.len()),
            Err(error) => {
                let kind = error.kind();
                self.result = Err(error);
                Err(kind.into())
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The bytes that are flushed at a time.
const FLUSHED: usize = 1 << 30;
