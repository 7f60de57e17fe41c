//! Files below a checkpoint: which there are, and whether they are plain.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use crate::error::{Error, Kind, Result};
use crate::manifest::Manifest;
use crate::name::{FileName, MANIFEST};

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
