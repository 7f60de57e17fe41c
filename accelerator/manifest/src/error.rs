//! The error of this crate.

use std::io;
use std::path::Path;

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

accelerator_host::define_error! {
    /// The reason why a checkpoint could not be written, found or read.
    ///
    /// The message says what was expected, what was found, where, and what to do; the predicates
    /// distinguish causes; [`source`](std::error::Error::source) is the error of the system. Cloning is cheap.
    #[derive(Clone, Debug)]
    pub struct Error;

    pub(crate) enum Kind {
        /// Returns `true` if a folder or a file does not exist.
        NotFound => is_not_found,
        /// Returns `true` if a checkpoint differs from its manifest, or the manifest from the one that was written.
        Corrupt => is_corrupt,
        /// Returns `true` if a checkpoint has a format that this version does not know.
        Incompatible => is_incompatible,
        /// Returns `true` if another process wrote a checkpoint of the same number at the same time.
        Conflict => is_conflict,
        /// Returns `true` if a text is not a valid name for a file of a checkpoint.
        Name => is_name,
        /// Returns `true` if the caller made a mistake: a file written twice, a file without an entry, a file in
        /// place of a folder.
        Misuse => is_misuse,
        /// Returns `true` if the system failed to read or to write.
        Io => is_io,
    }
}

impl Error {
    /// Wraps this error, and puts the path that it is about in front of the message.
    pub(crate) fn at(self, path: &Path) -> Self {
        let message = format!("{}: {self}", path.display());
        Self::new(self.kind(), message).with_source(self)
    }

    /// Wraps this error, for a checkpoint that may be good, though it cannot be read.
    pub(crate) fn undecided(self, checkpoint: &Path) -> Self {
        let message = format!(
            "cannot read the checkpoint {}: {self}; it may be good, so that no older one takes its place: move it away \
             to go back",
            checkpoint.display()
        );
        Self::new(self.kind(), message).with_source(self)
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
        Self::new(kind, message).with_source(source)
    }
}
