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
//!   ── Left ────────────────►  after Pause and Stop; another Start, or Exit, follows
//!   ── Ended, Failed, Refused ►
//! ```

use std::io::{BufRead, Write};
use std::net::TcpStream;
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::metrics::Metrics;
use crate::runner::Restore;
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
    },
    /// A checkpoint is in the folder.
    Saved,
    /// The trial does not save.
    Skipped,
    Left,
    Ended,
    Failed {
        message: String,
    },
    /// It does not take another configuration.
    Refused,
}

/// What a process that is started as a worker finds in its environment.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct WorkerPlace {
    pub(crate) address: String,
    pub(crate) token: String,
    pub(crate) worker: u32,
    /// The process that has started it, where that is the search.
    pub(crate) parent: Option<u32>,
    /// The cores that it is to run on.
    pub(crate) cores: Vec<usize>,
}

/// Sends a value as a line.
pub(crate) fn send(mut stream: &TcpStream, value: &impl Serialize) -> Result<()> {
    let mut line = serde_json::to_vec(value)
        .map_err(|error| Error::trial(error.to_string()).with_source(error))?;
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
