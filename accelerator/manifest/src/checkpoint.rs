//! Committed checkpoints: their names, the files below them, reading and verifying.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::error::{Error, Kind, Result};
use crate::hash::ContentHash;
use crate::manifest::{CheckpointKind, FileEntry, Manifest};
use crate::name::{FileName, MANIFEST};
use crate::staged::{StagedName, State, try_lock};
use crate::vfs::{BLOCK, Progress, Vfs};

/// A checkpoint in a [`Folder`](crate::Folder): at first a path only.
///
/// Everything that is read from it is compared with its manifest.
///
/// ```
/// use std::num::NonZeroUsize;
/// use accelerator_manifest::{Checkpoint, Metadata, FileName, Folder, Role};
///
/// # fn main() -> accelerator_manifest::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// # let path = temporary.path().join("checkpoints/a");
/// let name: FileName = "model.bin".parse()?;
/// let mut draft = Folder::create(&path)?.begin(0)?;
/// draft.write_bytes(&name, Role::Model, b"weights")?;
/// draft.commit(Metadata::new(NonZeroUsize::MIN))?;
///
/// let checkpoint = Checkpoint::at(path.join("checkpoint-000001"))?;
/// assert_eq!(checkpoint.number(), 1);
/// assert_eq!(checkpoint.read(&name)?, b"weights");
/// // For a reader that wants a path.
/// assert!(checkpoint.path_of(&name).is_file());
/// // For a reader whose peers wait.
/// checkpoint.with_progress(|| eprintln!("reads on")).read(&name)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Checkpoint {
    number: u64,
    path: PathBuf,
    manifest: OnceLock<Manifest>,
    progress: Progress,
}

impl Checkpoint {
    /// Opens the checkpoint at `path`, in any folder and under any name, such as a copy. If `path` itself is a link, it
    /// is followed, since the caller names it; links within a checkpoint are not.
    ///
    /// # Errors
    ///
    /// The errors of [`manifest`](Self::manifest) if the name does not tell the number.
    pub fn at(path: impl Into<PathBuf>) -> Result<Self> {
        let path = followed(path.into());
        let name = path.file_name().and_then(|x| x.to_str());
        if let Some(number) = name.and_then(parse_name) {
            return Ok(Self::named(path, number));
        }
        let manifest = read_manifest(&path)?;
        Ok(Self::committed(path, manifest))
    }

    /// Opens the checkpoint at `path` if there is a manifest, valid or not; returns `None` for any other place.
    ///
    /// # Errors
    ///
    /// [`Error::is_io`] if the system cannot tell whether there is a manifest, and the errors of [`at`](Self::at).
    pub fn find(path: impl Into<PathBuf>) -> Result<Option<Self>> {
        let path = path.into();
        let manifest = path.join(MANIFEST);
        match manifest.symlink_metadata() {
            Ok(_) => Self::at(path).map(Some),
            Err(error) if is_absence(&error) => Ok(None),
            Err(error) => Err(Error::io("read", &manifest, error)),
        }
    }

    /// The same checkpoint, which calls `progress` after each piece of a file that was read; see
    /// [`Folder::with_progress`](crate::Folder::with_progress).
    #[must_use]
    pub fn with_progress(
        self,
        progress: impl Fn() + Send + Sync + UnwindSafe + RefUnwindSafe + 'static,
    ) -> Self {
        self.with_callback(Progress::new(progress))
    }

    /// The number of the checkpoint, by its name.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The path of the checkpoint.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The manifest; read and checked once, then cached.
    ///
    /// # Errors
    ///
    /// [`Error::is_not_found`] where there is no checkpoint, [`Error::is_corrupt`] where its
    /// manifest is missing or not what was written, [`Error::is_incompatible`] where a newer version wrote it.
    pub fn manifest(&self) -> Result<&Manifest> {
        if let Some(manifest) = self.manifest.get() {
            return Ok(manifest);
        }
        let manifest = read_manifest(&self.path)?;
        Ok(self.manifest.get_or_init(|| manifest))
    }

    /// The content of a file, if it is what was written.
    ///
    /// # Errors
    ///
    /// The errors of [`manifest`](Self::manifest); [`Error::is_not_found`] for a file that the manifest
    /// does not have, [`Error::is_corrupt`] for one that differs from its entry.
    pub fn read(&self, name: &FileName) -> Result<Vec<u8>> {
        self.read_into(name, |bytes| {
            let mut content = Vec::new();
            content.try_reserve_exact(bytes)?;
            content.resize(bytes, 0);
            Ok(content)
        })
    }

