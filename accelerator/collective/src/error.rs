//! The error of this crate.

use std::{
    fmt,
    io::{self, Write},
    time::Duration,
};

use serde::{Deserialize, Serialize};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

accelerator_host::define_error! {
    /// An error of a topology, a rendezvous or a collective.
    ///
    /// The error is opaque: ask it with the `is_*` predicates, print it for people. Its message says
    /// what was expected, what was found, where, and what to do. It is cheap to clone, since a group
    /// that failed answers every later operation with the error it failed with.
    ///
    /// The errors that other ranks cause:
    ///
    /// ```
    /// use std::thread;
    /// use std::time::Duration;
    ///
    /// use accelerator_collective::{Error, GroupOptions, ProcessGroup, ReduceOp};
    ///
    /// /// The error that rank 0 gets, where rank 1 does that.
    /// fn error(rank_1: fn(ProcessGroup), options: &GroupOptions) -> Error {
    ///     let mut ranks = ProcessGroup::threads(2, options).unwrap().into_iter();
    ///     let (first, second) = (ranks.next().unwrap(), ranks.next().unwrap());
    ///     // Rank 1 lives until rank 0 has its error.
    ///     let _alive = second.clone();
    ///     thread::scope(|scope| {
    ///         scope.spawn(move || rank_1(second));
    ///         first.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap_err()
    ///     })
    /// }
    ///
    /// let short = GroupOptions::new().with_progress_timeout(Duration::from_millis(100));
    /// let hangs = error(drop, &short);
    /// assert!(hangs.is_timeout());
    /// assert_eq!(hangs.ranks(), [1]);
    ///
    /// let long = GroupOptions::new();
    /// let left = error(|group| group.close().unwrap(), &long);
    /// assert!(left.is_peer_left() && left.is_peer_lost());
    /// let confused = error(|group| drop(group.barrier()), &long);
    /// assert!(confused.is_mismatch());
    ///
    /// let group = ProcessGroup::single();
    /// group.close().unwrap();
    /// assert!(group.barrier().unwrap_err().is_closed());
    /// ```
    #[derive(Clone, Debug)]
    pub struct Error(Details);

    /// The families of errors; the numbers are those of the wire.
    #[derive(Deserialize, Serialize)]
    #[serde(into = "u8", try_from = "u8")]
    pub(crate) enum Kind {
        /// Returns `true` if the address on which a store should listen is taken.
        AddressInUse = 1 => is_address_in_use,
        /// Returns `true` if the group of this rank was closed before.
        Closed = 2 => is_closed,
        /// Returns `true` if the operating system refused something: a file, a socket, a thread.
        Io = 3 => is_io,
        /// Returns `true` if the ranks called different collectives, or the same one differently.
        Mismatch = 4 => is_mismatch,
        /// Returns `true` if the call itself is wrong: a root outside the world, a collective where none is allowed, a
        /// buffer read as another element type.
        Misuse = 5 => is_misuse,
        /// Returns `true` if another rank closed its group in good order while this one still called collectives.
        PeerLeft = 6 => is_peer_left,
        PeerLost = 7,
        /// Returns `true` if bytes arrived that are not what the protocol allows.
        Protocol = 8 => is_protocol,
        /// Returns `true` if the ranks did not find one another: some did not come, or they disagree about the job.
        Rendezvous = 9 => is_rendezvous,
        /// Returns `true` if a deadline passed while a rank that lives was waited for.
        Timeout = 10 => is_timeout,
        /// Returns `true` if the settings that describe the topology are malformed, incomplete or contradictory.
        Topology = 11 => is_topology,
        /// Returns `true` if the job token is missing, wrong, or not known to the other side.
        Unauthorized = 12 => is_unauthorized,
    }
}

impl Error {
    /// Returns `true` if another rank is gone while it was still needed: it died, its connection broke, or it
    /// left early (see [`is_peer_left`](Self::is_peer_left)).
    pub fn is_peer_lost(&self) -> bool {
        matches!(self.kind(), Kind::PeerLost | Kind::PeerLeft)
    }

