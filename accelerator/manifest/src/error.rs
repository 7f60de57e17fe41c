//! The error of this crate.

use std::error::Error as StdError;
use std::path::Path;
use std::sync::Arc;
use std::{fmt, io};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a checkpoint could not be written, found or read.
///
/// The message says what was expected, what was found, where, and what to do; the predicates
/// distinguish causes; [`source`](StdError::source) is the error of the system. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Error(Arc<Inner>);

impl Error {
    /// Returns `true` if a folder or a file does not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.0.kind == Kind::NotFound
    }

    /// Returns `true` if a checkpoint differs from its manifest, or the manifest from the one that was written.
    #[must_use]
    pub fn is_corrupt(&self) -> bool {
        self.0.kind == Kind::Corrupt
    }

    /// Returns `true` if a checkpoint has a format that this version does not know.
    #[must_use]
    pub fn is_incompatible(&self) -> bool {
        self.0.kind == Kind::Incompatible
    }

    /// Returns `true` if another process wrote a checkpoint of the same number at the same time.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        self.0.kind == Kind::Conflict
    }

    /// Returns `true` if a text is not a valid name for a file of a checkpoint.
    #[must_use]
    pub fn is_name(&self) -> bool {
        self.0.kind == Kind::Name
    }

    /// Returns `true` if the caller made a mistake: a file written twice, a file without an entry, a file in the place
    /// of a folder.
    #[must_use]
    pub fn is_misuse(&self) -> bool {
        self.0.kind == Kind::Misuse
    }

    /// Returns `true` if the system failed to read or to write.
    #[must_use]
    pub fn is_io(&self) -> bool {
        self.0.kind == Kind::Io
    }

    /// Returns `true` if the disk is full, or a quota is reached.
    #[must_use]
    pub fn is_disk_full(&self) -> bool {
        let mut source = self.source();
        while let Some(cause) = source {
            if let Some(error) = cause.downcast_ref::<io::Error>() {
                let full = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded];
                return full.contains(&error.kind());
            }
            source = cause.source();
        }
        false
    }

    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self(Arc::new(Inner {
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
        Self(Arc::new(Inner {
            kind,
            message: message.into(),
            source: Some(source.into()),
        }))
    }

    /// The same, with the path that it is about in front.
    pub(crate) fn at(self, path: &Path) -> Self {
        let message = format!("{}: {self}", path.display());
        Self::caused(self.0.kind, message, self)
    }

    /// Wraps this error, for a checkpoint that may be good, though it cannot be read.
    pub(crate) fn undecided(self, checkpoint: &Path) -> Self {
        let message = format!(
            "cannot read the checkpoint {}: {self}; it may be good, so that no older one takes its place: move it away \
             to go back",
            checkpoint.display()
        );
        Self::caused(self.0.kind, message, self)
    }

    /// An I/O error; `what` is a verb: "read", "write".
    pub(crate) fn io(what: &str, path: &Path, source: io::Error) -> Self {
        let kind = match source.kind() {
            io::ErrorKind::NotFound => Kind::NotFound,
            _ => Kind::Io,
        };
        let advice = match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                "; make room, or keep fewer checkpoints"
            }
            io::ErrorKind::PermissionDenied => "; check the permissions",
            io::ErrorKind::ReadOnlyFilesystem => "; choose a folder that can be written",
            _ => "",
        };
        let message = format!("cannot {what} {}: {source}{advice}", path.display());
        Self::caused(kind, message, source)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        let source = self.0.source.as_deref();
        source.map(|x| x as &(dyn StdError + 'static))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    NotFound,
    Corrupt,
    Incompatible,
    Conflict,
    Name,
    Misuse,
    Io,
}

#[derive(Debug)]
struct Inner {
    kind: Kind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}
