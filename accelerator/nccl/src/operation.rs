//! The reductions that NCCL is asked for.

use std::ffi::c_int;
use std::fmt;

use accelerator_collective::{DType, ReduceOp};

use crate::error::{Error, Kind, Result};

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
        let Some(dtype_code) = dtype_code(dtype) else {
            let known = DTYPES.map(DType::name).join(", ");
            let message = format!("NCCL does not reduce {dtype}: expected one of {known}");
            return Err(Error::new(Kind::Misuse, message));
        };
        let Some(op_code) = op_code(op) else {
            let message = format!("NCCL has no reduction {op}: expected max, mean, min or sum");
            return Err(Error::new(Kind::Misuse, message));
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

/// The types that NCCL reduces.
pub(crate) const DTYPES: [DType; 10] = [
    DType::BF16,
    DType::F16,
    DType::F32,
    DType::F64,
    DType::I8,
    DType::I32,
    DType::I64,
    DType::U8,
    DType::U32,
    DType::U64,
];

fn dtype_code(dtype: DType) -> Option<c_int> {
    match dtype {
        DType::I8 => Some(0),
        DType::U8 => Some(1),
        DType::I32 => Some(2),
        DType::U32 => Some(3),
        DType::I64 => Some(4),
        DType::U64 => Some(5),
        DType::F16 => Some(6),
        DType::F32 => Some(7),
        DType::F64 => Some(8),
        DType::BF16 => Some(9),
        _ => None,
    }
}

fn op_code(op: ReduceOp) -> Option<c_int> {
    match op {
        ReduceOp::Sum => Some(0),
        ReduceOp::Max => Some(2),
        ReduceOp::Min => Some(3),
        ReduceOp::Mean => Some(4),
        _ => None,
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
            assert!(DTYPES.contains(&dtype));
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
}
