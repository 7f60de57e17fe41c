//! Checkpoints for tests.

use std::fs;
use std::num::NonZeroUsize;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use accelerator_manifest::{Checkpoint, FileName, Folder, Metadata, Role};

/// The files of every checkpoint that [`save`] writes.
pub(crate) const FILES: [&str; 4] = [
    "model.safetensors",
    "optimizer.bin",
    "ranks/00000.json",
    "empty",
];

/// Returns a folder in memory if the system has one, since hundreds of saves would wait for the disk.
pub(crate) fn folder_in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap()
}

pub(crate) fn name(text: &str) -> FileName {
    text.parse().unwrap()
}

pub(crate) fn metadata(step: u64) -> Metadata {
    Metadata {
        step,
        ..Metadata::new(NonZeroUsize::MIN)
    }
}

/// Returns the content of a file in the checkpoint of this step.
pub(crate) fn content(file: &str, step: u64) -> Vec<u8> {
    let len = match file {
        "model.safetensors" => 3000,
        "empty" => 0,
        other => 40 + other.len() as u64,
    };
    (0..len).map(|x| (x * 31 + step) as u8).collect()
}

pub(crate) fn save(folder: &Folder, step: u64) -> accelerator_manifest::Result<Checkpoint> {
    let mut draft = folder.begin(0)?;
    for file in FILES {
        draft.write_bytes(&name(file), Role::Other, &content(file, step))?;
    }
    draft.commit(metadata(step))
}

/// Returns the numbers of a folder's checkpoints.
pub(crate) fn numbers(folder: &Folder) -> Vec<u64> {
    let checkpoints = folder.checkpoints().unwrap();
    checkpoints.iter().map(Checkpoint::number).collect()
}

/// Returns the number of the newest good checkpoint, and how many newer ones were rejected.
pub(crate) fn latest(folder: &Folder) -> (Option<u64>, usize) {
    let search = folder.latest_good().unwrap();
    (search.found.map(|x| x.number()), search.rejected.len())
}

/// Asserts that the message of an error contains a text.
#[track_caller]
pub(crate) fn assert_says(error: &accelerator_manifest::Error, text: &str) {
    assert!(error.to_string().contains(text), "{text:?} in: {error}");
}

/// Runs `work` without the privileges of root, so that file permissions apply: on a thread that has given up its
/// capabilities.
pub(crate) fn without_privileges<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

    let none = CapabilitySet::empty();
    let unprivileged = || {
        let sets = CapabilitySets {
            effective: none,
            permitted: none,
            inheritable: none,
        };
        set_capabilities(None, sets).unwrap();
        work()
    };
    std::thread::scope(|scope| scope.spawn(unprivileged).join().unwrap())
}

pub(crate) fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}
