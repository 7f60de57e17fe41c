//! The patience of an operation, and the words in which it ends.

use std::{
    fmt,
    time::{Duration, Instant},
};

use super::Peer;
use crate::{
    contract::Contract,
    error::{Certainty, Culprit, Error, Kind, Result, Seconds, list_ranks},
    notice::unheard,
};

/// How long an operation waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// After this time the operation fails.
    pub(crate) timeout: Duration,
    /// After this time a warning is logged.
    pub(crate) warn_after: Duration,
    pub(crate) limit: Limit,
}

/// Which of the group's timeouts bounds an operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Limit {
    /// The connect timeout, which goes on whatever happens.
    Connect,
    /// The progress timeout, which begins anew with each progress.
    Progress,
}

/// The clock of one operation of one rank.
#[derive(Debug)]
pub(crate) struct Watch {
    pub(crate) rank: usize,
    pub(crate) sequence: u64,
    pub(crate) contract: Contract,
    patience: Patience,
    /// The last progress, where the limit is that of progress; else the beginning.
    since: Instant,
    warned: bool,
}

impl Watch {
    pub(crate) fn new(rank: usize, sequence: u64, contract: Contract, patience: Patience) -> Self {
        Self {
            rank,
            sequence,
            contract,
            patience,
            since: Instant::now(),
            warned: false,
        }
    }

    /// Notes progress: the clock starts again, unless it is that of connecting.
    pub(crate) fn moved(&mut self, now: Instant) {
        if self.patience.limit == Limit::Progress {
            self.since = now;
            self.warned = false;
        }
    }

    /// As [`moved`](Self::moved), at this moment.
    pub(crate) fn restart(&mut self) {
        self.moved(Instant::now());
    }

    /// When the clock began.
    pub(crate) fn since(&self) -> Instant {
        self.since
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
    pub(crate) fn tick(&mut self, missing: impl Fn(&Self) -> Vec<usize>) -> Result<Duration> {
        let waited = self.since.elapsed();
        let Some(left) = self.patience.timeout.checked_sub(waited) else {
            return Err(self.overdue(waited, missing(self)));
        };
        if self.warned {
            return Ok(left.max(SHORTEST));
        }
        match self.patience.warn_after.checked_sub(waited) {
            Some(calm) if !calm.is_zero() => Ok(left.min(calm).max(SHORTEST)),
            _ => {
                self.warned = true;
                let missing = missing(self);
                let text = format!(
                    "rank {} has waited {} for {} in {self}; it gives up after {}",
                    self.rank,
                    Seconds(waited),
                    list_ranks(&missing),
                    Seconds(self.patience.timeout),
                );
                tracing::warn!(
                    rank = self.rank,
                    sequence = self.sequence,
                    ?missing,
                    "{text}"
                );
                unheard(&text);
                Ok(left.max(SHORTEST))
            }
        }
    }

    /// Notes that this thread slept until `woke` though it wanted to wake at `due`: the time in
    /// between does not count, since news that came in it could not be read, and a moment is
    /// given to read them.
    pub(crate) fn woke(&mut self, due: Instant, woke: Instant) {
        let late = woke.saturating_duration_since(due);
        if late >= LATE {
            self.since = (self.since + late + LATE).min(woke);
        }
    }

    pub(crate) fn lost(&self, peer: &Peer, cause: &str, certainty: Certainty) -> Error {
        self.blame(
            Kind::PeerLost,
            peer.culprit(cause, certainty),
            format_args!("{peer} is lost: {cause}"),
        )
    }

    pub(crate) fn left(&self, peer: &Peer) -> Error {
        let cause = "it closed its group";
        let message = format!(
            "{peer} left early: {cause} while rank {} was in {self}; it calls fewer collectives \
             than the others",
            self.rank
        );
        Error::blaming(
            Kind::PeerLeft,
            peer.culprit(cause, Certainty::Settled),
            message,
        )
    }

    pub(crate) fn protocol(&self, peer: &Peer, what: impl fmt::Display) -> Error {
        let cause = format!("it broke the protocol: {what}");
        let message = format!("{peer} is at fault: {cause}");
        let culprit = peer.culprit(cause, Certainty::Settled);
        self.blame(Kind::Protocol, culprit, format_args!("{message}"))
    }

    /// The error of a rank that another one has given up; `me` is this rank.
    pub(crate) fn given_up(&self, me: &Peer, by: usize, cause: &str) -> Error {
        self.blame(
            Kind::PeerLost,
            me.culprit(cause, Certainty::Settled),
            format_args!("{me} was declared lost by rank {by}: {cause}"),
        )
    }

    /// The error of a rank that did not run for so long that the others must have given it up.
    pub(crate) fn overslept(&self, me: &Peer, slept: Duration, seen: &str) -> Error {
        let cause = format!(
            "it did not run for {}: stopped, swapped out or starved; meanwhile {seen}",
            Seconds(slept)
        );
        let message = format!("{me} is lost: {cause}");
        self.blame(
            Kind::PeerLost,
            me.culprit(cause, Certainty::Settled),
            format_args!("{message}"),
        )
    }

    /// The error of a rank whose connections a fault has cut; `me` is this rank.
    pub(crate) fn cut(&self, me: &Peer) -> Error {
        self.lost(me, "its connections were cut", Certainty::Settled)
    }

    /// The error of an operation that runs while another thread ends the group.
    pub(crate) fn interrupted(&self) -> Error {
        let message = format!("rank {} gave up its group during {self}", self.rank);
        Error::new(Kind::Closed, message)
    }

    fn blame(&self, kind: Kind, culprit: Culprit, what: fmt::Arguments<'_>) -> Error {
        let message = format!("{what}; rank {} was in {self}", self.rank);
        Error::blaming(kind, culprit, message)
    }

    fn overdue(&self, waited: Duration, missing: Vec<usize>) -> Error {
        let advice = match self.patience.limit {
            Limit::Connect => "ranks that need longer ask for a longer connect timeout",
            Limit::Progress => {
                "a rank that needs longer asks for a longer progress timeout, one that never comes \
                 took another path through the program"
            }
        };
        let message = format!(
            "rank {} waited {} for {} in {self}; {advice}",
            self.rank,
            Seconds(waited),
            list_ranks(&missing),
        );
        Error::about(Kind::Timeout, missing, message)
    }
}

impl fmt::Display for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "collective #{}, {}", self.sequence, self.contract)
    }
}

const SHORTEST: Duration = Duration::from_millis(1);

/// A thread that wakes so much later than it asked for was kept from running.
pub(crate) const LATE: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::{Call, Site};

    #[test]
    fn progress_gives_no_more_time_to_connect() {
        let watch = |limit| {
            let patience = Patience {
                timeout: Duration::from_nanos(1),
                warn_after: Duration::from_secs(50),
                limit,
            };
            let contract = Contract::new(Call::Connect, Site::new("here.rs", 1));
            let mut watch = Watch::new(0, 0, contract, patience);
            watch.moved(Instant::now() + Duration::from_secs(3600));
            watch
        };
        assert!(watch(Limit::Progress).tick(|_| vec![1]).is_ok());
        let error = watch(Limit::Connect).tick(|_| vec![1]).unwrap_err();
        assert!(error.is_timeout(), "{error}");
        assert_eq!(error.ranks(), [1]);
        let text = error.to_string();
        assert!(text.ends_with("ask for a longer connect timeout"), "{text}");
    }
}