    /// Reads a file into the memory that `allocate` returns for its size in bytes, and verifies it against the manifest.
    ///
    /// # Errors
    ///
    /// The errors of [`read`](Self::read), and an I/O error if `allocate` fails.
    pub fn read_into<M: AsMut<[u8]>>(
        &self,
        name: &FileName,
        allocate: impl FnOnce(usize) -> io::Result<M>,
    ) -> Result<M> {
        let Some(entry) = self.manifest()?.files.get(name) else {
            let message = format!(
                "the checkpoint {} has no file {name}; expected it in its manifest",
                self.path.display()
            );
            return Err(Error::new(Kind::NotFound, message));
        };
        let mut reader = self.reader(name, entry)?;
        // `reader` has compared the length with that of the file.
        let bytes = usize::try_from(reader.expected.bytes).map_err(io::Error::other);
        let mut content = bytes.and_then(allocate).map_err(|error| {
            let path = name.at(&self.path);
            let message = format!("there is no memory for the content of {}", path.display());
            Error::new(Kind::Io, message).with_source(error)
        })?;
        // The reader compares the hash only at the end of the file.
        let mut end = [0];
        let mut blocks = content.as_mut().chunks_mut(BLOCK);
        blocks
            .try_for_each(|block| reader.read_exact(block))
            .and_then(|()| reader.read(&mut end))
            .map_err(|error| reader.error(error))?;
        Ok(content)
    }

    /// The path of a file, for readers that want one, such as memory maps. Nothing is checked: call
    /// [`verify`](Self::verify) first.
    #[must_use]
    pub fn path_of(&self, name: &FileName) -> PathBuf {
        name.at(&self.path)
    }

    /// Compares the checkpoint with its manifest, and lists everything that is wrong with it.
    #[must_use]
    pub fn verify(&self, level: VerifyLevel) -> VerifyReport {
        let mut report = VerifyReport {
            number: self.number,
            path: self.path.clone(),
            defects: Vec::new(),
            untracked: Vec::new(),
        };
        // Not the one that is kept: the file may have changed since.
        let manifest = match read_manifest(&self.path) {
            Ok(manifest) => manifest,
            Err(error) => {
                report
                    .defects
                    .push(Defect::new(&self.path, MANIFEST, error));
                return report;
            }
        };
        for (name, entry) in &manifest.files {
            if let Err(error) = self.check(name, entry, level) {
                let defect = Defect::new(&self.path, name.as_str(), error);
                report.defects.push(defect);
            }
        }
        report.untracked = untracked(&self.path, &manifest);
        report
    }

    /// Returns true if all ranks saved it together.
    pub(crate) fn is_full(&self) -> bool {
        let manifest = self.manifest();
        manifest.is_ok_and(|x| x.metadata.kind == CheckpointKind::Full)
    }

    pub(crate) fn named(path: PathBuf, number: u64) -> Self {
        let manifest = OnceLock::new();
        Self {
            number,
            path,
            manifest,
            progress: Progress::default(),
        }
    }

    pub(crate) fn committed(path: PathBuf, manifest: Manifest) -> Self {
        Self {
            number: manifest.number,
            path,
            manifest: OnceLock::from(manifest),
            progress: Progress::default(),
        }
    }

    pub(crate) fn with_callback(self, progress: Progress) -> Self {
        Self { progress, ..self }
    }

    fn check(&self, name: &FileName, entry: &FileEntry, level: VerifyLevel) -> Result<()> {
        let mut reader = self.reader(name, entry)?;
        if level == VerifyLevel::Sizes {
            return Ok(());
        }
        let mut buffer = vec![0; 1 << 18];
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(reader.error(error)),
            }
        }
    }

    /// A file of this length, to be compared with its sum.
    fn reader(&self, name: &FileName, entry: &FileEntry) -> Result<VerifiedReader> {
        Ok(VerifiedReader {
            file: expect_file(&self.path, name, entry.bytes)?,
            path: name.at(&self.path),
            expected: entry.clone(),
            bytes: 0,
            hash: blake3::Hasher::new(),
            progress: self.progress.clone(),
        })
    }
}

