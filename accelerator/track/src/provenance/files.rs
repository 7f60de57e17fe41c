//! Hashes of files and folders.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};

/// The digest of a folder's contents.
///
/// [`digest_folder`] makes it.
///
/// ```
/// use accelerator_track::FolderDigest;
///
/// let text = r#"{"path": "data", "hash": "af13", "files": 2, "bytes": 100}"#;
/// let digest: FolderDigest = serde_json::from_str(text).unwrap();
/// assert_eq!((digest.files, digest.bytes), (2, 100));
/// ```
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FolderDigest {
    /// Where it was, absolute.
    pub path: String,
    /// The digest, hexadecimal.
    pub hash: String,
    /// How many files it has, at every depth.
    pub files: u64,
    /// The length of all of them.
    pub bytes: u64,
}

/// A file and its hash.
///
/// ```
/// use accelerator_track::HashedFile;
///
/// let file: HashedFile = serde_json::from_str(r#"{"path": "Cargo.lock", "hash": "af13", "bytes": 3}"#).unwrap();
/// assert_eq!(file.bytes, 3);
/// ```
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HashedFile {
    /// Where it was.
    pub path: String,
    /// Its BLAKE3 sum, hexadecimal; absent if that would have delayed the program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hash: Option<String>,
    /// Its length.
    pub bytes: u64,
}

/// The digest of a folder, or of a file: BLAKE3 over the relative paths in their order, the sizes and the contents. It
/// does not depend on where the folder is, nor on times or permissions. Links are followed.
///
/// Every byte is read.
///
/// # Errors
/// If something cannot be read, or a link leads to a folder that contains it.
///
/// ```
/// # let temporary = tempfile::tempdir().unwrap();
/// # let folder = temporary.path();
/// std::fs::write(folder.join("train.bin"), [1, 2, 3]).unwrap();
/// let before = accelerator_track::digest_folder(folder)?;
/// assert_eq!((before.files, before.bytes), (1, 3));
///
/// std::fs::write(folder.join("train.bin"), [1, 2, 4]).unwrap();
/// assert_ne!(accelerator_track::digest_folder(folder)?.hash, before.hash);
/// # Ok::<(), accelerator_track::Error>(())
/// ```
pub fn digest_folder(path: impl AsRef<Path>) -> Result<FolderDigest> {
    let path = path.as_ref();
    let root = fs::canonicalize(path).map_err(|error| Error::io("read", path, error))?;
    let mut files = Vec::new();
    if root.is_dir() {
        walk(&root, "", &mut vec![root.clone()], &mut files)?;
    } else {
        files.push((String::new(), root.clone()));
    }
    files.sort();
    let mut digest = blake3::Hasher::new();
    let mut bytes = 0;
    for (name, path) in &files {
        let file = hash_file(path).map_err(|error| Error::io("read", path, error))?;
        let hash = file.hash.unwrap_or_default();
        for part in [name.as_bytes(), hash.as_bytes()] {
            digest
                .update(&(part.len() as u64).to_le_bytes())
                .update(part);
        }
        digest.update(&file.bytes.to_le_bytes());
        bytes += file.bytes;
    }
    Ok(FolderDigest {
        path: root.to_string_lossy().into_owned(),
        hash: digest.finalize().to_string(),
        files: files.len() as u64,
        bytes,
    })
}

/// Returns the length and BLAKE3 sum of a file.
pub(super) fn hash_file(path: &Path) -> io::Result<HashedFile> {
    hash_opened(File::open(path)?, path, None)
}

