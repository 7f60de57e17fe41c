//! The arithmetic of one element, and sums in several steps: values are widened once, combined as totals, and rounded
//! once.

use std::marker::PhantomData;

use bytemuck::Pod;
use half::{bf16, f16};

use super::simd::{Convert, Portable};
use crate::element::DType;

/// One reduction of one element type.
pub(super) trait Kernel {
    type Value: Copy;

    type Total: Copy;

    /// Pads the last block; the results of padding are discarded.
    const ZERO: Self::Value;

    /// `true` if there is a kernel for exactly two ranks.
    const PAIRS: bool;

    fn widen<P: Convert, const N: usize>(convert: P, values: &[Self::Value; N])
    -> [Self::Total; N];

    fn narrow<P: Convert, const N: usize>(
        convert: P,
        totals: &[Self::Total; N],
    ) -> [Self::Value; N];

    fn join(total: Self::Total, value: Self::Total) -> Self::Total;

    fn finish(total: Self::Total, world: usize) -> Self::Total;
}

/// The sum; of integers the sum that wraps around, which needs no wider total.
pub(super) struct Sum<T>(PhantomData<T>);

/// The sum of floating-point numbers, divided by the world size.
pub(super) struct Mean<T>(PhantomData<T>);

/// The exact sum of integers, divided by the world size and rounded toward zero.
pub(super) struct ExactMean<T>(PhantomData<T>);

pub(super) struct Max<T>(PhantomData<T>);

pub(super) struct Min<T>(PhantomData<T>);

/// An element type with the type of its totals.
pub(super) trait KernelElement: Copy {
    type Total: Total;

    const ZERO: Self;

    const PAIRS: bool;

    fn widen<P: Convert, const N: usize>(convert: P, values: &[Self; N]) -> [Self::Total; N];

    fn narrow<P: Convert, const N: usize>(convert: P, totals: &[Self::Total; N]) -> [Self; N];
}

pub(super) trait Total: Copy {
    fn plus(self, other: Self) -> Self;

    fn over(self, count: usize) -> Self;

    fn larger(self, other: Self) -> Self;

    fn smaller(self, other: Self) -> Self;

    /// The same number with one representation.
    fn settled(self) -> Self;
}

macro_rules! kernel {
    ($name:ident, $join:ident, |$total:ident, $world:ident| $finish:expr) => {
        impl<T: KernelElement> Kernel for $name<T> {
            type Value = T;
            type Total = T::Total;

            const ZERO: T = T::ZERO;
            const PAIRS: bool = T::PAIRS;

            #[inline(always)]
            fn widen<P: Convert, const N: usize>(convert: P, values: &[T; N]) -> [T::Total; N] {
                T::widen(convert, values)
            }

            #[inline(always)]
            fn narrow<P: Convert, const N: usize>(convert: P, totals: &[T::Total; N]) -> [T; N] {
                T::narrow(convert, totals)
            }

            #[inline(always)]
            fn join(total: T::Total, value: T::Total) -> T::Total {
                total.$join(value)
            }

            #[inline(always)]
            fn finish($total: T::Total, $world: usize) -> T::Total {
                $finish
            }
        }
    };
}

kernel!(Sum, plus, |total, _world| total.settled());
kernel!(Mean, plus, |total, world| total.over(world).settled());
kernel!(Max, larger, |total, _world| total);
kernel!(Min, smaller, |total, _world| total);

macro_rules! float_totals {
    ($($float:ty),*) => {
        $(
            impl Total for $float {
                #[inline(always)]
                fn plus(self, other: Self) -> Self {
                    self + other
                }

                #[inline(always)]
                fn over(self, count: usize) -> Self {
                    self / count as $float
                }

                // A NaN wins whichever side it is on: the comparison is false for a NaN on the
                // right, and the first test catches one on the left.
                #[inline(always)]
                fn larger(self, other: Self) -> Self {
                    if self.is_nan() || self > other { self } else { other }
                }

                #[inline(always)]
                fn smaller(self, other: Self) -> Self {
                    if self.is_nan() || self < other { self } else { other }
                }

                // Sign and payload of a NaN that an addition makes differ between processors and
                // with the order in which the compiler puts the operands.
                #[inline(always)]
                fn settled(self) -> Self {
                    if self.is_nan() { Self::NAN } else { self }
                }
            }
        )*
    };
}

