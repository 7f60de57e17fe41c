//! The settings of a store for its job, and its reports to the process that hosts it.

use std::{fmt, sync::Arc};

use super::{Security, Token};
use crate::error::Error;

/// The expectations of a store about the ranks.
///
/// A launcher that hosts the store, and hears of everything:
///
/// ```
/// use std::sync::mpsc;
///
/// use accelerator_collective::launcher::{Report, Security, StoreOptions, StoreServer, Token};
/// use accelerator_collective::{GroupOptions, Launch, ProcessGroup, Rendezvous, StoreHost, Topology};
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
    pub(super) world_size: usize,
    pub(super) token: Option<Token>,
    pub(super) job: String,
    pub(super) security: Security,
    pub(super) observer: Option<Observer>,
    /// The rank that hosts the store, where one does.
    pub(super) host: Option<usize>,
}

pub(super) type Observer = Arc<dyn Fn(Report) + Send + Sync>;

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

    pub(super) fn with_host(self, rank: usize) -> Self {
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
/// [`StoreOptions::with_observer`](super::StoreOptions::with_observer).
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
    /// Somebody was turned away.
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
    /// The ranks that it holds to be lost, missing or at fault; itself where it panicked.
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