/// The thoroughness of a verification.
///
/// ```
/// use std::num::NonZeroUsize;
/// use accelerator_manifest::{VerifyLevel, Metadata, Folder, Role};
///
/// # fn main() -> accelerator_manifest::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// let mut draft = Folder::create(temporary.path())?.begin(0)?;
/// draft.write_bytes(&"model.bin".parse()?, Role::Model, b"weights")?;
/// let checkpoint = draft.commit(Metadata::new(NonZeroUsize::MIN))?;
/// // Other bytes, and as many of them.
/// std::fs::write(checkpoint.path().join("model.bin"), b"weighus").unwrap();
/// assert!(checkpoint.verify(VerifyLevel::Sizes).is_good());
/// assert!(!checkpoint.verify(VerifyLevel::Hashes).is_good());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VerifyLevel {
    /// Checks that the manifest is intact and that all files exist with the right lengths: quick.
    Sizes,
    /// Checks the hash of every file's content: reads everything.
    Hashes,
}

/// The result of verifying a checkpoint.
#[derive(Clone, Debug)]
pub struct VerifyReport {
    /// The checkpoint's number.
    pub number: u64,
    /// The path of the checkpoint.
    pub path: PathBuf,
    /// Everything that is wrong with it.
    pub defects: Vec<Defect>,
    /// Files in it that the manifest does not list. They are harmless: nothing reads them.
    pub untracked: Vec<String>,
}

/// A file that differs from its entry in the manifest, or the manifest itself.
#[derive(Clone, Debug)]
pub struct Defect {
    /// The file's name within the checkpoint.
    pub file: String,
    /// The expected and the actual state; paths are within the checkpoint.
    pub what: String,
    /// The same, as it would come from reading the file.
    pub error: Error,
}

impl VerifyReport {
    /// Returns true if no defect was found at this level.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.defects.is_empty()
    }

    /// Returns the first defect that proves no damage: a file that the system could not read, or a manifest of a newer
    /// version. The checkpoint may be good, so nothing replaces it by an older one unless the user asks for that.
    #[must_use]
    pub fn unreadable(&self) -> Option<&Defect> {
        let mut defects = self.defects.iter();
        defects.find(|defect| defect.is_unreadable())
    }
}

impl Defect {
    /// Returns true if the file could not be read, so that nothing is known of its content.
    fn is_unreadable(&self) -> bool {
        self.error.is_io() || self.error.is_incompatible()
    }

    fn new(root: &Path, file: &str, error: Error) -> Self {
        let root = format!("{}{}", root.display(), std::path::MAIN_SEPARATOR);
        Self {
            file: file.to_owned(),
            what: error.to_string().replace(&root, ""),
            error,
        }
    }
}

impl fmt::Display for VerifyReport {
    /// The path, and the first defects.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 3;
        write!(f, "{}", self.path.display())?;
        if self.is_good() {
            return f.write_str(" is good");
        }
        for (index, defect) in self.defects.iter().take(SHOWN).enumerate() {
            write!(f, "{} {defect}", if index == 0 { ":" } else { ";" })?;
        }
        match self.defects.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

impl fmt::Display for Defect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.what.contains(&self.file) {
            write!(f, "{}: ", self.file)?;
        }
        f.write_str(&self.what)
    }
}

/// Reads a file of a checkpoint, and fails at its end where it is not what was written.
struct VerifiedReader {
    file: File,
    path: PathBuf,
    expected: FileEntry,
    bytes: u64,
    hash: blake3::Hasher,
    progress: Progress,
}

impl VerifiedReader {
    fn error(&self, error: io::Error) -> Error {
        match error.downcast::<Error>() {
            Ok(error) => error,
            Err(error) => Error::io("read", &self.path, error),
        }
    }
}

impl Read for VerifiedReader {
    /// Fails with an [`Error`] inside the [`io::Error`], which is of the kind `InvalidData`.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.progress.tick();
        self.bytes += read as u64;
        if read > 0 && self.bytes <= self.expected.bytes {
            self.hash.update(&buffer[..read]);
            return Ok(read);
        }
        if read == 0 && buffer.is_empty() {
            return Ok(0);
        }
        let message = if self.bytes != self.expected.bytes {
            size_message(&self.path, self.expected.bytes, self.bytes)
        } else {
            let found = ContentHash::from(self.hash.finalize());
            if found == self.expected.blake3 {
                return Ok(0);
            }
            format!(
                "{} has changed since it was written: expected the BLAKE3 sum {}, found {found}",
                self.path.display(),
                self.expected.blake3
            )
        };
        let error = Error::new(Kind::Corrupt, message);
        Err(io::Error::new(io::ErrorKind::InvalidData, error))
    }
}

/// Resolves a path that is a link, or that does not end in a name, such as `.`.
fn followed(path: PathBuf) -> PathBuf {
    match path.file_name() {
        Some(_) if !path.is_symlink() => path,
        _ => path.canonicalize().unwrap_or(path),
    }
}

