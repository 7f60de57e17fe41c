//! The launcher's error: a message that says what to do, and the exit code it ends with.

use std::error::Error as StdError;
use std::fmt;
use std::process::ExitCode;
use std::sync::Arc;

/// The exit code if a host was lost, or the launcher of host 0: start me again (`EX_TEMPFAIL` of `sysexits.h`).
pub(crate) const START_AGAIN: u8 = accelerator_host::PREEMPTED_EXIT_CODE;

/// An error before, or beside, the training program itself.
#[derive(Clone, Debug)]
pub(crate) struct Error {
    inner: Arc<Inner>,
}

/// A result whose error is an [`Error`].
pub(crate) type Result<T> = std::result::Result<T, Error>;

/// The result of code that runs in a rank, where any error ends the rank.
pub(crate) type BoxResult<T> = std::result::Result<T, Box<dyn StdError + Send + Sync>>;

impl Error {
    /// The command line, or what it points to, is wrong: exit code 2.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Kind::Usage, message)
    }

    /// Cargo could not build the program: exit code 101, as cargo's own.
    pub(crate) fn build(message: impl Into<String>) -> Self {
        Self::new(Kind::Build, message)
    }

    /// The machine did not give what was asked of it: exit code 1.
    pub(crate) fn system(message: impl Into<String>) -> Self {
        Self::new(Kind::System, message)
    }

    /// The launcher of host 0 was lost: exit code [`START_AGAIN`].
    pub(crate) fn host_lost(message: impl Into<String>) -> Self {
        Self::new(Kind::HostLost, message)
    }

    /// An error of the launcher on another host, which ended with this code.
    pub(crate) fn of_host(code: u8, message: impl Into<String>) -> Self {
        let kind = match code {
            2 => Kind::Usage,
            101 => Kind::Build,
            _ => Kind::System,
        };
        Self::new(kind, message)
    }

    /// A signal ended the launcher before the program ran: exit code 128 + `signal`.
    pub(crate) fn interrupted(signal: i32) -> Self {
        let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
        Self::new(
            Kind::Interrupted(signal),
            format!("ended by {name} before the ranks had started"),
        )
    }

    /// A signal ended the launcher while it waited to restart a job: exit code 128 + `signal`.
    pub(crate) fn interrupted_restart(signal: i32) -> Self {
        let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
        Self::new(
            Kind::Interrupted(signal),
            format!("ended by {name} before the restart"),
        )
    }

    /// Signals ended the launcher of another host before host 0 had ended the job: exit code 128 + `signal`.
    pub(crate) fn interrupted_host(signal: i32) -> Self {
        let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
        Self::new(
            Kind::Interrupted(signal),
            format!("ended by {name} without waiting for host 0"),
        )
    }

    /// Checks if the command line, or what it points to, is wrong.
    pub(crate) fn is_usage(&self) -> bool {
        matches!(self.inner.kind, Kind::Usage)
    }

    /// Checks if a signal ended the launcher.
    pub(crate) fn is_interrupted(&self) -> bool {
        matches!(self.inner.kind, Kind::Interrupted(_))
    }

    /// Attaches the error that led to this one.
    pub(crate) fn with_source(self, source: impl StdError + Send + Sync + 'static) -> Self {
        Self {
            inner: Arc::new(Inner {
                kind: self.inner.kind,
                message: self.inner.message.clone(),
                source: Some(Box::new(source)),
            }),
        }
    }

    /// The exit code that the launcher ends with.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code())
    }

    /// The same as a number.
    pub(crate) fn code(&self) -> u8 {
        match self.inner.kind {
            Kind::Usage => 2,
            Kind::Build => 101,
            Kind::System => 1,
            Kind::HostLost => START_AGAIN,
            Kind::Interrupted(signal) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
        }
    }

    fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            inner: Arc::new(Inner {
                kind,
                message: message.into(),
                source: None,
            }),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.inner.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.inner
            .source
            .as_deref()
            .map(|source| source as &(dyn StdError + 'static))
    }
}

/// `error` and the chain of its causes in one line.
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

#[derive(Debug)]
struct Inner {
    kind: Kind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Usage,
    Build,
    System,
    HostLost,
    Interrupted(i32),
}
