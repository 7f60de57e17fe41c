//! The error of this crate.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of CUDA, of NCCL, or of the ranks that use them together.
///
/// The error is opaque: ask it with the `is_*` predicates, print it for people. It is cheap to clone,
/// since a communicator that ended answers every later call with the error it ended with.
#[derive(Clone)]
pub struct Error(Arc<ErrorInner>);

impl Error {
    /// There is no GPU, or a library is not installed or too old: the driver's, or NCCL.
    pub fn is_absent(&self) -> bool {
        self.0.kind == Kind::Absent
    }

    /// The call itself is wrong: a GPU that is not there, bytes that do not fit, a type of elements that
    /// NCCL does not reduce, settings that contradict.
    pub fn is_misuse(&self) -> bool {
        self.0.kind == Kind::Misuse
    }

    /// The ranks did not come together within the deadline.
    pub fn is_timeout(&self) -> bool {
        self.0.kind == Kind::Timeout
    }

    /// The communicator has ended, since the group has, or since NCCL or CUDA failed on this rank;
    /// the message carries the reason.
    pub fn is_aborted(&self) -> bool {
        self.0.kind == Kind::Aborted
    }

    /// The driver refused something: memory, a stream, a device.
    pub fn is_cuda(&self) -> bool {
        self.0.kind == Kind::Cuda
    }

    /// NCCL refused something.
    pub fn is_nccl(&self) -> bool {
        self.0.kind == Kind::Nccl
    }

    pub(crate) fn kind(&self) -> Kind {
        self.0.kind
    }

    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self(Arc::new(ErrorInner {
            kind,
            message: message.into(),
            source: None,
        }))
    }

    pub(crate) fn caused(
        kind: Kind,
        message: impl Into<String>,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Self(Arc::new(ErrorInner {
            kind,
            message: message.into(),
            source: Some(source.into()),
        }))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ErrorInner {
            kind,
            message,
            source,
        } = &*self.0;
        let mut shown = formatter.debug_struct("Error");
        shown.field("kind", kind).field("message", message);
        if let Some(source) = source {
            shown.field("source", source);
        }
        shown.finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        let source = self.0.source.as_deref()?;
        Some(source)
    }
}

/// The kinds that the predicates tell apart.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) enum Kind {
    Absent,
    Misuse,
    Timeout,
    Aborted,
    Cuda,
    Nccl,
}

struct ErrorInner {
    kind: Kind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}
