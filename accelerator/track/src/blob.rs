//! Files of a run that are named by their contents.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use accelerator_manifest::ContentHash;

use crate::error::{Error, Result};
use crate::run_files::{self, BLOBS};

/// The file of a blob in a run's folder; none where a journal names it by something that is no hash, such as a path that
/// leads elsewhere.
pub(crate) fn blob_path(folder: &Path, hash: &str) -> Option<PathBuf> {
    let hash: ContentHash = hash.parse().ok()?;
    Some(folder.join(BLOBS).join(hash.to_string()))
}

/// Writes bytes to `blobs/<hash>` in a run's folder, and gives the hash.
pub(crate) fn write_blob(folder: &Path, bytes: &[u8]) -> Result<String> {
    let hash = ContentHash::of(bytes).to_string();
    let blobs = folder.join(BLOBS);
    let path = blobs.join(&hash);
    if path.exists() {
        return Ok(hash);
    }
    let written = fs::create_dir_all(&blobs)
        .and_then(|()| run_files::staged(&blobs))
        .and_then(|mut file| {
            file.write_all(bytes)?;
            file.persist(&path).map_err(|error| error.error)
        });
    written.map_err(|error| Error::io("write", &path, error))?;
    Ok(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blob_is_within_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let hash = write_blob(folder.path(), b"bytes").unwrap();
        let path = blob_path(folder.path(), &hash).unwrap();
        assert_eq!(fs::read(path).unwrap(), b"bytes");
        for elsewhere in ["/etc/passwd", "../journal.jsonl", "", "abc"] {
            assert_eq!(blob_path(folder.path(), elsewhere), None);
        }
    }
}
