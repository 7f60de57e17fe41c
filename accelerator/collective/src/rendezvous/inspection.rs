//! The last operations of all ranks of a running job, as an observer sees them through the store.

use std::{
    collections::BTreeMap,
    net::{TcpStream, ToSocketAddrs},
    time::{Duration, Instant},
};

use accelerator_host::sync::{Condvar, Mutex};

use super::{
    Rendezvous,
    outbox::Registry,
    token::{Key, Token, random},
};
use crate::{
    error::{Error, Kind, Result},
    wire::{
        ReadError,
        message::{MAX_RECORDS_BYTES, MAX_SHORT_BYTES, Message, OpRecord, Proves, RankStatus},
    },
};

/// The last operations of a rank, and the process that it is.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FlightRecords {
    /// The rank.
    pub rank: usize,
    /// Its host.
    pub host: String,
    /// Its process on that host.
    pub pid: u32,
    /// Its state, which says how old the operations are.
    pub state: RankStatus,
    /// Its last operations, the oldest first; `None` if it has never told any.
    pub operations: Option<Vec<OpRecord>>,
}

/// Asks the store of a running job for the last operations of its ranks, in the order of ranks. Only ranks that have come
/// to the store are listed. The store gives the ranks a second, and must answer within `timeout`.
///
/// # Errors
///
/// A rendezvous error if the store cannot be reached or does not answer; an unauthorized error if it refuses the token; a
/// protocol error if something else listens there.
pub fn flight_records(rendezvous: &Rendezvous, timeout: Duration) -> Result<Vec<FlightRecords>> {
    let deadline = Instant::now() + timeout;
    let key = rendezvous.token.read()?.as_ref().map(Token::key);
    let unreachable = |error: std::io::Error| {
        let text = format!(
            "cannot reach the store at {rendezvous}: the job may have ended, or its number of ranks may have changed"
        );
        Error::caused(Kind::Rendezvous, text, error)
    };
    let address = (rendezvous.host(), rendezvous.port());
    let mut found = Err(std::io::ErrorKind::AddrNotAvailable.into());
    for address in address.to_socket_addrs().map_err(unreachable)? {
        let left = deadline.saturating_duration_since(Instant::now());
        found = TcpStream::connect_timeout(&address, left.max(MIN_CONNECT_TIME));
        if found.is_ok() {
            break;
        }
    }
    let stream = found.map_err(unreachable)?;
    let client = InspectClient {
        rendezvous,
        stream,
        deadline,
    };
    client.inspect(key)
}

/// The connection of an observer to the store.
struct InspectClient<'a> {
    rendezvous: &'a Rendezvous,
    stream: TcpStream,
    deadline: Instant,
}

impl InspectClient<'_> {
    fn inspect(&self, key: Option<Key>) -> Result<Vec<FlightRecords>> {
        let nonce = random()?;
        self.send(&Message::Hello {
            nonce,
            job: self.rendezvous.job.clone(),
            proves: match key {
                Some(_) => Proves::Token,
                None => Proves::Nothing,
            },
        })?;
        let (own, proof) = match self.receive(MAX_SHORT_BYTES)? {
            Message::Challenge { nonce, proof, .. } => (nonce, proof),
            // Nothing proves who says it, so that its text is not shown.
            Message::Refused(_) => {
                return Err(Error::unauthorized(format!(
                    "the store at {} refused the request: it belongs to another job, or it requires a token (ACCEL_TOKEN_FILE)",
                    self.rendezvous
                )));
            }
            message => return Err(self.unexpected(message)),
        };
        if let Some(key) = &key
            && !key.accepts("store", &[&nonce, &own], &proof.unwrap_or_default())
        {
            return Err(Error::unauthorized(format!(
                "the store at {} does not know the token of this job; another job may be using its port",
                self.rendezvous
            )));
        }
        let proof = key.map(|key| key.prove("observer", &[&own, &nonce]));
        self.send(&Message::Inspect { proof })?;
        let mut ranks = Vec::new();
        loop {
            match self.receive(MAX_RECORDS_BYTES)? {
                Message::RecordsOf {
                    rank,
                    host,
                    pid,
                    state,
                    records: operations,
                } => ranks.push(FlightRecords {
                    rank,
                    host,
                    pid,
                    state,
                    operations,
                }),
                Message::StoreClosing => return Ok(ranks),
                message => return Err(self.unexpected(message)),
            }
        }
    }

    fn send(&self, message: &Message) -> Result<()> {
        message.send(&self.stream).map_err(|error| self.lost(error))
    }

    fn receive(&self, bound: usize) -> Result<Message> {
        Message::receive(&self.stream, bound, self.deadline).map_err(|error| self.lost(error))
    }

    fn lost(&self, error: ReadError) -> Error {
        let place = self.rendezvous;
        match error {
            ReadError::Frame(_) | ReadError::Message(_) => Error::protocol(format!(
                "the process listening at {place} is not a store, or has a different version of this library: {error}"
            )),
            ReadError::Closed | ReadError::Io(_) | ReadError::Torn => {
                Error::rendezvous(format!("the store at {place} did not answer: {error}"))
            }
        }
    }

    fn unexpected(&self, message: Message) -> Error {
        match message {
            Message::Refused(refusal) => refusal.into_error(),
            _ => Error::protocol(format!(
                "the store at {} sent an unexpected reply",
                self.rendezvous
            )),
        }
    }
}

