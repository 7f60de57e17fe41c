//! The rendezvous, by which ranks find one another.
//!
//! A small store listens at one address. Every rank registers there, and when all have come each
//! gets the table of all. This file has the settings of both sides.

mod address;
mod inspection;
mod join;
mod locality;
mod meeting;
mod outbox;
mod peer_origin;
mod pending_handshakes;
mod server;
mod store_client;
mod store_state;
mod token;

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use crate::error::{Error, Result};

pub use address::{is_own_address, listen_at, listen_everywhere};
pub use inspection::{FlightRecords, flight_records};
pub(crate) use locality::resolve_local_rank;
pub(crate) use meeting::{Meeting, StorePlace};
pub use pending_handshakes::{PendingHandshake, PendingHandshakes};
pub use server::StoreServer;
pub(crate) use store_client::{StoreClient, WeakStoreClient};
pub(crate) use store_state::MAX_WAIT;
pub use token::Token;
pub(crate) use token::{Key, random};

/// The place where the ranks of a job meet, and the proof that they belong to it.
///
/// Between hosts, where ranks prove that they belong to the job:
///
/// ```
/// use accelerator_collective::internal::{Rendezvous, StoreHost};
///
/// let store = Rendezvous::new("node-0", 29_500)
///     .with_store(StoreHost::Launcher)
///     .with_job("night run")
///     .with_token_file("/run/secrets/job-token");
/// assert_eq!((store.host(), store.port(), store.store()), ("node-0", 29_500, StoreHost::Launcher));
///
/// // A network that is trusted.
/// let open = Rendezvous::new("10.0.0.1", 29_500).without_security();
/// # let _ = open;
/// ```
#[derive(Clone, Debug)]
pub struct Rendezvous {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) store: StoreHost,
    pub(crate) job: String,
    pub(crate) token: TokenSource,
    pub(crate) security: Security,
    /// The network interface at which ranks listen, where one is named.
    pub(crate) network_interface: Option<String>,
    interfaces: Interfaces,
}

impl Rendezvous {
    /// A store at a host and port, hosted by rank 0, without a token. An IPv6 address may be in brackets.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self {
            host: without_brackets(&host.into()).to_owned(),
            port,
            store: StoreHost::Rank0,
            job: String::new(),
            token: TokenSource::None,
            security: Security::Required,
            network_interface: None,
            interfaces: Interfaces::OfHost,
        }
    }

    /// Sets who hosts the store.
    pub fn with_store(self, store: StoreHost) -> Self {
        Self { store, ..self }
    }

    /// Names the job; ranks of a job with another name are refused.
    pub fn with_job(self, job: impl Into<String>) -> Self {
        Self {
            job: job.into(),
            ..self
        }
    }

    /// The token by which ranks and store know one another.
    #[doc(hidden)]
    pub fn with_token(self, token: Token) -> Self {
        Self {
            token: TokenSource::Given(token),
            ..self
        }
    }

    /// The file that holds the token; it is read when the group connects.
    pub fn with_token_file(self, path: impl Into<PathBuf>) -> Self {
        Self {
            token: TokenSource::File(path.into()),
            ..self
        }
    }

    /// Lets several hosts meet without a token: whoever reaches the port may join the job.
    pub fn without_security(self) -> Self {
        Self {
            security: Security::Waived,
            ..self
        }
    }

    /// Makes this rank listen on a network interface, or on the first one in a comma-separated list that its host
    /// has. By default, it listens on the interface that routes to the store.
    pub fn with_network_interface(self, name: impl Into<String>) -> Self {
        Self {
            network_interface: Some(name.into()),
            ..self
        }
    }

    /// Lets rank 0 host the store at all addresses of its host, whatever the name of the host means there.
    pub(crate) fn in_network(self) -> Self {
        Self {
            interfaces: Interfaces::All,
            ..self
        }
    }

    pub(crate) fn is_in_network(&self) -> bool {
        self.interfaces == Interfaces::All
    }

    pub(crate) fn has_token(&self) -> bool {
        !matches!(self.token, TokenSource::None)
    }

    /// The host of the store.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port of the store.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The host of the store: the launcher or rank 0.
    pub fn store(&self) -> StoreHost {
        self.store
    }

    /// The network interface at which this rank listens, where one is named.
    pub fn network_interface(&self) -> Option<&str> {
        self.network_interface.as_deref()
    }

    /// Checks if the address is on the loopback interface, going by its text alone.
    pub(crate) fn is_loopback(&self) -> bool {
        self.host == "localhost" || self.host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
    }
}

