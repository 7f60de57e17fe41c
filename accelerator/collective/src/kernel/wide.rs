//! Sums in several steps: values are widened once, combined as totals, and rounded once.

use bytemuck::Pod;
use half::{bf16, f16};

use super::{
    arithmetic::{KernelElement, Total},
    simd::Portable,
};
use crate::element::DType;

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
pub(crate) fn finish(dtype: DType, total: &[u8], result: &mut [u8]) {
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
