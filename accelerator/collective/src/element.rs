//! The element types that collectives work on, and the reductions that combine elements.

use std::fmt;

use half::{bf16, f16};

/// The type of the elements of a buffer.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum DType {
    /// bfloat16, summed in `f32` and rounded once.
    BF16,
    /// IEEE 754 half precision, summed in `f32` and rounded once.
    F16,
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 double precision.
    F64,
    /// Signed 8-bit integer.
    I8,
    /// Signed 16-bit integer.
    I16,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// Unsigned 8-bit integer; also the type of plain bytes.
    U8,
    /// Unsigned 16-bit integer.
    U16,
    /// Unsigned 32-bit integer.
    U32,
    /// Unsigned 64-bit integer.
    U64,
}

impl DType {
    pub(crate) const ALL: [Self; 12] = [
        Self::BF16,
        Self::F16,
        Self::F32,
        Self::F64,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::U8,
        Self::U16,
        Self::U32,
        Self::U64,
    ];

    /// The size of one element in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::BF16 | Self::F16 | Self::I16 | Self::U16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    /// The name as Rust writes it, such as `f32`.
    pub fn name(self) -> &'static str {
        match self {
            Self::BF16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::I8 => "i8",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U8 => "u8",
            Self::U16 => "u16",
            Self::U32 => "u32",
            Self::U64 => "u64",
        }
    }

    pub(crate) fn code(self) -> u8 {
        match self {
            Self::BF16 => 1,
            Self::F16 => 2,
            Self::F32 => 3,
            Self::F64 => 4,
            Self::I8 => 5,
            Self::I16 => 6,
            Self::I32 => 7,
            Self::I64 => 8,
            Self::U8 => 9,
            Self::U16 => 10,
            Self::U32 => 11,
            Self::U64 => 12,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.code() == code)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A number that collectives can carry and reduce.
///
/// The trait is sealed: it is implemented for `f32`, `f64`, [`half::f16`], [`half::bf16`] and the
/// integers of 8 to 64 bits, and for nothing else.
pub trait Element: sealed::Sealed + bytemuck::Pod + fmt::Debug + Send + Sync {
    /// The element type as a value.
    const DTYPE: DType;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($element:ty => $dtype:ident),* $(,)?) => {
        $(
            impl sealed::Sealed for $element {}
            impl Element for $element {
                const DTYPE: DType = DType::$dtype;
            }
        )*
    };
}

elements! {
    bf16 => BF16,
    f16 => F16,
    f32 => F32,
    f64 => F64,
    i8 => I8,
    i16 => I16,
    i32 => I32,
    i64 => I64,
    u8 => U8,
    u16 => U16,
    u32 => U32,
    u64 => U64,
}

/// The operation that combines the values of all ranks into one.
///
/// Values are combined in rank order, so a result has the same bits on every rank, run after run
/// and over every transport that groups the ranks alike: the
/// [hierarchical](crate::TransportKind::Hierarchical) one combines the ranks of each host in their
/// order, then the hosts in theirs; all others take rank by rank.
///
/// - `f16` and `bf16` are combined in `f32` and rounded once.
/// - A sum of integers wraps around, as [`i32::wrapping_add`] does.
/// - A mean is the sum divided by the world size; for integers the sum is exact (it does not
///   wrap) and the quotient is rounded toward zero.
/// - A sum or mean that is NaN is the NaN without sign and payload.
/// - Maximum and minimum of floating-point values are NaN where any rank's value is NaN; the two
///   zeros count as equal, and of equal values that of the highest rank is taken.
///
/// ```
/// use std::thread;
///
/// use accelerator_collective::{GroupOptions, ProcessGroup, ReduceOp};
///
/// # fn main() -> accelerator_collective::Result<()> {
/// let ops = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min];
/// let ranks = ProcessGroup::threads(2, &GroupOptions::new())?;
/// thread::scope(|scope| {
///     for group in ranks {
///         scope.spawn(move || {
///             let results = ops.map(|op| {
///                 let mut value = [1.0 + 2.0 * group.rank() as f64];
///                 group.all_reduce(&mut value, op).unwrap();
///                 value[0]
///             });
///             assert_eq!(results, [4.0, 2.0, 3.0, 1.0]);
///         });
///     }
/// });
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The largest value.
    Max,
    /// The sum divided by the world size.
    Mean,
    /// The smallest value.
    Min,
    /// The sum.
    Sum,
}

impl ReduceOp {
    pub(crate) const ALL: [Self; 4] = [Self::Max, Self::Mean, Self::Min, Self::Sum];

    /// The name in messages, such as `sum`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Max => "max",
            Self::Mean => "mean",
            Self::Min => "min",
            Self::Sum => "sum",
        }
    }

    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Max => 1,
            Self::Mean => 2,
            Self::Min => 3,
            Self::Sum => 4,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|op| op.code() == code)
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Up to this many bytes a buffer is reduced by every rank for itself: one exchange, not two.
pub(crate) const ONE_EXCHANGE_BYTES: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_sizes_are_consistent() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_code(dtype.code()), Some(dtype));
        }
        assert_eq!(DType::from_code(0), None);
        assert_eq!(DType::BF16.size(), size_of::<bf16>());
        assert_eq!(f64::DTYPE.size(), size_of::<f64>());
        assert_eq!(u8::DTYPE.to_string(), "u8");
    }
    #[test]
    fn codes_are_distinct() {
        for op in ReduceOp::ALL {
            assert_eq!(ReduceOp::from_code(op.code()), Some(op));
        }
        assert_eq!(ReduceOp::from_code(0), None);
    }
}
