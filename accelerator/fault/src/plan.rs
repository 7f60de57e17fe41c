//! Fault plans: the faults of a job, each on one rank at one point.

use std::fmt;
use std::time::Duration;

/// Faults of one job, each of which is triggered once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// The faults, in no particular order.
    pub faults: Vec<Fault>,
}

/// A fault of one rank at one point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The rank on which it happens.
    pub rank: usize,
    /// The attempt of the job in which it happens: 0 before any restart.
    pub restart: u64,
    /// The point at which it happens.
    pub point: Point,
    /// The action that it takes.
    pub action: Action,
}

/// A point in the run of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// The moment before the rank contacts the store.
    Rendezvous,
    /// The moment at which the rank knows all others and is about to connect to them.
    Connect,
    /// The next backward pass that ends a window after this many optimizer steps, counted over the whole job.
    Step(u64),
    /// The collective with this sequence number, once the rank has declared it and sent its first data.
    Operation(u64),
    /// A place within the collective with this sequence number: behind its header and its first chunk,
    /// before the rank shows or sends more. A collective that ends with its first data has no such
    /// place.
    Within(u64),
    /// A stage of saving the checkpoint with this number.
    Save(u64, SaveStage),
}

/// A place within a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveStage {
    /// The start, before anything is written.
    Begin,
    /// The moment at which the first data file is half written.
    Data,
    /// All data are written and flushed; the checkpoint has no name yet.
    Written,
    /// The checkpoint has its name; `latest` does not point to it yet.
    Renamed,
}

/// The action of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// SIGKILL.
    Kill,
    /// SIGSEGV.
    Segv,
    /// The process exits with this code, without unwinding.
    Exit(i32),
    /// A panic on the thread of the rank.
    Panic,
    /// SIGSTOP, for a time or for ever.
    Stop(Option<Duration>),
    /// The rank sleeps, and lives.
    Slow(Duration),
    /// All connections of the rank are cut.
    DropConnection,
    /// The next frame that the rank sends has a wrong bit.
    CorruptFrame,
    /// The next write of a checkpoint fails as on a full disk.
    DiskFull,
    /// The next write of a checkpoint fails.
    FailWrite,
}

impl Action {
    /// Returns `true` if the rank or its process is gone, or is taken for gone, once the fault is triggered.
    pub fn is_deadly(self) -> bool {
        !matches!(self, Self::Slow(_) | Self::DiskFull | Self::FailWrite)
    }
}

impl fmt::Display for FaultPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, fault) in self.faults.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{fault}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank={}", self.rank)?;
        if self.restart > 0 {
            write!(f, " restart={}", self.restart)?;
        }
        write!(f, " {} {}", self.point, self.action)
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rendezvous => f.write_str("rendezvous"),
            Self::Connect => f.write_str("connect"),
            Self::Step(step) => write!(f, "step={step}"),
            Self::Operation(operation) => write!(f, "op={operation}"),
            Self::Within(operation) => write!(f, "op={operation} within"),
            Self::Save(number, stage) => write!(f, "save={number} {stage}"),
        }
    }
}

impl fmt::Display for SaveStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Begin => "begin",
            Self::Data => "data",
            Self::Written => "written",
            Self::Renamed => "renamed",
        })
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kill => f.write_str("kill"),
            Self::Segv => f.write_str("segv"),
            Self::Exit(code) => write!(f, "exit {code}"),
            Self::Panic => f.write_str("panic"),
            Self::Stop(None) => f.write_str("stop"),
            Self::Stop(Some(time)) => write!(f, "stop {}ms", time.as_millis()),
            Self::Slow(time) => write!(f, "slow {}ms", time.as_millis()),
            Self::DropConnection => f.write_str("drop-connection"),
            Self::CorruptFrame => f.write_str("corrupt-frame"),
            Self::DiskFull => f.write_str("disk-full"),
            Self::FailWrite => f.write_str("fail-write"),
        }
    }
}
