//! The foreign functions, behind a trait, so that all else is tested without a GPU.
//!
//! Handles are made by an [`Api`] alone, and each is kept by one owner of this crate, which gives it
//! back once, when nothing else can reach it. That is what each `unsafe` call of a method relies on.

#![expect(
    unsafe_code,
    reason = "handles are pointers, and only their owners know what is whole"
)]

mod dynamic;
#[cfg(test)]
pub(crate) mod fake;

use std::fmt;

pub(crate) use dynamic::Dynamic;

use crate::error::{Error, Kind};
use crate::operation::Operation;

/// A device of the driver's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Device(pub(crate) i32);

/// A context of a device, as a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Context(pub(crate) usize);

/// A stream, as a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamHandle(pub(crate) usize);

/// An event, as a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EventHandle(pub(crate) usize);

/// NCCL's communicator, as a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Comm(pub(crate) usize);

/// The progress of work that was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Done,
    UnderWay,
}

/// The library that a function belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Foreign {
    /// CUDA's driver.
    Cuda,
    Nccl,
}

impl fmt::Display for Foreign {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Cuda => "CUDA",
            Self::Nccl => "NCCL",
        })
    }
}

/// A call that failed, in its own words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CallError {
    pub(crate) of: Foreign,
    pub(crate) call: &'static str,
    pub(crate) text: String,
}

impl fmt::Display for CallError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { of, call, text } = self;
        write!(formatter, "{of} failed in {call}: {text}")
    }
}

impl std::error::Error for CallError {}

impl CallError {
    pub(crate) fn kind(&self) -> Kind {
        match self.of {
            Foreign::Cuda => Kind::Cuda,
            Foreign::Nccl => Kind::Nccl,
        }
    }
}

impl From<CallError> for Error {
    fn from(fault: CallError) -> Self {
        Self::new(fault.kind(), fault.to_string())
    }
}

pub(crate) type CallResult<T> = Result<T, CallError>;

/// The calls of CUDA's driver and of NCCL.
///
/// # Safety
/// Handles that are given to methods were made by the same value and not destroyed since, and belong
/// together: a stream or event is used with its own context, and while that is current. Nothing else
/// uses a communicator at the same time. Memory that is given lies on the device of the context and
/// holds as many bytes as are asked for.
pub(crate) trait Api: fmt::Debug + Send + Sync {
    /// Returns the version as the driver numbers its releases: 12050 is 12.5.
    fn driver_version(&self) -> CallResult<u32>;
    /// Returns `true` if events can be about a whole context.
    fn has_context_events(&self) -> bool;
    fn gpu_count(&self) -> CallResult<usize>;
    fn device(&self, ordinal: i32) -> CallResult<Device>;
    fn bus_id(&self, device: Device) -> CallResult<String>;
    /// Takes a share in the primary context.
    fn retain(&self, device: Device) -> CallResult<Context>;
    /// Gives one share back.
    unsafe fn release(&self, device: Device);

    /// Makes the context current in this thread until [`leave`](Self::leave).
    unsafe fn enter(&self, context: Context) -> CallResult<()>;
    /// Restores what was current before.
    unsafe fn leave(&self);
    /// Waits for all that is enqueued in the current context.
    unsafe fn synchronize(&self) -> CallResult<()>;

    /// A stream of its own, with the highest priority.
    unsafe fn create_stream(&self) -> CallResult<StreamHandle>;
    unsafe fn destroy_stream(&self, stream: StreamHandle);
    unsafe fn create_event(&self) -> CallResult<EventHandle>;
    unsafe fn destroy_event(&self, event: EventHandle);
    unsafe fn record(&self, event: EventHandle, stream: StreamHandle) -> CallResult<()>;
    /// Records what is enqueued in the whole context.
    unsafe fn record_context(&self, event: EventHandle, context: Context) -> CallResult<()>;
    unsafe fn query(&self, event: EventHandle) -> CallResult<Progress>;
    unsafe fn wait_stream(&self, stream: StreamHandle, event: EventHandle) -> CallResult<()>;
    /// Lets all that is enqueued in the context from then on wait.
    unsafe fn wait_context(&self, context: Context, event: EventHandle) -> CallResult<()>;

    unsafe fn allocate(&self, bytes: usize) -> CallResult<u64>;
    unsafe fn free(&self, at: u64);
    unsafe fn write(&self, at: u64, bytes: &[u8]) -> CallResult<()>;
    unsafe fn read(&self, at: u64, bytes: &mut [u8]) -> CallResult<()>;

    /// Returns the version as NCCL numbers its releases: 22703 is 2.27.3.
    fn nccl_version(&self) -> CallResult<u32>;
    fn unique_id(&self) -> CallResult<[u8; 128]>;
    /// Begins to connect the device of the current context.
    unsafe fn connect(&self, id: &[u8; 128], rank: i32, world_size: i32) -> CallResult<Comm>;
    /// Returns the progress of the last call, or what failed since.
    unsafe fn progress(&self, comm: Comm) -> CallResult<Progress>;
    unsafe fn all_reduce(
        &self,
        comm: Comm,
        stream: StreamHandle,
        at: u64,
        elements: usize,
        operation: Operation,
    ) -> CallResult<Progress>;
    unsafe fn finalize(&self, comm: Comm) -> CallResult<Progress>;
    unsafe fn destroy(&self, comm: Comm) -> CallResult<()>;
    unsafe fn abort(&self, comm: Comm) -> CallResult<()>;
}