fn read_manifest(root: &Path) -> Result<Manifest> {
    if let Err(error) = root.symlink_metadata() {
        return Err(Error::io("read the checkpoint", root, error));
    }
    expect_folder(root)?;
    let path = root.join(MANIFEST);
    let mut bytes = Vec::new();
    // One byte more than is allowed: `parse` refuses what is longer.
    let read = open_file(&path).and_then(|file| {
        file.take(Manifest::LONGEST as u64 + 1)
            .read_to_end(&mut bytes)
    });
    read.map_err(|error| broken("the manifest of the checkpoint", &path, error))?;
    Manifest::parse(&bytes).map_err(|error| error.at(&path))
}

/// `checkpoint-000003`.
pub(crate) fn name_of(number: u64) -> String {
    format!("checkpoint-{number:06}")
}

/// The number of `checkpoint-000003`; only as [`name_of`] writes it, so that no two names are one
/// number.
pub(crate) fn parse_name(name: &str) -> Option<u64> {
    let number = name.strip_prefix("checkpoint-")?.parse().ok()?;
    let is_number = (1..=LARGEST).contains(&number) && name_of(number) == name;
    is_number.then_some(number)
}

/// A hidden name for a checkpoint, or for the hint at the newest.
pub(crate) fn temporary(what: &str, state: State) -> String {
    StagedName::new(what, state).to_string()
}

/// Checks if this is the name of something unfinished in a folder of checkpoints.
pub(crate) fn is_leftover(name: &str) -> bool {
    StagedName::parse(name).is_some_and(|staged| is_ours(&staged))
}

/// Checks if [`temporary`] made this name for something that a folder of checkpoints has.
pub(crate) fn is_ours(staged: &StagedName) -> bool {
    staged.target() == LATEST || parse_name(staged.target()).is_some()
}

/// Replaces the text file `latest`, all of it or nothing.
pub(crate) fn point_latest(vfs: &Vfs, folder: &Path, number: u64) -> io::Result<()> {
    let draft = folder.join(temporary(LATEST, State::Partial));
    let replace = || {
        let mut file = vfs.create(&draft)?;
        // The draft exists for a moment only; if it is swept before it is locked, the rename fails.
        let _lock = try_lock(&draft);
        vfs.write(
            &draft,
            &mut file,
            format!("{}\n", name_of(number)).as_bytes(),
        )?;
        vfs.sync(&draft, &file)?;
        vfs.rename(&draft, &folder.join(LATEST))?;
        vfs.sync_folder(folder)
    };
    replace().inspect_err(|_| {
        let _ = vfs.remove_file(&draft);
    })
}

pub(crate) const LATEST: &str = "latest";

/// The largest number of a checkpoint.
pub(crate) const LARGEST: u64 = 999_999_999_999_999_999;

/// All files below a checkpoint or a draft but the manifest, as names with `/`, sorted.
///
/// # Errors
///
/// [`Error::is_misuse`] for entries that a checkpoint cannot have: folders in folders, links, pipes, names that are
/// no text.
pub(crate) fn files_of(root: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    walk(root, &mut |name, is_file| {
        if !is_file {
            let message = format!(
                "{} cannot be part of a checkpoint: expected plain files, and one level of folders",
                root.join(name).display()
            );
            return Err(Error::new(Kind::Misuse, message));
        }
        files.push(name.to_owned());
        Ok(())
    })?;
    files.retain(|x| x != MANIFEST);
    files.sort();
    Ok(files)
}

/// Files below a checkpoint that its manifest does not list.
pub(crate) fn untracked(root: &Path, manifest: &Manifest) -> Vec<String> {
    let mut untracked = Vec::new();
    // What cannot be listed is not reported; files that are missed have defects.
    let _ = walk(root, &mut |name, _| {
        let known = FileName::new(name).is_ok_and(|x| manifest.files.contains_key(&x));
        if !known && name != MANIFEST {
            untracked.push(name.to_owned());
        }
        Ok(())
    });
    untracked.sort();
    untracked
}

/// A plain file of a checkpoint, of this length.
pub(crate) fn expect_file(root: &Path, name: &FileName, bytes: u64) -> Result<File> {
    if let Some(folder) = name.folder() {
        expect_folder(&root.join(folder))?;
    }
    let path = name.at(root);
    let file = open_file(&path).map_err(|error| broken("a file", &path, error))?;
    let metadata = file.metadata();
    let found = metadata
        .map_err(|error| Error::io("read", &path, error))?
        .len();
    if found != bytes {
        return Err(Error::new(Kind::Corrupt, size_message(&path, bytes, found)));
    }
    Ok(file)
}

