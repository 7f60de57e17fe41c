//! Random values of a job: the secret that agents and ranks prove to one another, and its nonce.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::rand::{GetRandomFlags, getrandom};

/// The name of its file in the folder of a job.
pub(super) const FILE: &str = "token";

/// A new secret, in hexadecimal digits.
///
/// # Errors
/// When the system has no random bytes.
pub(super) fn new() -> io::Result<String> {
    hexadecimal::<32>()
}

/// Returns a new nonce, in hexadecimal digits. Labels of Kubernetes have no room for a longer one.
///
/// # Errors
/// When the system has no random bytes.
pub(crate) fn nonce() -> io::Result<String> {
    hexadecimal::<16>()
}

fn hexadecimal<const BYTES: usize>() -> io::Result<String> {
    let mut bytes = [0; BYTES];
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Where the secret of the job of this folder is.
pub(super) fn path(folder: &Path) -> PathBuf {
    folder.join(FILE)
}

/// Writes a new secret into the folder of a job. Nobody but its owner may read it.
///
/// # Errors
/// When the system has no random bytes, or the folder has a secret already.
pub(super) fn write(folder: &Path) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .create_new(true)
        .write(true)
        .mode(0o600)
        .open(path(folder))?;
    file.write_all(new()?.as_bytes())
}
