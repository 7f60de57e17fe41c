//! The messages of launchers after the handshake, which `handshake.rs` has.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};

use crate::output::Stream;
use crate::process::End;
use crate::settings::{Elastic, Layout};
use crate::supervisor::leftovers::LeftBehind;

/// The version of these messages and of the handshake: launchers of different versions do not work together.
pub(super) const PROTOCOL: u32 = 2;

/// The request of another host's launcher to be admitted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct JoinRequest {
    /// The number of hosts, as its user gave it.
    pub(super) hosts: usize,
    /// The number of this host.
    pub(super) host: usize,
    /// The purpose of the connection.
    pub(super) purpose: ConnectionKind,
}

/// The purpose of a connection. A host has one for messages and one for each stream of output, so that output that
/// nobody reads delays no message.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum ConnectionKind {
    /// Messages.
    Messages(HostInfo),
    /// A stream of the ranks' output.
    Output {
        /// The stream.
        stream: Stream,
        /// The number that the head gave to the connection for messages.
        session: u64,
    },
}

/// A host as its launcher describes it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct HostInfo {
    /// Its name.
    #[serde(deserialize_with = "read_name")]
    pub(super) name: String,
    /// The process id of its launcher.
    pub(super) pid: u32,
    /// The number of ranks that it runs.
    pub(super) ranks: usize,
    /// The job that its user named.
    pub(super) job: Option<String>,
    /// The restarts that its user asked for, which the head does not count by.
    pub(super) max_restarts: Option<u64>,
}

/// The head's answer to a host that it admits.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct JoinReply {
    /// The number of this connection for messages.
    pub(super) session: u64,
    /// Silence for which a host is lost.
    pub(super) liveness: Duration,
    /// The name of the head's host.
    #[serde(deserialize_with = "read_name")]
    pub(super) name: String,
}

/// Deserializes the name of a host, which is shown: if no token is required, it may be any text from anybody.
fn read_name<'a, D: Deserializer<'a>>(from: D) -> Result<String, D::Error> {
    let name = String::deserialize(from)?;
    Ok(name.chars().filter(|c| !c.is_control()).take(64).collect())
}

/// A message from a host to the head.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum ToHead {
    /// Its program is built, and its ranks can be started.
    Ready,
    /// Its ranks can never be started; the launcher there ends with this code.
    Failed { code: u8, text: String },
    /// A rank was started.
    Started { restart: u64, rank: usize, pid: i32 },
    /// A rank could not be started. It is the user's error if no other rank could be either.
    NotStarted {
        restart: u64,
        rank: usize,
        text: String,
        is_usage: bool,
    },
    /// A rank has ended.
    Ended { restart: u64, rank: usize, end: End },
    /// Nothing of the attempt runs any more.
    Swept {
        restart: u64,
        left_behind: LeftBehind,
    },
    /// A signal asks the launcher there to end.
    Asked { signal: i32 },
    /// The launcher there has forwarded a signal to its ranks.
    Forwarded,
}

/// A message from the head to a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum ToHost {
    /// Start the host's ranks.
    StartAttempt(Plan),
    /// Send a signal.
    Signal {
        restart: u64,
        rank: usize,
        signal: i32,
        scope: SignalScope,
    },
    /// End what runs of the attempt: `first` is the first signal, SIGKILL follows after `grace`.
    EndAttempt {
        restart: u64,
        first: i32,
        grace: Duration,
    },
    /// The job is over: end with this code.
    JobOver { code: u8, text: Option<String> },
    /// The job continues without this host, which wanted to leave.
    Left,
}

/// An attempt, as far as hosts have to agree on it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    /// The number of restarts so far: the number of the attempt, which every message about it carries.
    pub(super) restart: u64,
    /// The largest number of restarts.
    pub(super) max_restarts: u64,
    /// The name of the job.
    pub(super) job: String,
    /// The ranks of all hosts.
    pub(super) layout: Layout,
    /// The place of this host in the layout.
    pub(super) host: usize,
    /// The state that its ranks read if their number may change.
    pub(super) elastic: Option<Elastic>,
    /// The host of the store, as this host reaches it.
    pub(super) store_host: String,
    /// The port of the store.
    pub(super) store_port: u16,
}

/// The receivers of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum SignalScope {
    /// The rank.
    Process,
    /// The processes of its group.
    Group,
}
