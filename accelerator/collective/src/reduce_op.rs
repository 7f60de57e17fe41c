//! Reductions in rank order.

use std::fmt;

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
///                 (op.name(), value[0])
///             });
///             assert_eq!(results, [("sum", 4.0), ("mean", 2.0), ("max", 3.0), ("min", 1.0)]);
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
    pub fn name(self) -> &'static str {
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
    fn codes_are_distinct() {
        for op in ReduceOp::ALL {
            assert_eq!(ReduceOp::from_code(op.code()), Some(op));
        }
        assert_eq!(ReduceOp::from_code(0), None);
    }
}
