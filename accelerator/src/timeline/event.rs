use serde::{Deserialize, Serialize};

/// What the thread that trains is doing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Phase {
    /// Burn's backward pass.
    Backward,
    /// Gradients into buckets, or out of them.
    Copy,
    Optimizer,
    /// Waiting for a bucket, or reducing it.
    Reduce {
        bucket: usize,
        bytes: usize,
    },
}

/// What happened, in a trace.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) enum Kind {
    AllReduce,
    Backward,
    Copy,
    Data,
    Forward,
    Load,
    Operation,
    Optimizer,
    Reduce,
    Step,
}

impl Kind {
    /// Those that share out the time of the main thread.
    pub(super) const PHASES: [Self; 6] = [
        Self::Data,
        Self::Forward,
        Self::Backward,
        Self::Copy,
        Self::Reduce,
        Self::Optimizer,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::Backward => "backward",
            Self::Copy => "copy",
            Self::Data => "wait for data",
            Self::Forward => "forward",
            Self::Load => "load batch",
            Self::Operation => "collective",
            Self::Optimizer => "optimizer",
            Self::Reduce => "wait for all-reduce",
            Self::Step => "step",
        }
    }
}

/// The threads of a rank, as a trace shows them.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub(crate) enum Thread {
    Main,
    Communication,
    Loader(u16),
}

impl Thread {
    pub(super) fn number(self) -> u32 {
        match self {
            Self::Main => 0,
            Self::Communication => 1,
            Self::Loader(worker) => 2 + u32::from(worker),
        }
    }

    pub(super) fn name(self) -> String {
        match self {
            Self::Main => "training".to_owned(),
            Self::Communication => "communication".to_owned(),
            Self::Loader(worker) => format!("loader {worker}"),
        }
    }
}

/// Something with a beginning and an end, in nanoseconds since the recorder was made.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct Event {
    pub(super) kind: Kind,
    pub(super) thread: Thread,
    pub(super) start: u64,
    pub(super) end: u64,
    /// The optimizer steps that were done before.
    pub(super) step: u64,
    pub(super) bytes: u64,
    /// The bucket, or the number of the operation in its group.
    pub(super) number: u64,
}

impl Phase {
    pub(super) fn kind(self) -> Kind {
        match self {
            Self::Backward => Kind::Backward,
            Self::Copy => Kind::Copy,
            Self::Optimizer => Kind::Optimizer,
            Self::Reduce { .. } => Kind::Reduce,
        }
    }
}
