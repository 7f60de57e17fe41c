//! The store of an attempt, its token, and the reports of ranks to it. The launcher hosts the store, so that it outlives
//! every rank.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Once, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_collective::internal::{
    FlightRecords, Report, Security, StoreOptions, StoreServer, Token,
};
use accelerator_host::sync::Mutex;
use accelerator_host::{TOKEN_FILE, variable};
use accelerator_manifest::internal::StagedFolder;
use rustix::fs::{MemfdFlags, Mode, fchmod, memfd_create};

use crate::error::{Error, Result, chain};
use crate::event::Event;
use crate::settings::Settings;
use crate::text::note;
use crate::variables;

/// The time that the store of an attempt may take to give back a port that was asked for.
const PORT_RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// A running store; it stops when dropped.
#[derive(Debug)]
pub(super) struct Store {
    server: Arc<StoreServer>,
    credentials: Credentials,
}

/// The token of a job, and where its ranks find it.
#[derive(Clone, Debug, Default)]
struct Credentials {
    token: Option<Token>,
    /// The file of a token that the launcher has made.
    own: Option<Arc<OwnToken>>,
    /// The file of a token that was given, if ranks cannot read it themselves.
    given: Option<&'static Path>,
}

impl Store {
    /// Starts the store for the ranks of `settings`; `observer` receives their reports.
    ///
    /// The ranks inherit the launcher's environment, so the store goes by the same variables:
    /// it asks for the token of `ACCEL_TOKEN_FILE`, if that is set, and with
    /// `ACCEL_INSECURE=1` for none. Otherwise it asks for one of its own.
    ///
    /// # Errors
    /// When the port is taken, the host is no address of this machine, the token cannot be read or
    /// made, or `ACCEL_INSECURE` is neither 1 nor 0.
    pub(super) fn open(
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
    pub(super) fn open_next(
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

    /// Returns the file of its token, if ranks do not know it.
    pub(super) fn token_file(&self) -> Option<&Path> {
        let own = self.credentials.own.as_ref();
        own.map(|token| token.path()).or(self.credentials.given)
    }

    /// The address it listens on.
    pub(super) fn address(&self) -> SocketAddr {
        self.server.local_addr()
    }

    /// The last operations of the ranks, as far as they are known.
    pub(super) fn operations(&self) -> Vec<FlightRecords> {
        self.server.flight_records(Duration::ZERO)
    }

    /// A handle that does not keep the store open.
    pub(super) fn handle(&self) -> StoreHandle {
        StoreHandle(Arc::downgrade(&self.server))
    }
}

/// Reads `ACCEL_INSECURE`.
fn given_security() -> Result<Security> {
    Security::from_env().map_err(|error| Error::usage(chain(&error)))
}

#[derive(Clone, Debug)]
pub(super) struct StoreHandle(Weak<StoreServer>);

impl StoreHandle {
    /// Reports the end of `rank` to all ranks, unless the store is gone.
    pub(super) fn report_exit(&self, rank: usize, text: String) {
        if let Some(server) = self.0.upgrade() {
            server.report_exit(rank, text);
        }
    }

    /// Asks the ranks that run for their last operations, which the store keeps as they come.
    pub(super) fn ask_operations(&self) {
        if let Some(server) = self.0.upgrade() {
            server.flight_records(Duration::ZERO);
        }
    }

    /// Forgives the silence of ranks so far.
    pub(super) fn forgive_silence(&self) {
        if let Some(server) = self.0.upgrade() {
            server.forgive_silence();
        }
    }

    /// Tells a rank its place in the next group, by variables; none if it has no place there.
    pub(super) fn tell_next_place(&self, rank: usize, variables: Vec<(String, String)>) {
        if let Some(server) = self.0.upgrade() {
            server.tell_next_place(rank, variables);
        }
    }
}

/// The reports of the ranks of one attempt. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct RankReports {
    received: Arc<Mutex<Received>>,
}

/// The first failure report of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FailureReport {
    pub(crate) rank: usize,
    pub(crate) blamed: BTreeSet<usize>,
    /// Its error in full.
    pub(crate) text: String,
}

impl RankReports {
    /// Records a report of the store, and forwards it to `events` if the supervisor needs it.
    pub(crate) fn record(&self, report: Report, events: &Sender<Event>) {
        let event = match report {
            Report::Joined { rank, host, .. } => {
                self.received.lock().joined.insert(rank, host);
                Event::Joined(rank)
            }
            Report::Failed(report) => {
                let is_first = self.received.lock().keep_first(FailureReport {
                    rank: report.rank,
                    blamed: report.blamed.iter().copied().collect(),
                    text: report.text,
                });
                if !is_first {
                    return;
                }
                Event::FailureReported {
                    rank: report.rank,
                    blamed: report.blamed,
                }
            }
            Report::Closed { rank, .. } => {
                self.received.lock().closed.insert(rank);
                Event::Closed(rank)
            }
            _ => return,
        };
        // Without a receiver the attempt is over.
        let _ = events.send(event);
    }

    /// Returns `true` if any rank has joined the job.
    pub(crate) fn has_any_joined(&self) -> bool {
        !self.received.lock().joined.is_empty()
    }

    /// Returns `true` if `rank` has joined the job and not closed its group.
    pub(crate) fn is_joined(&self, rank: usize) -> bool {
        let received = self.received.lock();
        received.joined.contains_key(&rank) && !received.closed.contains(&rank)
    }