/// Describes how the length of a file is wrong.
pub(crate) fn size_message(path: &Path, expected: u64, found: u64) -> String {
    let what = if found < expected {
        "cut off"
    } else {
        "too long"
    };
    format!(
        "{} is {what}: expected {expected} bytes, found {found}",
        path.display()
    )
}

/// A folder of a checkpoint, and not a link to one.
pub(crate) fn expect_folder(path: &Path) -> Result<()> {
    let metadata = path
        .symlink_metadata()
        .map_err(|error| broken("a folder", path, error))?;
    if metadata.is_dir() {
        return Ok(());
    }
    let found = kind_of(&metadata);
    let message = format!("expected a folder at {}, found {found}", path.display());
    Err(Error::new(Kind::Corrupt, message))
}

/// The error of a failed read: an entry that is missing, or is something else, is a defect of the checkpoint; any
/// other failure is the system's.
pub(crate) fn broken(expected: &str, path: &Path, error: io::Error) -> Error {
    let message = match error.kind() {
        _ if is_absence(&error) => {
            format!("{} is missing: expected {expected} there", path.display())
        }
        io::ErrorKind::InvalidData => format!("{}: {error}", path.display()),
        _ => return Error::io("read", path, error),
    };
    Error::new(Kind::Corrupt, message).with_source(error)
}

/// Returns true if the system reports that nothing has that name, as opposed to that it cannot tell.
pub(crate) fn is_absence(error: &io::Error) -> bool {
    let absent = [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory];
    absent.contains(&error.kind())
}

/// Opens a plain file; never follows a link, never waits for a pipe.
pub(crate) fn open_file(path: &Path) -> io::Result<File> {
    let metadata = path.symlink_metadata()?;
    if !metadata.is_file() {
        let message = format!("expected a plain file, found {}", kind_of(&metadata));
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    File::open(path)
}

/// Visits everything below `root`, two levels deep; `true` for plain files.
fn walk(root: &Path, visit: &mut dyn FnMut(&str, bool) -> Result<()>) -> Result<()> {
    for outer in entries(root)? {
        let (name, kind) = outer;
        if !kind.is_dir() {
            visit(&name, kind.is_file())?;
            continue;
        }
        for (inner, kind) in entries(&root.join(&name))? {
            visit(&format!("{name}/{inner}"), kind.is_file())?;
        }
    }
    Ok(())
}

fn entries(folder: &Path) -> Result<Vec<(String, fs::FileType)>> {
    let list = || {
        let entries = fs::read_dir(folder)?.map(|entry| {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            Ok((name, entry.file_type()?))
        });
        entries.collect::<io::Result<_>>()
    };
    list().map_err(|error| Error::io("list", folder, error))
}

fn kind_of(metadata: &fs::Metadata) -> &'static str {
    let kind = metadata.file_type();
    if kind.is_symlink() {
        "a symbolic link"
    } else if kind.is_dir() {
        "a folder"
    } else if kind.is_file() {
        "a file"
    } else {
        "something that is neither a file nor a folder"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_one_name_each() {
        for (name, number) in [
            ("checkpoint-000001", 1),
            ("checkpoint-999999", 999_999),
            ("checkpoint-1000000", 1_000_000),
        ] {
            assert_eq!(parse_name(name), Some(number));
            assert_eq!(name_of(number), name);
        }
        for name in [
            "checkpoint-000000",
            "checkpoint-1",
            "checkpoint-0000001",
            "checkpoint-+00001",
            "checkpoint-",
            "Checkpoint-000001",
            "checkpoint-000001 ",
            "checkpoint-1000000000000000000",
            "checkpoint-00000x",
            "latest",
        ] {
            assert_eq!(parse_name(name), None, "{name}");
        }
    }

    #[test]
    fn only_temporary_names_of_ours_are_leftovers() {
        assert!(is_leftover(&temporary("checkpoint-000003", State::Partial)));
        assert!(is_leftover(&temporary(LATEST, State::Partial)));
        assert!(is_leftover(&temporary("checkpoint-000003", State::Removed)));
        for name in [
            "checkpoint-000003",
            ".checkpoint-000003.partial",
            ".notes.partial-01234567-1-0123456789abcdef",
            ".checkpoint-3.partial-01234567-1-0123456789abcdef",
            ".x.checkpoint-000003.partial-01234567-1-0123456789abcdef",
        ] {
            assert!(!is_leftover(name), "{name}");
        }
    }
}
