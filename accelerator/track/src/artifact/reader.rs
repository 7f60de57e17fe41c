//! Reading a file of an artifact.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use accelerator_manifest::ContentHash;

use super::version::ArtifactFile;
use crate::error::{Error, Kind};

/// Reads a file of an artifact, and fails at its end where it is not what was stored.
///
/// ```
/// use std::io::Read;
/// use accelerator_track::{Artifact, ArtifactReader, ArtifactStore};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let temporary = tempfile::tempdir()?;
/// # let file = temporary.path().join("model.bin");
/// # std::fs::write(&file, "weights")?;
/// let store = ArtifactStore::of_runs(temporary.path());
/// let model = store.commit(&Artifact::create("model").add_file(&file)?)?;
/// let mut reader: ArtifactReader = model.open_file("model.bin")?;
/// let mut content = String::new();
/// reader.read_to_string(&mut content)?;
/// assert_eq!((content.as_str(), reader.file().bytes), ("weights", 7));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ArtifactReader {
    file: File,
    what: String,
    path: PathBuf,
    expected: ArtifactFile,
    bytes: u64,
    hash: blake3::Hasher,
}

impl ArtifactReader {
    /// `what` is the file in words, `path` is where its content lies.
    pub(super) fn open(what: String, path: PathBuf, expected: ArtifactFile) -> io::Result<Self> {
        Ok(Self {
            file: File::open(&path)?,
            what,
            path,
            expected,
            bytes: 0,
            hash: blake3::Hasher::new(),
        })
    }

    /// What the manifest says of the file.
    #[must_use]
    pub fn file(&self) -> &ArtifactFile {
        &self.expected
    }

    pub(super) fn error(&self, error: io::Error) -> Error {
        match error.downcast::<Error>() {
            Ok(error) => error,
            Err(error) => Error::io("read", &self.path, error),
        }
    }
}

impl Read for ArtifactReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.hash.update(&buffer[..read]);
        self.bytes += read as u64;
        if read == 0 && !buffer.is_empty() {
            let found = self.hash.finalize().into();
            if (self.bytes, found) != (self.expected.bytes, self.expected.hash) {
                let error = damaged(&self.what, &self.path, &self.expected, self.bytes, found);
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
        }
        Ok(read)
    }
}

/// The error where a file is something else.
pub(super) fn damaged(
    what: &str,
    path: &Path,
    expected: &ArtifactFile,
    bytes: u64,
    hash: ContentHash,
) -> Error {
    Error::new(
        Kind::Corrupt,
        format!(
            "{what} is not what was stored: expected {} bytes with the hash {}, found {bytes} with {hash} in {}; store the artifact again",
            expected.bytes,
            expected.hash,
            path.display()
        ),
    )
}