    /// Returns `true` if `rank` has reported a failure, or never joined.
    pub(crate) fn has_reported(&self, rank: usize) -> bool {
        let received = self.received.lock();
        !received.joined.contains_key(&rank) || received.has_reported(rank)
    }

    /// The host that `rank` joined from.
    pub(crate) fn host(&self, rank: usize) -> Option<String> {
        self.received.lock().joined.get(&rank).cloned()
    }

    /// The first failure report of each rank, in order of arrival.
    pub(crate) fn failure_reports(&self) -> Vec<FailureReport> {
        self.received.lock().failure_reports.clone()
    }
}

#[derive(Debug, Default)]
struct Received {
    /// The host of each rank that joined.
    joined: BTreeMap<usize, String>,
    closed: BTreeSet<usize>,
    /// The failure reports, at most one per rank.
    failure_reports: Vec<FailureReport>,
}

impl Received {
    /// Keeps only the first report of a rank, which bounds the launcher's memory. Returns `true` if it was the first.
    fn keep_first(&mut self, said: FailureReport) -> bool {
        let is_first = !self.has_reported(said.rank);
        if is_first {
            self.failure_reports.push(said);
        }
        is_first
    }

    fn has_reported(&self, rank: usize) -> bool {
        self.failure_reports.iter().any(|said| said.rank == rank)
    }
}

/// The token of `ACCEL_TOKEN_FILE`.
#[derive(Debug)]
pub(crate) struct GivenToken {
    pub(crate) token: Token,
    /// Its path for ranks, if that differs from the launcher's.
    pub(crate) file: Option<&'static Path>,
}

/// Returns the token of `ACCEL_TOKEN_FILE`, if that is set. A pipe is read once per process.
pub(crate) fn given_token() -> Result<Option<GivenToken>> {
    static PIPED: OnceLock<(Token, MemoryFile)> = OnceLock::new();
    static GUESSABLE: Once = Once::new();
    let Some(path) = variables::given(TOKEN_FILE.name).map(PathBuf::from) else {
        return Ok(None);
    };
    if PIPED.get().is_none() {
        let token = Token::from_file(&path).map_err(|error| Error::usage(chain(&error)))?;
        if token.is_guessable() {
            GUESSABLE.call_once(|| note(Token::GUESSABLE));
        }
        if !fs::metadata(&path).is_ok_and(|found| found.file_type().is_fifo()) {
            return Ok(Some(GivenToken { token, file: None }));
        }
        let file = MemoryFile::of_token(token.secret())?;
        // Another thread may have been faster.
        let _ = PIPED.set((token, file));
    }
    Ok(PIPED.get().map(|(token, file)| GivenToken {
        token: token.clone(),
        file: Some(file.path()),
    }))
}

/// Returns the token by which several hosts know one another: that of `ACCEL_TOKEN_FILE`; `None` where
/// `ACCEL_INSECURE=1` waives it.
///
/// # Errors
/// When there is neither, or the file cannot be read.
pub(crate) fn token_of_hosts() -> Result<Option<Token>> {
    if let Some(given) = given_token()? {
        return Ok(Some(given.token));
    }
    match given_security()? {
        Security::Waived => Ok(None),
        Security::Required => Err(Error::usage(
            "several hosts know one another by a token: write the same random one (`openssl rand -hex 32`) into a file on \
             each, readable by you alone, and name it in ACCEL_TOKEN_FILE; on a network that you trust, ACCEL_INSECURE=1 \
             does without",
        )),
    }
}

/// A file in memory that only this user can read, and that is gone with this process.
#[derive(Debug)]
pub(crate) struct MemoryFile {
    path: PathBuf,
    _file: File,
}

impl MemoryFile {
    /// A file with the secret of a token.
    pub(crate) fn of_token(secret: &[u8]) -> Result<Self> {
        let write = || -> io::Result<Self> {
            let file = memfd_create("accel-token", MemfdFlags::CLOEXEC)?;
            fchmod(&file, Mode::RUSR | Mode::WUSR)?;
            let mut file = File::from(file);
            file.write_all(secret)?;
            let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
            Ok(Self {
                path: path.into(),
                _file: file,
            })
        };
        write().map_err(|error| Error::system("the token cannot be kept").with_source(error))
    }

    /// Its path, for other processes of this user.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// The file of a token for one attempt, which only this user can read; it is removed when this is dropped. The
/// file of a launcher that was killed is removed by the next one.
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

    fn path(&self) -> &Path {
        &self.path
    }
}

/// The folder for temporary files.
fn temporary() -> PathBuf {
    variable("TMPDIR").map_or_else(|| PathBuf::from("/tmp"), PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_report_of_a_rank_is_kept() {
        let said = |rank, blamed, text: &str| FailureReport {
            rank,
            blamed: BTreeSet::from([blamed]),
            text: text.to_owned(),
        };
        let mut received = Received::default();
        assert!(received.keep_first(said(1, 2, "first")));
        for _ in 0..1000 {
            assert!(!received.keep_first(said(1, 0, "and again")));
        }
        assert!(received.keep_first(said(0, 2, "another")));
        assert_eq!(
            received.failure_reports,
            [said(1, 2, "first"), said(0, 2, "another")]
        );
    }
}
