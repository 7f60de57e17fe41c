//! The launcher's error, and its exit codes.

use std::error::Error as StdError;

pub(crate) use accelerator_host::cli::{Error, Result, chain};

/// The exit code if a host was lost, or the launcher of host 0: start me again (`EX_TEMPFAIL` of `sysexits.h`).
pub(crate) const START_AGAIN: u8 = accelerator_host::PREEMPTED_EXIT_CODE;

/// The result of code that runs in a rank, where any error ends the rank.
pub(crate) type BoxResult<T> = std::result::Result<T, Box<dyn StdError + Send + Sync>>;

/// A time at which a signal ended the launcher.
pub(crate) const BEFORE_START: &str = "before the ranks had started";
/// Another such time, between two attempts of a job.
pub(crate) const BEFORE_RESTART: &str = "before the restart";

/// Makes the error for a signal that ended the launcher at a time such as [`BEFORE_START`].
pub(crate) fn ended_by(signal: i32, when: &str) -> Error {
    let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
    Error::interrupted(signal, format!("ended by {name} {when}"))
}
