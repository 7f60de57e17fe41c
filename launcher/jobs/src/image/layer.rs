//! The layer of an image: files of this machine as a compressed tar archive, the same bytes for the same files.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Seek, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use accelerator_host::cli::{Error, Result};
use flate2::{Compression, GzBuilder};
use sha2::{Digest, Sha256};
use tar::{EntryType, Header};

/// A layer in a temporary file.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) file: File,
    /// The digest of the compressed archive.
    pub(super) digest: String,
    pub(super) size: u64,
    /// The digest of the archive itself.
    pub(super) diff_id: String,
}

/// The files of a layer, by their paths in the image.
#[derive(Debug, Default)]
pub(super) struct LayerFiles(BTreeMap<String, Source>);

#[derive(Debug)]
enum Source {
    Folder,
    File(PathBuf, Executable),
    Link(PathBuf),
}

/// The mode of a file in the image.
#[derive(Clone, Copy, Debug)]
enum Executable {
    Yes,
    AsItIs,
}

/// A writer that computes the digest of the bytes that it passes on.
#[derive(Debug)]
pub(super) struct DigestWriter<W> {
    inner: W,
    hasher: Sha256,
    bytes: u64,
}

impl LayerFiles {
    /// Adds a program, which the image has as `target`.
    ///
    /// # Errors
    /// When there is no such file, or another one is there already.
    pub(super) fn add_program(&mut self, path: &Path, target: &str) -> Result<()> {
        let metadata = metadata(path)?;
        match metadata.is_file() {
            true => self.insert(target, Source::File(path.to_owned(), Executable::Yes)),
            false => Err(Error::usage(format!("{} is not a file", path.display()))),
        }
    }

    /// Adds a file, or a folder with its contents, which the image has as `target`.
    ///
    /// # Errors
    /// When there is no such file, it is neither file nor folder nor link, or another one is there already.
    pub(super) fn add(&mut self, path: &Path, target: &str) -> Result<()> {
        let metadata = metadata(path)?;
        match metadata.is_dir() {
            true => self.add_folder(path, path, target),
            false if metadata.is_file() => {
                self.insert(target, Source::File(path.to_owned(), Executable::AsItIs))
            }
            false => Err(neither(path)),
        }
    }

    /// Writes the layer. Times, owners and permissions are the same on every machine. Folders of the base stay as they
    /// are: only those that are included are in the archive.
    ///
    /// # Errors
    /// When a file cannot be read or changes meanwhile, or the disk of temporary files is full.
    pub(super) fn write(&self) -> Result<Layer> {
        let failed = |error: io::Error| {
            let folder = std::env::temp_dir();
            Error::system(format!(
                "the layer of the image cannot be written in {}; make room there, or name another folder in TMPDIR",
                folder.display()
            ))
            .with_source(error)
        };
        let file = tempfile::tempfile().map_err(failed)?;
        let compressed = DigestWriter::new(BufWriter::new(file));
        // The header has no name, no time, and no system.
        let gzip = GzBuilder::new()
            .operating_system(255)
            .write(compressed, Compression::new(LEVEL));
        let mut archive = tar::Builder::new(DigestWriter::new(gzip));
        for (target, source) in &self.0 {
            append(&mut archive, target, source)?.map_err(failed)?;
        }
        let (gzip, diff_id, _) = archive.into_inner().map_err(failed)?.finish();
        let (file, digest, size) = gzip.finish().map_err(failed)?.finish();
        let file = file
            .into_inner()
            .map_err(|error| failed(error.into_error()))?;
        Ok(Layer {
            file,
            digest,
            size,
            diff_id,
        })
    }

