//! The store of an attempt. The launcher hosts it, so that it outlives every rank.

use std::fs::{self, Permissions};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_collective::rendezvous::{Report, Security, StoreOptions, StoreServer, Token};
use accelerator_env::variable;
use accelerator_manifest::StagedFolder;

use crate::error::{Error, Result, chain};
use crate::settings::Settings;
use crate::variables;

/// How long the store of an attempt may take to give back a port that was asked for.
const PORT_RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// A running store; it stops when dropped.
#[derive(Debug)]
pub(crate) struct Store {
    server: Arc<StoreServer>,
    token: Option<OwnToken>,
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
        let (host, port) = (settings.listen_addr.as_str(), settings.master_port);
        let security = given_security()?;
        let mut options = StoreOptions::new(settings.layout.ranks())
            .with_job(&settings.job)
            .with_security(security)
            .with_observer(observer);
        let mut own = None;
        if let Some(token) = given_token()? {
            options = options.with_token(token);
        } else if security == Security::Required && settings.layout.ranks() > 1 {
            let (token, made) = OwnToken::make()?;
            options = options.with_token(token);
            own = Some(made);
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
            token: own,
        })
    }

    /// The file of its own token, for the ranks.
    pub(crate) fn token_file(&self) -> Option<&Path> {
        self.token.as_ref().map(|token| token.path.as_path())
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

/// The token of `ACCEL_TOKEN_FILE`, where that is set.
///
/// # Errors
/// When the file cannot be read.
pub(crate) fn given_token() -> Result<Option<Token>> {
    let path = variables::given(accelerator_env::TOKEN_FILE.name);
    let token = path.map(Token::from_file).transpose();
    token.map_err(|error| Error::usage(chain(&error)))
}

/// What `ACCEL_INSECURE` says.
///
/// # Errors
/// When it is neither 1 nor 0.
pub(crate) fn given_security() -> Result<Security> {
    Security::from_env().map_err(|error| Error::usage(chain(&error)))
}

/// The folder for temporary files.
fn temporary() -> PathBuf {
    variable("TMPDIR").map_or_else(|| PathBuf::from("/tmp"), PathBuf::from)
}

/// The file of a token for one attempt, which only this user can read; it goes when this is dropped. That of a
/// launcher that was killed goes with the next.
#[derive(Debug)]
struct OwnToken {
    path: PathBuf,
    _folder: StagedFolder,
}

impl OwnToken {
    /// A new token, and its file.
    ///
    /// # Errors
    /// When the folder for temporary files cannot be written.
    fn make() -> Result<(Token, Self)> {
        let unwritable = |error: &dyn std::error::Error| {
            Error::system(format!(
                "no token can be made for this job in {}; name another folder in TMPDIR, or a token in \
                 ACCEL_TOKEN_FILE: {}",
                temporary().display(),
                chain(error)
            ))
        };
        // Ranks may change their working folder.
        let temporary = std::path::absolute(temporary());
        // Other users have theirs in the same folder.
        let name = format!("accel-token-{}", rustix::process::getuid().as_raw());
        let folder = temporary
            .and_then(|parent| StagedFolder::create(&parent, &name, |target| target == name))
            .and_then(|folder| {
                fs::set_permissions(folder.path(), Permissions::from_mode(0o700)).map(|()| folder)
            })
            .map_err(|error| unwritable(&error))?;
        let path = folder.path().join("token");
        let token = Token::generate().map_err(|error| unwritable(&error))?;
        let written = token.write_file(&path);
        written.map_err(|error| unwritable(&error))?;
        let file = Self {
            path,
            _folder: folder,
        };
        Ok((token, file))
    }
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
}
