//! How ranks find one another.
//!
//! A small store listens at one address. Every rank registers there, and when all have come each
//! gets the table of all.

mod client;
mod owner;
mod server;
mod state;
mod token;

use std::{fmt, net::IpAddr, path::PathBuf};

pub use server::{StoreOptions, StoreServer};
pub(crate) use state::LONGEST;
pub use token::Token;

pub(crate) use client::Meeting;
pub(crate) use token::{Key, random};

/// Where the ranks of a job meet, and by what right.
///
/// ```
/// use accelerator_collective::{Rendezvous, StoreHost};
///
/// let rendezvous = Rendezvous::new("127.0.0.1", 29_500).with_store(StoreHost::Launcher);
/// assert_eq!(rendezvous.to_string(), "127.0.0.1:29500");
/// ```
#[derive(Clone, Debug)]
pub struct Rendezvous {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) store: StoreHost,
    pub(crate) job: String,
    pub(crate) token: TokenSource,
    pub(crate) security: Security,
}

impl Rendezvous {
    /// A store at a host and port, hosted by rank 0, without a token.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self {
            host: host.into(),
            port,
            store: StoreHost::Rank0,
            job: String::new(),
            token: TokenSource::None,
            security: Security::Required,
        }
    }

    /// Says who hosts the store.
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

    /// The host of the store.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port of the store.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Who hosts the store.
    pub fn store(&self) -> StoreHost {
        self.store
    }

    /// Whether the address is on the loopback interface, going by its text alone.
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

/// Who hosts the store.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum StoreHost {
    /// The launcher, so that the store outlives every rank.
    Launcher,
    /// Rank 0, where no launcher does.
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

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Security {
    Required,
    Waived,
}
