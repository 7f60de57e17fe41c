//! The messages between the process of a search and those of its trials: JSON lines over a connection.
//!
//! ```text
//! worker                    search
//!   ── Hello ───────────────►  a nonce
//!   ◄─────────── Challenge ──  another one, and the proof that it knows the token
//!   ── Introduction ────────►  who it is, and its proof
//!   ◄────────────── Start ───
//!   ── Started ─────────────►
//!   ── Reported ────────────►
//!   ◄─ Continue, Save, Pause, Stop
//!   ── Saved, Skipped ──────►  after Save and Pause
//!   ── Stopped ────────────────►  after Pause and Stop; another Start, or Exit, follows
//!   ── Ended, Failed, Refused ►
//! ```
//!
//! Both sides prove that they know the search's token, by its keyed hash of both nonces; nobody sends it.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use accelerator_collective::internal::{PendingHandshakes, Token};
use accelerator_host::machine::host_name;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::appended::json_lines;
use crate::error::{Error, Kind, Result};
use crate::runner::{Report, TrialStart};

/// The first line of a connection, from a worker or agent.
#[derive(Debug, Deserialize, Serialize)]
struct Hello {
    nonce: Nonce,
}

/// The second line, from the search.
#[derive(Debug, Deserialize, Serialize)]
struct Challenge {
    nonce: Nonce,
    proof: Nonce,
}

/// The third line, from the worker or agent: a [`Peer`], in the bytes of which the sender has proved the token.
#[derive(Debug, Deserialize, Serialize)]
struct Introduction {
    peer: String,
    proof: Nonce,
}

type Nonce = [u8; 32];

