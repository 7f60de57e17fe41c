//! A rank's way to the store and to the other ranks' addresses.

use std::{
    fmt,
    net::{
        IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket,
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    Rendezvous, Security, StoreHost, TokenSource,
    owner::Neighbour,
    server::{StoreOptions, StoreServer},
    token::{Key, Token, random},
};
use crate::rendezvous::LONGEST;
use crate::{
    error::{Error, Kind, Result},
    topology::Topology,
    transport::Seconds,
    wire::{
        ReadError,
        message::{self, Message, Proves, Registration, Table},
    },
};

/// What a rank knows when all have met.
#[derive(Debug)]
pub(crate) struct Meeting {
    /// All ranks, in rank order.
    pub(crate) ranks: Vec<Registration>,
    /// Where this rank listens for the others.
    pub(crate) listener: TcpListener,
    /// By what the ranks of this job know one another.
    pub(crate) key: Key,
    /// The store, where this rank hosts it; to be kept until all ranks are connected.
    pub(crate) store: Option<StoreServer>,
}

impl Rendezvous {
    /// Meets the other ranks.
    pub(crate) fn meet(&self, topology: &Topology, patience: Duration) -> Result<Meeting> {
        let deadline = Instant::now() + patience.min(LONGEST);
        let token = match &self.token {
            TokenSource::File(path) => Some(Token::from_file(path)?),
            TokenSource::Given(token) => Some(token.clone()),
            TokenSource::None => None,
        };
        let addresses = self.resolve(deadline)?;
        let mut targets = addresses.clone();
        let mut store = None;
        if topology.is_main() && self.store == StoreHost::Rank0 {
            let server = self.serve(&addresses, topology.world_size(), token.clone())?;
            let mut own = server.local_addr();
            if own.ip().is_unspecified() {
                own.set_ip(match own.ip() {
                    IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                    IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
                });
            }
            targets = vec![own];
            store = Some(server);
        }
        let visit = Visit {
            rendezvous: self,
            topology,
            key: token.as_ref().map(Token::key),
            deadline,
            patience,
            outward: addresses[0],
        };
        let (ranks, secret, listener) = visit.run(&targets)?;
        let key = match &visit.key {
            Some(key) => Key::new(key.prove("job", &[&secret])),
            None => Key::new(secret),
        };
        Ok(Meeting {
            ranks,
            listener,
            key,
            store,
        })
    }

    /// The addresses of the store; at least one.
    fn resolve(&self, deadline: Instant) -> Result<Vec<SocketAddr>> {
        loop {
            let failure = match (self.host.as_str(), self.port).to_socket_addrs() {
                Ok(addresses) => {
                    let addresses: Vec<SocketAddr> = addresses.collect();
                    if !addresses.is_empty() {
                        return Ok(addresses);
                    }
                    std::io::Error::other("the name has no address")
                }
                Err(error) => error,
            };
            // The name of a host that is starting may become known yet.
            if Instant::now() + RETRY > deadline {
                return Err(Error::caused(
                    Kind::Rendezvous,
                    format!(
                        "the host of the store, {:?}, has no known address; MASTER_ADDR must be \
                         the host where the ranks meet",
                        self.host
                    ),
                    failure,
                ));
            }
            thread::sleep(RETRY);
        }
    }

    /// Hosts the store: at the address itself or, where that is a name for something in front
    /// of this host, at all its addresses.
    fn serve(
        &self,
        addresses: &[SocketAddr],
        world_size: usize,
        token: Option<Token>,
    ) -> Result<StoreServer> {
        let mut options = StoreOptions::new(world_size).with_job(&self.job);
        if let Some(token) = token {
            options = options.with_token(token);
        }
        if self.security == Security::Waived {
            options = options.without_security();
        }
        match StoreServer::bind_with(addresses, options.clone()) {
            Err(error) if error.is_io() => {
                let any = match addresses[0] {
                    SocketAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
                    SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
                };
                StoreServer::bind_with((any, self.port), options).map_err(|_| error)
            }
            other => other,
        }
    }
}

/// One rank's visit to the store.
struct Visit<'a> {
    rendezvous: &'a Rendezvous,
    topology: &'a Topology,
    key: Option<Key>,
    deadline: Instant,
    patience: Duration,
    /// The store's address as the other ranks see it.
    outward: SocketAddr,
}

