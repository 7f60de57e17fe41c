//! How a group behaves.

use std::time::Duration;

use crate::{
    error::{Error, Kind, Result},
    transport::{Patience, TransportKind},
};

/// Deadlines and transport of a process group.
///
/// ```
/// use std::time::Duration;
///
/// use accelerator_collective::{GroupOptions, ProcessGroup};
///
/// # fn main() -> accelerator_collective::Result<()> {
/// let options = GroupOptions::new().with_progress_timeout(Duration::from_secs(30));
/// let ranks = ProcessGroup::threads(2, &options)?;
/// assert_eq!(ranks[1].options().progress_timeout(), Duration::from_secs(30));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct GroupOptions {
    connect_timeout: Duration,
    progress_timeout: Duration,
    warn_after: Duration,
    transport: TransportKind,
}

impl GroupOptions {
    /// The defaults: 60 seconds to find one another, 10 minutes without progress in an
    /// operation, a warning after 10 seconds, any transport.
    pub fn new() -> Self {
        Self {
            connect_timeout: Duration::from_secs(60),
            progress_timeout: Duration::from_secs(600),
            warn_after: Duration::from_secs(10),
            transport: TransportKind::Auto,
        }
    }

    /// How long the ranks may take to find one another.
    pub fn with_connect_timeout(self, connect_timeout: Duration) -> Self {
        Self {
            connect_timeout,
            ..self
        }
    }

    /// How long an operation may wait for a rank that lives without any progress.
    pub fn with_progress_timeout(self, progress_timeout: Duration) -> Self {
        Self {
            progress_timeout,
            ..self
        }
    }

    /// After how long without progress a warning names the ranks that are waited for.
    pub fn with_warn_after(self, warn_after: Duration) -> Self {
        Self { warn_after, ..self }
    }

    /// The transport; [`TransportKind::Auto`] leaves the choice to the launch and the library.
    pub fn with_transport(self, transport: TransportKind) -> Self {
        Self { transport, ..self }
    }

    /// How long the ranks may take to find one another.
    pub fn connect_timeout(&self) -> Duration {
        self.connect_timeout
    }

    /// How long an operation may wait for a rank that lives without any progress.
    pub fn progress_timeout(&self) -> Duration {
        self.progress_timeout
    }

    /// After how long without progress a warning is logged.
    pub fn warn_after(&self) -> Duration {
        self.warn_after
    }

    /// The transport that was asked for.
    pub fn transport(&self) -> TransportKind {
        self.transport
    }

    pub(crate) fn check(&self) -> Result<()> {
        for (name, timeout) in [
            ("connect", self.connect_timeout),
            ("progress", self.progress_timeout),
        ] {
            if timeout.is_zero() {
                return Err(Error::new(
                    Kind::Misuse,
                    format!("the {name} timeout is zero, so nothing could ever succeed"),
                ));
            }
        }
        Ok(())
    }

    pub(crate) fn patience(&self) -> Patience {
        Patience {
            timeout: self.progress_timeout,
            warn_after: self.warn_after,
        }
    }
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self::new()
    }
}