    /// The ranks that this error is about, in ascending order: those that are lost, missing or
    /// at fault. Empty if the error is not about particular ranks.
    pub fn ranks(&self) -> &[usize] {
        &self.0.details.ranks
    }

    /// The rank that failed first, and why, as far as this rank knows: for peers that were lost or broke
    /// the protocol, even if another rank reported it.
    pub fn culprit(&self) -> Option<&Culprit> {
        self.0.details.culprit.as_ref()
    }

    pub(crate) fn about(kind: Kind, ranks: Vec<usize>, message: impl Into<String>) -> Self {
        let culprit = None;
        Self::new(kind, message).with_details(Details { ranks, culprit })
    }

    /// Makes an error for which one rank is to blame; the message contains the cause.
    pub(crate) fn blaming(kind: Kind, culprit: Culprit, message: impl Into<String>) -> Self {
        Self::new(kind, message).with_details(Details {
            ranks: vec![culprit.rank],
            culprit: Some(culprit),
        })
    }

    /// Returns this error with the cause that the store knows.
    pub(crate) fn with_exit_notice(&self, text: &str) -> Self {
        let Some(culprit) = self.culprit() else {
            return self.clone();
        };
        let cause = match culprit.certainty {
            Certainty::Guessed => text.to_owned(),
            Certainty::Partial => format!("{}; {text}", culprit.cause),
            Certainty::Settled => return self.clone(),
        };
        let message = self.0.message.replacen(&culprit.cause, &cause, 1);
        let culprit = Culprit {
            cause,
            certainty: Certainty::Settled,
            ..culprit.clone()
        };
        Self::blaming(self.kind(), culprit, message)
    }

    pub(crate) fn closed(message: impl Into<String>) -> Self {
        Self::new(Kind::Closed, message)
    }

    pub(crate) fn misuse(message: impl Into<String>) -> Self {
        Self::new(Kind::Misuse, message)
    }

    pub(crate) fn protocol(message: impl Into<String>) -> Self {
        Self::new(Kind::Protocol, message)
    }

    pub(crate) fn rendezvous(message: impl Into<String>) -> Self {
        Self::new(Kind::Rendezvous, message)
    }

    pub(crate) fn topology(message: impl Into<String>) -> Self {
        Self::new(Kind::Topology, message)
    }

    pub(crate) fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(Kind::Unauthorized, message)
    }

    pub(crate) fn io(message: impl fmt::Display, source: io::Error) -> Self {
        Self::caused(Kind::Io, message, source)
    }

    /// Makes an error whose message ends with its cause.
    pub(crate) fn caused(
        kind: Kind,
        message: impl fmt::Display,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self::new(kind, format!("{message}: {source}")).with_source(source)
    }
}

/// The ranks that an error is about.
#[derive(Clone, Debug, Default)]
pub(crate) struct Details {
    ranks: Vec<usize>,
    culprit: Option<Culprit>,
}

/// The rank that is to blame for an error; see [`Error::culprit`].
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Culprit {
    pub(crate) rank: usize,
    pub(crate) host: String,
    pub(crate) pid: Option<u32>,
    pub(crate) cause: String,
    pub(crate) certainty: Certainty,
}

impl Culprit {
    /// The rank's number in the job.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The name of the host on which it runs, or ran; "this process" for a thread.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The process id on that host; `None` for a thread.
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// The known cause, for people: "it panicked: index out of bounds (at src/main.rs:7)", "it has been silent for
    /// 5.0 s: stopped, swapped out, or cut off from the network".
    pub fn cause(&self) -> &str {
        &self.cause
    }
}

/// The certainty of a cause, which tells if the store could say more; the numbers are those of the wire.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(into = "u8", try_from = "u8")]
pub(crate) enum Certainty {
    /// Only the effect was seen; the store may know the cause.
    Guessed = 1,
    /// The cause is true and may have one of its own.
    Partial = 2,
    /// Nobody knows better.
    Settled = 3,
}

impl From<Certainty> for u8 {
    fn from(certainty: Certainty) -> Self {
        certainty as Self
    }
}

impl TryFrom<u8> for Certainty {
    type Error = String;

