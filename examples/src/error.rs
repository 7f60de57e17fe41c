use core::fmt;
use std::error::Error as StdError;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The result of this crate's operations.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// What went wrong with a file, a device or a setting, where, and what to do about it.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

struct Inner {
    kind: Kind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    Device,
    Format,
    Io,
    Mismatch,
    Missing,
    Settings,
    Trailing,
    Truncated,
}

impl Error {
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self(Arc::new(Inner {
            kind,
            message: message.into(),
            source: None,
        }))
    }

    pub(crate) fn with_source(
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

    pub(crate) fn io(action: &str, path: &Path, source: io::Error) -> Self {
        let message = format!(
            "cannot {action} `{}`; check the path, its permissions and the space left",
            path.display()
        );
        Self::with_source(Kind::Io, message, source)
    }

    /// A device is not compiled in, or does not support the dtype that was asked for.
    pub fn is_device(&self) -> bool {
        self.0.kind == Kind::Device
    }

    /// A data file is not what its name says: another format, another image size, a label that
    /// is no digit, a damaged compression.
    pub fn is_format(&self) -> bool {
        self.0.kind == Kind::Format
    }

    /// A file could not be read or written.
    pub fn is_io(&self) -> bool {
        self.0.kind == Kind::Io
    }

    /// The number of labels is not the number of images.
    pub fn is_mismatch(&self) -> bool {
        self.0.kind == Kind::Mismatch
    }

    /// A data file or folder is not there.
    pub fn is_missing(&self) -> bool {
        self.0.kind == Kind::Missing
    }

    /// A setting is out of its range.
    pub fn is_settings(&self) -> bool {
        self.0.kind == Kind::Settings
    }

    /// A data file goes on after the last sample that its header announces.
    pub fn is_trailing(&self) -> bool {
        self.0.kind == Kind::Trailing
    }

    /// A data file ends before the last sample that its header announces.
    pub fn is_truncated(&self) -> bool {
        self.0.kind == Kind::Truncated
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_chain(self, f)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0
            .source
            .as_ref()
            .map(|source| &**source as &(dyn StdError + 'static))
    }
}

/// Any error, as `main` returns it: its `Debug` form is the message with its causes, so that a
/// program ends with a text for people.
///
/// ```
/// use accelerator_examples::Report;
///
/// fn parse(text: &str) -> Result<usize, Report> {
///     Ok(text.parse()?)
/// }
///
/// assert_eq!(format!("{:?}", parse("x").unwrap_err()), "invalid digit found in string");
/// ```
pub struct Report(Box<dyn StdError + Send + Sync>);

impl<E: StdError + Send + Sync + 'static> From<E> for Report {
    fn from(error: E) -> Self {
        Self(Box::new(error))
    }
}

impl fmt::Debug for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_chain(&*self.0, f)
    }
}

/// Writes the error and its causes, leaving out a cause that only repeats what was said: wrappers
/// often show the error inside them as their own text.
fn write_chain(error: &(dyn StdError + 'static), f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut said = error.to_string();
    f.write_str(&said)?;
    let mut source = error.source();
    while let Some(error) = source {
        let text = error.to_string();
        if !said.ends_with(&text) {
            write!(f, ": {text}")?;
        }
        said = text;
        source = error.source();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_shows_each_cause_once() {
        let cause = io::Error::new(io::ErrorKind::NotFound, "no such file");
        let error = Error::io("read", Path::new("digits.gz"), cause);
        assert!(error.is_io());
        let report = Report::from(burn::data::dataset::DatasetError::new(error));
        let text = format!("{report:?}");
        assert_eq!(text.matches("digits.gz").count(), 1, "{text}");
        assert!(text.ends_with(": no such file"), "{text}");
    }
}
