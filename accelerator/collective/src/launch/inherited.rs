//! Descriptors that a process inherits from its parent.

#![expect(
    unsafe_code,
    reason = "a descriptor is known by its number only, in a variable"
)]

use std::{
    fs,
    os::fd::{FromRawFd, OwnedFd, RawFd},
};
#[cfg(target_os = "linux")]
use std::{
    io::{self, Write},
    os::fd::{AsRawFd, BorrowedFd},
    os::unix::process::CommandExt,
    process::{Child, Command},
};

#[cfg(target_os = "linux")]
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd};

use crate::error::{Error, Result};

/// Takes ownership of the socket with this number, and keeps child processes from inheriting it.
///
/// # Errors
///
/// A topology error if there is no socket of this number, an I/O error if the system refuses it.
pub(super) fn socket(number: usize) -> Result<OwnedFd> {
    let descriptor: Option<RawFd> = number.try_into().ok().filter(|number| *number > 2);
    let is_socket = fs::read_link(format!("/proc/self/fd/{number}"))
        .is_ok_and(|target| target.to_string_lossy().starts_with("socket:"));
    let Some(descriptor) = descriptor.filter(|_| is_socket) else {
        return Err(Error::topology(format!(
            "PMI_FD is {number}, but this process has no socket of that number: the launcher's was closed before \
             this process started; set MASTER_ADDR and MASTER_PORT for every process instead"
        )));
    };
    // SAFETY: the descriptor is open, as was just seen. By PMI's contract it is the launcher's end of this very
    // process, and it is taken once per process (`Exchange::meet`), which uses no MPI besides.
    let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
    match fcntl_setfd(&socket, FdFlags::CLOEXEC) {
        Ok(()) => Ok(socket),
        Err(error) => Err(Error::io(
            "the launcher's socket cannot be kept",
            error.into(),
        )),
    }
}

/// Starts a command that alone can read `content`, by [`inherited`]. A file in memory holds the content, the process
/// inherits the file's descriptor, and the variable holds the descriptor's number.
///
/// Children of the command inherit the descriptor, too, until the command calls [`inherited`]; later ones do not. So
/// the ranks that `accel-launch` starts have it, and the processes that these ranks start do not.
///
/// ```
/// use std::process::Command;
///
/// use accelerator_collective::internal::spawn_with_inherited;
///
/// # fn main() -> std::io::Result<()> {
/// let mut command = Command::new("sh");
/// command.args(["-c", "test \"$(cat /proc/self/fd/$PLACE)\" = content"]);
/// let status = spawn_with_inherited(command, "PLACE", b"content")?.wait()?;
/// assert!(status.success());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// The errors of [`Command::spawn`], and an error of the system if it has no room for the file.
#[cfg(target_os = "linux")]
pub fn spawn_with_inherited(
    mut command: Command,
    variable: &str,
    content: &[u8],
) -> io::Result<Child> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = fs::File::from(memfd_create("inherited", flags)?);
    file.write_all(content)?;
    fcntl_add_seals(&file, SEALS)?;
    command.env(variable, file.as_raw_fd().to_string());
    let keep = move || Ok(fcntl_setfd(&file, FdFlags::empty())?);
    // SAFETY: the closure runs in the child between fork and exec, where only async-signal-safe work is allowed: it
    // makes one system call, allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(keep);
    }
    command.spawn()
}

/// Returns the content that the parent of this process [left for it](spawn_with_inherited) under the name of a
/// variable. From then on, no process that this one starts inherits it.
///
/// Returns `None` in a process that inherited only the variable, such as a child of a process that has called this.
///
/// # Errors
///
/// Fails if the process has inherited the content but cannot read it.
#[cfg(target_os = "linux")]
pub fn inherited(variable: &str) -> io::Result<Option<Vec<u8>>> {
    let number = accelerator_host::variable(variable);
    let number = number.and_then(|number| number.to_str()?.parse().ok());
    let Some(number) = number.filter(|number: &RawFd| *number > 2) else {
        return Ok(None);
    };
    // SAFETY: the number is only passed to the system, which reports an error if no file is open under it.
    let file = unsafe { BorrowedFd::borrow_raw(number) };
    // Any other file that is open under this number has other seals, or cannot have any.
    if !fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SEALS)) {
        return Ok(None);
    }
    fcntl_setfd(file, FdFlags::CLOEXEC)?;
    let length = rustix::fs::fstat(file)?.st_size;
    let length = usize::try_from(length).map_err(io::Error::other)?;
    let mut content = vec![0; length];
    let mut read = 0;
    // The ranks of a launcher share the file's position, so this reads at explicit offsets.
    while read < length {
        match rustix::io::pread(file, &mut content[read..], read as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => read += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Some(content))
}

/// The seals that keep everyone from changing the file.
#[cfg(target_os = "linux")]
const SEALS: SealFlags = SealFlags::SEAL
    .union(SealFlags::WRITE)
    .union(SealFlags::GROW)
    .union(SealFlags::SHRINK);

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that has called `inherited` starts another one, which has the variable and finds nothing.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_inherits_what_was_left_for_it_and_those_that_it_starts_do_not() {
        const NAME: &str = "INHERITED_BY_A_TEST";
        const OF_ONE_THAT_HAS_ASKED: &str = "STARTED_BY_A_TEST_THAT_HAS_ASKED";
        const TEST: &str = "launch::inherited::tests::a_process_inherits_what_was_left_for_it_and_those_that_it_starts_do_not";
        let again = || {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", TEST, "--nocapture"]);
            command
        };
        match (
            inherited(NAME).unwrap(),
            std::env::var_os(OF_ONE_THAT_HAS_ASKED),
        ) {
            (found, Some(_)) => assert!(found.is_none() && std::env::var_os(NAME).is_some()),
            (Some(content), None) => {
                assert_eq!(content, b"from the first");
                let mut command = again();
                command.env(OF_ONE_THAT_HAS_ASKED, "1");
                assert!(command.status().unwrap().success());
            }
            (None, None) => {
                assert!(std::env::var_os(NAME).is_none(), "it was left for this one");
                // A process between the two that does not call `inherited`, such as a launcher of ranks.
                let mut between = Command::new("sh");
                between.args(["-c", "\"$@\"", "sh"]);
                let test = again();
                between.arg(test.get_program()).args(test.get_args());
                for command in [again(), between] {
                    let child = spawn_with_inherited(command, NAME, b"from the first");
                    assert!(child.unwrap().wait().unwrap().success());
                }
            }
        }
    }

    #[test]
    fn what_is_no_socket_is_refused() {
        let file = fs::File::open("/dev/null").unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&file);
        for number in [0, 2, 999_999, usize::MAX, usize::try_from(number).unwrap()] {
            let error = socket(number).unwrap_err();
            assert!(error.is_topology(), "{error}");
            assert!(error.to_string().contains(&number.to_string()), "{error}");
        }
    }
}
