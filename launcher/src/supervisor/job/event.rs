//! Events of a group of processes, actions, and how a process or a group ends.

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// It exited with this code.
    Code(i32),
    /// It was killed by this signal.
    Signal(i32),
}

impl End {
    /// The exit code a shell would report: the code itself, or 128 + signal.
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            // The kernel keeps eight bits of an exit code.
            Self::Code(code) => (code & 0xff) as u8,
            Self::Signal(signal) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
        }
    }

    pub(super) fn is_success(self) -> bool {
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
        }
    }
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A process of the group ended.
    Ended {
        /// Its place in the group.
        rank: usize,
        /// How it ended.
        end: End,
    },
    /// A rank has joined the job: it learns of failures from the store.
    Joined(usize),
    /// A rank has closed its group.
    Closed(usize),
    /// A rank reported to the store that its group has failed.
    FailureReported {
        /// The rank that reports it.
        rank: usize,
        /// The ranks that it blames: itself after a panic, none where it does not know.
        blamed: Vec<usize>,
    },
    /// The launcher received a signal that asks it to end.
    Signal(i32),
    /// The launcher's output was closed.
    OutputClosed,
    /// Nothing; time has passed.
    Tick,
}

/// What is to be done about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Send this signal to the process groups of these members.
    Signal {
        /// Its number.
        signal: i32,
        /// The members, of whom some may have ended: they can have left children.
        ranks: Vec<usize>,
    },
    /// Report that these ranks have not ended yet.
    Waiting(Vec<usize>),
}

/// Why a group was ended, when it did not end by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// This rank failed first.
    Failure(usize),
    /// The launcher received this signal.
    Signal(i32),
    /// The launcher's output was closed.
    OutputClosed,
}