/// Hashes an opened file that is, or was, at `path`; without the hash if that takes longer than `patience`.
pub(super) fn hash_opened(
    mut file: File,
    path: &Path,
    patience: Option<Duration>,
) -> io::Result<HashedFile> {
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("expected a plain file"));
    }
    let start = Instant::now();
    let path = path.to_string_lossy().into_owned();
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 17];
    loop {
        if patience.is_some_and(|patience| start.elapsed() > patience) {
            let bytes = metadata.len();
            return Ok(HashedFile {
                path,
                hash: None,
                bytes,
            });
        }
        match io::Read::read(&mut file, &mut buffer) {
            Ok(0) => break,
            Ok(count) => hasher.update(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
    }
    Ok(HashedFile {
        path,
        hash: Some(hasher.finalize().to_string()),
        bytes: hasher.count(),
    })
}

/// Lists the files below `folder`, by their names below the root; `above` are the folders on the way, for links.
fn walk(
    folder: &Path,
    prefix: &str,
    above: &mut Vec<PathBuf>,
    files: &mut Vec<(String, PathBuf)>,
) -> Result<()> {
    let fault = |error| Error::io("read", folder, error);
    for entry in fs::read_dir(folder).map_err(fault)? {
        let entry = entry.map_err(fault)?;
        let (name, path) = (entry.file_name(), entry.path());
        let name = format!("{prefix}{}", name.to_string_lossy());
        let metadata = fs::metadata(&path).map_err(|error| Error::io("read", &path, error))?;
        if metadata.is_dir() {
            let real = fs::canonicalize(&path).map_err(|error| Error::io("read", &path, error))?;
            if above.contains(&real) {
                let message = format!(
                    "{} leads to a folder that it is in; remove the link, or take the digest of another folder",
                    path.display()
                );
                return Err(Error::new(Kind::Misuse, message));
            }
            above.push(real);
            walk(&path, &format!("{name}/"), above, files)?;
            above.pop();
        } else if metadata.is_file() {
            files.push((name, path));
        }
        // A pipe or a socket holds no data.
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_of_names_and_contents_and_not_of_the_place() {
        let temporary = tempfile::tempdir().unwrap();
        let make = |folder: &str, files: &[(&str, &str)]| {
            let folder = temporary.path().join(folder);
            for (name, text) in files {
                let path = folder.join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            digest_folder(folder).unwrap()
        };
        let first = make("a", &[("x/1", "one"), ("x-", "two"), ("é", "")]);
        assert_eq!((first.files, first.bytes), (3, 6));
        assert_eq!(
            make("b", &[("é", ""), ("x-", "two"), ("x/1", "one")]).hash,
            first.hash
        );
        // A name, where contents end, and one more file all count.
        assert_ne!(
            make("c", &[("x/2", "one"), ("x-", "two"), ("é", "")]).hash,
            first.hash
        );
        assert_ne!(
            make("d", &[("x/1", "onet"), ("x-", "wo"), ("é", "")]).hash,
            first.hash
        );
        assert_ne!(make("e", &[("x/1", "one"), ("x-", "two")]).hash, first.hash);
        assert!(
            digest_folder(temporary.path().join("none"))
                .unwrap_err()
                .is_not_found()
        );
    }

    #[test]
    fn a_hash_that_takes_too_long_is_left_out() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "text").unwrap();
        let hashed =
            hash_opened(file.reopen().unwrap(), file.path(), Some(Duration::ZERO)).unwrap();
        assert_eq!((hashed.hash, hashed.bytes), (None, 4));
    }

    #[test]
    #[cfg(unix)]
    fn links_are_followed_and_circles_refused() {
        let temporary = tempfile::tempdir().unwrap();
        let (data, other) = (
            temporary.path().join("data"),
            temporary.path().join("other"),
        );
        fs::create_dir_all(&data).unwrap();
        fs::create_dir_all(&other).unwrap();
        fs::write(other.join("big"), "1").unwrap();
        std::os::unix::fs::symlink(&other, data.join("linked")).unwrap();
        let before = digest_folder(&data).unwrap();
        fs::write(other.join("big"), "2").unwrap();
        assert_ne!(digest_folder(&data).unwrap().hash, before.hash);
        std::os::unix::fs::symlink(&data, other.join("back")).unwrap();
        let error = digest_folder(&data).unwrap_err();
        assert!(
            error.is_misuse() && error.to_string().contains("back"),
            "{error}"
        );
    }
}
