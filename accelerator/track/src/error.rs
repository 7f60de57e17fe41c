//! The error of this crate, and warnings.

use std::io::{self, Write};
use std::path::Path;

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

accelerator_host::define_error! {
    /// An error of writing or reading a run, an artifact or a sink.
    ///
    /// The message says what was expected, what was found, where, and what to do; the predicates distinguish causes;
    /// [`source`](std::error::Error::source) is the error below. Cloning is cheap.
    ///
    /// ```
    /// use accelerator_track::RunHistory;
    ///
    /// let error = RunHistory::read("no/such/run").unwrap_err();
    /// assert!(error.is_not_found() && !error.is_corrupt());
    /// ```
    #[derive(Clone, Debug)]
    pub struct Error;

    #[cfg_attr(
        not(any(feature = "kubeflow", feature = "mlflow")),
        allow(dead_code, reason = "only a server answers `Remote` and `Denied`")
    )]
    pub(crate) enum Kind {
        /// Returns `true` if a run, an artifact or a file does not exist.
        NotFound => is_not_found,
        /// Returns `true` if a journal or an artifact is damaged.
        Corrupt => is_corrupt,
        /// Returns `true` if a journal has a format that this version does not know.
        Incompatible => is_incompatible,
        /// Returns `true` if another process uses the run, or the name is taken.
        Conflict => is_conflict,
        /// Returns `true` if an argument is invalid.
        Misuse => is_misuse,
        Remote,
        // A server would refuse a retry, too: it denies access to this user, or rejects such requests.
        Denied,
        /// Returns `true` if the system failed to read or to write.
        Io => is_io,
    }
}

impl Error {
    /// Returns `true` if a server refused a request, or could not be reached.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        matches!(self.kind(), Kind::Remote | Kind::Denied)
    }

    /// Returns `true` if the same call may succeed later.
    pub(crate) fn is_temporary(&self) -> bool {
        let source = self.0.source.as_deref();
        let io = source.and_then(|source| source.downcast_ref::<io::Error>());
        match self.kind() {
            Kind::Remote | Kind::Conflict => true,
            Kind::Io => !matches!(
                io.map(io::Error::kind),
                Some(
                    io::ErrorKind::AlreadyExists
                        | io::ErrorKind::InvalidFilename
                        | io::ErrorKind::InvalidInput
                        | io::ErrorKind::IsADirectory
                        | io::ErrorKind::NotADirectory
                        | io::ErrorKind::PermissionDenied
                        | io::ErrorKind::ReadOnlyFilesystem
                )
            ),
            Kind::NotFound | Kind::Corrupt | Kind::Incompatible | Kind::Misuse | Kind::Denied => {
                false
            }
        }
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

/// Logs a warning, or writes it to standard error if the program collects no log.
pub(crate) fn warn(text: &str) {
    tracing::warn!("{text}");
    if !tracing::dispatcher::has_been_set() {
        // A closed standard error must not end the program.
        let _ = writeln!(std::io::stderr(), "accelerator: {text}");
    }
}
