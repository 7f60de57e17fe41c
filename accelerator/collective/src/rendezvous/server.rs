//! The store behind its sockets.

use std::{
    collections::HashMap,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    Security,
    owner::Neighbour,
    state::{Action, Connection, Event, State},
    token::{Key, Token, random},
};
use crate::{
    error::{Error, Kind, Result},
    topology::Topology,
    wire::{
        ReadError,
        message::{self, Message, Nonce, Proves, Refusal, Registration, Table},
    },
};

/// The store where the ranks of one job meet; it runs on threads of its own until it is dropped.
///
/// ```
/// use accelerator_collective::rendezvous::{StoreServer, Token};
///
/// # fn main() -> accelerator_collective::Result<()> {
/// let store = StoreServer::bind(("127.0.0.1", 0), 2, Some(Token::generate()?))?;
/// assert_ne!(store.local_addr().port(), 0);
/// # Ok(())
/// # }
/// ```
pub struct StoreServer {
    shared: Arc<Shared>,
    address: SocketAddr,
}

impl StoreServer {
    /// Listens for the ranks of a job; port 0 takes a free one.
    ///
    /// With a token, ranks must prove it. Without one, processes of the same user on this host
    /// may join, and nobody else.
    ///
    /// # Errors
    ///
    /// An address-in-use error where the port is taken, an I/O error where the address is not
    /// one of this host, a topology error for a world of none.
    pub fn bind(
        address: impl ToSocketAddrs + fmt::Debug,
        world_size: usize,
        token: Option<Token>,
    ) -> Result<Self> {
        let mut options = StoreOptions::new(world_size);
        options.token = token;
        Self::bind_with(address, options)
    }

    /// Listens for the ranks of a job, as [`bind`](Self::bind) does, with further options.
    ///
    /// # Errors
    ///
    /// As [`bind`](Self::bind).
    pub fn bind_with(
        address: impl ToSocketAddrs + fmt::Debug,
        options: StoreOptions,
    ) -> Result<Self> {
        Topology::new(0, options.world_size)?;
        let listener = TcpListener::bind(&address).map_err(|error| {
            use std::io::ErrorKind;
            match error.kind() {
                ErrorKind::AddrInUse => Error::caused(
                    Kind::AddressInUse,
                    format!(
                        "the store cannot listen at {address:?}, the port is taken; end the \
                         process that listens there, or choose another port (MASTER_PORT or \
                         ACCEL_PORT, 0 in the launcher for a free one)"
                    ),
                    error,
                ),
                ErrorKind::AddrNotAvailable => Error::io(
                    format!(
                        "the store cannot listen at {address:?}, which is no address of this \
                         host; MASTER_ADDR must be the host of rank 0"
                    ),
                    error,
                ),
                _ => Error::io(format!("the store cannot listen at {address:?}"), error),
            }
        })?;
        let address = listener
            .local_addr()
            .map_err(|error| Error::io("the store's own address cannot be read", error))?;
        let shared = Arc::new(Shared {
            limit: 2 * options.world_size + 64,
            desk: Mutex::new(Desk {
                state: State::new(options.world_size),
                waiting: HashMap::new(),
            }),
            options,
            secret: random()?,
            changed: Condvar::new(),
            open: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
        });
        let server = Self {
            shared: Arc::clone(&shared),
            address,
        };
        server.spawn("store-clock", {
            let shared = Arc::clone(&shared);
            move || shared.keep_time()
        })?;
        server.spawn("store", move || shared.accept(&listener))?;
        Ok(server)
    }

    /// Where the store listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    fn spawn(&self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
        let spawned = thread::Builder::new().name(name.to_owned()).spawn(body);
        match spawned {
            Ok(_) => Ok(()),
            Err(error) => Err(Error::io("a thread of the store cannot be started", error)),
        }
    }
}

impl fmt::Debug for StoreServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreServer")
            .field("address", &self.address)
            .field("options", &self.shared.options)
            .finish_non_exhaustive()
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Release);
        let mut desk = self.shared.desk();
        for (_, stream) in desk.waiting.drain() {
            // The other end may be gone already.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        drop(desk);
        self.shared.changed.notify_all();
        // A last visitor wakes the thread that accepts. Should it not get through, the thread
        // ends with the next one.
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(match address.ip() {
                IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            });
        }
        drop(TcpStream::connect_timeout(&address, Duration::from_secs(1)));
    }
}

