//! The arithmetic of reductions, as fast as memory.
//!
//! [`fold`] combines the same part of all ranks' buffers in rank order and writes the result to one place, or to all of
//! those buffers at once. It works block by block: it fills a few vector registers from each rank in turn, and writes
//! the totals after the last rank. Totals never leave the registers; every byte is read once and written once.
//!
//! The code is written once, as loops over arrays, and compiled several times: for AVX-512, for AVX2, and for the
//! instructions that every processor of the architecture has. The widest that the processor supports are used. The
//! choice does not change any bits: each element goes through the same operations in the same order, and bits that an
//! instruction leaves open (the payload of a sum that is NaN) are fixed. Only `f16` has separate conversions for each
//! (`simd.rs`).
//!
//! These alternatives were tried and left out, with two cores and buffers of 64 KB to 100 MB: totals in the first-level
//! cache rather than in registers (half as fast within caches, no faster from memory), stores that bypass the caches
//! (the lines have just been read: up to 20 times slower), and prefetching (the processor finds these streams by
//! itself). `tests/speed.rs` measures.
#![expect(unsafe_code, reason = "works on memory that several ranks share")]

mod arithmetic;
mod simd;

#[cfg(test)]
mod tests;

use half::{bf16, f16};

use crate::element::{DType, ReduceOp};
use arithmetic::{ExactMean, Kernel, Max, Mean, Min, Sum};
pub(crate) use arithmetic::{divide, narrow, wide, widen};
pub(crate) use simd::SimdLevel;
use simd::{Convert, Instructions, Portable};

/// Combines `len` elements of each of `sources`, in their order, and writes the result to each of
/// `targets`, as [`ReduceOp`] says. Without sources it does nothing.
///
/// # Safety
///
/// - Each source can be read, and each target written, for `len` elements of `dtype`.
/// - All of them are aligned to the element.
/// - A target is exactly one of the sources, or touches none of them; no two targets overlap.
/// - Meanwhile, nobody else writes sources, or reads or writes targets, and neither does any other process.
pub(crate) unsafe fn fold(
    dtype: DType,
    op: ReduceOp,
    sources: &[*const u8],
    targets: &[*mut u8],
    len: usize,
) {
    // SAFETY: the caller promises the same.
    unsafe { fold_by(SimdLevel::best(), dtype, op, sources, targets, len) }
}

/// One rank's bytes in a reduction.
pub(crate) trait ReduceInput {
    /// The bytes, or `None` for the rank whose values lie in the output.
    fn bytes(&self) -> Option<&[u8]>;
}

/// Combines the shares of all ranks, in rank order, into `out`.
///
/// `out` holds the values of the rank whose share says `None`. All shares have the length of `out`,
/// which is a whole number of elements.
///
/// # Panics
///
/// Panics if a share has another length, or is not aligned to the elements.
pub(crate) fn combine(dtype: DType, op: ReduceOp, shares: &[impl ReduceInput], out: &mut [u8]) {
    combine_by(SimdLevel::best(), dtype, op, shares, out);
}

/// Runs [`combine`] with the given instructions.
pub(crate) fn combine_by(
    level: SimdLevel,
    dtype: DType,
    op: ReduceOp,
    shares: &[impl ReduceInput],
    out: &mut [u8],
) {
    let (bytes, out) = (out.len(), out.as_mut_ptr());
    let len = bytes / dtype.size();
    let source = |share: &_| {
        let source = match ReduceInput::bytes(share) {
            Some(share) => {
                assert_eq!(share.len(), bytes, "a share as long as the output");
                share.as_ptr()
            }
            None => out.cast_const(),
        };
        let offset = source.align_offset(dtype.size());
        assert!(len == 0 || offset == 0, "a share aligned to its elements");
        source
    };
    assert!(
        len == 0 || out.align_offset(dtype.size()) == 0,
        "an output aligned to its elements"
    );
    let mut few = [std::ptr::null(); MAX_STACK_POINTERS];
    let many: Vec<*const u8>;
    let sources = if let Some(few) = few.get_mut(..shares.len()) {
        for (slot, share) in few.iter_mut().zip(shares) {
            *slot = source(share);
        }
        &*few
    } else {
        many = shares.iter().map(source).collect();
        &many
    };
    // SAFETY: `out` is borrowed mutably and the shares are borrowed, so nobody else writes them
    // and those with bytes of their own do not touch `out`; the others are `out` itself. Lengths and
    // alignment were checked.
    unsafe { fold_by(level, dtype, op, sources, &[out], len) }
}

/// The number of ranks whose pointers find room on the stack.
const MAX_STACK_POINTERS: usize = 128;

