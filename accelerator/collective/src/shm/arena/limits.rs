//! The limits of the room for buffers.

use std::io;

use super::{CONTROL, allocator::LARGE};
use crate::shm::memory::PAGE;

/// The memory of the machine: more buffers than that there cannot be.
pub(super) fn installed() -> usize {
    let info = rustix::system::sysinfo();
    let bytes = info.totalram as u64 * u64::from(info.mem_unit.max(1));
    // At most a 64th of the address space, so that the ranks of a large host fit into it.
    bytes.min(1 << 41).next_multiple_of(LARGE as u64) as usize
}

/// The room for buffers in a file that this process may make: one that is larger than its limit
/// would end it by SIGXFSZ.
pub(super) fn permitted() -> io::Result<usize> {
    use rustix::process::{Resource, getrlimit};

    let Some(limit) = getrlimit(Resource::Fsize).current else {
        return Ok(usize::MAX);
    };
    match limit.checked_sub(CONTROL as u64) {
        Some(room) => Ok(usize::try_from(room).unwrap_or(usize::MAX) / PAGE * PAGE),
        None => Err(io::Error::other(format!(
            "it takes a file of {CONTROL} bytes, and files may have {limit} (`ulimit -f`)"
        ))),
    }
}
