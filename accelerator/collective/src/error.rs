//! The error of this crate.

use std::{fmt, io, sync::Arc};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong in a topology, a rendezvous or a collective.
///
/// The error is opaque: ask it with the `is_*` predicates, print it for people. Its message says
/// what was expected, what was found, where, and what to do. It is cheap to clone, since a group
/// that failed answers every later operation with the error it failed with.
///
/// ```
/// use accelerator_collective::Topology;
///
/// let error = Topology::new(2, 2).unwrap_err();
/// assert!(error.is_topology());
/// assert_eq!(error.to_string(), "rank 2 is outside the world: with a world size of 2, ranks are 0 to 1");
/// ```
#[derive(Clone)]
pub struct Error(Arc<Inner>);

impl Error {
    /// The settings that describe the topology are malformed, incomplete or contradictory.
    pub fn is_topology(&self) -> bool {
        self.0.kind == Kind::Topology
    }

    /// The ranks did not find one another: some did not come, or they disagree about the job.
    pub fn is_rendezvous(&self) -> bool {
        self.0.kind == Kind::Rendezvous
    }

    /// A deadline passed while a rank that lives was waited for.
    pub fn is_timeout(&self) -> bool {
        self.0.kind == Kind::Timeout
    }

    /// Another rank is gone while it was still needed: it died, its connection broke, or it
    /// left early (see [`is_peer_left`](Self::is_peer_left)).
    pub fn is_peer_lost(&self) -> bool {
        matches!(self.0.kind, Kind::PeerLost | Kind::PeerLeft)
    }

    /// Another rank closed its group in good order while this one still called collectives.
    pub fn is_peer_left(&self) -> bool {
        self.0.kind == Kind::PeerLeft
    }

    /// The ranks called different collectives, or the same one differently.
    pub fn is_mismatch(&self) -> bool {
        self.0.kind == Kind::Mismatch
    }

    /// The job token is missing, wrong, or not known to the other side.
    pub fn is_unauthorized(&self) -> bool {
        self.0.kind == Kind::Unauthorized
    }

    /// The call itself is wrong: a root outside the world, a collective where none is allowed, a
    /// buffer read as another element type.
    pub fn is_misuse(&self) -> bool {
        self.0.kind == Kind::Misuse
    }

    /// The address on which a store should listen is taken.
    pub fn is_address_in_use(&self) -> bool {
        self.0.kind == Kind::AddressInUse
    }

    /// The group of this rank was closed before.
    pub fn is_closed(&self) -> bool {
        self.0.kind == Kind::Closed
    }

    /// Bytes arrived that are not what the protocol allows.
    pub fn is_protocol(&self) -> bool {
        self.0.kind == Kind::Protocol
    }

    /// The operating system refused something: a file, a socket, a thread.
    pub fn is_io(&self) -> bool {
        self.0.kind == Kind::Io
    }

    /// The ranks that this error is about, in ascending order: those that are lost, missing or
    /// at fault. Empty where the error is not about particular ranks.
    pub fn ranks(&self) -> &[usize] {
        &self.0.ranks
    }

    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self(Arc::new(Inner {
            kind,
            message: message.into(),
            ranks: Vec::new(),
            source: None,
        }))
    }

    pub(crate) fn about(kind: Kind, ranks: Vec<usize>, message: impl Into<String>) -> Self {
        Self(Arc::new(Inner {
            kind,
            message: message.into(),
            ranks,
            source: None,
        }))
    }

    pub(crate) fn io(message: impl Into<String>, source: io::Error) -> Self {
        Self::caused(Kind::Io, message, source)
    }

    pub(crate) fn caused(
        kind: Kind,
        message: impl Into<String>,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(Inner {
            kind,
            message: message.into(),
            ranks: Vec::new(),
            source: Some(Box::new(source)),
        }))
    }

    pub(crate) fn kind(&self) -> Kind {
        self.0.kind
    }

    pub(crate) fn message(&self) -> &str {
        &self.0.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)?;
        match &self.0.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("message", &self.0.message)
            .field("ranks", &self.0.ranks)
            .field("source", &self.0.source)
            .finish()
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.0.source {
            Some(source) => Some(source.as_ref()),
            None => None,
        }
    }
}

/// The families of errors; the numbers are those of the wire.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    AddressInUse = 1,
    Closed = 2,
    Io = 3,
    Mismatch = 4,
    Misuse = 5,
    PeerLeft = 6,
    PeerLost = 7,
    Protocol = 8,
    Rendezvous = 9,
    Timeout = 10,
    Topology = 11,
    Unauthorized = 12,
}

impl Kind {
    pub(crate) const ALL: [Self; 12] = [
        Self::AddressInUse,
        Self::Closed,
        Self::Io,
        Self::Mismatch,
        Self::Misuse,
        Self::PeerLeft,
        Self::PeerLost,
        Self::Protocol,
        Self::Rendezvous,
        Self::Timeout,
        Self::Topology,
        Self::Unauthorized,
    ];

    pub(crate) fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }
}

struct Inner {
    kind: Kind,
    message: String,
    ranks: Vec<usize>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// Lists ranks for people: "rank 1", "ranks 1 and 2", "ranks 1, 2 and 5".
pub(crate) fn list_ranks(ranks: &[usize]) -> String {
    match ranks {
        [] => "no rank".to_owned(),
        [rank] => format!("rank {rank}"),
        [first @ .., last] if first.len() < LISTED => {
            let first: Vec<String> = first.iter().map(usize::to_string).collect();
            format!("ranks {} and {last}", first.join(", "))
        }
        [first @ .., last] => {
            let shown: Vec<String> = first.iter().take(LISTED).map(usize::to_string).collect();
            let more = first.len() - shown.len();
            format!("ranks {}, {more} more and {last}", shown.join(", "))
        }
    }
}

/// How many ranks a message lists one by one.
const LISTED: usize = 8;

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
    fn kinds_survive_the_wire() {
        for kind in Kind::ALL {
            assert_eq!(Kind::from_code(kind.code()), Some(kind));
        }
        assert_eq!(Kind::from_code(0), None);
        assert_eq!(Kind::from_code(200), None);
    }
}
