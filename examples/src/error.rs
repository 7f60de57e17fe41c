use core::fmt;
use std::error::Error as StdError;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The result of this crate's operations.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// A problem with a file, a device or a setting, and what to do about it.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

struct Inner {
    kind: Kind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    Data,
    Device,
    Io,
    Settings,
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

    /// Returns true if a data file or folder is missing, or is not what its name or its header says.
    pub fn is_data(&self) -> bool {
        self.0.kind == Kind::Data
    }

    /// Returns true if a device is not compiled in, or does not support the chosen dtype.
    pub fn is_device(&self) -> bool {
        self.0.kind == Kind::Device
    }

    /// Returns true if a file could not be read or written.
    pub fn is_io(&self) -> bool {
        self.0.kind == Kind::Io
    }

    /// Returns true if a setting is out of range.
    pub fn is_settings(&self) -> bool {
        self.0.kind == Kind::Settings
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

/// An error of any type, for `main` to return: its `Debug` form is the message with its causes, so that users get
/// readable text.
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

/// Writes the error and its causes, except for a cause that the text already ends with: wrappers often show the error
/// inside them as their own text.
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
