//! What the process of a search and those of trials say to one another: JSON lines over a connection.
//!
//! ```text
//! worker                    search
//!   ◄──────────── Greeting ──  a nonce
//!   ── Hello ───────────────►  its proof that it knows the token
//!   ◄────────────── Start ───
//!   ── Started ─────────────►
//!   ── Reported ────────────►
//!   ◄─ Continue, Save, Pause, Stop
//!   ── Saved, Skipped ──────►  after Save and Pause
//!   ── Stopped ────────────────►  after Pause and Stop; another Start, or Exit, follows
//!   ── Ended, Failed, Refused ►
//! ```

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::metrics::Metrics;
use crate::runner::{Offer, Restore};
use crate::trial_id::TrialId;

/// The first line of a connection, from the search.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Greeting {
    pub(crate) nonce: String,
}

/// The second line, from the worker.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Hello {
    pub(crate) proof: String,
    pub(crate) worker: u32,
    pub(crate) rank: usize,
    pub(crate) host: String,
    pub(crate) pid: u32,
}

impl Hello {
    /// What only those can compute that know the token.
    pub(crate) fn proof(token: &str, nonce: &str, worker: u32, rank: usize) -> String {
        let key = blake3::hash(token.as_bytes());
        let text = format!("{nonce} {worker} {rank}");
        blake3::keyed_hash(key.as_bytes(), text.as_bytes()).to_string()
    }
}

/// What a worker is told.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToWorker {
    Start {
        trial: TrialId,
        config: Config,
        folder: PathBuf,
        restore: Option<Restore>,
    },
    Continue,
    Save {
        folder: PathBuf,
    },
    Pause {
        folder: PathBuf,
    },
    Stop,
    Exit,
}

/// What a worker says.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromWorker {
    Started,
    Reported {
        iteration: u64,
        metrics: Metrics,
        seconds: f64,
        offer: Offer,
    },
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

/// What a process that is started as a worker finds in its environment.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct WorkerEnv {
    pub(crate) address: String,
    pub(crate) token: String,
    pub(crate) worker: u32,
    /// The process that has started it, where that is the search.
    pub(crate) parent: Option<u32>,
    /// The cores that it is to run on.
    pub(crate) cores: Vec<usize>,
}

/// Makes a process that has connected prove that it knows the token; `None` where it does not.
pub(crate) fn greet(stream: &TcpStream, token: &str) -> Option<(BufReader<TcpStream>, Hello)> {
    stream.set_nodelay(true).ok()?;
    stream.set_read_timeout(Some(HANDSHAKE)).ok()?;
    let nonce = random();
    let greeting = Greeting {
        nonce: nonce.clone(),
    };
    send(stream, &greeting).ok()?;
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    // Whoever it is: not much is read before it has proved that it knows the token.
    let hello: Hello = receive(&mut reader.by_ref().take(HELLO_BYTES))?;
    if hello.proof != Hello::proof(token, &nonce, hello.worker, hello.rank) {
        tracing::warn!("a process connected that does not know the search's token; it is ignored");
        return None;
    }
    stream.set_read_timeout(None).ok()?;
    Some((reader, hello))
}

/// Connects to the search, and proves that this process is its.
pub(crate) fn connect(
    address: &str,
    token: &str,
    worker: u32,
    rank: usize,
) -> Result<(BufReader<TcpStream>, TcpStream)> {
    let stream = TcpStream::connect(address).map_err(|error| {
        Error::connection(format!("the search is not reached at {address}: {error}"))
            .with_source(error)
    })?;
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let Some(Greeting { nonce }) = receive(&mut reader) else {
        return Err(Error::connection(format!(
            "the search does not answer at {address}"
        )));
    };
    let hello = Hello {
        proof: Hello::proof(token, &nonce, worker, rank),
        worker,
        rank,
        host: host_name(),
        pid: std::process::id(),
    };
    send(&stream, &hello)?;
    Ok((reader, stream))
}

/// What this host calls itself.
pub(crate) fn host_name() -> String {
    let system = rustix::system::uname();
    system.nodename().to_string_lossy().into_owned()
}

/// 128 bits that nobody can guess.
pub(crate) fn random() -> String {
    let mut bytes = [0; 16];
    // It fails on no system that this runs on: it waits until there is randomness.
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    debug_assert_eq!(filled, Ok(bytes.len()));
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Sends a value as a line.
pub(crate) fn send(mut stream: &TcpStream, value: &impl Serialize) -> Result<()> {
    let mut line = serde_json::to_vec(value)
        .map_err(|error| Error::connection(error.to_string()).with_source(error))?;
    line.push(b'\n');
    Ok(stream.write_all(&line)?)
}

/// Reads a line; `None` at the end, and of what is no such value.
pub(crate) fn receive<T: DeserializeOwned>(reader: &mut impl BufRead) -> Option<T> {
    let mut line = String::new();
    match reader.read_line(&mut line) {
        Ok(read) if read > 0 => serde_json::from_str(&line).ok(),
        _ => None,
    }
}

/// How long a connection may take to say who it is.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long what it says may be.
const HELLO_BYTES: u64 = 4 << 10;

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener};
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_search_that_is_not_reached_is_no_failure_of_the_trial() {
        let is_not_reached = |address: SocketAddr, expected: &str| {
            let error = connect(&address.to_string(), "token", 0, 0).unwrap_err();
            assert!(error.is_io() && !error.is_trial(), "{error:?}");
            assert!(
                error.to_string().contains(&format!("{expected} {address}")),
                "{error}"
            );
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let silent = std::thread::spawn(move || {
            drop(listener.accept());
            listener
        });
        is_not_reached(address, "does not answer at");
        let _far = silent.join().unwrap();
        // Nobody can listen at the near end of a connection.
        let near = TcpStream::connect(address).unwrap();
        is_not_reached(near.local_addr().unwrap(), "is not reached at");
    }

    #[test]
    fn a_connection_that_says_much_and_proves_nothing_is_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let begun = Instant::now();
        let greeted = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            greet(&stream, "token").is_some()
        });
        let mut stream = TcpStream::connect(address).unwrap();
        let megabyte = vec![b'x'; 1 << 20];
        let sent = (0..200).take_while(|_| stream.write_all(&megabyte).is_ok());
        assert!(sent.count() < 200);
        assert!(begun.elapsed() < HANDSHAKE);
        assert!(!greeted.join().unwrap());
    }
}
