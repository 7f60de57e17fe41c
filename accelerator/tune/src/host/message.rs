//! The messages between the search and the agents of other hosts: JSON lines over a connection.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{HostResources, ProcessSpec};

/// The invitation that agents get from the search through the job's process group.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Invitation {
    pub(super) address: String,
    /// A file in the search's folder.
    pub(super) mark: PathBuf,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ToAgent {
    Start { process: u32, spec: ProcessSpec },
    Signal { process: u32, signal: EndSignal },
    Close,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum EndSignal {
    Terminate,
    Kill,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromAgent {
    Joined {
        resources: HostResources,
    },
    Started {
        pid: u32,
    },
    NotStarted {
        message: String,
    },
    /// A line of standard output, with its end.
    Output {
        process: u32,
        line: String,
    },
    OutputClosed {
        process: u32,
    },
    /// The status as `waitpid` tells it.
    Exited {
        process: u32,
        status: Option<i32>,
    },
}