impl Visit<'_> {
    fn run(
        &self,
        targets: &[SocketAddr],
    ) -> Result<(Vec<Registration>, message::Nonce, TcpListener)> {
        let mut targets = targets.iter().cycle();
        loop {
            // `targets` has at least one address, so its cycle has no end.
            let Some(target) = targets.next() else {
                return Err(self.error("its host has no address"));
            };
            let failure = match self.try_once(target) {
                Ok(done) => return Ok(done),
                Err(Setback::Final(error)) => return Err(error),
                Err(Setback::Again(failure)) => failure,
            };
            if Instant::now() + RETRY > self.deadline {
                return Err(self.error(format_args!(
                    "it could not be reached within {}: {failure}; is rank 0 or the launcher \
                     running, and do MASTER_ADDR and the port name it?",
                    Seconds(self.patience)
                )));
            }
            thread::sleep(RETRY);
        }
    }

    fn try_once(
        &self,
        target: &SocketAddr,
    ) -> Result<(Vec<Registration>, message::Nonce, TcpListener), Setback> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let left = left.clamp(Duration::from_millis(1), Duration::from_secs(5));
        let stream = TcpStream::connect_timeout(target, left)
            .map_err(|error| Setback::Again(error.to_string()))?;
        // Without it the answer only takes longer.
        let _ = stream.set_nodelay(true);
        self.check_neighbour(&stream)?;
        let nonce = random().map_err(Setback::Final)?;
        self.say(
            &stream,
            &Message::Hello {
                nonce,
                job: self.rendezvous.job.clone(),
                proves: match self.key {
                    Some(_) => Proves::Token,
                    None => Proves::Nothing,
                },
            },
        )?;
        let own = match self.hear(&stream, message::SHORT, self.deadline)? {
            Message::Challenge { nonce: own, proof } => {
                self.check_store(&nonce, &own, proof)?;
                own
            }
            other => return Err(self.unexpected(other)),
        };
        let listener = self.listen(&stream).map_err(Setback::Final)?;
        let body = message::to_bytes(&self.registration(&listener).map_err(Setback::Final)?);
        let proof = self
            .key
            .as_ref()
            .map(|key| key.prove("rank", &[&own, &nonce, &body]));
        self.say(&stream, &Message::Register { body, proof })?;
        // The store answers at its deadline at the latest, which is not after this rank's; the
        // rest is for the way.
        match self.hear(&stream, message::LONG, self.deadline + SLACK)? {
            Message::Welcome { body, proof } => {
                let (ranks, secret) = self.read(&body, proof, &[nonce, own])?;
                Ok((ranks, secret, listener))
            }
            other => Err(self.unexpected(other)),
        }
    }

    fn registration(&self, listener: &TcpListener) -> Result<Registration> {
        let mut address = listener
            .local_addr()
            .map_err(|error| Error::io("this rank's own address cannot be read", error))?;
        if address.ip().is_loopback() && !self.outward.ip().is_loopback() {
            // This rank hosts the store behind a name that is not its own address. The others
            // reach it where the way to that address begins.
            let any = match self.outward {
                SocketAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
                SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            let outward = UdpSocket::bind((any, 0))
                .and_then(|socket| {
                    socket.connect(self.outward)?;
                    socket.local_addr()
                })
                .map_err(|error| {
                    Error::io("this host's address in the network cannot be found", error)
                })?;
            address.set_ip(outward.ip());
        }
        Ok(Registration {
            rank: self.topology.rank(),
            world_size: self.topology.world_size(),
            host: host_name(),
            pid: std::process::id(),
            address,
            patience: self.deadline.saturating_duration_since(Instant::now()),
        })
    }

    /// Listens where the store is reached from, so that ranks on the loopback interface are
    /// reachable there only.
    fn listen(&self, stream: &TcpStream) -> Result<TcpListener> {
        let local = stream.local_addr().map(|local| local.ip());
        local
            .and_then(|ip| {
                let behind_a_name = ip.is_loopback() && !self.outward.ip().is_loopback();
                match (behind_a_name, self.outward) {
                    (true, SocketAddr::V4(_)) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)),
                    (true, SocketAddr::V6(_)) => TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)),
                    (false, _) => TcpListener::bind((ip, 0)),
                }
            })
            .map_err(|error| Error::io("this rank cannot listen for the other ranks", error))
    }

    /// Without a token, only a store of this user on this host is trusted.
    fn check_neighbour(&self, stream: &TcpStream) -> Result<(), Setback> {
        if self.key.is_some() {
            return Ok(());
        }
        let why = match Neighbour::of(stream) {
            Neighbour::Own => return Ok(()),
            Neighbour::Afar if self.rendezvous.security == Security::Waived => return Ok(()),
            Neighbour::Afar => "it is on another host, and this rank has no token; set \
                 ACCEL_TOKEN_FILE for every process, or ACCEL_INSECURE=1 on a network where \
                 everyone may join"
                .to_owned(),
            Neighbour::Other { user } => format!(
                "it belongs to user {user}, and this rank has no token; another job may be using \
                 this port"
            ),
        };
        Err(Setback::Final(Error::new(
            Kind::Unauthorized,
            format!("{}: {why}", self.place()),
        )))
    }

    fn check_store(
        &self,
        nonce: &[u8; 32],
        own: &[u8; 32],
        proof: Option<[u8; 32]>,
    ) -> Result<(), Setback> {
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
        Err(Setback::Final(Error::new(
            Kind::Unauthorized,
            format!("{}: {why}", self.place()),
        )))
    }

    fn read(
        &self,
        body: &[u8],
        proof: Option<[u8; 32]>,
        nonces: &[message::Nonce; 2],
    ) -> Result<(Vec<Registration>, message::Nonce), Setback> {
        let expected = self
            .key
            .as_ref()
            .map(|key| super::server::welcome(key, nonces, body));
        if expected.is_some() && expected != proof {
            return Err(Setback::Final(Error::new(
                Kind::Unauthorized,
                format!(
                    "{}: its table of ranks is not proved by the token",
                    self.place()
                ),
            )));
        }
        let table: Table =
            message::from_bytes(body).map_err(|error| Setback::Final(self.error(error)))?;
        let complete = table.ranks.len() == self.topology.world_size()
            && table.ranks.iter().enumerate().all(|(i, x)| x.rank == i);
        if !complete {
            return Err(Setback::Final(
                self.error("its table of ranks is incomplete"),
            ));
        }
        Ok((table.ranks, table.secret))
    }

    fn say(&self, stream: &TcpStream, message: &Message) -> Result<(), Setback> {
        message
            .send(stream)
            .map_err(|error| Setback::Again(error.to_string()))
    }

    fn hear(
        &self,
        stream: &TcpStream,
        bound: usize,
        deadline: Instant,
    ) -> Result<Message, Setback> {
        Message::receive(stream, bound, deadline).map_err(|error| match error {
            ReadError::Frame(_) | ReadError::Message(_) => Setback::Final(Error::new(
                Kind::Protocol,
                format!(
                    "{} is no store of this library: {error}; does something else listen there?",
                    self.place()
                ),
            )),
            ReadError::Closed | ReadError::Io(_) | ReadError::Torn => {
                Setback::Again(error.to_string())
            }
        })
    }

    fn unexpected(&self, message: Message) -> Setback {
        Setback::Final(match message {
            Message::Refused(refusal) => refusal.into_error(),
            _ => Error::new(
                Kind::Protocol,
                format!("{} gave an answer to another question", self.place()),
            ),
        })
    }

    fn error(&self, what: impl fmt::Display) -> Error {
        Error::new(Kind::Rendezvous, format!("{}: {what}", self.place()))
    }

    fn place(&self) -> String {
        format!(
            "rank {} and the store at {}",
            self.topology.rank(),
            self.rendezvous
        )
    }
}

/// Why a visit ended without a table.
enum Setback {
    /// Another try may succeed.
    Again(String),
    Final(Error),
}

/// The name of this host, for messages.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname");
    let name = name.or_else(|_| std::env::var("HOSTNAME"));
    let mut name = name.unwrap_or_default().trim().to_owned();
    let end = name.char_indices().nth(64).map_or(name.len(), |(at, _)| at);
    name.truncate(end);
    match name.is_empty() {
        true => "an unnamed host".to_owned(),
        false => name,
    }
}

const RETRY: Duration = Duration::from_millis(50);
const SLACK: Duration = Duration::from_secs(5);
