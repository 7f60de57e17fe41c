//! Descriptors that a launcher has left to this process.

#![expect(
    unsafe_code,
    reason = "a descriptor is known by its number only, in a variable"
)]

use std::{
    fs,
    os::fd::{FromRawFd, OwnedFd, RawFd},
};

use rustix::io::{FdFlags, fcntl_setfd};

use super::reader::invalid;
use crate::error::{Error, Result};

/// Takes the socket of this number, which processes that this one starts do not inherit.
///
/// # Errors
///
/// A topology error where there is no socket of this number, an I/O error where the system refuses it.
pub(super) fn socket(number: usize) -> Result<OwnedFd> {
    let descriptor: Option<RawFd> = number.try_into().ok().filter(|number| *number > 2);
    let is_socket = fs::read_link(format!("/proc/self/fd/{number}"))
        .is_ok_and(|target| target.to_string_lossy().starts_with("socket:"));
    let Some(descriptor) = descriptor.filter(|_| is_socket) else {
        return Err(invalid(format!(
            "PMI_FD is {number}, but this process has no socket of that number: its launcher's was closed on \
             the way; set MASTER_ADDR and MASTER_PORT for every process instead"
        )));
    };
    // SAFETY: the descriptor is open, as was just seen. By PMI's contract it is the launcher's end of this very
    // process, and it is taken once in a process (`Exchange::meet`), which uses no MPI beside it.
    let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
    match fcntl_setfd(&socket, FdFlags::CLOEXEC) {
        Ok(()) => Ok(socket),
        Err(error) => Err(Error::io(
            "the launcher's socket cannot be kept",
            error.into(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
