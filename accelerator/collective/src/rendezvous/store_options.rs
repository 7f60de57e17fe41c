//! The settings of a store for its job.

use std::{fmt, sync::Arc};

use super::{Report, Security, Token};

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