float_totals!(f32, f64);

macro_rules! integer_totals {
    ($($integer:ty),*) => {
        $(
            impl Total for $integer {
                #[inline(always)]
                fn plus(self, other: Self) -> Self {
                    self.wrapping_add(other)
                }

                #[inline(always)]
                fn over(self, count: usize) -> Self {
                    self / count as $integer
                }

                #[inline(always)]
                fn larger(self, other: Self) -> Self {
                    self.max(other)
                }

                #[inline(always)]
                fn smaller(self, other: Self) -> Self {
                    self.min(other)
                }

                #[inline(always)]
                fn settled(self) -> Self {
                    self
                }
            }
        )*
    };
}

integer_totals!(i8, i16, i32, i64, u8, u16, u32, u64);

macro_rules! own_totals {
    ($($element:ty = $zero:expr, $pairs:literal;)*) => {
        $(
            impl KernelElement for $element {
                type Total = Self;

                const ZERO: Self = $zero;
                const PAIRS: bool = $pairs;

                #[inline(always)]
                fn widen<P: Convert, const N: usize>(_: P, values: &[Self; N]) -> [Self; N] {
                    *values
                }

                #[inline(always)]
                fn narrow<P: Convert, const N: usize>(_: P, totals: &[Self; N]) -> [Self; N] {
                    *totals
                }
            }
        )*
    };
}

// Models rarely add integers, and each kernel costs time to compile.
own_totals! {
    f32 = 0.0, true;
    f64 = 0.0, true;
    i8 = 0, false;
    i16 = 0, false;
    i32 = 0, false;
    i64 = 0, false;
    u8 = 0, false;
    u16 = 0, false;
    u32 = 0, false;
    u64 = 0, false;
}

impl KernelElement for f16 {
    type Total = f32;

    const ZERO: Self = Self::ZERO;
    const PAIRS: bool = true;

    #[inline(always)]
    fn widen<P: Convert, const N: usize>(convert: P, values: &[Self; N]) -> [f32; N] {
        convert.widen(values)
    }

    #[inline(always)]
    fn narrow<P: Convert, const N: usize>(convert: P, totals: &[f32; N]) -> [Self; N] {
        convert.narrow(totals)
    }
}

impl KernelElement for bf16 {
    type Total = f32;

    const ZERO: Self = Self::ZERO;
    const PAIRS: bool = true;

    #[inline(always)]
    fn widen<P: Convert, const N: usize>(_: P, values: &[Self; N]) -> [f32; N] {
        values.map(|value| f32::from_bits(u32::from(value.to_bits()) << 16))
    }

    // To the nearest, of two that are as near to the even one; a NaN becomes a quiet one.
    #[inline(always)]
    fn narrow<P: Convert, const N: usize>(_: P, totals: &[f32; N]) -> [Self; N] {
        totals.map(|total| {
            let bits = total.to_bits();
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
            let kept = if total.is_nan() {
                bits | 0x0040_0000
            } else {
                rounded
            };
            Self::from_bits((kept >> 16) as u16)
        })
    }
}

macro_rules! exact_means {
    ($($element:ty => $wide:ty),* $(,)?) => {
        $(
            impl Kernel for ExactMean<$element> {
                type Value = $element;
                // Wider than the element by enough bits for any number of ranks.
                type Total = $wide;

                const ZERO: $element = 0;
                const PAIRS: bool = false;

                #[inline(always)]
                fn widen<P: Convert, const N: usize>(_: P, values: &[$element; N]) -> [$wide; N] {
                    values.map(<$wide>::from)
                }

                // A mean lies between the values, so it fits.
                #[inline(always)]
                fn narrow<P: Convert, const N: usize>(_: P, totals: &[$wide; N]) -> [$element; N] {
                    totals.map(|total| total as $element)
                }

                #[inline(always)]
                fn join(total: $wide, value: $wide) -> $wide {
                    total.wrapping_add(value)
                }

                #[inline(always)]
                fn finish(total: $wide, world: usize) -> $wide {
                    total / world as $wide
                }
            }
        )*
    };
}