/// What a store expects of the ranks.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    world_size: usize,
    token: Option<Token>,
    job: String,
    security: Security,
}

impl StoreOptions {
    /// A store for so many ranks.
    pub fn new(world_size: usize) -> Self {
        Self {
            world_size,
            token: None,
            job: String::new(),
            security: Security::Required,
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

    /// Lets ranks of other hosts join without a token.
    pub fn without_security(self) -> Self {
        Self {
            security: Security::Waived,
            ..self
        }
    }
}

struct Shared {
    options: StoreOptions,
    /// What the key of the job is made from.
    secret: Nonce,
    desk: Mutex<Desk>,
    /// The deadline has changed, or the store stops.
    changed: Condvar,
    /// How many connections are open, and how many may be.
    open: AtomicUsize,
    limit: usize,
    stopped: AtomicBool,
}

/// The state machine with the connections that wait for its answer.
struct Desk {
    state: State,
    waiting: HashMap<Connection, Arc<Visitor>>,
}

/// A connection that has been let in.
struct Visitor {
    stream: TcpStream,
    /// The nonces of its challenge, for the proof of the answer.
    nonces: [Nonce; 2],
}

impl Visitor {
    fn shutdown(&self, how: std::net::Shutdown) -> std::io::Result<()> {
        self.stream.shutdown(how)
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for connection in 0.. {
            let accepted = listener.accept();
            if self.is_stopped() {
                return;
            }
            let Ok((stream, _)) = accepted else {
                // Too many open files, for instance: try again, but not at full speed.
                thread::sleep(Duration::from_millis(20));
                continue;
            };
            if self.open.fetch_add(1, Ordering::AcqRel) >= self.limit {
                self.open.fetch_sub(1, Ordering::AcqRel);
                continue;
            }
            let shared = Arc::clone(self);
            let spawned = thread::Builder::new()
                .name("store-visitor".to_owned())
                .stack_size(512 * 1024)
                .spawn(move || {
                    shared.receive(connection, stream);
                    shared.open.fetch_sub(1, Ordering::AcqRel);
                });
            if spawned.is_err() {
                self.open.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Serves one connection from the first byte to the last.
    fn receive(&self, connection: Connection, stream: TcpStream) {
        let registered = self.admit(&stream);
        let (registration, nonces) = match registered {
            Ok(registered) => registered,
            Err(error) => {
                let peer = match stream.peer_addr() {
                    Ok(peer) => peer.to_string(),
                    Err(_) => "somebody".to_owned(),
                };
                tracing::debug!(%peer, %error, "the store turned a connection away");
                // Nobody may be there to read it.
                let _ = Message::Refused(Refusal::new(&error)).send(&stream);
                let note = format!("{peer} was turned away: {error}");
                self.step(Event::Stranger { note });
                return;
            }
        };
        let visitor = Arc::new(Visitor { stream, nonces });
        {
            let mut desk = self.desk();
            if self.is_stopped() {
                return;
            }
            desk.waiting.insert(connection, Arc::clone(&visitor));
        }
        self.step(Event::Registered {
            connection,
            registration,
        });
        // The rank has nothing more to say; this returns when it or the store ends.
        while !self.is_stopped() {
            let pause = Instant::now() + Duration::from_millis(500);
            match Message::receive(&visitor.stream, message::SHORT, pause) {
                Err(error) if error.is_timeout() => {}
                _ => break,
            }
        }
        self.desk().waiting.remove(&connection);
        self.step(Event::Gone { connection });
    }

    /// The conversation at the door; the rank that may join comes out of it.
    fn admit(&self, stream: &TcpStream) -> Result<(Registration, [Nonce; 2])> {
        let deadline = Instant::now() + DOOR;
        let unreadable =
            |error: ReadError| Error::new(Kind::Protocol, format!("no rank of this job: {error}"));
        // A rank that waits must not be delayed; without this it only takes longer.
        let _ = stream.set_nodelay(true);
        let key = self.options.token.as_ref().map(Token::key);
        let hello = Message::receive(stream, message::SHORT, deadline).map_err(unreadable)?;
        let Message::Hello { nonce, job, proves } = hello else {
            return Err(Error::new(Kind::Protocol, "it did not say hello"));
        };
        if job != self.options.job {
            return Err(Error::new(
                Kind::Rendezvous,
                format!(
                    "this store serves the job {:?}, a rank of the job {job:?} must look for its \
                     own; do two jobs use one port?",
                    self.options.job
                ),
            ));
        }
        match (&key, proves) {
            (Some(_), Proves::Nothing) => {
                return Err(Error::new(
                    Kind::Unauthorized,
                    "this job has a token, but the rank has none; set ACCEL_TOKEN_FILE to the \
                     file that holds it",
                ));
            }
            (None, Proves::Nothing) => self.check_neighbour(stream)?,
            // Without a token of its own the store proves nothing, and the rank turns away.
            _ => {}
        }
        let own = random()?;
        Message::Challenge {
            nonce: own,
            proof: key.as_ref().map(|key| key.prove("store", &[&nonce, &own])),
        }
        .send(stream)
        .map_err(unreadable)?;
        let register = Message::receive(stream, message::SHORT, deadline).map_err(unreadable)?;
        let Message::Register { body, proof } = register else {
            return Err(Error::new(Kind::Protocol, "it did not register"));
        };
        if let Some(key) = &key
            && !key.accepts("rank", &[&own, &nonce, &body], &proof.unwrap_or_default())
        {
            return Err(Error::new(
                Kind::Unauthorized,
                "the token of the rank is not the token of this job; ACCEL_TOKEN_FILE must name \
                 the same token for every process",
            ));
        }
        let registration = message::from_bytes(&body).map_err(unreadable)?;
        Ok((registration, [nonce, own]))
    }

    fn check_neighbour(&self, stream: &TcpStream) -> Result<()> {
        match Neighbour::of(stream) {
            Neighbour::Own => Ok(()),
            Neighbour::Other { user } => Err(Error::new(
                Kind::Unauthorized,
                format!(
                    "a process of user {user} cannot join another user's job without a token; \
                     set ACCEL_TOKEN_FILE for every process"
                ),
            )),
            Neighbour::Afar if self.options.security == Security::Waived => Ok(()),
            Neighbour::Afar => Err(Error::new(
                Kind::Unauthorized,
                "a rank on another host cannot join without a token; set ACCEL_TOKEN_FILE for \
                 every process, or ACCEL_INSECURE=1 on a network where everyone may join",
            )),
        }
    }

    fn step(&self, event: Event) {
        let mut desk = self.desk();
        let actions = desk.state.step(event, Instant::now());
        for action in actions {
            self.act(&mut desk, action);
        }
        drop(desk);
        self.changed.notify_all();
    }

    fn act(&self, desk: &mut Desk, action: Action) {
        match action {
            Action::Refuse { connection, error } => {
                if let Some(visitor) = desk.waiting.remove(&connection) {
                    // Who has gone needs no answer; that is seen by its own thread.
                    let _ = Message::Refused(Refusal::new(&error)).send(&visitor.stream);
                }
            }
            Action::Welcome { connections, ranks } => {
                let body = message::to_bytes(&Table {
                    ranks,
                    secret: self.secret,
                });
                let key = self.options.token.as_ref().map(Token::key);
                for connection in connections {
                    if let Some(visitor) = desk.waiting.remove(&connection) {
                        let proof = key.as_ref().map(|key| welcome(key, &visitor.nonces, &body));
                        let body = body.clone();
                        let _ = Message::Welcome { body, proof }.send(&visitor.stream);
                    }
                }
            }
        }
    }

    fn keep_time(&self) {
        let mut desk = self.desk();
        while !self.is_stopped() {
            let now = Instant::now();
            desk = match desk.state.deadline() {
                Some(deadline) if deadline <= now => {
                    for action in desk.state.step(Event::Tick, now) {
                        self.act(&mut desk, action);
                    }
                    desk
                }
                Some(deadline) => {
                    let waited = self.changed.wait_timeout(desk, deadline - now);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => {
                    let waited = self.changed.wait(desk);
                    waited.unwrap_or_else(PoisonError::into_inner)
                }
            };
        }
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        // The state machine has no step that could fail half-way.
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }
}

/// The proof that a table comes from this store, for this visitor.
pub(crate) fn welcome(key: &Key, nonces: &[Nonce; 2], body: &[u8]) -> [u8; 32] {
    key.prove("welcome", &[&nonces[0], &nonces[1], body])
}

/// How long a stranger may take to say who it is.
const DOOR: Duration = Duration::from_secs(10);
