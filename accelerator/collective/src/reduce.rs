//! Reductions in rank order.

use std::{fmt, ops::Range};

use half::{bf16, f16, slice::HalfFloatSliceExt};

use crate::element::{DType, Element};

/// How the values of all ranks become one.
///
/// Values are combined in rank order, so a result has the same bits on every rank, run after run
/// and over every transport.
///
/// - `f16` and `bf16` are combined in `f32` and rounded once.
/// - A sum of integers wraps around, as [`i32::wrapping_add`] does.
/// - A mean is the sum divided by the world size; for integers the sum is exact (it does not
///   wrap) and the quotient is rounded toward zero.
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
    match dtype {
        DType::BF16 => combine_as::<bf16>(op, shares, out),
        DType::F16 => combine_as::<f16>(op, shares, out),
        DType::F32 => combine_as::<f32>(op, shares, out),
        DType::F64 => combine_as::<f64>(op, shares, out),
        DType::I8 => combine_as::<i8>(op, shares, out),
        DType::I16 => combine_as::<i16>(op, shares, out),
        DType::I32 => combine_as::<i32>(op, shares, out),
        DType::I64 => combine_as::<i64>(op, shares, out),
        DType::U8 => combine_as::<u8>(op, shares, out),
        DType::U16 => combine_as::<u16>(op, shares, out),
        DType::U32 => combine_as::<u32>(op, shares, out),
        DType::U64 => combine_as::<u64>(op, shares, out),
    }
}

fn combine_as<T: Kernel>(op: ReduceOp, shares: &[impl Share], out: &mut [u8]) {
    let out: &mut [T] = bytemuck::cast_slice_mut(out);
    let world = shares.len();
    match op {
        ReduceOp::Max => fold(shares, out, T::Wide::larger, |total| total),
        ReduceOp::Mean => fold(shares, out, T::Wide::plus, |total| total.over(world)),
        ReduceOp::Min => fold(shares, out, T::Wide::smaller, |total| total),
        ReduceOp::Sum => fold(shares, out, T::Wide::plus, |total| total),
    }
}

/// Works block by block, so that the running totals stay in the first-level cache and every
/// share is read once.
fn fold<T: Kernel>(
    shares: &[impl Share],
    out: &mut [T],
    join: impl Fn(T::Wide, T::Wide) -> T::Wide,
    finish: impl Fn(T::Wide) -> T::Wide,
) {
    let mut totals = [T::Wide::default(); BLOCK];
    let mut values = [T::Wide::default(); BLOCK];
    let mut start = 0;
    while start < out.len() {
        let range = start..out.len().min(start + BLOCK);
        let totals = &mut totals[..range.len()];
        let values = &mut values[..range.len()];
        for (rank, share) in shares.iter().enumerate() {
            if rank == 0 {
                T::widen(block(share, out, &range), totals);
            } else {
                T::widen(block(share, out, &range), values);
                for (total, value) in totals.iter_mut().zip(&*values) {
                    *total = join(*total, *value);
                }
            }
        }
        for total in &mut *totals {
            *total = finish(*total);
        }
        T::narrow(totals, &mut out[range.clone()]);
        start = range.end;
    }
}

fn block<'a, T: Kernel>(share: &'a impl Share, out: &'a [T], range: &Range<usize>) -> &'a [T] {
    match share.bytes() {
        Some(bytes) => &bytemuck::cast_slice(bytes)[range.clone()],
        None => &out[range.clone()],
    }
}

const BLOCK: usize = 512;

/// An element with the type in which its totals are kept.
trait Kernel: Element {
    type Wide: Wide;

    fn widen(source: &[Self], target: &mut [Self::Wide]);

    fn narrow(source: &[Self::Wide], target: &mut [Self]);
}

/// The arithmetic of totals.
trait Wide: Copy + Default {
    fn plus(self, other: Self) -> Self;

    fn over(self, count: usize) -> Self;

    fn larger(self, other: Self) -> Self;

    fn smaller(self, other: Self) -> Self;
}

macro_rules! float_totals {
    ($($wide:ty),*) => {
        $(
            impl Wide for $wide {
                fn plus(self, other: Self) -> Self {
                    self + other
                }

                fn over(self, count: usize) -> Self {
                    self / count as $wide
                }

                // A NaN wins whichever side it is on: the comparison is false for a NaN on the
                // right, and the first test catches one on the left.
                fn larger(self, other: Self) -> Self {
                    if self.is_nan() || self > other { self } else { other }
                }

                fn smaller(self, other: Self) -> Self {
                    if self.is_nan() || self < other { self } else { other }
                }
            }
        )*
    };
}

float_totals!(f32, f64);

macro_rules! integer_totals {
    ($($wide:ty),*) => {
        $(
            impl Wide for $wide {
                // Wider than the element by enough bits for any number of ranks.
                fn plus(self, other: Self) -> Self {
                    self.wrapping_add(other)
                }

                fn over(self, count: usize) -> Self {
                    self / count as $wide
                }

                fn larger(self, other: Self) -> Self {
                    self.max(other)
                }

                fn smaller(self, other: Self) -> Self {
                    self.min(other)
                }
            }
        )*
    };
}

integer_totals!(i64, i128, u64, u128);

macro_rules! kernels {
    ($($element:ty => $wide:ty),* $(,)?) => {
        $(
            impl Kernel for $element {
                type Wide = $wide;

                fn widen(source: &[Self], target: &mut [$wide]) {
                    for (target, source) in target.iter_mut().zip(source) {
                        *target = *source as $wide;
                    }
                }

                // `as` keeps the low bits of an integer: that is the wrapping sum.
                fn narrow(source: &[$wide], target: &mut [Self]) {
                    for (target, source) in target.iter_mut().zip(source) {
                        *target = *source as $element;
                    }
                }
            }
        )*
    };
}

kernels! {
    f32 => f32,
    f64 => f64,
    i8 => i64,
    i16 => i64,
    i32 => i64,
    i64 => i128,
    u8 => u64,
    u16 => u64,
    u32 => u64,
    u64 => u128,
}

macro_rules! half_kernels {
    ($($element:ty),*) => {
        $(
            // The slice conversions use the processor's instructions where it has them.
            impl Kernel for $element {
                type Wide = f32;

                fn widen(source: &[Self], target: &mut [f32]) {
                    source.convert_to_f32_slice(target);
                }

                fn narrow(source: &[f32], target: &mut [Self]) {
                    target.convert_from_f32_slice(source);
                }
            }
        )*
    };
}

half_kernels!(bf16, f16);

#[cfg(test)]
mod tests {
    use super::*;

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
        let len = 3 * BLOCK + 7;
        let first: Vec<i32> = (0..len as i32).collect();
        let second: Vec<i32> = (0..len as i32).map(|x| 10 * x).collect();
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
