//! The foreign functions, behind a trait, so that all else is tested without a GPU; the reductions that NCCL carries
//! out, and the id that the ranks of a communicator have in common.
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

use std::ffi::c_int;
use std::fmt;

use accelerator_collective::{DType, ReduceOp};

use crate::error::{Error, Kind, Result};

pub(crate) use dynamic::Dynamic;

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

impl From<CallError> for Error {
    fn from(fault: CallError) -> Self {
        let kind = match fault.of {
            Foreign::Cuda => Kind::Cuda,
            Foreign::Nccl => Kind::Nccl,
        };
        Self::new(kind, fault.to_string())
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

/// A reduction that NCCL has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Operation {
    dtype: DType,
    op: ReduceOp,
    /// `ncclDataType_t`.
    pub(crate) dtype_code: c_int,
    /// `ncclRedOp_t`.
    pub(crate) op_code: c_int,
}

impl Operation {
    /// # Errors
    /// A misuse for what NCCL does not have.
    pub(crate) fn new(dtype: DType, op: ReduceOp) -> Result<Self> {
        let Some((_, dtype_code)) = DTYPES.into_iter().find(|(known, _)| *known == dtype) else {
            let known = DTYPES.map(|(known, _)| known.name()).join(", ");
            return Err(Error::misuse(format!(
                "NCCL does not reduce {dtype}: expected one of {known}"
            )));
        };
        let Some(op_code) = op_code(op) else {
            return Err(Error::misuse(format!(
                "NCCL has no reduction {op}: expected max, mean, min or sum"
            )));
        };
        Ok(Self {
            dtype,
            op,
            dtype_code,
            op_code,
        })
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dtype, op, .. } = self;
        write!(formatter, "{op} of {dtype}")
    }
}

/// The types that NCCL reduces, with their `ncclDataType_t`.
const DTYPES: [(DType, c_int); 10] = [
    (DType::BF16, 9),
    (DType::F16, 6),
    (DType::F32, 7),
    (DType::F64, 8),
    (DType::I8, 0),
    (DType::I32, 2),
    (DType::I64, 4),
    (DType::U8, 1),
    (DType::U32, 3),
    (DType::U64, 5),
];

fn op_code(op: ReduceOp) -> Option<c_int> {
    match op {
        ReduceOp::Sum => Some(0),
        ReduceOp::Max => Some(2),
        ReduceOp::Min => Some(3),
        ReduceOp::Mean => Some(4),
        _ => None,
    }
}

/// The place where ranks meet, and a random number. One id makes one communicator; it travels from rank 0
/// to the others.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct UniqueId([u8; Self::SIZE]);

impl UniqueId {
    /// The size in bytes.
    pub(crate) const SIZE: usize = 128;

    pub(crate) fn new(bytes: [u8; Self::SIZE]) -> Self {
        Self(bytes)
    }

    /// Reads an id as rank 0 has sent it.
    pub(crate) fn received(bytes: &[u8]) -> Result<Self> {
        match bytes.try_into() {
            Ok(bytes) => Ok(Self(bytes)),
            Err(_) => {
                let message = format!(
                    "rank 0 has sent no id of NCCL's: expected {} bytes, found {}; run one build on all ranks",
                    Self::SIZE,
                    bytes.len()
                );
                Err(Error::new(Kind::Nccl, message))
            }
        }
    }

    pub(crate) fn to_bytes(&self) -> &[u8; Self::SIZE] {
        &self.0
    }
}

impl fmt::Debug for UniqueId {
    /// Leaves out the bytes: whoever knows them may take a rank's place.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("UniqueId(..)")
    }
}

#[cfg(test)]
mod tests {
    use cudarc::nccl::sys as nccl;

    use super::*;

    #[test]
    fn codes_are_those_of_the_header() {
        use nccl::ncclDataType_t as Type;
        for (dtype, code) in [
            (DType::BF16, Type::ncclBfloat16),
            (DType::F16, Type::ncclFloat16),
            (DType::F32, Type::ncclFloat32),
            (DType::F64, Type::ncclFloat64),
            (DType::I8, Type::ncclInt8),
            (DType::I32, Type::ncclInt32),
            (DType::I64, Type::ncclInt64),
            (DType::U8, Type::ncclUint8),
            (DType::U32, Type::ncclUint32),
            (DType::U64, Type::ncclUint64),
        ] {
            let operation = Operation::new(dtype, ReduceOp::Sum).unwrap();
            assert_eq!(operation.dtype_code, code as c_int, "{dtype}");
        }
        use nccl::ncclRedOp_t as Op;
        for (op, code) in [
            (ReduceOp::Max, Op::ncclMax),
            (ReduceOp::Mean, Op::ncclAvg),
            (ReduceOp::Min, Op::ncclMin),
            (ReduceOp::Sum, Op::ncclSum),
        ] {
            let operation = Operation::new(DType::F32, op).unwrap();
            assert_eq!(operation.op_code, code as c_int, "{op}");
        }
    }

    #[test]
    fn a_type_that_nccl_lacks_is_refused() {
        for dtype in [DType::I16, DType::U16] {
            let error = Operation::new(dtype, ReduceOp::Sum).unwrap_err();
            assert!(error.is_misuse());
            let text = format!("NCCL does not reduce {dtype}: expected one of bf16, f16, f32");
            assert!(error.to_string().starts_with(&text), "{error}");
        }
    }

    #[test]
    fn ids_do_not_show_what_they_are() {
        let id = UniqueId::received(&[42; UniqueId::SIZE]).unwrap();
        assert!(!format!("{id:?}").contains("42"));
    }

    #[test]
    fn what_is_no_id_is_refused() {
        let error = UniqueId::received(&[42; 3]).unwrap_err();
        assert!(error.to_string().contains("expected 128 bytes, found 3"));
    }
}
