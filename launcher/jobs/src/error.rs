//! The error of `accel-jobs`: a message with a remedy, and the exit code.

use std::error::Error as StdError;
use std::fmt;
use std::process::ExitCode;

/// An error with its kind, which decides the exit code.
#[derive(Debug)]
pub(crate) struct Error {
    kind: Kind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// A result whose error is an [`Error`].
pub(crate) type Result<T> = std::result::Result<T, Error>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Usage,
    NotFound,
    Refused,
    Unreachable,
    System,
}

impl Error {
    /// Makes an error of the command line, or of a file that it names: exit code 2.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Kind::Usage, message)
    }

    /// Makes an error for a job that does not exist, or that the engine has forgotten.
    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(Kind::NotFound, message)
    }

    /// Makes an error for a refusal of the engine: rights, a quota, a name that is taken.
    pub(crate) fn refused(message: impl Into<String>) -> Self {
        Self::new(Kind::Refused, message)
    }

    /// Makes an error for an engine that does not answer, or is too busy.
    pub(crate) fn unreachable(message: impl Into<String>) -> Self {
        Self::new(Kind::Unreachable, message)
    }

    /// Makes an error of this machine.
    pub(crate) fn system(message: impl Into<String>) -> Self {
        Self::new(Kind::System, message)
    }

    /// Returns `true` if there is no such job.
    pub(crate) fn is_not_found(&self) -> bool {
        self.kind == Kind::NotFound
    }

    /// Returns `true` if the engine did not answer.
    pub(crate) fn is_unreachable(&self) -> bool {
        self.kind == Kind::Unreachable
    }

    /// Returns `true` if nobody reads the output any more, as after `| head`.
    pub(crate) fn is_broken_pipe(&self) -> bool {
        let mut cause = self.source();
        while let Some(error) = cause {
            let io = error.downcast_ref::<std::io::Error>();
            if io.is_some_and(|io| io.kind() == std::io::ErrorKind::BrokenPipe) {
                return true;
            }
            cause = error.source();
        }
        false
    }

    /// Attaches the error that led to this one.
    pub(crate) fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.source = Some(Box::new(source));
        self
    }

    /// Returns the exit code of the program.
    pub(crate) fn exit_code(&self) -> ExitCode {
        match self.kind {
            Kind::Usage => ExitCode::from(2),
            // `EX_TEMPFAIL` of `sysexits.h`: the same command may succeed later.
            Kind::Unreachable => ExitCode::from(accelerator_host::PREEMPTED_EXIT_CODE),
            Kind::NotFound | Kind::Refused | Kind::System => ExitCode::FAILURE,
        }
    }

    fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            source: None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        let source = self.source.as_deref()?;
        Some(source)
    }
}

/// Returns `error` and the chain of its causes in one line.
pub(crate) fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