/// The last operations that ranks have told the store.
#[derive(Debug, Default)]
pub(super) struct RecordStore {
    ranks: Mutex<BTreeMap<usize, RankRecords>>,
    changed: Condvar,
}

#[derive(Clone, Debug, Default)]
struct RankRecords {
    told: Option<(Instant, Vec<OpRecord>)>,
    /// The time at which its connection ended.
    ended: Option<Instant>,
}

impl RankRecords {
    /// Returns `true` if the rank has answered since `began`.
    fn has_answered(&self, began: Instant) -> bool {
        self.told.as_ref().is_some_and(|(at, _)| *at >= began)
    }
}

impl RecordStore {
    pub(super) fn add(&self, rank: usize, records: Vec<OpRecord>) {
        self.ranks.lock().entry(rank).or_default().told = Some((Instant::now(), records));
        self.changed.notify_all();
    }

    /// Notes that nothing more comes from a rank.
    pub(super) fn end(&self, rank: usize) {
        self.ranks.lock().entry(rank).or_default().ended = Some(Instant::now());
        self.changed.notify_all();
    }

    /// Asks all ranks that are connected to one another, and waits up to `timeout` for their answers. A rank that does not
    /// answer is listed with what it has told before.
    pub(super) fn ask(&self, registry: &Mutex<Registry>, timeout: Duration) -> Vec<FlightRecords> {
        let began = Instant::now();
        let mut connections = Vec::new();
        let mut all = Vec::new();
        {
            let registry = registry.lock();
            for (registration, state, connection) in registry.state.participants() {
                connections.extend(connection.filter(|_| state == RankStatus::Silent));
                all.push(FlightRecords {
                    rank: registration.rank,
                    host: registration.host.clone(),
                    pid: registration.pid,
                    state,
                    operations: None,
                });
            }
            registry.send(&connections, &Message::AskRecords);
        }
        let waiting = |ranks: &mut BTreeMap<usize, RankRecords>| {
            let mut asked = all.iter().filter(|rank| rank.state == RankStatus::Silent);
            asked.any(|rank| {
                let known = ranks.get(&rank.rank);
                !known.is_some_and(|known| {
                    known.has_answered(began) || known.ended.is_some_and(|at| at >= began)
                })
            })
        };
        let ranks = self
            .changed
            .wait_timeout_while(self.ranks.lock(), timeout, waiting);
        for rank in &mut all {
            let Some(known) = ranks.get(&rank.rank) else {
                continue;
            };
            match rank.state {
                RankStatus::Silent if known.has_answered(began) => {
                    rank.state = RankStatus::Answered
                }
                RankStatus::Silent if known.ended.is_some_and(|at| at >= began) => {
                    rank.state = RankStatus::Gone
                }
                _ => {}
            }
            rank.operations = known.told.as_ref().map(|(_, records)| records.clone());
        }
        all
    }
}

/// The least time for a connection to one of several addresses.
const MIN_CONNECT_TIME: Duration = Duration::from_millis(100);
