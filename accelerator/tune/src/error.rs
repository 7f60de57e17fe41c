//! The error of this crate.

use std::io;
use std::path::Path;

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

accelerator_host::define_error! {
    /// The reason why a search could not be set up, run or read.
    ///
    /// The message says what was expected, what was found, where, and what to do; the predicates distinguish causes;
    /// [`source`](std::error::Error::source) is the error below. Cloning is cheap.
    #[derive(Clone, Debug)]
    pub struct Error;

    pub(crate) enum Kind {
        /// Returns `true` if a search, a trial or a file does not exist.
        NotFound => is_not_found,
        /// Returns `true` if a journal is not what was written.
        Corrupt => is_corrupt,
        /// Returns `true` if the folder belongs to another search, or another process uses it.
        Conflict => is_conflict,
        /// Returns `true` if an argument, a specification or a configuration cannot be used as it is.
        Misuse => is_misuse,
        /// A trial's own program failed.
        Trial,
        /// A searcher that lives in another process failed.
        Searcher,
        /// Returns `true` if the system failed to read, to write or to start a process, or a connection between the
        /// processes of the search ended.
        Io => is_io,
    }
}

impl Error {
    pub(crate) fn misuse(message: impl Into<String>) -> Self {
        Self::new(Kind::Misuse, message)
    }

    /// Returns the error of a connection between the processes of a search.
    pub(crate) fn connection(message: impl Into<String>) -> Self {
        Self::new(Kind::Io, message)
    }

    /// Passes on an error from below.
    pub(crate) fn of(kind: Kind, error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::new(kind, error.to_string()).with_source(error)
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
        Self::of(Kind::Io, error)
    }
}
