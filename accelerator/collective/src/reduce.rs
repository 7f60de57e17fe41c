//! Reductions in rank order.

use std::fmt;

use crate::{element::DType, kernel};

/// How the values of all ranks become one.
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

/// One rank's bytes in a reduction.
pub(crate) trait Share {
    /// The bytes, or `None` for the rank whose values lie in the output.
    fn bytes(&self) -> Option<&[u8]>;
}

/// Combines the shares of all ranks, in rank order, into `out`.
///
/// `out` holds the values of the rank whose share says `None`. All shares have the length of
/// `out`, which is a whole number of elements and aligned to them.
pub(crate) fn combine(dtype: DType, op: ReduceOp, shares: &[impl Share], out: &mut [u8]) {
    kernel::fold_shares(dtype, op, shares, out);
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::element::Element;

    struct Values(Option<Vec<u8>>);

    impl Share for Values {
        fn bytes(&self) -> Option<&[u8]> {
            self.0.as_deref()
        }
    }

    fn reduce<T: Element>(op: ReduceOp, ranks: &[&[T]], own: usize) -> Vec<T> {
        let shares: Vec<Values> = ranks
            .iter()
            .enumerate()
            .map(|(rank, values)| {
                Values((rank != own).then(|| bytemuck::cast_slice(values).to_vec()))
            })
            .collect();
        let mut out = ranks[own].to_vec();
        combine(T::DTYPE, op, &shares, bytemuck::cast_slice_mut(&mut out));
        out
    }

    #[test]
    fn sums_follow_the_order_of_ranks() {
        let ranks: [&[f32]; 3] = [&[1e8], &[1.0], &[-1e8]];
        for own in 0..3 {
            assert_eq!(reduce(ReduceOp::Sum, &ranks, own), [(1e8 + 1.0) - 1e8]);
        }
    }

    #[test]
    fn halves_are_summed_in_f32_and_rounded_once() {
        // In f16, 2048 + 1 + 1 stays 2048; in f32 it is 2050, which f16 can hold.
        let values = [2048.0, 1.0, 1.0].map(|x| [f16::from_f32(x)]);
        let ranks: Vec<&[f16]> = values.iter().map(|x| &x[..]).collect();
        assert_eq!(reduce(ReduceOp::Sum, &ranks, 1), [f16::from_f32(2050.0)]);
        let values = [256.0, 1.0, 1.0].map(|x| [bf16::from_f32(x)]);
        let ranks: Vec<&[bf16]> = values.iter().map(|x| &x[..]).collect();
        assert_eq!(reduce(ReduceOp::Sum, &ranks, 2), [bf16::from_f32(258.0)]);
    }

    #[test]
    fn integer_sums_wrap_and_means_do_not() {
        let ranks: [&[u8]; 2] = [&[200], &[101]];
        assert_eq!(reduce(ReduceOp::Sum, &ranks, 0), [45]);
        assert_eq!(reduce(ReduceOp::Mean, &ranks, 0), [150]);
        let ranks: [&[i64]; 2] = [&[i64::MAX], &[i64::MAX]];
        assert_eq!(reduce(ReduceOp::Sum, &ranks, 0), [-2]);
        assert_eq!(reduce(ReduceOp::Mean, &ranks, 1), [i64::MAX]);
        let ranks: [&[i32]; 2] = [&[-3], &[0]];
        assert_eq!(reduce(ReduceOp::Mean, &ranks, 1), [-1]);
    }

    #[test]
    fn a_nan_of_any_rank_wins() {
        for op in [ReduceOp::Max, ReduceOp::Min] {
            for odd in 0..3 {
                let mut values = [[1.0_f64], [2.0], [3.0]];
                values[odd] = [f64::NAN];
                let ranks: Vec<&[f64]> = values.iter().map(|x| &x[..]).collect();
                assert!(reduce(op, &ranks, 1)[0].is_nan(), "{op}, rank {odd}");
            }
        }
    }

    #[test]
    fn blocks_join_without_seams() {
        let len = 3 * 512 + 7;
        let first: Vec<i32> = (0..len).collect();
        let second: Vec<i32> = (0..len).map(|x| 10 * x).collect();
        let sum = reduce(ReduceOp::Sum, &[&first, &second], 0);
        assert!(sum.iter().enumerate().all(|(i, x)| *x == 11 * i as i32));
        assert_eq!(reduce(ReduceOp::Max, &[&first, &second], 1), second);
        assert_eq!(reduce(ReduceOp::Min, &[&first, &second], 1), first);
    }

    #[test]
    fn codes_are_distinct() {
        for op in ReduceOp::ALL {
            assert_eq!(ReduceOp::from_code(op.code()), Some(op));
        }
        assert_eq!(ReduceOp::from_code(0), None);
    }
}
