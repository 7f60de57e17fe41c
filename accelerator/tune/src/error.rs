//! The error of this crate.

use std::error::Error as StdError;
use std::path::Path;
use std::sync::Arc;
use std::{fmt, io};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a search could not be set up, run or read.
///
/// The message says what was expected, what was found, where, and what to do; the predicates distinguish causes;
/// [`source`](StdError::source) is the error below. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Error(Arc<Inner>);

impl Error {
    /// Returns `true` if a search, a trial or a file does not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.0.kind == Kind::NotFound
    }

    /// Returns `true` if a journal is not what was written.
    #[must_use]
    pub fn is_corrupt(&self) -> bool {
        self.0.kind == Kind::Corrupt
    }

    /// Returns `true` if the folder belongs to another search, or another process uses it.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        self.0.kind == Kind::Conflict
    }

    /// Returns `true` if an argument, a specification or a configuration cannot be used as it is.
    #[must_use]
    pub fn is_misuse(&self) -> bool {
        self.0.kind == Kind::Misuse
    }

    /// Returns `true` if a trial's own program failed.
    #[must_use]
    pub fn is_trial(&self) -> bool {
        self.0.kind == Kind::Trial
    }

    /// Returns `true` if a searcher that lives in another process failed.
    #[must_use]
    pub fn is_searcher(&self) -> bool {
        self.0.kind == Kind::Searcher
    }

    /// Returns `true` if the system failed to read, to write or to start a process, or a connection between the
    /// processes of the search ended.
    #[must_use]
    pub fn is_io(&self) -> bool {
        self.0.kind == Kind::Io
    }

    /// The error of a trial's own work: what a [`Trainable`](crate::Trainable) returns.
    #[must_use]
    pub fn trial(message: impl Into<String>) -> Self {
        Self::new(Kind::Trial, message)
    }

    pub(crate) fn misuse(message: impl Into<String>) -> Self {
        Self::new(Kind::Misuse, message)
    }

    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self(Arc::new(Inner {
            kind,
            message: message.into(),
            source: None,
        }))
    }

    pub(crate) fn with_source(self, source: impl StdError + Send + Sync + 'static) -> Self {
        Self(Arc::new(Inner {
            kind: self.0.kind,
            message: self.0.message.clone(),
            source: Some(Box::new(source)),
        }))
    }

    /// Returns the error of a connection between the processes of a search.
    pub(crate) fn connection(message: impl Into<String>) -> Self {
        Self::new(Kind::Io, message)
    }

    /// `doing` is a verb and what it is done to, without the path: "write the journal".
    pub(crate) fn io(doing: &str, path: &Path, error: io::Error) -> Self {
        let kind = match error.kind() {
            io::ErrorKind::NotFound => Kind::NotFound,
            _ => Kind::Io,
        };
        Self::new(kind, format!("cannot {doing} {}: {error}", path.display())).with_source(error)
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::new(Kind::Io, error.to_string()).with_source(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    NotFound,
    Corrupt,
    Conflict,
    Misuse,
    Trial,
    Searcher,
    Io,
}

#[derive(Debug)]
struct Inner {
    kind: Kind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}