    fn add_folder(&mut self, root: &Path, folder: &Path, target: &str) -> Result<()> {
        self.insert(target, Source::Folder)?;
        let entries = fs::read_dir(folder).and_then(Iterator::collect::<io::Result<Vec<_>>>);
        for entry in entries.map_err(|error| unreadable(folder, error))? {
            let path = entry.path();
            let target = format!("{target}/{}", file_name(&path)?);
            let kind = entry
                .file_type()
                .map_err(|error| unreadable(&path, error))?;
            match () {
                () if kind.is_dir() => self.add_folder(root, &path, &target)?,
                () if kind.is_symlink() => {
                    self.insert(&target, Source::Link(link(root, &path)?))?
                }
                () if kind.is_file() => {
                    self.insert(&target, Source::File(path, Executable::AsItIs))?;
                }
                () => return Err(neither(&path)),
            }
        }
        Ok(())
    }

    fn insert(&mut self, target: &str, source: Source) -> Result<()> {
        let target = target.trim_start_matches('/');
        match self.0.insert(target.to_owned(), source) {
            None => Ok(()),
            Some(_) => Err(Error::usage(format!(
                "two files would be /{target} in the image; give one of them another place: --include PATH:DEST"
            ))),
        }
    }
}

impl Layer {
    pub(super) fn reader(&self) -> Result<&File> {
        let mut file = &self.file;
        let begun = file.rewind();
        begun.map_err(|error| Error::system("the layer cannot be read").with_source(error))?;
        Ok(file)
    }
}

impl<W: Write> DigestWriter<W> {
    pub(super) fn new(inner: W) -> Self {
        Self {
            inner,
            hasher: Sha256::new(),
            bytes: 0,
        }
    }

    /// Returns the inner writer, the digest, and the number of bytes written.
    pub(super) fn finish(self) -> (W, String, u64) {
        (self.inner, digest_text(self.hasher), self.bytes)
    }
}