impl fmt::Display for Rendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Returns the host as a resolver expects it: `::1` for `[::1]`.
pub(crate) fn without_brackets(host: &str) -> &str {
    let inner = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    inner.filter(|inner| inner.contains(':')).unwrap_or(host)
}

/// The addresses on which a store that rank 0 hosts listens.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Interfaces {
    /// The addresses of the store's host.
    OfHost,
    /// All addresses of rank 0's host.
    All,
}

/// The process that hosts the store.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum StoreHost {
    /// The launcher, so that the store outlives every rank.
    Launcher,
    /// Rank 0, if no launcher does.
    Rank0,
}

impl fmt::Display for StoreHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Launcher => "launcher",
            Self::Rank0 => "rank0",
        })
    }
}

#[derive(Clone, Debug)]
pub(crate) enum TokenSource {
    File(PathBuf),
    Given(Token),
    None,
}

impl TokenSource {
    /// The token, if there is one.
    pub(crate) fn read(&self) -> Result<Option<Token>> {
        Ok(match self {
            Self::File(path) => Some(Token::from_file(path)?),
            Self::Given(token) => Some(token.clone()),
            Self::None => None,
        })
    }
}

/// The choice whether ranks of other hosts need a token to join.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Security {
    /// Only processes of the same user on the same host may join without a token.
    #[default]
    Required,
    /// Every process that reaches the port may join.
    Waived,
}

impl Security {
    /// The variable that waives security if it is `1` or `true`; `0`, `false` and an empty value keep it.
    pub const VARIABLE: &'static str = accelerator_host::INSECURE.name;

    /// Reads the environment of this process.
    ///
    /// # Errors
    ///
    /// A topology error where the variable holds anything else.
    pub fn from_env() -> Result<Self> {
        Self::from_vars(|name| {
            std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
        })
    }

    /// Reads the variable through `lookup`, as [`from_env`](Self::from_env) reads the
    /// environment.
    ///
    /// # Errors
    ///
    /// The errors of [`from_env`](Self::from_env).
    pub fn from_vars(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let waived = match lookup(Self::VARIABLE) {
            Some(value) => is_on(Self::VARIABLE, &value)?,
            None => false,
        };
        Ok(match waived {
            true => Self::Waived,
            false => Self::Required,
        })
    }
}

pub(crate) fn is_on(name: &str, value: &str) -> Result<bool> {
    accelerator_host::switch(value).ok_or_else(|| {
        let expected = accelerator_host::Grammar::Switch;
        Error::topology(format!("{name} is {value:?}; expected {expected}"))
    })
}

/// The options of a store.
///
/// A launcher that hosts the store, and hears of everything:
///
/// ```
/// use std::sync::mpsc;
///
/// use accelerator_collective::internal::{
///     Rendezvous, Report, Security, StoreHost, StoreOptions, StoreServer, Token,
/// };
/// use accelerator_collective::{GroupOptions, Launch, ProcessGroup, Topology};
///
/// # fn main() -> accelerator_collective::Result<()> {
/// let (sender, reports) = mpsc::channel();
/// let token = Token::generate()?;
/// let options = StoreOptions::new(2)
///     .with_job("night run")
///     .with_token(token.clone())
///     .with_security(Security::Required)
///     .with_observer(move |report| drop(sender.send(report)));
/// let store = StoreServer::bind_with(("127.0.0.1", 0), options)?;
///
/// // In a program these are processes of their own.
/// let port = store.local_addr().port();
/// let ranks: Vec<_> = [0, 1].map(|rank| {
///     let rendezvous = Rendezvous::new("127.0.0.1", port)
///         .with_store(StoreHost::Launcher)
///         .with_job("night run")
///         .with_token(token.clone());
///     std::thread::spawn(move || {
///         let launch = Launch::new(Topology::new(rank, 2)?, rendezvous);
///         ProcessGroup::connect(&launch, &GroupOptions::new())?.close()
///     })
/// }).into();
/// for rank in ranks {
///     rank.join().unwrap()?;
/// }
/// assert!(reports.iter().any(|report| matches!(report, Report::Met)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct StoreOptions {
    world_size: usize,
    token: Option<Token>,
    job: String,
    security: Security,
    observer: Option<Observer>,
    /// The rank that hosts the store, where one does.
    host: Option<usize>,
}

