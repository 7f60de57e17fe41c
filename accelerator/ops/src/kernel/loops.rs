//! Loops over parts of tensors: vectorised, on all threads, and with the same bits for any number of them.

use burn::tensor::{Shape, TensorData};
use burn_flex::FlexTensor;
use rayon::prelude::*;

/// Runs a loop compiled for the widest vectors that the processor has. Bits do not depend on it. Only a closure that is
/// `#[inline(always)]` is compiled so; iterators that zip slices in it may not be.
#[inline(always)]
pub(super) fn vectorised<R>(work: impl FnOnce() -> R) -> R {
    macerator::AutoArch::new().dispatch(work)
}

/// The numbers of a contiguous tensor.
pub(super) fn values(tensor: &FlexTensor) -> &[f32] {
    let start = tensor.layout().start_offset();
    &tensor.storage()[start..start + tensor.layout().num_elements()]
}

pub(super) fn shape(tensor: &FlexTensor) -> Shape {
    tensor.layout().shape().clone()
}

pub(super) fn tensor(values: Vec<f32>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape.into()))
}

/// The number of values that are worth a task of their own.
pub(super) const TASK: usize = 1 << 15;

pub(super) fn has_threads() -> bool {
    rayon::current_num_threads() > 1
}

/// Calls `work` with each part of `out`, on all threads if there are several. Parts have `len` values, but for the
/// last. `work` gets the number of its part.
pub(super) fn for_parts(out: &mut [f32], len: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
    for_each(out.len(), out.chunks_mut(len.max(1)), work);
}

/// Calls `work` with each part and its number, on all threads if there are several. Together, parts have so many
/// `values`.
pub(super) fn for_each<T: Send>(
    values: usize,
    parts: impl Iterator<Item = T>,
    work: impl Fn(usize, T) + Sync,
) {
    if has_threads() && values > 4 * TASK {
        let parts: Vec<T> = parts.collect();
        let parts = parts.into_par_iter().enumerate();
        parts.for_each(|(number, part)| work(number, part));
    } else {
        parts
            .enumerate()
            .for_each(|(number, part)| work(number, part));
    }
}

/// Returns `len` zeros, written in parallel if there are many.
pub(super) fn zeros(len: usize) -> Vec<f32> {
    const BLOCK: usize = 64;
    if !has_threads() || len <= 4 * TASK {
        return vec![0.0; len];
    }
    let blocks = rayon::iter::repeat_n([0.0; BLOCK], len.div_ceil(BLOCK));
    let blocks: Vec<[f32; BLOCK]> = blocks.with_min_len(TASK / BLOCK).collect();
    let mut zeros = blocks.into_flattened();
    zeros.truncate(len);
    zeros
}

/// Returns what `of` makes of each value.
pub(super) fn mapped(x: &[f32], of: impl Fn(f32) -> f32 + Sync) -> Vec<f32> {
    let mut out = zeros(x.len());
    for_parts(&mut out, TASK, |part, out| {
        vectorised(
            #[inline(always)]
            || {
                let x = &x[part * TASK..][..out.len()];
                for at in 0..out.len() {
                    out[at] = of(x[at]);
                }
            },
        );
    });
    out
}

/// Returns what `of` makes of each pair of values.
pub(super) fn mapped_both(x: &[f32], y: &[f32], of: impl Fn(f32, f32) -> f32 + Sync) -> Vec<f32> {
    let mut out = zeros(x.len());
    for_parts(&mut out, TASK, |part, out| {
        vectorised(
            #[inline(always)]
            || {
                let len = out.len();
                let (x, y) = (&x[part * TASK..][..len], &y[part * TASK..][..len]);
                for at in 0..len {
                    out[at] = of(x[at], y[at]);
                }
            },
        );
    });
    out
}

/// Returns the sums of the vectors that `work` adds to for a range of `items`. Ranges are the same for any number of
/// threads, and so are the bits of the sums.
pub(super) fn sums<const N: usize>(
    items: usize,
    lens: [usize; N],
    work: impl Fn(core::ops::Range<usize>, &mut [Vec<f32>; N]) + Sync,
) -> [Vec<f32>; N] {
    const RANGES: usize = 8;
    let zeros = || lens.map(|len| vec![0.0; len]);
    let len = items.div_ceil(RANGES).max(1);
    let of_range = |start: usize| {
        let mut sums = zeros();
        work(start..(start + len).min(items), &mut sums);
        sums
    };
    let starts: Vec<usize> = (0..items).step_by(len).collect();
    let parts: Vec<[Vec<f32>; N]> = match has_threads() {
        true => starts.into_par_iter().map(of_range).collect(),
        false => starts.into_iter().map(of_range).collect(),
    };
    let all = parts.into_iter().reduce(|mut all, part| {
        for (all, part) in all.iter_mut().zip(&part) {
            for_parts(all, TASK, |number, all| {
                vectorised(
                    #[inline(always)]
                    || {
                        let part = &part[number * TASK..][..all.len()];
                        for at in 0..all.len() {
                            all[at] += part[at];
                        }
                    },
                );
            });
        }
        all
    });
    all.unwrap_or_else(zeros)
}

/// Writes the transpose of a matrix whose rows have length `columns`, block by block, so that both reads and writes use
/// the cache.
pub(super) fn transpose(out: &mut [f32], from: &[f32], columns: usize) {
    const SIDE: usize = 32;
    let rows = from.len() / columns.max(1);
    // Bands of rows of `out`, so that threads can share the work.
    let band = (TASK / rows.max(1)).max(1).next_multiple_of(SIDE);
    for_parts(out, band * rows, |part, out| {
        let from = &from[part * band..];
        let width = out.len() / rows;
        for top in (0..rows).step_by(SIDE) {
            let height = SIDE.min(rows - top);
            for left in (0..width).step_by(SIDE) {
                for column in left..(left + SIDE).min(width) {
                    let out = &mut out[column * rows + top..][..height];
                    for (row, out) in out.iter_mut().enumerate() {
                        *out = from[(top + row) * columns + column];
                    }
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_of_any_sizes_is_transposed() {
        for [rows, columns] in [[40_000, 3], [3, 40_000], [33, 65], [1, 7], [1000, 100]] {
            let from: Vec<f32> = (0..rows * columns).map(|at| at as f32).collect();
            let mut out = vec![-1.0; from.len()];
            transpose(&mut out, &from, columns);
            for (at, value) in out.iter().enumerate() {
                assert_eq!(*value, from[at % rows * columns + at / rows]);
            }
        }
    }
}
