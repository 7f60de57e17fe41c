use core::fmt;

use serde::{Deserialize, Serialize};

/// What the thread that trains is doing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Phase {
    /// Burn's backward pass.
    Backward,
    /// Gradients into buckets, or out of them.
    Copy(EventSubject),
    Optimizer,
    /// Waiting for what was sent, or reducing it.
    Reduce {
        part: EventSubject,
        bytes: usize,
    },
}

/// What an event is about.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) enum EventSubject {
    /// Everything.
    Whole,
    /// A bucket of gradients, by number.
    Bucket(u32),
    /// The numbers that go with the gradients.
    Control,
    /// The weight of the window, which goes ahead of compressed gradients.
    Weight,
    /// An operation, by its number in the group.
    Operation(u64),
}

/// What happened, in a trace.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) enum EventKind {
    Backward,
    Copy,
    Data,
    Forward,
    Load,
    Operation(Operation),
    Optimizer,
    Reduce,
    Step,
}

/// A collective, called as the method that starts it.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) enum Operation {
    AllGather,
    AllGatherObject,
    AllGatherParts,
    AllGatherVaried,
    AllReduce,
    Barrier,
    Broadcast,
    BroadcastObject,
    GatherObject,
    Other,
    ReduceScatter,
    ReduceScatterBuffer,
    ScatterObject,
}

impl Operation {
    const ALL: [Self; 13] = [
        Self::AllGather,
        Self::AllGatherObject,
        Self::AllGatherParts,
        Self::AllGatherVaried,
        Self::AllReduce,
        Self::Barrier,
        Self::Broadcast,
        Self::BroadcastObject,
        Self::GatherObject,
        Self::Other,
        Self::ReduceScatter,
        Self::ReduceScatterBuffer,
        Self::ScatterObject,
    ];

    pub(super) fn of(name: &str) -> Self {
        let known = Self::ALL.into_iter().find(|known| known.name() == name);
        known.unwrap_or(Self::Other)
    }

    fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::AllGatherObject => "all_gather_object",
            Self::AllGatherParts => "all_gather_parts",
            Self::AllGatherVaried => "all_gather_varied",
            Self::AllReduce => "all_reduce",
            Self::Barrier => "barrier",
            Self::Broadcast => "broadcast",
            Self::BroadcastObject => "broadcast_object",
            Self::GatherObject => "gather_object",
            Self::Other => "collective",
            Self::ReduceScatter => "reduce_scatter",
            Self::ReduceScatterBuffer => "reduce_scatter_buffer",
            Self::ScatterObject => "scatter_object",
        }
    }
}

impl EventKind {
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
            Self::Backward => "backward",
            Self::Copy => "copy",
            Self::Data => "wait for data",
            Self::Forward => "forward",
            Self::Load => "load batch",
            Self::Operation(operation) => operation.name(),
            Self::Optimizer => "optimizer",
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

/// What else there is to say about an event.
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
    /// What it is about, and how many bytes that has where they travel.
    pub(super) fn detail(self) -> Detail {
        let (part, bytes) = match self {
            Self::Backward | Self::Optimizer => (EventSubject::Whole, 0),
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
            Self::Reduce { .. } => EventKind::Reduce,
        }
    }
}