/// The identity of a process that connects to the search.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Peer {
    pub(crate) role: PeerRole,
    pub(crate) rank: usize,
    pub(crate) host: String,
    pub(crate) pid: u32,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) enum PeerRole {
    Agent,
    /// The worker with this number.
    Worker(u32),
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToWorker {
    Start(TrialStart),
    Continue,
    Save { folder: PathBuf },
    Pause { folder: PathBuf },
    Stop,
    Exit,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromWorker {
    Started,
    Reported(Report),
    /// A checkpoint is in the folder.
    Saved,
    /// The trial does not save.
    Skipped,
    Stopped,
    Ended,
    Failed {
        message: String,
    },
    /// It does not take another configuration.
    Refused,
}

/// The address of the search, and the number under which it expects the worker.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct WorkerPlace {
    pub(crate) address: String,
    pub(crate) worker: u32,
}

impl WorkerPlace {
    /// Returns the content that a worker inherits: its place, and the search's token.
    pub(crate) fn to_inherit(&self, token: &Token) -> Result<Vec<u8>> {
        let bytes = serde_json::to_vec(&(self, token.secret()));
        bytes.map_err(|error| Error::of(Kind::Io, error))
    }

    /// Returns the place of this process and the token, if it is a worker.
    ///
    /// # Errors
    /// If the process has inherited a worker's place that it cannot read: then it is no search of its own.
    pub(crate) fn inherited() -> Result<Option<(Self, Token)>> {
        let unreadable = |why: &dyn std::fmt::Display| {
            let message = "this process is a worker of a search, and cannot read which";
            Error::connection(format!("{message}: {why}"))
        };
        let bytes = accelerator_collective::internal::inherited(accelerator_host::TUNE_WORKER.name);
        let Some(bytes) = bytes.map_err(|error| unreadable(&error).with_source(error))? else {
            return Ok(None);
        };
        let (place, secret): (_, Vec<u8>) = serde_json::from_slice(&bytes)
            .map_err(|error| unreadable(&error).with_source(error))?;
        match Token::from_secret(&secret) {
            Some(token) => Ok(Some((place, token))),
            None => Err(unreadable(&"its secret is too short")),
        }
    }
}

/// Accepts a connection, which `greet` gets in a thread of that name; returns after a while if there is none, or if the
/// system refuses it, for instance since too many files are open.
pub(crate) fn accept_one(
    listener: &TcpListener,
    name: &str,
    greet: impl FnOnce(TcpStream) + Send + 'static,
) {
    let accepted = match listener.accept() {
        Err(error) if error.kind() == ErrorKind::WouldBlock => return thread::sleep(POLL),
        Err(error) => Err(error),
        Ok((stream, _)) => stream.set_nonblocking(false).and_then(|()| {
            let thread = thread::Builder::new().name(name.to_owned());
            thread.spawn(move || greet(stream)).map(drop)
        }),
    };
    if let Err(error) = accepted {
        tracing::warn!("a connection to the search cannot be taken: {error}");
        thread::sleep(REFUSED);
    }
}

/// Runs the search's side of the handshake; returns `None` if the peer does not prove that it knows the token.
pub(crate) fn greet(stream: &TcpStream, token: &Token) -> Option<(BufReader<TcpStream>, Peer)> {
    stream.set_nodelay(true).ok()?;
    stream
        .set_read_timeout(Some(PendingHandshakes::TIMEOUT))
        .ok()?;
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    // Whoever it is: not much is read before it has proved that it knows the token.
    let mut unproved = reader.by_ref().take(UNPROVED_BYTES);
    let Hello { nonce } = receive(&mut unproved)?;
    let own = Token::nonce().ok()?;
    let challenge = Challenge {
        nonce: own,
        proof: token.prove(SEARCH, &[&nonce, &own]),
    };
    send(stream, &challenge).ok()?;
    let Introduction { peer, proof } = receive(&mut unproved)?;
    if !token.accepts(PEER, &[&own, &nonce, peer.as_bytes()], &proof) {
        tracing::warn!("ignored a process that connected and does not know the search's token");
        return None;
    }
    stream.set_read_timeout(None).ok()?;
    Some((reader, serde_json::from_str(&peer).ok()?))
}

/// Connects to the search, and proves that this process is its.
pub(crate) fn connect(
    address: &str,
    token: &Token,
    role: PeerRole,
    rank: usize,
) -> Result<(BufReader<TcpStream>, TcpStream)> {
    let until = Instant::now() + PendingHandshakes::TIMEOUT;
    loop {
        let stream = TcpStream::connect(address).map_err(|error| {
            Error::connection(format!("cannot reach the search at {address}: {error}"))
                .with_source(error)
        })?;
        match introduce(&stream, token, role, rank)? {
            Some(reader) => return Ok((reader, stream)),
            // Others that connect at the same time may have made it give up this connection.
            None if Instant::now() < until => thread::sleep(RETRY),
            None => {
                return Err(Error::connection(format!(
                    "the search does not answer at {address}"
                )));
            }
        }
    }
}

/// Runs the peer's side of the handshake; returns `None` if the other end closes the connection before it has proved
/// anything.
fn introduce(
    stream: &TcpStream,
    token: &Token,
    role: PeerRole,
    rank: usize,
) -> Result<Option<BufReader<TcpStream>>> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SEARCH_PATIENCE))?;
    let nonce = Token::nonce().map_err(|error| Error::of(Kind::Io, error))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    if send(stream, &Hello { nonce }).is_err() {
        return Ok(None);
    }
    let challenge = receive(&mut reader.by_ref().take(UNPROVED_BYTES));
    let Some(Challenge { nonce: own, proof }) = challenge else {
        return Ok(None);
    };
    if !token.accepts(SEARCH, &[&nonce, &own], &proof) {
        return Err(Error::connection(
            "the process at the search's address does not know its token: it has taken the port of a search that ended",
        ));
    }
    let peer = Peer {
        role,
        rank,
        host: host_name(),
        pid: std::process::id(),
    };
    let peer = serde_json::to_string(&peer).map_err(|error| Error::of(Kind::Io, error))?;
    let proof = token.prove(PEER, &[&own, &nonce, peer.as_bytes()]);
    send(stream, &Introduction { peer, proof })?;
    stream.set_read_timeout(None)?;
    Ok(Some(reader))
}

pub(crate) fn send(mut stream: &TcpStream, value: &impl Serialize) -> Result<()> {
    Ok(stream.write_all(&json_lines("a message", [value])?)?)
}

/// Reads a line; `None` at the end, and of what is no such value.
pub(crate) fn receive<T: DeserializeOwned>(reader: &mut impl BufRead) -> Option<T> {
    let mut line = String::new();
    match reader.read_line(&mut line) {
        Ok(read) if read > 0 => serde_json::from_str(&line).ok(),
        _ => None,
    }
}

/// The roles in which the token is proved.
const SEARCH: &str = "tune search";
const PEER: &str = "tune peer";

/// The wait between two looks for a connection to a listener that does not block.
const POLL: Duration = Duration::from_millis(2);
/// The wait after a connection that could not be accepted.
const REFUSED: Duration = Duration::from_millis(100);

/// The number of bytes that are read from a peer that has not proved anything.
const UNPROVED_BYTES: u64 = 4 << 10;

