//! The store behind its sockets.

mod handshake;
mod rank_stream;
mod reader;

use std::{
    collections::HashMap,
    fmt,
    io::{self, ErrorKind},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use self::rank_stream::ReaderQueue;
use super::{
    FlightRecords, StoreOptions,
    address::{is_own_address, listen_everywhere, reachable},
    inspection::RecordStore,
    outbox::{self, Registry},
    pending_handshakes::PendingHandshakes,
    store_state::{Connection, RankMessage, Severity, StoreAction, StoreInput, StoreState},
    token::{Token, random},
};
use crate::{
    error::{Error, Kind, Result},
    topology::Topology,
    wire::{
        WireError,
        message::{MAX_MESSAGE_RANKS, MAX_TEXT_BYTES, Message, Nonce, RankTable},
        shorten, to_bytes,
    },
};
use accelerator_host::{
    machine::host_name,
    sync::{Condvar, Mutex},
};

/// The store where the ranks of one job meet; it runs on threads of its own until it is dropped.
pub struct StoreServer {
    shared: Arc<ServerState>,
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
    /// The errors of [`bind`](Self::bind).
    pub fn bind_with(
        address: impl ToSocketAddrs + fmt::Debug,
        options: StoreOptions,
    ) -> Result<Self> {
        let listener = listen(&address).map_err(|error| not_listening(&address, error))?;
        Self::on(listener, options)
    }

    /// A store that listens already.
    pub(super) fn on(listener: TcpListener, options: StoreOptions) -> Result<Self> {
        Topology::new(0, options.world_size)?;
        let address = listener
            .local_addr()
            .map_err(|error| Error::io("the store's own address cannot be read", error))?;
        let shared = Arc::new(ServerState {
            pending: PendingHandshakes::logged(options.world_size + 64),
            // Refusals are recorded elsewhere, so evictions among them need no warning.
            rejected_handshakes: PendingHandshakes::new(8, |_| {}),
            registry: Mutex::new(Registry {
                state: StoreState::new(options.world_size),
                connections: HashMap::new(),
                reports: None,
                clock_due: None,
            }),
            options,
            secret: random()?,
            host_name: host_name(),
            changed: Condvar::new(),
            rejected_count: AtomicUsize::new(0),
            records: RecordStore::default(),
            reading: AtomicU64::new(0),
            reader_queue: ReaderQueue::new().map_err(|error| {
                Error::io("a socket pair for the store cannot be created", error)
            })?,
            is_inspected: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
        });
        let server = Self {
            shared: Arc::clone(&shared),
            address,
        };
        if let Some(observer) = shared.options.observer.clone() {
            let (sender, reports) = mpsc::channel();
            shared.registry.lock().reports = Some(sender);
            server.spawn("store-observer", move || {
                for report in reports {
                    observer(report);
                }
            })?;
        }
        server.spawn("store-clock", {
            let shared = Arc::clone(&shared);
            move || shared.run_clock()
        })?;
        server.spawn("store-reader", {
            let shared = Arc::clone(&shared);
            move || shared.read_ranks()
        })?;
        server.spawn("store", move || shared.accept(&listener))?;
        Ok(server)
    }

    /// Tells all ranks how a rank ended, as the one who saw it end. The text continues from
    /// "rank 2 (process 17 on host) is lost: ", such as "it was killed by SIGKILL" or "it ended
    /// with exit code 3; its last words: …".
    ///
    /// Until the ranks are connected, everybody fails with it at once. Later they know the cause
    /// when they see the rank gone. A rank that has left in good order is not lost by it.
    pub fn report_exit(&self, rank: usize, text: impl Into<String>) {
        let text = shorten(&text.into(), MAX_TEXT_BYTES);
        self.shared.step(StoreInput::ExitNotice { rank, text });
    }

    /// Gives each silent rank another liveness timeout, after a caller has stopped the ranks and before it continues
    /// them. It matters until the ranks are connected; from then on they watch one another, and notice by themselves
    /// when they were stopped.
    pub fn forgive_silence(&self) {
        self.shared.step(StoreInput::Suspended);
    }

    /// Tells a rank its place in the group that follows this one, by the variables of a
    /// [`Launch`](crate::Launch), which take precedence over its environment. Without variables it has no place there.
    /// The program learns of it by [`next_place`](crate::ProcessGroup::next_place), at the earliest when it
    /// is connected to the others.
    ///
    /// ```
    /// use accelerator_collective::internal::StoreServer;
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// let store = StoreServer::bind(("127.0.0.1", 0), 2, None)?;
    /// let next = StoreServer::bind(("127.0.0.1", 0), 3, None)?;
    /// for rank in 0..2 {
    ///     let variables = [
    ///         ("RANK", rank.to_string()),
    ///         ("WORLD_SIZE", "3".to_owned()),
    ///         ("MASTER_ADDR", "127.0.0.1".to_owned()),
    ///         ("ACCEL_PORT", next.local_addr().port().to_string()),
    ///     ];
    ///     store.tell_next_place(rank, variables.map(|(name, value)| (name.to_owned(), value)));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn tell_next_place(
        &self,
        rank: usize,
        variables: impl IntoIterator<Item = (String, String)>,
    ) {
        let place = variables.into_iter().collect();
        self.shared.step(StoreInput::NextPlace { rank, place });
    }

    /// Asks the ranks for their last operations, and waits up to `timeout` for the answers, which are kept for ranks that do
    /// not answer later. Only ranks that have come are listed.
    pub fn flight_records(&self, timeout: Duration) -> Vec<FlightRecords> {
        self.shared.records.ask(&self.shared.registry, timeout)
    }

    /// The address on which the store listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Handles a message of the rank that hosts the store, which needs no connection.
    pub(super) fn message(&self, rank: usize, message: RankMessage) {
        self.shared.step(StoreInput::Message { rank, message });
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
        let host = self.shared.options.host;
        self.shared.step(StoreInput::Closing { host });
        self.shared.stopped.store(true, Ordering::Release);
        let mut registry = self.shared.registry.lock();
        registry.reports = None;
        let ranks: Vec<_> = registry.connections.drain().map(|(_, rank)| rank).collect();
        drop(registry);
        let deadline = outbox::last_call();
        for rank in ranks {
            rank.outbox.flush(deadline);
            rank.outbox.end();
        }
        self.shared.pending.clear();
        self.shared.rejected_handshakes.clear();
        self.shared.changed.notify_all();
        self.shared.reader_queue.waker().wake();
        // A last connection wakes the thread that accepts. Should it not get through, the thread
        // ends with the next one.
        let address = reachable(self.address);
        drop(TcpStream::connect_timeout(&address, Duration::from_secs(1)));
    }
}

