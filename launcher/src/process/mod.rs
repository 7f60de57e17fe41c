//! Processes: starting, signalling and reaping one, its end, and the descendants of this one.

pub(crate) mod descendants;
mod local;

use std::fmt::Debug;
use std::fs::File;

use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use crate::error::START_AGAIN;
pub(crate) use local::{Process, close, inherited, reap_orphans, spawn_with, wait_for_end};

/// The end of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum End {
    Code(i32),
    Signal(i32),
    /// It was lost with the host that it ran on.
    Lost,
}

impl End {
    /// It has saved because it was told to leave, and asks for another start.
    pub(crate) const PREEMPTED: Self = Self::Code(accelerator_host::PREEMPTED_EXIT_CODE as i32);

    /// Returns the end of a process with this exit status or terminating signal.
    pub(crate) fn of(code: Option<i32>, signal: Option<i32>) -> Self {
        match (code, signal) {
            (Some(code), _) => Self::Code(code),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => Self::Code(1),
        }
    }

    /// The exit code a shell would report: the code itself, or 128 + signal.
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            // The kernel keeps eight bits of an exit code.
            Self::Code(code) => (code & 0xff) as u8,
            Self::Signal(signal) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
            Self::Lost => START_AGAIN,
        }
    }

    /// Checks if it exited with code 0.
    pub(crate) fn is_success(self) -> bool {
        self == Self::Code(0)
    }
}

impl std::fmt::Display for End {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(formatter, "exit code {code}"),
            Self::Signal(signal) => match signal_hook::low_level::signal_name(*signal) {
                Some(name) => write!(formatter, "killed by {name}"),
                None => write!(formatter, "killed by signal {signal}"),
            },
            Self::Lost => formatter.write_str("lost with its host"),
        }
    }
}

/// A rank that was started. Dropped before [`reap`](Self::reap), it is killed with the processes that it started.
pub(crate) trait RankProcess: Debug {
    /// Its process id on the host that it runs on.
    fn pid(&self) -> i32;

    /// Its process id, if it runs on this machine.
    fn local_pid(&self) -> Option<i32>;

    /// The name of the host that it runs on, if that is another one.
    fn host(&self) -> Option<String> {
        None
    }

    /// Describes the host that was lost with it, and the loss; `None` if it did not end so.
    fn loss(&self) -> Option<String> {
        None
    }

    /// Its standard output, once.
    fn take_stdout(&mut self) -> Option<File>;

    /// Its standard error, once.
    fn take_stderr(&mut self) -> Option<File>;

    /// A function that blocks until the rank has ended and returns how; another thread calls it. The rank is not
    /// reaped.
    fn waiter(&self) -> Box<dyn FnOnce() -> End + Send>;

    /// Sends `signal` to the rank, if it has not been reaped.
    fn signal(&self, signal: Signal);

    /// Sends `signal` to the rank and to the processes of its group.
    fn signal_group(&self, signal: Signal);

    /// Checks if any process of its group is left. Called after [`reap`](Self::reap).
    fn has_group(&self) -> bool;

    /// Frees the entry that the system keeps of the rank, which has ended; processes that it started may continue.
    fn reap(&mut self);

    /// Gives the rank up, which did not end on SIGKILL: it is not touched any more.
    fn abandon(&mut self);
}