exact_means! {
    i8 => i64,
    i16 => i64,
    i32 => i64,
    i64 => i128,
    u8 => u64,
    u16 => u64,
    u32 => u64,
    u64 => u128,
}

/// The type in which values are added up, so that the sum is rounded once.
pub(crate) fn wide(dtype: DType) -> DType {
    match dtype {
        DType::BF16 | DType::F16 | DType::F32 => DType::F32,
        other => other,
    }
}

/// Writes the values of `source` as the type in which they are added up.
///
/// # Panics
///
/// Panics if `target` has not as many elements of that type, or either is not aligned.
pub(crate) fn widen(dtype: DType, source: &[u8], target: &mut [u8]) {
    match dtype {
        DType::BF16 => widen_all::<bf16>(source, target),
        DType::F16 => widen_all::<f16>(source, target),
        // It is wide enough.
        _ => target.copy_from_slice(source),
    }
}

/// Writes totals as values of `dtype`.
///
/// # Panics
///
/// The same as for [`widen`].
pub(crate) fn narrow(dtype: DType, total: &[u8], result: &mut [u8]) {
    match dtype {
        DType::BF16 => narrow_all::<bf16>(total, result),
        DType::F16 => narrow_all::<f16>(total, result),
        _ => result.copy_from_slice(total),
    }
}

/// Divides the totals of floating-point values by the world size, as a mean does.
pub(crate) fn divide(dtype: DType, total: &mut [u8], world: usize) {
    match wide(dtype) {
        DType::F32 => divide_all::<f32>(total, world),
        DType::F64 => divide_all::<f64>(total, world),
        // Their mean is rounded from a sum that no element holds.
        other => unreachable!("{other} has no totals that can be divided"),
    }
}

fn widen_all<T: KernelElement<Total = f32> + Pod>(source: &[u8], target: &mut [u8]) {
    let (source, rest) = bytemuck::cast_slice::<u8, T>(source).as_chunks::<BLOCK>();
    let target: &mut [f32] = bytemuck::cast_slice_mut(target);
    let (target, last) = target.split_at_mut(source.len() * BLOCK);
    for (values, totals) in source.iter().zip(target.chunks_exact_mut(BLOCK)) {
        totals.copy_from_slice(&T::widen(Portable, values));
    }
    let mut values = [T::ZERO; BLOCK];
    values[..rest.len()].copy_from_slice(rest);
    last.copy_from_slice(&T::widen(Portable, &values)[..rest.len()]);
}

fn narrow_all<T: KernelElement<Total = f32> + Pod>(source: &[u8], target: &mut [u8]) {
    let (source, rest) = bytemuck::cast_slice::<u8, f32>(source).as_chunks::<BLOCK>();
    let target: &mut [T] = bytemuck::cast_slice_mut(target);
    let (target, last) = target.split_at_mut(source.len() * BLOCK);
    for (totals, values) in source.iter().zip(target.chunks_exact_mut(BLOCK)) {
        values.copy_from_slice(&T::narrow(Portable, totals));
    }
    let mut totals = [0.0; BLOCK];
    totals[..rest.len()].copy_from_slice(rest);
    last.copy_from_slice(&T::narrow(Portable, &totals)[..rest.len()]);
}

fn divide_all<T: Total + Pod>(total: &mut [u8], world: usize) {
    for total in bytemuck::cast_slice_mut::<u8, T>(total) {
        *total = total.over(world).settled();
    }
}

/// Elements that are converted at once.
const BLOCK: usize = 64;