/// Listens on the first of the addresses on which this host can.
fn listen(address: &impl ToSocketAddrs) -> io::Result<TcpListener> {
    let mut failure = ErrorKind::AddrNotAvailable.into();
    for address in address.to_socket_addrs()? {
        let listening = match address.ip() {
            IpAddr::V6(ip) if ip.is_unspecified() => listen_everywhere(address.port()),
            ip if ip.is_unspecified() || is_own_address(ip) => TcpListener::bind(address),
            _ => Err(ErrorKind::AddrNotAvailable.into()),
        };
        match listening {
            Ok(listener) => return Ok(listener),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// Returns the error of a store that cannot listen, with the remedy.
pub(super) fn not_listening(address: impl fmt::Debug, error: io::Error) -> Error {
    match error.kind() {
        ErrorKind::AddrInUse => Error::caused(
            Kind::AddressInUse,
            format!(
                "the store cannot listen at {address:?}, the port is taken. If this process has \
                 joined the job before, make one `Accelerator` and clone it; if not, end the \
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
}

struct ServerState {
    options: StoreOptions,
    /// The secret from which the key of the job is derived.
    secret: Nonce,
    host_name: String,
    // The state machine has no step that could fail half-way.
    registry: Mutex<Registry>,
    /// The deadline has changed, or the store stops.
    changed: Condvar,
    pending: Arc<PendingHandshakes>,
    /// The rejected connections whose rejection is still being sent.
    rejected_handshakes: Arc<PendingHandshakes>,
    rejected_count: AtomicUsize,
    /// The last operations of ranks, as they have told them.
    records: RecordStore,
    /// Hands connections to the reading thread.
    reader_queue: ReaderQueue,
    /// The connection whose messages the reading thread is handling, plus one; zero if there is none.
    reading: AtomicU64,
    /// Set while an observer is answered.
    is_inspected: AtomicBool,
    stopped: AtomicBool,
}

impl ServerState {
    fn step(&self, event: StoreInput) {
        let mut registry = self.registry.lock();
        let is_sooner = self.step_before_clock(&mut registry, event, Instant::now());
        drop(registry);
        if is_sooner {
            self.changed.notify_all();
        }
    }

    /// Takes a step, and returns `true` if the clock has to look at once, since it would come too late otherwise.
    fn step_before_clock(&self, registry: &mut Registry, event: StoreInput, now: Instant) -> bool {
        let before = registry.state.due();
        self.step_at(registry, event, now);
        let after = registry.state.due();
        let is_sooner = after.is_some_and(|after| before.is_none_or(|before| after < before));
        if is_sooner {
            registry.clock_due = Some(registry.clock_due.map_or(now, |due| due.min(now)));
        }
        is_sooner
    }

    fn step_at(&self, registry: &mut Registry, event: StoreInput, now: Instant) {
        for action in registry.state.step(event, now) {
            self.act(registry, action);
        }
    }

    fn act(&self, registry: &Registry, action: StoreAction) {
        match action {
            StoreAction::CloseStore { connections } => {
                registry.send(&connections, &Message::StoreClosing);
            }
            StoreAction::TellNextPlace {
                connection,
                place: variables,
            } => {
                registry.send(&[connection], &Message::NextPlace { variables });
            }
            StoreAction::Heartbeat { connections } => {
                let message = Message::Heartbeat.encode();
                for rank in registry.of(&connections) {
                    rank.outbox.heartbeat(&message);
                }
            }
            StoreAction::Refuse { connection, error } => {
                registry.send(&[connection], &Message::Refused(WireError::new(&error)));
            }
            StoreAction::Report(report) => {
                if let Some(reports) = &registry.reports {
                    // The observer may have panicked; the store continues without it.
                    let _ = reports.send(report);
                }
            }
            StoreAction::ReportMissing {
                connection,
                mut missing,
            } => {
                let count = missing.len();
                missing.truncate(MAX_MESSAGE_RANKS);
                registry.send(&[connection], &Message::Waiting { missing, count });
            }
            StoreAction::ReportExit {
                connections,
                rank,
                text,
                severity,
            } => {
                let message = match severity {
                    Severity::RankLost => Message::ExitNotice { rank, text },
                    Severity::ExitInfo => Message::ExitInfo { rank, text },
                };
                registry.send(&connections, &message);
            }
            StoreAction::Welcome { connections, ranks } => {
                let body = to_bytes(&RankTable {
                    ranks,
                    secret: self.secret,
                });
                let key = self.options.token.as_ref().map(Token::key);
                for rank in registry.of(&connections) {
                    let parts: [&[u8]; 3] = [&rank.nonces[0], &rank.nonces[1], &body];
                    let proof = key.as_ref().map(|key| key.prove("welcome", &parts));
                    let body = body.clone();
                    rank.outbox.push(&Message::Welcome { body, proof }.encode());
                }
            }
        }
    }

    fn run_clock(&self) {
        let mut registry = self.registry.lock();
        while !self.is_stopped() {
            let now = Instant::now();
            registry = match self.look_at_clock(&mut registry, now) {
                Some(due) => {
                    let pause = due.saturating_duration_since(now);
                    self.changed.wait_timeout(registry, pause)
                }
                None => self.changed.wait(registry),
            };
        }
    }

    /// Does what is due, and returns when the clock is to look again. A suspension after `now` makes the next look late.
    fn look_at_clock(&self, registry: &mut Registry, now: Instant) -> Option<Instant> {
        if registry.state.was_suspended(registry.clock_due, now) {
            self.step_at(registry, StoreInput::Suspended, now);
        }
        if registry.state.due().is_some_and(|due| due <= now) {
            // A heartbeat may have arrived that the reading thread has not read yet.
            for (rank, connection) in registry.state.silent(now) {
                if registry.has_unread(connection) || self.is_reading(connection) {
                    let message = RankMessage::Heartbeat;
                    self.step_at(registry, StoreInput::Message { rank, message }, now);
                }
            }
            self.step_at(registry, StoreInput::Tick, now);
        }
        registry.clock_due = registry.state.due().map(|due| due.max(now));
        registry.clock_due
    }

    /// Returns `true` if the reading thread may have taken bytes of a connection, and not handled them yet.
    fn is_reading(&self, connection: Connection) -> bool {
        self.reading.load(Ordering::SeqCst) == connection + 1
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{rendezvous::tests::registration, wire::message::Registration};

    const LIVENESS: Duration = Duration::from_secs(2);

    /// Lets a rank register at the time that is returned, long ago.
    fn register(shared: &ServerState, registry: &mut Registry) -> Instant {
        let registration = Registration {
            connect_timeout: Duration::from_secs(600),
            ..registration(0, 2)
        };
        let start = Instant::now().checked_sub(10 * LIVENESS).unwrap();
        let event = StoreInput::Registered {
            connection: 1,
            registration,
        };
        assert!(shared.step_before_clock(registry, event, start));
        start
    }

    #[test]
    fn a_store_stopped_before_its_first_look_blames_nobody() {
        let server = StoreServer::bind(("127.0.0.1", 0), 2, None).unwrap();
        // The clock of the server waits for the lock.
        let mut registry = server.shared.registry.lock();
        let start = register(&server.shared, &mut registry);
        let now = start + 2 * LIVENESS;
        server.shared.look_at_clock(&mut registry, now);
        assert!(registry.state.due().is_some(), "it was asleep itself");
        // From here on somebody watches.
        for looks in 1..=8 {
            assert!(registry.state.due().is_some(), "it is blamed too soon");
            let now = now + looks * LIVENESS / 8;
            server.shared.look_at_clock(&mut registry, now);
        }
        assert!(registry.state.due().is_none(), "silence is never noticed");
    }

    /// The reading thread has taken the bytes of a rank, and waits for the lock that the clock holds.
    #[test]
    fn a_rank_whose_message_is_being_handled_is_not_silent() {
        let server = StoreServer::bind(("127.0.0.1", 0), 2, None).unwrap();
        let mut registry = server.shared.registry.lock();
        let start = register(&server.shared, &mut registry);
        server.shared.reading.store(1 + 1, Ordering::SeqCst);
        for looks in 0..=16 {
            let now = start + looks * LIVENESS / 8;
            server.shared.look_at_clock(&mut registry, now);
            assert!(registry.state.due().is_some(), "it is blamed");
        }
        server.shared.reading.store(0, Ordering::SeqCst);
        for looks in 17..=32 {
            let now = start + looks * LIVENESS / 8;
            server.shared.look_at_clock(&mut registry, now);
        }
        assert!(registry.state.due().is_none(), "silence is never noticed");
    }

    #[test]
    fn the_threads_of_a_dropped_store_end() {
        let server = StoreServer::bind(("127.0.0.1", 0), 2, None).unwrap();
        let shared = Arc::downgrade(&server.shared);
        drop(server);
        let until = Instant::now() + Duration::from_secs(30);
        while shared.strong_count() > 0 {
            assert!(Instant::now() < until, "a thread still runs");
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_store_stopped_within_a_look_blames_nobody() {
        let server = StoreServer::bind(("127.0.0.1", 0), 2, None).unwrap();
        let mut registry = server.shared.registry.lock();
        let start = register(&server.shared, &mut registry);
        // The look takes all the time from then to now.
        server.shared.look_at_clock(&mut registry, start);
        server.shared.look_at_clock(&mut registry, Instant::now());
        assert!(registry.state.due().is_some(), "it was asleep itself");
    }
}