impl<W: Write> Write for DigestWriter<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(buffer)?;
        self.hasher.update(&buffer[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Returns the digest of bytes, as registries write it.
pub(super) fn digest(bytes: &[u8]) -> String {
    digest_text(Sha256::new_with_prefix(bytes))
}

/// Returns the last part of a path as text.
///
/// # Errors
/// When it has none, or one that is not UTF-8.
pub(super) fn file_name(path: &Path) -> Result<&str> {
    let name = path.file_name().and_then(|name| name.to_str());
    name.ok_or_else(|| {
        Error::usage(format!(
            "{} has no name that an image can have; names are UTF-8",
            path.display()
        ))
    })
}

/// A compromise between speed and size.
const LEVEL: u32 = 6;

fn append<W: Write>(
    archive: &mut tar::Builder<W>,
    target: &str,
    source: &Source,
) -> Result<io::Result<()>> {
    let mut header = Header::new_gnu();
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    match source {
        Source::Folder => {
            header.set_entry_type(EntryType::Directory);
            header.set_mode(0o755);
            header.set_size(0);
            Ok(archive.append_data(&mut header, format!("{target}/"), io::empty()))
        }
        Source::Link(to) => {
            header.set_entry_type(EntryType::Symlink);
            header.set_mode(0o777);
            header.set_size(0);
            Ok(archive.append_link(&mut header, target, to))
        }
        Source::File(path, executable) => {
            let mut file = File::open(path).map_err(|error| unreadable(path, error))?;
            let metadata = file.metadata().map_err(|error| unreadable(path, error))?;
            let mode = match executable {
                Executable::AsItIs if metadata.permissions().mode() & 0o111 == 0 => 0o644,
                Executable::AsItIs | Executable::Yes => 0o755,
            };
            header.set_mode(mode);
            header.set_size(metadata.len());
            let contents = Read::take(&mut file, metadata.len());
            if let Err(error) = archive.append_data(&mut header, target, contents) {
                return Ok(Err(error));
            }
            match file.stream_position() {
                Ok(end) if end == metadata.len() => Ok(Ok(())),
                _ => Err(Error::system(format!(
                    "{} changes while it is read; try again when it is complete",
                    path.display()
                ))),
            }
        }
    }
}

/// Returns the target of a link in an included folder.
fn link(root: &Path, path: &Path) -> Result<PathBuf> {
    let to = fs::read_link(path).map_err(|error| unreadable(path, error))?;
    let folder = path
        .parent()
        .and_then(|folder| folder.strip_prefix(root).ok());
    let mut depth = folder.map_or(0, |folder| folder.components().count());
    for part in to.components() {
        let deeper = match part {
            Component::Normal(_) => depth.checked_add(1),
            Component::CurDir => Some(depth),
            Component::ParentDir => depth.checked_sub(1),
            Component::RootDir | Component::Prefix(_) => None,
        };
        depth = deeper.ok_or_else(|| {
            Error::usage(format!(
                "{} is a link to {}, which the image does not have; include what it leads to",
                path.display(),
                to.display()
            ))
        })?;
    }
    Ok(to)
}

fn metadata(path: &Path) -> Result<fs::Metadata> {
    fs::metadata(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::usage(format!("there is no file {}", path.display())),
        _ => unreadable(path, error),
    })
}

fn unreadable(path: &Path, error: io::Error) -> Error {
    Error::usage(format!("{} cannot be read", path.display())).with_source(error)
}

fn neither(path: &Path) -> Error {
    Error::usage(format!(
        "{} is neither a file nor a folder, so an image cannot have it",
        path.display()
    ))
}

fn digest_text(hasher: Sha256) -> String {
    let digits: String = hasher
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("sha256:{digits}")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn tree(folder: &Path) {
        fs::create_dir_all(folder.join("data/empty")).unwrap();
        for (name, mode) in [("data/b", 0o600), ("data/a.sh", 0o711), ("program", 0o700)] {
            fs::write(folder.join(name), name.repeat(1000)).unwrap();
            fs::set_permissions(folder.join(name), fs::Permissions::from_mode(mode)).unwrap();
        }
    }

    fn layer(folder: &Path) -> Layer {
        let mut files = LayerFiles::default();
        files
            .add_program(&folder.join("program"), "/app/program")
            .unwrap();
        files.add(&folder.join("data"), "/app/data").unwrap();
        files.write().unwrap()
    }

    #[test]
    fn what_is_in_a_layer_belongs_to_root_and_has_plain_modes() {
        let folder = tempfile::tempdir().unwrap();
        tree(folder.path());
        symlink("b", folder.path().join("data/to-b")).unwrap();
        let layer = layer(folder.path());
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(layer.reader().unwrap()));
        let entries = archive.entries().unwrap().map(|entry| {
            let entry = entry.unwrap();
            let header = entry.header();
            assert_eq!(
                (
                    header.uid().unwrap(),
                    header.gid().unwrap(),
                    header.mtime().unwrap()
                ),
                (0, 0, 0)
            );
            (
                entry.path().unwrap().display().to_string(),
                header.mode().unwrap(),
            )
        });
        let expected = [
            ("app/data/", 0o755),
            ("app/data/a.sh", 0o755),
            ("app/data/b", 0o644),
            ("app/data/empty/", 0o755),
            ("app/data/to-b", 0o777),
            ("app/program", 0o755),
        ];
        let expected = expected.map(|(path, mode)| (path.to_owned(), mode));
        assert_eq!(entries.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn what_an_image_cannot_have_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        tree(folder.path());
        let mut files = LayerFiles::default();
        symlink("../program", folder.path().join("data/out")).unwrap();
        assert!(files.add(&folder.path().join("data"), "/app/data").is_err());
        let program = folder.path().join("program");
        files.add_program(&program, "/app/program").unwrap();
        assert!(files.add_program(&program, "/app/program").is_err());
        assert!(
            files
                .add_program(&folder.path().join("none"), "/app/x")
                .is_err()
        );
        assert!(files.add_program(folder.path(), "/app/x").is_err());
        assert!(files.add(Path::new("/dev/null"), "/app/x").is_err());
    }
}