type Observer = Arc<dyn Fn(Report) + Send + Sync>;

impl StoreOptions {
    /// A store for so many ranks.
    pub fn new(world_size: usize) -> Self {
        Self {
            world_size,
            token: None,
            job: String::new(),
            security: Security::Required,
            observer: None,
            host: None,
        }
    }

    /// Ranks must prove this token.
    pub fn with_token(self, token: Token) -> Self {
        Self {
            token: Some(token),
            ..self
        }
    }

    /// Names the job; ranks of a job with another name are refused.
    pub fn with_job(self, job: impl Into<String>) -> Self {
        Self {
            job: job.into(),
            ..self
        }
    }

    fn with_host(self, rank: usize) -> Self {
        Self {
            host: Some(rank),
            ..self
        }
    }

    /// Sets whether ranks of other hosts need a token.
    pub fn with_security(self, security: Security) -> Self {
        Self { security, ..self }
    }

    /// Calls `observer` on a thread of the store, in order, for everything that the store learns. It
    /// should return soon.
    pub fn with_observer(self, observer: impl Fn(Report) + Send + Sync + 'static) -> Self {
        Self {
            observer: Some(Arc::new(observer)),
            ..self
        }
    }
}

impl fmt::Debug for StoreOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreOptions")
            .field("world_size", &self.world_size)
            .field("token", &self.token)
            .field("job", &self.job)
            .field("security", &self.security)
            .finish_non_exhaustive()
    }
}

/// Something that a store has learnt; see
/// [`StoreOptions::with_observer`](self::StoreOptions::with_observer).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Report {
    /// A rank has registered and waits for the others.
    #[non_exhaustive]
    Joined {
        /// The rank.
        rank: usize,
        /// The host where it runs.
        host: String,
        /// The process id on that host.
        pid: u32,
    },
    /// All ranks have come; each gets the table of all.
    Met,
    /// The group of a rank has failed.
    Failed(FailureReport),
    /// A rank has left in good order.
    #[non_exhaustive]
    Closed {
        /// The rank.
        rank: usize,
    },
    /// A connection was refused.
    #[non_exhaustive]
    Rejected {
        /// The address that was turned away, and the reason.
        note: String,
    },
}

/// The report of a rank about the failure of its group.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FailureReport {
    /// The rank that says it.
    pub rank: usize,
    /// The ranks that it considers lost, missing or at fault; the rank itself if it panicked.
    pub blamed: Vec<usize>,
    /// The full text of the rank's error.
    pub text: String,
    error: Error,
}

impl FailureReport {
    pub(crate) fn new(rank: usize, error: &Error) -> Self {
        Self {
            rank,
            blamed: error.ranks().to_vec(),
            text: error.to_string(),
            error: error.clone(),
        }
    }

    /// Returns `true` if the rank blames itself alone, as one that panicked does.
    pub(crate) fn is_self_reported(&self) -> bool {
        self.blamed == [self.rank]
    }

    /// The error of the rank, with its `is_*` predicates and the culprit.
    pub fn error(&self) -> &Error {
        &self.error
    }
}

#[cfg(test)]
pub(crate) mod tests;
