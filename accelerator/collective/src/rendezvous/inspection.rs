//! The last operations of all ranks of a running job, as an observer sees them through the store.

use std::{
    collections::BTreeMap,
    net::{TcpStream, ToSocketAddrs},
    time::{Duration, Instant},
};

use accelerator_host::sync::{Condvar, Mutex};

use super::{
    Rendezvous, TokenSource,
    outbox::Registry,
    token::{Key, Token, random},
};
use crate::{
    error::{Error, Kind, Result},
    wire::{
        ReadError,
        message::{MAX_RECORDS_BYTES, MAX_SHORT_BYTES, Message, OpRecord, Proves},
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
    /// Its last operations, the oldest first; `None` if it did not answer, as one that is stopped or has ended.
    pub operations: Option<Vec<OpRecord>>,
}

/// Asks the store of a running job for the last operations of its ranks, in the order of ranks. Only ranks that have come
/// to the store are listed. The store must answer within `timeout`, of which each rank has at most half.
///
/// # Errors
///
/// A rendezvous error if the store cannot be reached or does not answer; an unauthorized error if it refuses the token; a
/// protocol error if something else listens there.
pub fn flight_records(rendezvous: &Rendezvous, timeout: Duration) -> Result<Vec<FlightRecords>> {
    let deadline = Instant::now() + timeout;
    let key = match &rendezvous.token {
        TokenSource::File(path) => Some(Token::from_file(path)?.key()),
        TokenSource::Given(token) => Some(token.key()),
        TokenSource::None => None,
    };
    let unreachable = |error: std::io::Error| {
        let text = format!("the store at {rendezvous} cannot be reached; has the job ended?");
        Error::caused(Kind::Rendezvous, text, error)
    };
    let address = (rendezvous.host(), rendezvous.port());
    let mut addresses = address.to_socket_addrs().map_err(unreachable)?;
    let Some(address) = addresses.next() else {
        let text = format!("the store at {rendezvous} has no address");
        return Err(Error::rendezvous(text));
    };
    let stream = TcpStream::connect_timeout(&address, timeout).map_err(unreachable)?;
    let observer = Observer {
        rendezvous,
        stream,
        deadline,
    };
    observer.inspect(key)
}

/// The connection of an observer to the store.
struct Observer<'a> {
    rendezvous: &'a Rendezvous,
    stream: TcpStream,
    deadline: Instant,
}

impl Observer<'_> {
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
            message => return Err(self.unexpected(message)),
        };
        if let Some(key) = &key
            && !key.accepts("store", &[&nonce, &own], &proof.unwrap_or_default())
        {
            return Err(Error::unauthorized(format!(
                "the store at {} has another token than this job; does another job use its port?",
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
                    records: operations,
                } => ranks.push(FlightRecords {
                    rank,
                    host,
                    pid,
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
                "what listens at {place} is no store of this version of the library: {error}"
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
                "the store at {} gave an answer to another question",
                self.rendezvous
            )),
        }
    }
}

/// The last operations that ranks have reported to the store.
#[derive(Debug, Default)]
pub(super) struct Reported {
    ranks: Mutex<BTreeMap<usize, (Instant, Vec<OpRecord>)>>,
    changed: Condvar,
}

impl Reported {
    pub(super) fn add(&self, rank: usize, records: Vec<OpRecord>) {
        self.ranks.lock().insert(rank, (Instant::now(), records));
        self.changed.notify_all();
    }

    /// Asks all ranks that are connected to one another, and waits up to `timeout` for their answers. A rank that does not
    /// answer is listed with what it has reported before.
    pub(super) fn ask(&self, registry: &Mutex<Registry>, timeout: Duration) -> Vec<FlightRecords> {
        let began = Instant::now();
        let mut asked = Vec::new();
        let mut all = Vec::new();
        {
            let registry = registry.lock();
            let mut connections = Vec::new();
            for (registration, connection) in registry.state.participants() {
                if let Some(connection) = connection {
                    asked.push(registration.rank);
                    connections.push(connection);
                }
                all.push(FlightRecords {
                    rank: registration.rank,
                    host: registration.host.clone(),
                    pid: registration.pid,
                    operations: None,
                });
            }
            registry.send(&connections, &Message::AskRecords);
        }
        let waiting = |ranks: &mut BTreeMap<usize, (Instant, Vec<OpRecord>)>| {
            let answered = |rank| ranks.get(rank).is_some_and(|(at, _)| *at >= began);
            !asked.iter().all(answered)
        };
        let ranks = self
            .changed
            .wait_timeout_while(self.ranks.lock(), timeout, waiting);
        for rank in &mut all {
            let reported = ranks.get(&rank.rank);
            rank.operations = reported.map(|(_, records)| records.clone());
        }
        all
    }
}
