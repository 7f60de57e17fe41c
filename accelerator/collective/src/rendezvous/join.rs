//! The attempt of one rank to join through the store, until it has the table of all ranks.

use std::{
    cell::OnceCell,
    fmt,
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use super::address::{address_like, any_like, listen_everywhere};
use super::peer_origin::PeerOrigin;
use super::store_client::{HeartbeatTimer, StoreLocation, WeakStoreClient};
use super::store_state::RECONNECT_TIME;
use super::token::{Key, random};
use super::{Rendezvous, Security, StoreHost};
use crate::error::{Error, Kind, Result, Seconds, list_ranks, stderr_fallback};
use crate::socket::limit_backoff;
use crate::topology::{Topology, TransportKind};
use crate::wire::message::{
    LocalPlace, MAX_SHORT_BYTES, MAX_TABLE_BYTES, Message, Nonce, Proves, RankTable, Registration,
};
use crate::wire::{ReadError, from_bytes, to_bytes};
use accelerator_host::machine::{boot_id, host_name};

pub(super) struct JoinAttempt<'a> {
    pub(super) rendezvous: &'a Rendezvous,
    pub(super) topology: &'a Topology,
    pub(super) key: Option<Key>,
    pub(super) deadline: Instant,
    pub(super) connect_timeout: Duration,
    /// The time without a heartbeat after which a rank or the store counts as lost.
    pub(super) liveness: Duration,
    pub(super) transport: TransportKind,
    /// The store of the group that this rank comes from, if any. The launcher may announce a newer place for the rank
    /// there.
    pub(super) former_store: &'a WeakStoreClient,
    /// The store's address as the other ranks see it.
    pub(super) outward: SocketAddr,
    /// True if other hosts may reach this one by an address other than the one by which this rank reaches the store.
    pub(super) is_in_network: bool,
    /// The host and the id of the process that hosts the store, once they are known.
    pub(super) store_process: OnceCell<(String, u32)>,
}

pub(super) struct Joined {
    pub(super) ranks: Vec<Registration>,
    /// The secret from which the key of the job is derived.
    pub(super) secret: Nonce,
    pub(super) listener: TcpListener,
    pub(super) stream: TcpStream,
}