/// Runs [`fold`] with the given instructions.
///
/// # Safety
///
/// The same as for [`fold`].
pub(crate) unsafe fn fold_by(
    level: SimdLevel,
    dtype: DType,
    op: ReduceOp,
    sources: &[*const u8],
    targets: &[*mut u8],
    len: usize,
) {
    let parts = FoldParts {
        sources,
        targets,
        len,
    };
    if sources.is_empty() {
        return;
    }
    // `$block` is the number of elements in a block: totals of 256 bytes.
    macro_rules! run {
        ($kernel:ty, $block:expr) => {
            // SAFETY: the caller meets the conditions of `run`, for elements of this type.
            unsafe { run::<$kernel, { $block }, { $block / 2 }>(level, &parts) }
        };
    }
    macro_rules! float {
        ($element:ty, $block:expr) => {
            match op {
                ReduceOp::Max => run!(Max<$element>, $block),
                ReduceOp::Mean => run!(Mean<$element>, $block),
                ReduceOp::Min => run!(Min<$element>, $block),
                ReduceOp::Sum => run!(Sum<$element>, $block),
            }
        };
    }
    macro_rules! integer {
        ($element:ty, $block:expr) => {
            match op {
                ReduceOp::Max => run!(Max<$element>, $block),
                // Vectors do not divide integers.
                // SAFETY: the caller meets the conditions of `blocks`.
                ReduceOp::Mean => unsafe {
                    blocks::<ExactMean<$element>, _, 8>(Portable, &parts);
                },
                ReduceOp::Min => run!(Min<$element>, $block),
                ReduceOp::Sum => run!(Sum<$element>, $block),
            }
        };
    }
    match dtype {
        DType::BF16 => float!(bf16, 64),
        DType::F16 => float!(f16, 64),
        DType::F32 => float!(f32, 64),
        DType::F64 => float!(f64, 32),
        DType::I8 => integer!(i8, 256),
        DType::I16 => integer!(i16, 128),
        DType::I32 => integer!(i32, 64),
        DType::I64 => integer!(i64, 32),
        DType::U8 => integer!(u8, 256),
        DType::U16 => integer!(u16, 128),
        DType::U32 => integer!(u32, 64),
        DType::U64 => integer!(u64, 32),
    }
}

/// The inputs of a reduction, and the places for its results.
struct FoldParts<'a> {
    sources: &'a [*const u8],
    targets: &'a [*mut u8],
    len: usize,
}

/// Combines in blocks of `WIDE` elements, or of `SLIM` if vectors are short.
///
/// # Safety
///
/// The same as for [`fold`], for elements of the kernel's type, with at least one source.
unsafe fn run<K: Kernel, const WIDE: usize, const SLIM: usize>(
    level: SimdLevel,
    parts: &FoldParts<'_>,
) {
    match level.instructions() {
        // SAFETY: the caller promises the same.
        Instructions::Portable => unsafe { blocks::<K, _, SLIM>(Portable, parts) },
        // SAFETY: the same, and a level exists only where the processor has its instructions.
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2 => unsafe { avx2::<K, WIDE>(parts) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx512 => unsafe { avx512::<K, WIDE>(parts) },
    }
}

/// # Safety
///
/// The same as for [`run`], on a processor with these instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn avx2<K: Kernel, const N: usize>(parts: &FoldParts<'_>) {
    // SAFETY: the caller promises the same.
    unsafe { blocks::<K, _, N>(simd::Avx2::assume(), parts) }
}

/// # Safety
///
/// The same as for [`run`], on a processor with these instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")]
unsafe fn avx512<K: Kernel, const N: usize>(parts: &FoldParts<'_>) {
    // SAFETY: the caller promises the same.
    unsafe { blocks::<K, _, N>(simd::Avx512::assume(), parts) }
}

/// Combines in blocks of `N` elements. With two ranks, the most frequent number, the pointers stay in registers.
///
/// # Safety
///
/// The same as for [`run`].
#[inline(always)]
unsafe fn blocks<K: Kernel, P: Convert, const N: usize>(convert: P, parts: &FoldParts<'_>) {
    let FoldParts {
        sources,
        targets,
        len,
    } = *parts;
    // SAFETY: the caller promises the same, of the same pointers.
    unsafe {
        match (sources, targets) {
            (&[a, b], &[x, y]) if K::PAIRS => each::<K, P, N>(convert, &[a, b], &[x, y], len),
            (&[a, b], &[x]) if K::PAIRS => each::<K, P, N>(convert, &[a, b], &[x], len),
            _ => each::<K, P, N>(convert, sources, targets, len),
        }
    }
}

/// # Safety
///
/// The same as for [`blocks`].
#[inline(always)]
unsafe fn each<K: Kernel, P: Convert, const N: usize>(
    convert: P,
    sources: &[*const u8],
    targets: &[*mut u8],
    len: usize,
) {
    let mut start = 0;
    while len - start >= N {
        let total = total::<K, P, N>(convert, sources.len(), |rank| {
            // SAFETY: `start + N <= len` elements can be read; an array is aligned as its elements.
            unsafe {
                sources[rank]
                    .cast::<K::Value>()
                    .add(start)
                    .cast::<[K::Value; N]>()
                    .read()
            }
        });
        for target in targets {
            // SAFETY: as above, for writing. All sources of this block were read before.
            unsafe {
                target
                    .cast::<K::Value>()
                    .add(start)
                    .cast::<[K::Value; N]>()
                    .write(total)
            };
        }
        start += N;
    }
    let rest = len - start;
    if rest > 0 {
        let total = total::<K, P, N>(convert, sources.len(), |rank| {
            let mut values = [K::ZERO; N];
            // SAFETY: `start + rest` is `len`, `rest` is less than `N`, and a local array touches
            // nothing else.
            unsafe {
                let source = sources[rank].cast::<K::Value>().add(start);
                source.copy_to_nonoverlapping(values.as_mut_ptr(), rest);
            }
            values
        });
        for target in targets {
            // SAFETY: as above, for writing.
            unsafe {
                let target = target.cast::<K::Value>().add(start);
                target.copy_from_nonoverlapping(total.as_ptr(), rest);
            }
        }
    }
}

/// One block of all ranks.
#[inline(always)]
fn total<K: Kernel, P: Convert, const N: usize>(
    convert: P,
    world: usize,
    load: impl Fn(usize) -> [K::Value; N],
) -> [K::Value; N] {
    let mut total = K::widen(convert, &load(0));
    for rank in 1..world {
        let values = K::widen(convert, &load(rank));
        for (total, value) in total.iter_mut().zip(values) {
            *total = K::join(*total, value);
        }
    }
    for total in &mut total {
        *total = K::finish(*total, world);
    }
    K::narrow(convert, &total)
}
