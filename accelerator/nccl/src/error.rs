//! The error of this crate.

use serde::{Deserialize, Serialize};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

accelerator_host::define_error! {
    /// An error of CUDA, of NCCL, or of the ranks that use them together.
    ///
    /// The error is opaque: ask it with the `is_*` predicates, print it for people. It is cheap to clone,
    /// since a communicator that ended answers every later call with the error it ended with.
    #[derive(Clone, Debug)]
    pub struct Error;

    #[derive(Deserialize, Serialize)]
    pub(crate) enum Kind {
        /// Returns `true` if there is no GPU, or a library is not installed or too old: the driver's, or NCCL.
        Absent => is_absent,
        /// Returns `true` if the call itself is wrong: a GPU that does not exist, bytes that do not fit, a type of
        /// elements that NCCL does not reduce, contradictory settings.
        Misuse => is_misuse,
        /// Returns `true` if the ranks did not come together within the deadline.
        Timeout => is_timeout,
        /// Returns `true` if the communicator has ended because the group has, or because NCCL or CUDA failed on this
        /// rank; the message has the reason.
        Aborted => is_aborted,
        /// Returns `true` if the driver refused something: memory, a stream, a device.
        Cuda => is_cuda,
        /// NCCL refused something.
        Nccl,
    }
}

impl Error {
    pub(crate) fn misuse(message: impl Into<String>) -> Self {
        Self::new(Kind::Misuse, message)
    }
}