impl JoinAttempt<'_> {
    pub(super) fn run(&self, targets: &[SocketAddr]) -> Result<Joined> {
        let mut targets = targets.iter().cycle();
        // Until when a store that was there must be there again.
        let mut lost: Option<Instant> = None;
        let started = Instant::now();
        let mut warning = WARN_AFTER;
        loop {
            self.check_for_newer_place()?;
            // `targets` has at least one address, so its cycle has no end.
            let Some(target) = targets.next() else {
                return Err(self.error("its host has no address"));
            };
            let until = lost.map_or(self.deadline, |lost| lost.min(self.deadline));
            let (failure, advice) = match self.try_once(target, until) {
                Ok(table) => return Ok(table),
                Err(JoinError::Final(error)) => return Err(error),
                Err(JoinError::Again(failure)) => (failure, WHERE_IT_IS),
                Err(JoinError::NoAnswer(why)) => (
                    format!("something listens there, but {why}"),
                    ANOTHER_PROGRAM,
                ),
                Err(JoinError::Lost(failure)) => {
                    lost.get_or_insert(Instant::now() + RECONNECT_TIME);
                    (failure, WHERE_IT_IS)
                }
            };
            let due = Instant::now() + RETRY;
            if lost.is_some_and(|lost| due > lost) {
                return Err(self.gone(&failure));
            }
            if due > self.deadline {
                return Err(self.error(format_args!(
                    "it could not be reached within {}: {failure}; {advice}",
                    Seconds(self.connect_timeout)
                )));
            }
            if started.elapsed() > warning {
                self.warn_of_absence(started.elapsed(), &failure);
                warning *= 2;
            }
            thread::sleep(RETRY);
        }
    }

    fn try_once(&self, target: &SocketAddr, until: Instant) -> Result<Joined, JoinError> {
        let left = until.saturating_duration_since(Instant::now());
        let left = left.clamp(Duration::from_millis(1), Duration::from_secs(5));
        let stream = TcpStream::connect_timeout(target, left)
            .map_err(|error| JoinError::Again(error.to_string()))?;
        // Without it the answer only takes longer.
        let _ = stream.set_nodelay(true);
        limit_backoff(&stream);
        self.check_origin(&stream, until)?;
        let nonce = random().map_err(JoinError::Final)?;
        let hello = Message::Hello {
            nonce,
            job: self.rendezvous.job.clone(),
            proves: match self.key {
                Some(_) => Proves::Token,
                None => Proves::Nothing,
            },
        };
        // Whoever does not answer it may be anybody.
        let answer = self
            .send(&stream, &hello)
            .and_then(|()| {
                let until = until.min(Instant::now() + ANSWER);
                self.receive(&stream, MAX_SHORT_BYTES, until)
            })
            .map_err(|error| match error {
                JoinError::Again(why) => {
                    JoinError::NoAnswer(format!("it does not answer as a store does: {why}"))
                }
                other => other,
            })?;
        let own = match answer {
            Message::Challenge {
                nonce: own,
                proof,
                host,
                pid,
            } => {
                self.check_store(&nonce, &own, proof)?;
                // It may be the second time that the store is asked.
                let _ = self.store_process.set((host, pid));
                own
            }
            Message::Refused(refusal) => return Err(self.refused(refusal.kind())),
            other => return Err(self.unexpected(other)),
        };
        let listener = self.listen(&stream).map_err(JoinError::Final)?;
        let body = to_bytes(
            &self
                .registration(&listener, &stream)
                .map_err(JoinError::Final)?,
        );
        let proof = self
            .key
            .as_ref()
            .map(|key| key.prove("rank", &[&own, &nonce, &body]));
        self.send(&stream, &Message::Register { body, proof })?;
        let (body, proof) = self.wait(&stream)?;
        let (ranks, secret) = self.read(&body, proof, &[nonce, own])?;
        Ok(Joined {
            ranks,
            secret,
            listener,
            stream,
        })
    }

    /// Waits for the table, with heartbeats in both directions.
    fn wait(&self, stream: &TcpStream) -> Result<(Vec<u8>, Option<[u8; 32]>), JoinError> {
        let started = Instant::now();
        // The store answers at its deadline at the latest, which is not after this rank's; the
        // rest is for the way.
        let until = self.deadline + VERDICT_WAIT;
        let mut timer = HeartbeatTimer::new(self.liveness);
        loop {
            let lost = |error: ReadError| JoinError::Lost(error.to_string());
            if Message::arrives(stream, Some(timer.pause())).map_err(lost)? {
                timer.on_received();
                let due = Instant::now() + VERDICT_WAIT;
                match self.receive(stream, MAX_TABLE_BYTES, due) {
                    Ok(Message::Welcome { body, proof }) => return Ok((body, proof)),
                    Ok(Message::Waiting { missing, count }) => {
                        self.warn(started, &missing, count);
                    }
                    Ok(Message::Heartbeat) => {}
                    Ok(Message::StoreClosing) => {
                        return Err(JoinError::Lost("the store was closed".to_owned()));
                    }
                    Ok(other) => return Err(self.unexpected(other)),
                    Err(JoinError::Again(why)) => return Err(JoinError::Lost(why)),
                    Err(error) => return Err(error),
                }
            }
            if timer.is_due() {
                // Whether the store is there shows when something is read.
                let _ = Message::Heartbeat.offer(stream);
            }
            self.check_for_newer_place().map_err(JoinError::Final)?;
            if self.rendezvous.store == StoreHost::Rank0
                && let Some(silence) = timer.silence()
            {
                return Err(JoinError::Final(self.store().error(format_args!(
                    "has been silent for {} before the ranks had met: stopped, swapped out, or \
                     cut off from the network",
                    Seconds(silence)
                ))));
            }
            if Instant::now() > until {
                return Err(JoinError::Again("nothing came in time".to_owned()));
            }
        }
    }

    /// Returns an error if the launcher has since given this rank a newer place, or told it that it does not continue.
    /// The group at this store will then never be complete, and the store may be gone.
    fn check_for_newer_place(&self) -> Result<()> {
        match self.former_store.has_next_place() {
            true => Err(self.error(
                "the launcher has given up the group that meets there, because a rank was lost",
            )),
            false => Ok(()),
        }
    }

    fn warn(&self, started: Instant, missing: &[usize], count: usize) {
        let more = count.saturating_sub(missing.len());
        let text = format!(
            "rank {} has waited {} for the others at the store at {}; missing: {}{}",
            self.topology.rank(),
            Seconds(started.elapsed()),
            self.rendezvous,
            list_ranks(missing),
            match more {
                0 => String::new(),
                more => format!(", and {more} more"),
            }
        );
        tracing::warn!("{text}");
        stderr_fallback(&text);
    }

    fn warn_of_absence(&self, waited: Duration, failure: &str) {
        let text = format!(
            "rank {} has not reached the store at {} in {}: {failure}; it gives up after {}",
            self.topology.rank(),
            self.rendezvous,
            Seconds(waited),
            Seconds(self.connect_timeout)
        );
        tracing::warn!("{text}");
        stderr_fallback(&text);
    }

    /// The error of a store that was there, and is not any more.
    fn gone(&self, failure: &str) -> Error {
        self.store()
            .error(format_args!("is gone before the ranks had met: {failure}"))
    }

    /// The address of the store and its host, as far as they are known.
    pub(super) fn store(&self) -> StoreLocation {
        StoreLocation {
            address: self.rendezvous.to_string(),
            host: self.rendezvous.store,
            store_process: self.store_process.get().cloned(),
        }
    }

    fn registration(&self, listener: &TcpListener, store: &TcpStream) -> Result<Registration> {
        let unread = |error| Error::io("this rank's own address cannot be read", error);
        let mut address = listener.local_addr().map_err(unread)?;
        if address.ip().is_unspecified() {
            let mut ip = store.local_addr().map_err(unread)?.ip();
            if ip.is_loopback() {
                // The others reach this host where its way to the store's address begins.
                let outward = UdpSocket::bind((any_like(self.outward), 0))
                    .and_then(|socket| {
                        socket.connect(self.outward)?;
                        socket.local_addr()
                    })
                    .map_err(|error| {
                        Error::io("this host's address in the network cannot be found", error)
                    })?;
                ip = outward.ip();
            }
            address.set_ip(ip);
        }
        Ok(Registration {
            rank: self.topology.rank(),
            world_size: self.topology.world_size(),
            host: host_name(),
            pid: std::process::id(),
            address,
            connect_timeout: self.deadline.saturating_duration_since(Instant::now()),
            liveness: self.liveness,
            transport: self.transport,
            boot: boot_id(),
            local: self.topology.is_local_known().then(|| LocalPlace {
                rank: self.topology.local_rank(),
                size: self.topology.local_world_size(),
            }),
        })
    }

    /// Listens at the network interface that is named. Otherwise where the store is reached from, so that ranks on the
    /// loopback interface are reachable there only; at all addresses where others may reach this host by another one.
    fn listen(&self, stream: &TcpStream) -> Result<TcpListener> {
        let refused = |error| Error::io("this rank cannot listen for the other ranks", error);
        if let Some(name) = self.rendezvous.network_interface() {
            let local = stream.local_addr().map_err(refused)?;
            let ip = address_like(name, local.ip())?;
            return TcpListener::bind((ip, 0)).map_err(refused);
        }
        let bind = |local: SocketAddr| {
            let behind_a_name = local.ip().is_loopback() && !self.outward.ip().is_loopback();
            match behind_a_name || self.is_in_network {
                true => listen_everywhere(0),
                false => TcpListener::bind((local.ip(), 0)),
            }
        };
        stream.local_addr().and_then(bind).map_err(refused)
    }

    /// Checks that the store belongs to this user on this host; with a token, any store passes.
    fn check_origin(&self, stream: &TcpStream, until: Instant) -> Result<(), JoinError> {
        if self.key.is_some() {
            return Ok(());
        }
        let left = until.saturating_duration_since(Instant::now());
        let why = match PeerOrigin::of(stream, left.min(ACCEPTANCE)) {
            PeerOrigin::SameUser => return Ok(()),
            PeerOrigin::Unknown if self.rendezvous.security == Security::Waived => return Ok(()),
            // It belongs to nobody until the store has accepted it.
            PeerOrigin::Unknown => {
                return Err(JoinError::NoAnswer(
                    "it has not accepted the connection, or the system does not tell whose process it is, for which \
                     ACCEL_TOKEN_FILE has to be set for every process"
                        .to_owned(),
                ));
            }
            PeerOrigin::Remote if self.rendezvous.security == Security::Waived => return Ok(()),
            PeerOrigin::Remote => "it is on another host, and this rank has no token; set \
                 ACCEL_TOKEN_FILE for every process, or ACCEL_INSECURE=1 on a network where \
                 everyone may join"
                .to_owned(),
            PeerOrigin::OtherUser { user } => format!(
                "it belongs to user {user}, and this rank has no token; another program or another job may be \
                 using this port"
            ),
        };
        Err(JoinError::Final(Error::unauthorized(format!(
            "{}: {why}",
            self.place()
        ))))
    }

    fn check_store(
        &self,
        nonce: &[u8; 32],
        own: &[u8; 32],
        proof: Option<[u8; 32]>,
    ) -> Result<(), JoinError> {
        let why = match (&self.key, proof) {
            (None, None) => return Ok(()),
            (Some(key), Some(proof)) if key.accepts("store", &[nonce, own], &proof) => {
                return Ok(());
            }
            (Some(_), Some(_)) => {
                "its token is not the token of this rank; ACCEL_TOKEN_FILE must name the same \
                 token for every process"
            }
            (Some(_), None) => {
                "it has no token, but this rank has; ACCEL_TOKEN_FILE must be set for every \
                 process, the launcher included"
            }
            (None, Some(_)) => "it has a token, but this rank has none; set ACCEL_TOKEN_FILE",
        };
        Err(JoinError::Final(Error::unauthorized(format!(
            "{}: {why}",
            self.place()
        ))))
    }

    fn read(
        &self,
        body: &[u8],
        proof: Option<[u8; 32]>,
        nonces: &[Nonce; 2],
    ) -> Result<(Vec<Registration>, Nonce), JoinError> {
        let parts: [&[u8]; 3] = [&nonces[0], &nonces[1], body];
        if let Some(key) = &self.key
            && !key.accepts("welcome", &parts, &proof.unwrap_or_default())
        {
            return Err(JoinError::Final(Error::unauthorized(format!(
                "{}: its table of ranks is not proved by the token",
                self.place()
            ))));
        }
        let table: RankTable =
            from_bytes(body).map_err(|error| JoinError::Final(self.error(error)))?;
        if table.ranks.len() != self.topology.world_size() {
            return Err(JoinError::Final(
                self.error("its table of ranks is incomplete"),
            ));
        }
        Ok((table.ranks, table.secret))
    }

    fn send(&self, stream: &TcpStream, message: &Message) -> Result<(), JoinError> {
        message
            .send(stream)
            .map_err(|error| JoinError::Again(error.to_string()))
    }

    fn receive(
        &self,
        stream: &TcpStream,
        bound: usize,
        deadline: Instant,
    ) -> Result<Message, JoinError> {
        Message::receive(stream, bound, deadline).map_err(|error| match error {
            ReadError::Frame(_) | ReadError::Message(_) => {
                JoinError::Final(Error::protocol(format!(
                    "{} is no store of this library: {error}; does something else listen there?",
                    self.place()
                )))
            }
            ReadError::Closed | ReadError::Io(_) | ReadError::Torn => {
                JoinError::Again(error.to_string())
            }
        })
    }

    /// Returns the error of a rank that an unauthenticated peer has refused: it depends on the kind of the refusal
    /// only, and its text is this rank's own.
    fn refused(&self, kind: Kind) -> JoinError {
        let why = match kind {
            Kind::Rendezvous => format!(
                "it serves another job, and a rank of the job {:?} must look for its own; do two jobs use one port?",
                self.rendezvous.job
            ),
            Kind::Unauthorized if self.key.is_none() => "it does not let this rank join without a token; set \
                 ACCEL_TOKEN_FILE for every process to the file that holds the job's token, or, on a network where \
                 everyone may join, ACCEL_INSECURE=1 for every process, that of the store included"
                .to_owned(),
            Kind::Unauthorized => "it has no token, but this rank has; ACCEL_TOKEN_FILE must be set for every process, \
                 the launcher included"
                .to_owned(),
            _ => "it refused this rank before it proved that it is the store; all ranks and the launcher must be \
                 built with the same version of this library, and no other program may use the port"
                .to_owned(),
        };
        let kind = match kind {
            Kind::Rendezvous | Kind::Unauthorized => kind,
            _ => Kind::Protocol,
        };
        JoinError::Final(Error::new(kind, format!("{}: {why}", self.place())))
    }

    fn unexpected(&self, message: Message) -> JoinError {
        JoinError::Final(match message {
            Message::Refused(refusal) => refusal.into_error(),
            _ => Error::protocol(format!(
                "{} gave an answer to another question",
                self.place()
            )),
        })
    }

    fn error(&self, what: impl fmt::Display) -> Error {
        Error::rendezvous(format!("{}: {what}", self.place()))
    }

    fn place(&self) -> String {
        format!(
            "rank {} and the store at {}",
            self.topology.rank(),
            self.rendezvous
        )
    }
}

enum JoinError {
    Again(String),
    Final(Error),
    /// Somebody listens there, and nothing shows that it is the store. Another try may succeed.
    NoAnswer(String),
    /// The store was there and is gone; it may come again soon.
    Lost(String),
}

pub(super) const RETRY: Duration = Duration::from_millis(50);
/// The longest time that a store may take to accept a connection.
const ACCEPTANCE: Duration = Duration::from_secs(1);
/// The longest time that a store may take to identify itself.
const ANSWER: Duration = Duration::from_secs(10);
const VERDICT_WAIT: Duration = Duration::from_secs(5);
/// The advice if nobody listens.
const WHERE_IT_IS: &str =
    "is rank 0 or the launcher running, and do MASTER_ADDR and the port name it?";
/// The advice if another program seems to listen.
const ANOTHER_PROGRAM: &str = "does another program use this port? Then end it, or give the job \
     another port (MASTER_PORT)";
/// The time after which the first warning about an absent store is logged; it doubles with each warning.
const WARN_AFTER: Duration = Duration::from_secs(3);
