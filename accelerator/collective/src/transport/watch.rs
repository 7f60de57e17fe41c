//! The patience of an operation, and the words in which it ends.

use std::{
    fmt,
    time::{Duration, Instant},
};

use super::Peer;
use crate::{
    contract::Contract,
    error::{Error, Kind, Result, list_ranks},
};

/// How long an operation waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Without any progress, the operation fails after this time.
    pub(crate) timeout: Duration,
    /// Without any progress, a warning is logged after this time.
    pub(crate) warn_after: Duration,
}

/// The clock of one operation of one rank.
#[derive(Debug)]
pub(crate) struct Watch<'a> {
    pub(crate) rank: usize,
    pub(crate) sequence: u64,
    pub(crate) contract: &'a Contract,
    patience: Patience,
    /// The last progress.
    since: Instant,
    warned: bool,
}

impl<'a> Watch<'a> {
    pub(crate) fn new(
        rank: usize,
        sequence: u64,
        contract: &'a Contract,
        patience: Patience,
    ) -> Self {
        Self {
            rank,
            sequence,
            contract,
            patience,
            since: Instant::now(),
            warned: false,
        }
    }

    /// Notes progress: the clock starts again.
    pub(crate) fn moved(&mut self, now: Instant) {
        self.since = now;
        self.warned = false;
    }

    /// Waits no longer than the time until the warning from here on.
    pub(crate) fn hurry(&mut self) {
        self.patience.timeout = self.patience.timeout.min(self.patience.warn_after);
    }

    /// How long to wait before asking again; logs the warning when it is due.
    ///
    /// # Errors
    ///
    /// A timeout that names the missing ranks.
    pub(crate) fn tick(&mut self, missing: impl Fn() -> Vec<usize>) -> Result<Duration> {
        let waited = self.since.elapsed();
        let Some(left) = self.patience.timeout.checked_sub(waited) else {
            return Err(self.overdue(waited, missing()));
        };
        if self.warned {
            return Ok(left.max(SHORTEST));
        }
        match self.patience.warn_after.checked_sub(waited) {
            Some(calm) if !calm.is_zero() => Ok(left.min(calm).max(SHORTEST)),
            _ => {
                self.warned = true;
                let missing = missing();
                tracing::warn!(
                    rank = self.rank,
                    sequence = self.sequence,
                    ?missing,
                    "rank {} has waited {} for {} in {self}; it gives up after {}",
                    self.rank,
                    Seconds(waited),
                    list_ranks(&missing),
                    Seconds(self.patience.timeout),
                );
                Ok(left.max(SHORTEST))
            }
        }
    }

    pub(crate) fn lost(&self, peer: &Peer, why: &str) -> Error {
        Error::about(
            Kind::PeerLost,
            vec![peer.rank],
            format!("{peer} is lost: {why}; rank {} was in {self}", self.rank),
        )
    }

    pub(crate) fn left(&self, peer: &Peer) -> Error {
        Error::about(
            Kind::PeerLeft,
            vec![peer.rank],
            format!(
                "{peer} left early: it closed its group, or its program ended, while rank {} was \
                 in {self}; if it failed, its own message says why, otherwise it calls fewer \
                 collectives than the others",
                self.rank
            ),
        )
    }

    pub(crate) fn protocol(&self, from: usize, what: impl fmt::Display) -> Error {
        Error::about(
            Kind::Protocol,
            vec![from],
            format!(
                "rank {from} broke the protocol: {what}; rank {} was in {self}",
                self.rank
            ),
        )
    }

    fn overdue(&self, waited: Duration, missing: Vec<usize>) -> Error {
        let message = format!(
            "rank {} waited {} for {} in {self}; a rank that needs longer asks for a longer \
             progress timeout, one that never comes took another path through the program",
            self.rank,
            Seconds(waited),
            list_ranks(&missing),
        );
        Error::about(Kind::Timeout, missing, message)
    }
}

impl fmt::Display for Watch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "collective #{}, {}", self.sequence, self.contract)
    }
}

/// A duration for people: "0.25 s", "10 s".
pub(crate) struct Seconds(pub(crate) Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs_f64();
        if seconds < 10.0 && seconds.fract() > 0.005 {
            write!(f, "{seconds:.2} s")
        } else {
            write!(f, "{seconds:.0} s")
        }
    }
}

const SHORTEST: Duration = Duration::from_millis(1);
