//! The store of an attempt. The launcher hosts it, so that it outlives every rank.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_collective::rendezvous::{Report, Security, StoreOptions, StoreServer, Token};

use crate::error::{Error, Result, chain};
use crate::settings::Settings;
use crate::supervisor::token::{OwnToken, given_token};

/// How long the store of an attempt may take to give back a port that was asked for.
const PORT_RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// A running store; it stops when dropped.
#[derive(Debug)]
pub(crate) struct Store {
    server: Arc<StoreServer>,
    credentials: Credentials,
}

/// The token of a job, and where its ranks find it.
#[derive(Clone, Debug, Default)]
struct Credentials {
    token: Option<Token>,
    /// The file of a token that the launcher has made.
    own: Option<Arc<OwnToken>>,
    /// The file of a token that was given, where ranks cannot read it themselves.
    given: Option<&'static Path>,
}

impl Store {
    /// Starts the store for the ranks of `settings`; `observer` receives what they report.
    ///
    /// The ranks inherit the launcher's environment, so the store goes by the same variables:
    /// it asks for the token of `ACCEL_TOKEN_FILE`, where that is set, and with
    /// `ACCEL_INSECURE=1` for none. Otherwise it asks for one of its own.
    ///
    /// # Errors
    /// When the port is taken, the host is no address of this machine, the token cannot be read or
    /// made, or `ACCEL_INSECURE` is neither 1 nor 0.
    pub(crate) fn open(
        settings: &Settings,
        observer: impl Fn(Report) + Send + Sync + 'static,
    ) -> Result<Self> {
        let security = given_security()?;
        let has_several = settings.layout.ranks() > 1 || settings.elastic.is_some();
        let mut credentials = Credentials::default();
        if let Some(given) = given_token()? {
            credentials.token = Some(given.token);
            credentials.given = given.file;
        } else if security == Security::Required && has_several {
            let (token, own) = OwnToken::make()?;
            credentials.token = Some(token);
            credentials.own = Some(Arc::new(own));
        }
        Self::serve(settings, security, credentials, observer)
    }

    /// Starts the store of the group that follows the one of this store, for the ranks of `settings`: with the same
    /// token, which ranks have that run already.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) fn open_next(
        &self,
        settings: &Settings,
        observer: impl Fn(Report) + Send + Sync + 'static,
    ) -> Result<Self> {
        let credentials = self.credentials.clone();
        Self::serve(settings, given_security()?, credentials, observer)
    }

    fn serve(
        settings: &Settings,
        security: Security,
        credentials: Credentials,
        observer: impl Fn(Report) + Send + Sync + 'static,
    ) -> Result<Self> {
        let (host, port) = (settings.listen_addr.as_str(), settings.master_port);
        let mut options = StoreOptions::new(settings.layout.ranks())
            .with_job(&settings.job)
            .with_security(security)
            .with_observer(observer);
        if let Some(token) = &credentials.token {
            options = options.with_token(token.clone());
        }
        // The store of the attempt before gives its port back when its last thread ends.
        let timeout = if settings.restart > 0 {
            PORT_RELEASE_TIMEOUT
        } else {
            Duration::ZERO
        };
        let until = Instant::now() + timeout;
        let server = loop {
            match StoreServer::bind_with((host, port), options.clone()) {
                Err(error) if error.is_address_in_use() && Instant::now() < until => {
                    thread::sleep(Duration::from_millis(5));
                }
                result => break result,
            }
        };
        let server = server.map_err(|error| {
            if error.is_address_in_use() {
                Error::system(format!(
                    "port {port} of {host} is taken; leave --master-port out to take a free one, \
                     or end what listens there"
                ))
            } else {
                Error::system(format!("--master-addr {host}: {}", chain(&error)))
            }
        })?;
        Ok(Self {
            server: Arc::new(server),
            credentials,
        })
    }

    /// The file of its token, where ranks do not know it.
    pub(crate) fn token_file(&self) -> Option<&Path> {
        let own = self.credentials.own.as_ref();
        own.map(|token| token.path()).or(self.credentials.given)
    }

    /// The address it listens on.
    pub(crate) fn address(&self) -> SocketAddr {
        self.server.local_addr()
    }

    /// A handle that does not keep the store open.
    pub(crate) fn handle(&self) -> StoreHandle {
        StoreHandle(Arc::downgrade(&self.server))
    }
}

/// What `ACCEL_INSECURE` says.
///
/// # Errors
/// When it is neither 1 nor 0.
pub(crate) fn given_security() -> Result<Security> {
    Security::from_env().map_err(|error| Error::usage(chain(&error)))
}

/// A weak handle to the store.
#[derive(Clone, Debug)]
pub(crate) struct StoreHandle(Weak<StoreServer>);

impl StoreHandle {
    /// Tells all ranks how `rank` ended, unless the store is gone.
    pub(crate) fn report_exit(&self, rank: usize, text: String) {
        if let Some(server) = self.0.upgrade() {
            server.report_exit(rank, text);
        }
    }

    /// Forgives the silence of ranks so far.
    pub(crate) fn forgive_silence(&self) {
        if let Some(server) = self.0.upgrade() {
            server.forgive_silence();
        }
    }

    /// Tells a rank its place in the next group, by variables; none where it has no place there.
    pub(crate) fn tell_next_place(&self, rank: usize, variables: Vec<(String, String)>) {
        if let Some(server) = self.0.upgrade() {
            server.tell_next_place(rank, variables);
        }
    }
}
