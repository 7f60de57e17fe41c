//! The frame of a command-line program: an error with its exit code, and printing.

use std::error::Error as StdError;
use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;
use std::sync::Arc;

use serde::Serialize;

use crate::PREEMPTED_EXIT_CODE;
pub use crate::error::chain;

/// An error that ends a program: what happened and what to do, and the exit code. Clones share the cause.
#[derive(Clone, Debug)]
pub struct Error {
    kind: Kind,
    message: String,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

/// Options by which a launch builds its program, and which commands that start a built one do not have.
pub const BUILD_OPTIONS: [&str; 8] = [
    "--bin",
    "--example",
    "--features",
    "--no-default-features",
    "--package",
    "--profile",
    "--release",
    "-p",
];

/// A result whose error is an [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Prints `text`. A closed pipe is not an error.
///
/// # Errors
/// If standard output cannot be written.
pub fn print(text: &str) -> Result<ExitCode> {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Error::system("standard output cannot be written").with_source(error))
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Formats `value` as JSON that ends with a line break.
///
/// # Errors
/// If JSON cannot represent `value`.
pub fn json(value: &impl Serialize) -> Result<String> {
    let text = serde_json::to_string_pretty(value);
    let text = text.map_err(|error| Error::system("cannot write JSON").with_source(error))?;
    Ok(text + "\n")
}

impl Error {
    /// Makes an error for a wrong command line, or for something wrong that it names: exit code 2.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Kind::Usage, message)
    }

    /// Makes an error of this machine: exit code 1.
    pub fn system(message: impl Into<String>) -> Self {
        Self::new(Kind::System, message)
    }

    /// Makes an error for a refusal of another program, such as for lack of permission: exit code 1.
    pub fn refused(message: impl Into<String>) -> Self {
        Self::new(Kind::System, message)
    }

    /// Makes an error for something that another program does not have, or has forgotten: exit code 1.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(Kind::NotFound, message)
    }

    /// Makes an error for a program or host that does not answer: exit code 75, because the same command may succeed
    /// later.
    pub fn unreachable(message: impl Into<String>) -> Self {
        Self::new(Kind::Unreachable, message)
    }

    /// Makes an error for a program that cargo could not build: exit code 101, as cargo's own.
    pub fn build(message: impl Into<String>) -> Self {
        Self::new(Kind::Build, message)
    }

    /// Makes an error for a signal that ended the program: exit code 128 + `signal`.
    pub fn interrupted(signal: i32, message: impl Into<String>) -> Self {
        Self::new(Kind::Interrupted(signal), message)
    }

    /// Makes an error for another launcher that ended with `code`.
    pub fn of_code(code: u8, message: impl Into<String>) -> Self {
        let kind = match code {
            2 => Kind::Usage,
            101 => Kind::Build,
            _ => Kind::System,
        };
        Self::new(kind, message)
    }

    /// Attaches the error that led to this one.
    #[must_use]
    pub fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.source = Some(Arc::new(source));
        self
    }

    /// Returns `true` if the command line, or something that it names, is wrong.
    pub fn is_usage(&self) -> bool {
        self.kind == Kind::Usage
    }

    /// Returns `true` if another program does not have the requested thing.
    pub fn is_not_found(&self) -> bool {
        self.kind == Kind::NotFound
    }

    /// Returns `true` if a program or host did not answer.
    pub fn is_unreachable(&self) -> bool {
        self.kind == Kind::Unreachable
    }

    /// Returns `true` if a signal ended the program.
    pub fn is_interrupted(&self) -> bool {
        matches!(self.kind, Kind::Interrupted(_))
    }

    /// Returns `true` if nobody reads the output any more, as after `| head`.
    pub fn is_broken_pipe(&self) -> bool {
        let mut cause = self.source();
        while let Some(error) = cause {
            let io = error.downcast_ref::<io::Error>();
            if io.is_some_and(|io| io.kind() == ErrorKind::BrokenPipe) {
                return true;
            }
            cause = error.source();
        }
        false
    }

    /// Returns the exit code of the program as a number.
    pub fn code(&self) -> u8 {
        match self.kind {
            Kind::Usage => 2,
            Kind::System | Kind::NotFound => 1,
            Kind::Unreachable => PREEMPTED_EXIT_CODE,
            Kind::Build => 101,
            Kind::Interrupted(signal) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
        }
    }

    /// Prints the error and its causes on standard error, and returns the exit code of the program.
    pub fn report(&self) -> ExitCode {
        // Standard error may be closed.
        let _ = writeln!(io::stderr(), "error: {}", chain(self));
        ExitCode::from(self.code())
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Usage,
    System,
    NotFound,
    Unreachable,
    Build,
    Interrupted(i32),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_has_each_cause_once() {
        let closed = || io::Error::from(ErrorKind::BrokenPipe);
        let error = Error::system("inner").with_source(closed());
        let error = Error::usage("outer: inner").with_source(error);
        assert_eq!(chain(&error), "outer: inner: broken pipe");
        assert!(error.is_usage() && error.is_broken_pipe());
        assert!(!Error::usage("").is_broken_pipe());
    }

    #[test]
    fn kinds_have_their_exit_codes() {
        for (error, code) in [
            (Error::usage(""), 2),
            (Error::refused(""), 1),
            (Error::not_found(""), 1),
            (Error::unreachable(""), 75),
            (Error::of_code(101, ""), 101),
            (Error::of_code(75, ""), 1),
            (Error::interrupted(15, ""), 143),
        ] {
            assert_eq!(error.code(), code, "{error:?}");
        }
    }
}
