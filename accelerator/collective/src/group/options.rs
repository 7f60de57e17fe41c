//! The options of a group: its deadlines and its transport.

use std::time::Duration;

use crate::{
    error::{Error, Result, Seconds},
    launch::{Launch, OnLoss},
    liveness,
    topology::TransportKind,
    transport::{OpTimeouts, TimeoutKind},
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
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct GroupOptions {
    pub(super) connect_timeout: Duration,
    progress_timeout: Duration,
    /// `None` stands for the launch's value, else five seconds.
    liveness_timeout: Option<Duration>,
    pub(super) busy_timeout: Duration,
    warn_after: Duration,
    pub(super) transport: TransportKind,
    /// Copied from the launch.
    pub(super) on_loss: OnLoss,
}

impl GroupOptions {
    /// The defaults: 60 seconds to find one another, 10 minutes without progress in an
    /// operation, an hour for a rank that is busy, a warning after 10 seconds, 5 seconds without a
    /// sign of life, any transport.
    pub fn new() -> Self {
        Self {
            connect_timeout: Duration::from_secs(60),
            progress_timeout: Duration::from_secs(600),
            liveness_timeout: None,
            busy_timeout: Duration::from_secs(3600),
            warn_after: Duration::from_secs(10),
            transport: TransportKind::Auto,
            on_loss: OnLoss::End,
        }
    }

    /// Sets the time that the ranks may take to find one another and to agree on the path of data.
    pub fn with_connect_timeout(self, connect_timeout: Duration) -> Self {
        Self {
            connect_timeout,
            ..self
        }
    }

    /// Sets the time that an operation may wait for a live rank without any progress. A rank that
    /// [shows that it works](crate::Activity) makes progress. A sign takes up to a second to arrive.
    pub fn with_progress_timeout(self, progress_timeout: Duration) -> Self {
        Self {
            progress_timeout,
            ..self
        }
    }

    /// Sets how long a rank that is [busy](crate::Activity::busy) counts as one that works without any
    /// further sign of it. A busy rank that hangs is named when this and the
    /// [progress timeout](Self::with_progress_timeout) are over. Zero: only
    /// [`keep_alive`](crate::Activity::keep_alive) counts.
    pub fn with_busy_timeout(self, busy_timeout: Duration) -> Self {
        Self {
            busy_timeout,
            ..self
        }
    }

    /// Sets the time without a heartbeat after which a rank is lost: stopped, swapped out, or cut off
    /// from the network. A live rank shows that it lives, however busy it is; one that is merely slow
    /// has the [progress timeout](Self::with_progress_timeout). Below a second, a loaded machine
    /// may make ranks look dead; less than 0.1 seconds is refused. Threads of one process
    /// cannot fall silent.
    ///
    /// If it is not set, the launch's `ACCEL_LIVENESS_TIMEOUT` counts.
    pub fn with_liveness_timeout(self, liveness_timeout: Duration) -> Self {
        Self {
            liveness_timeout: Some(liveness_timeout),
            ..self
        }
    }

    /// Sets the time without progress after which a warning names the missing ranks, their processes, and the last
    /// operation of each. The warning is repeated after three and six times that time, and then every six times: by
    /// default after 10, 30 and 60 s, and then every 60 s.
    pub fn with_warn_after(self, warn_after: Duration) -> Self {
        Self { warn_after, ..self }
    }

    /// The transport; [`TransportKind::Auto`] leaves the choice to the launch and the library.
    pub fn with_transport(self, transport: TransportKind) -> Self {
        Self { transport, ..self }
    }

    /// Returns the time without a heartbeat after which a rank is lost.
    pub fn liveness_timeout(&self) -> Duration {
        self.liveness_timeout.unwrap_or(liveness::DEFAULT_TIMEOUT)
    }

    pub(crate) fn check(&self) -> Result<()> {
        for (name, timeout) in [
            ("connect", self.connect_timeout),
            ("progress", self.progress_timeout),
            ("liveness", self.liveness_timeout()),
        ] {
            if timeout.is_zero() {
                return Err(Error::misuse(format!(
                    "the {name} timeout is zero, so nothing could ever succeed"
                )));
            }
        }
        let timeout = self.liveness_timeout();
        if timeout < liveness::MIN_TIMEOUT {
            return Err(Error::misuse(format!(
                "the liveness timeout is {}, expected at least {}: a busy machine holds ranks up \
                     for longer, which would then count as lost",
                Seconds(timeout),
                Seconds(liveness::MIN_TIMEOUT),
            )));
        }
        Ok(())
    }

    /// The same options, with the launch's values for those that are not set.
    pub(crate) fn completed_by(&self, launch: &Launch) -> Self {
        Self {
            liveness_timeout: self.liveness_timeout.or(launch.liveness_timeout),
            on_loss: launch.on_loss,
            ..self.clone()
        }
    }

    pub(crate) fn op_timeouts(&self) -> OpTimeouts {
        OpTimeouts {
            timeout: self.progress_timeout,
            warn_after: self.warn_after,
            limit: TimeoutKind::Progress,
        }
    }

    /// The timeouts of operations while the group connects; `spent` of the connect timeout has passed.
    ///
    /// A rank may have waited nearly all of it for the last one to come, and then needs a moment
    /// all the same.
    pub(crate) fn connect_timeouts(&self, spent: Duration) -> OpTimeouts {
        let left = self.connect_timeout.saturating_sub(spent);
        OpTimeouts {
            timeout: left.max(MIN_NEGOTIATION_TIME),
            warn_after: self.warn_after,
            limit: TimeoutKind::Connect,
        }
    }
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// The least that ranks which have met get to agree on how they exchange data.
const MIN_NEGOTIATION_TIME: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_launch_completes_what_the_options_leave_open() {
        let launch =
            Launch::from_vars(|name| (name == "ACCEL_LIVENESS_TIMEOUT").then(|| "1.5".to_owned()))
                .unwrap();
        let silent = GroupOptions::new();
        assert_eq!(silent.liveness_timeout(), Duration::from_secs(5));
        let completed = silent.completed_by(&launch);
        assert_eq!(completed.liveness_timeout(), Duration::from_millis(1500));
        let set = silent.with_liveness_timeout(Duration::from_secs(2));
        let completed = set.completed_by(&launch);
        assert_eq!(completed.liveness_timeout(), Duration::from_secs(2));
    }

    #[test]
    fn deadlines_that_nobody_can_keep_are_misuse() {
        for options in [
            GroupOptions::new().with_connect_timeout(Duration::ZERO),
            GroupOptions::new().with_progress_timeout(Duration::ZERO),
            GroupOptions::new().with_liveness_timeout(Duration::ZERO),
            GroupOptions::new().with_liveness_timeout(liveness::MIN_TIMEOUT / 2),
        ] {
            assert!(options.check().unwrap_err().is_misuse());
        }
    }
}
