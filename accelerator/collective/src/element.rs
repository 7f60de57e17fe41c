//! The element types that collectives work on, and the reductions that combine elements.

use std::fmt;

use half::{bf16, f16};

/// Gives an enum the list of its variants, and their names.
macro_rules! names {
    (
        $type:ident, $(#[$all_doc:meta])* $all:vis ALL, $(#[$name_doc:meta])* $name:vis name {
            $($variant:ident $text:literal),* $(,)?
        }
    ) => {
        impl $type {
            $(#[$all_doc])*
            $all const ALL: [Self; [$($text),*].len()] = [$(Self::$variant),*];

            $(#[$name_doc])*
            $name fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text),*
                }
            }
        }
    };
}

pub(crate) use names;

/// The type of the elements of a buffer.
// The numbers are those of the wire.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum DType {
    /// bfloat16, summed in `f32` and rounded once.
    BF16 = 1,
    /// IEEE 754 half precision, summed in `f32` and rounded once.
    F16 = 2,
    /// IEEE 754 single precision.
    F32 = 3,
    /// IEEE 754 double precision.
    F64 = 4,
    /// Signed 8-bit integer.
    I8 = 5,
    /// Signed 16-bit integer.
    I16 = 6,
    /// Signed 32-bit integer.
    I32 = 7,
    /// Signed 64-bit integer.
    I64 = 8,
    /// Unsigned 8-bit integer; also the type of plain bytes.
    U8 = 9,
    /// Unsigned 16-bit integer.
    U16 = 10,
    /// Unsigned 32-bit integer.
    U32 = 11,
    /// Unsigned 64-bit integer.
    U64 = 12,
}

impl DType {
    /// The size of one element in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::BF16 | Self::F16 | Self::I16 | Self::U16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    pub(crate) fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.code() == code)
    }
}

names! {
    DType, pub(crate) ALL,
    /// The name as Rust writes it, such as `f32`.
    pub name {
        BF16 "bf16",
        F16 "f16",
        F32 "f32",
        F64 "f64",
        I8 "i8",
        I16 "i16",
        I32 "i32",
        I64 "i64",
        U8 "u8",
        U16 "u16",
        U32 "u32",
        U64 "u64",
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
    Max = 1,
    /// The sum divided by the world size.
    Mean = 2,
    /// The smallest value.
    Min = 3,
    /// The sum.
    Sum = 4,
}

impl ReduceOp {
    pub(crate) fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|op| op.code() == code)
    }
}

names! {
    ReduceOp, pub(crate) ALL,
    /// The name in messages, such as `sum`.
    pub(crate) name {
        Max "max",
        Mean "mean",
        Min "min",
        Sum "sum",
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
    fn sizes_are_those_of_the_types() {
        assert_eq!(DType::BF16.size(), size_of::<bf16>());
        assert_eq!(f64::DTYPE.size(), size_of::<f64>());
        assert_eq!(u8::DTYPE.to_string(), "u8");
    }
}