    fn try_from(code: u8) -> Result<Self, String> {
        let all = [Self::Guessed, Self::Partial, Self::Settled];
        let known = all.into_iter().find(|certainty| *certainty as u8 == code);
        known.ok_or_else(|| format!("no certainty has the number {code}"))
    }
}

impl From<Kind> for u8 {
    fn from(kind: Kind) -> Self {
        kind as Self
    }
}

impl TryFrom<u8> for Kind {
    type Error = String;

    fn try_from(code: u8) -> Result<Self, String> {
        let known = Self::ALL.iter().find(|kind| **kind as u8 == code);
        known
            .copied()
            .ok_or_else(|| format!("no kind of error has the number {code}"))
    }
}

/// Lists ranks for people: "rank 1", "ranks 1 and 2", "ranks 1, 2 and 5".
pub(crate) fn list_ranks(ranks: &[usize]) -> String {
    match ranks {
        [] => "no rank".to_owned(),
        [rank] => format!("rank {rank}"),
        [first @ .., last] if first.len() < MAX_LISTED_RANKS => {
            let first: Vec<String> = first.iter().map(usize::to_string).collect();
            format!("ranks {} and {last}", first.join(", "))
        }
        [first @ .., last] => {
            let shown: Vec<String> = first
                .iter()
                .take(MAX_LISTED_RANKS)
                .map(usize::to_string)
                .collect();
            let more = first.len() - shown.len();
            format!("ranks {}, {more} more and {last}", shown.join(", "))
        }
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

/// The most ranks that a message lists one by one.
const MAX_LISTED_RANKS: usize = 8;

/// Tells standard error what was logged, where the program collects no logs.
pub fn stderr_fallback(text: &str) {
    if !tracing::dispatcher::has_been_set() {
        // A closed standard error is no reason to end.
        let _ = writeln!(std::io::stderr(), "accelerator: {text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_listed_for_people() {
        assert_eq!(list_ranks(&[3]), "rank 3");
        assert_eq!(list_ranks(&[1, 3]), "ranks 1 and 3");
        assert_eq!(list_ranks(&[0, 1, 3]), "ranks 0, 1 and 3");
        let many: Vec<usize> = (1..100).collect();
        assert_eq!(
            list_ranks(&many),
            "ranks 1, 2, 3, 4, 5, 6, 7, 8, 90 more and 99"
        );
    }

    #[test]
    fn the_cause_is_kept_and_printed() {
        let cause = io::Error::new(io::ErrorKind::NotFound, "no such file");
        let error = Error::io("the token file x cannot be read", cause);
        assert_eq!(
            error.to_string(),
            "the token file x cannot be read: no such file"
        );
        assert!(std::error::Error::source(&error).is_some());
        assert!(error.is_io());
    }

    #[test]
    fn an_exit_notice_replaces_a_guess_and_adds_to_a_part() {
        let error = |certainty| {
            let culprit = Culprit {
                rank: 2,
                host: "there".to_owned(),
                pid: Some(7),
                cause: "its connection ended".to_owned(),
                certainty,
            };
            let message = "rank 2 is lost: its connection ended; rank 0 was busy";
            Error::blaming(Kind::PeerLost, culprit, message)
        };
        let told = |certainty| {
            let told = error(certainty).with_exit_notice("it was killed by SIGKILL");
            let cause = told.culprit().unwrap().cause().to_owned();
            assert_eq!(
                told.to_string(),
                format!("rank 2 is lost: {cause}; rank 0 was busy")
            );
            assert_eq!(told.ranks(), [2]);
            cause
        };
        assert_eq!(told(Certainty::Guessed), "it was killed by SIGKILL");
        assert_eq!(
            told(Certainty::Partial),
            "its connection ended; it was killed by SIGKILL"
        );
        assert_eq!(told(Certainty::Settled), "its connection ended");
    }

    #[test]
    fn kinds_survive_the_wire() {
        for &kind in Kind::ALL {
            assert_eq!(Kind::try_from(u8::from(kind)), Ok(kind));
        }
        assert_eq!(Kind::try_from(0).ok(), None);
        assert_eq!(Kind::try_from(200).ok(), None);
    }
}
