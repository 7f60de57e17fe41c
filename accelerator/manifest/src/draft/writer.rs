//! Files that are written into a draft.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use accelerator_fault::{Effect, Point, SaveStage, fail_point};

use crate::error::{Error, Kind, Result};
use crate::manifest::{FileEntry, Manifest, Role};
use crate::name::FileName;
use crate::tree;
use crate::vfs::Vfs;

/// Writes files into a folder, and remembers what they are.
#[derive(Debug)]
pub(super) struct Writer {
    pub(super) root: PathBuf,
    number: u64,
    rank: usize,
    pub(super) vfs: Vfs,
    pub(super) files: BTreeMap<FileName, FileEntry>,
    /// Set once a first write was done in halves.
    halved: bool,
}

impl Writer {
    /// `root` is set when the folder is made.
    pub(super) fn new(number: u64, rank: usize, vfs: Vfs) -> Self {
        let files = BTreeMap::new();
        Self {
            root: PathBuf::new(),
            number,
            rank,
            vfs,
            files,
            halved: false,
        }
    }

    pub(super) fn write<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
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

    pub(super) fn adopt(&mut self, name: &FileName, role: Role) -> Result<()> {
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
        let file = tree::open_file(&path).and_then(sum_up);
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

    /// Lets planned faults happen; those that are a failing disk come back as what it would say.
    pub(super) fn fail_point(&self, stage: SaveStage) -> io::Result<()> {
        match fail_point(self.rank, Point::Save(self.number, stage)) {
            Some(Effect::DiskFull) => Err(io::ErrorKind::StorageFull.into()),
            Some(Effect::FailWrite) => Err(io::Error::other("an injected fault: the write failed")),
            _ => Ok(()),
        }
    }
}

/// Sums up what goes to a file.
struct Summing<'a> {
    writer: &'a Writer,
    path: &'a Path,
    file: File,
    hash: blake3::Hasher,
    halved: bool,
    /// The bytes since the file was flushed last.
    unflushed: usize,
    result: io::Result<()>,
}

impl<'a> Summing<'a> {
    fn new(writer: &'a Writer, path: &'a Path, file: File) -> Self {
        Self {
            writer,
            path,
            file,
            hash: blake3::Hasher::new(),
            halved: writer.halved,
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
            self.writer.fail_point(SaveStage::Data)?;
        }
        self.put_all(bytes)
    }

    fn put_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        let vfs = &self.writer.vfs;
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

/// The bytes that are written or summed up at a time.
const BLOCK: usize = 1 << 20;

/// The bytes that are flushed at a time.
const FLUSHED: usize = 1 << 30;