/// The time that a worker waits for a search that has accepted its connection, since it may be stopped for a while.
const SEARCH_PATIENCE: Duration = Duration::from_secs(600);

const RETRY: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Answers one connection as the search with that token.
    fn search(token: Token) -> (String, thread::JoinHandle<Option<Peer>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let greeted = move || {
            let (stream, _) = listener.accept().unwrap();
            greet(&stream, &token).map(|(_, peer)| peer)
        };
        (address, thread::spawn(greeted))
    }

    #[test]
    fn both_sides_prove_that_they_know_the_token() {
        let token = Token::generate().unwrap();
        let (address, greeted) = search(token.clone());
        connect(&address, &token, PeerRole::Worker(3), 1).unwrap();
        let peer = greeted.join().unwrap().unwrap();
        assert_eq!((peer.role, peer.rank), (PeerRole::Worker(3), 1));

        // A program that listens at the port of a search that has ended learns nothing.
        let (address, greeted) = search(Token::generate().unwrap());
        let error = connect(&address, &token, PeerRole::Agent, 1).unwrap_err();
        assert!(
            error.to_string().contains("does not know its token"),
            "{error}"
        );
        assert!(greeted.join().unwrap().is_none());
    }

    #[test]
    fn what_was_recorded_opens_nothing_and_holds_no_secret() {
        let token = Token::generate().unwrap();
        let (address, greeted) = search(token.clone());
        // An eavesdropper between the two records everything.
        let tap = TcpListener::bind("127.0.0.1:0").unwrap();
        let tapped = tap.local_addr().unwrap().to_string();
        let recorder = thread::spawn(move || {
            let (worker, _) = tap.accept().unwrap();
            let search = TcpStream::connect(address).unwrap();
            let lines = |stream: &TcpStream| BufReader::new(stream.try_clone().unwrap());
            let (mut from_worker, mut from_search) = (lines(&worker), lines(&search));
            let pass = |from: &mut BufReader<TcpStream>, mut to: &TcpStream| {
                let mut line = String::new();
                from.read_line(&mut line).unwrap();
                to.write_all(line.as_bytes()).unwrap();
                line
            };
            [
                pass(&mut from_worker, &search),
                pass(&mut from_search, &worker),
                pass(&mut from_worker, &search),
            ]
        });
        connect(&tapped, &token, PeerRole::Worker(0), 0).unwrap();
        assert!(greeted.join().unwrap().is_some());
        let [hello, challenge, introduction] = recorder.join().unwrap();
        let recorded = [&*hello, &*challenge, &*introduction].concat();
        let secret = std::str::from_utf8(token.secret()).unwrap();
        let bytes = serde_json::to_string(token.secret()).unwrap();
        assert!(!recorded.contains(secret) && !recorded.contains(&bytes));

        let (address, greeted) = search(token);
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(hello.as_bytes()).unwrap();
        stream.write_all(introduction.as_bytes()).unwrap();
        assert!(greeted.join().unwrap().is_none());
    }

    #[test]
    fn a_search_that_is_not_reached_is_no_failure_of_the_trial() {
        // Nobody can listen at port 0.
        let address = "127.0.0.1:0";
        let token = Token::generate().unwrap();
        let error = connect(address, &token, PeerRole::Agent, 0).unwrap_err();
        assert!(error.is_io(), "{error:?}");
        let expected = format!("cannot reach the search at {address}");
        assert!(error.to_string().contains(&expected), "{error}");
    }

    #[test]
    fn a_connection_that_was_given_up_is_tried_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let token = Token::generate().unwrap();
        let known = token.clone();
        let greeted = thread::spawn(move || {
            drop(listener.accept());
            let (stream, _) = listener.accept().unwrap();
            greet(&stream, &known).is_some()
        });
        connect(&address, &token, PeerRole::Agent, 0).unwrap();
        assert!(greeted.join().unwrap());
    }

    #[test]
    fn a_connection_that_says_much_and_proves_nothing_is_closed() {
        let (address, greeted) = search(Token::generate().unwrap());
        let begun = Instant::now();
        let mut stream = TcpStream::connect(address).unwrap();
        let megabyte = vec![b'x'; 1 << 20];
        let sent = (0..200).take_while(|_| stream.write_all(&megabyte).is_ok());
        assert!(sent.count() < 200);
        assert!(begun.elapsed() < PendingHandshakes::TIMEOUT);
        assert!(greeted.join().unwrap().is_none());
    }
}
