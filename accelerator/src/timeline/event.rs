use core::fmt;

use accelerator_collective::internal::OpKind;
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Phase {
    Backward,
    /// A block of the model, whose activations were not kept.
    Recompute,
    /// Gradients into buckets, or out of them.
    Copy(EventSubject),
    Optimizer,
    /// The wait for what was sent, or its reduction.
    Reduce {
        part: EventSubject,
        bytes: usize,
    },
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) enum EventSubject {
    Whole,
    Bucket(u32),
    /// The numbers that go with the gradients.
    Control,
    /// The weight of the window, which goes ahead of compressed gradients.
    Weight,
    Operation(u64),
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) enum EventKind {
    Backward,
    Copy,
    Data,
    Forward,
    Load,
    Operation(OpKind),
    Optimizer,
    Recompute,
    Reduce,
    Step,
}

impl EventKind {
    /// The kinds that share out the time of the main thread.
    pub(super) const PHASES: [Self; 7] = [
        Self::Data,
        Self::Forward,
        Self::Backward,
        Self::Copy,
        Self::Reduce,
        Self::Optimizer,
        Self::Recompute,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Backward => "backward",
            Self::Copy => "copy",
            Self::Data => "wait for data",
            Self::Forward => "forward",
            Self::Load => "load batch",
            Self::Operation(operation) => operation.name(),
            Self::Optimizer => "optimizer",
            Self::Recompute => "recompute",
            Self::Reduce => "wait for all_reduce",
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
    pub(super) kind: EventKind,
    pub(super) thread: Thread,
    pub(super) start: u64,
    pub(super) end: u64,
    /// The optimizer steps that were done before.
    pub(super) step: u64,
    pub(super) bytes: u64,
    pub(super) part: EventSubject,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Detail {
    pub(super) bytes: u64,
    pub(super) part: EventSubject,
}

impl Detail {
    pub(super) const NONE: Self = Self {
        bytes: 0,
        part: EventSubject::Whole,
    };
}

impl EventSubject {
    pub(crate) fn bucket(number: usize) -> Self {
        Self::Bucket(u32::try_from(number).unwrap_or(u32::MAX))
    }
}

impl fmt::Display for EventSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("all"),
            Self::Bucket(number) => write!(f, "bucket {number}"),
            Self::Control => f.write_str("control"),
            Self::Weight => f.write_str("weight"),
            Self::Operation(number) => write!(f, "operation {number}"),
        }
    }
}

impl Phase {
    pub(super) fn detail(self) -> Detail {
        let (part, bytes) = match self {
            Self::Backward | Self::Optimizer | Self::Recompute => (EventSubject::Whole, 0),
            Self::Copy(part) => (part, 0),
            Self::Reduce { part, bytes } => (part, bytes as u64),
        };
        Detail { bytes, part }
    }

    pub(super) fn kind(self) -> EventKind {
        match self {
            Self::Backward => EventKind::Backward,
            Self::Copy(_) => EventKind::Copy,
            Self::Optimizer => EventKind::Optimizer,
            Self::Recompute => EventKind::Recompute,
            Self::Reduce { .. } => EventKind::Reduce,
        }
    }
}
