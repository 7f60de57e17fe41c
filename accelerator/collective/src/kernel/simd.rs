//! The choice of vector instructions, and the conversions that they make fast.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps, _mm256_cvtps_ph,
    _mm256_loadu_ps, _mm256_loadu_si256, _mm256_storeu_ps, _mm256_storeu_si256, _mm512_cvtph_ps,
    _mm512_cvtps_ph, _mm512_loadu_ps, _mm512_storeu_ps,
};

use half::{f16, slice::HalfFloatSliceExt};

/// Instructions that this processor has.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct SimdLevel(Instructions);

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Instructions {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl SimdLevel {
    /// The fastest; the standard library remembers what it has found out about the processor.
    pub(crate) fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if has_avx512() {
                return Self(Instructions::Avx512);
            }
            if has_avx2() {
                return Self(Instructions::Avx2);
            }
        }
        Self(Instructions::Portable)
    }

    /// All that this processor has, for tests and measurements.
    #[cfg(test)]
    pub(crate) fn all() -> Vec<Self> {
        let mut all = vec![Self(Instructions::Portable)];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(has_avx2().then_some(Self(Instructions::Avx2)));
            all.extend(has_avx512().then_some(Self(Instructions::Avx512)));
        }
        all
    }

    pub(super) fn instructions(self) -> Instructions {
        self.0
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && has_avx2()
}

/// Conversions of `f16`, which only vector instructions make fast.
///
/// A value is proof that the processor has the instructions: code that holds one may use them.
pub(super) trait Convert: Copy {
    fn widen<const N: usize>(self, values: &[f16; N]) -> [f32; N];

    /// Rounds to nearest, ties to even; a NaN becomes a quiet NaN.
    fn narrow<const N: usize>(self, totals: &[f32; N]) -> [f16; N];
}

#[derive(Clone, Copy)]
pub(super) struct Portable;

impl Convert for Portable {
    #[inline(always)]
    fn widen<const N: usize>(self, values: &[f16; N]) -> [f32; N] {
        let mut totals = [0.0; N];
        values.convert_to_f32_slice(&mut totals);
        totals
    }

    #[inline(always)]
    fn narrow<const N: usize>(self, totals: &[f32; N]) -> [f16; N] {
        let mut values = [f16::ZERO; N];
        values.convert_from_f32_slice(totals);
        values
    }
}

#[cfg(target_arch = "x86_64")]
macro_rules! convert {
    ($name:ident, $lanes:literal, $widen:ident, $narrow:ident) => {
        #[derive(Clone, Copy)]
        pub(super) struct $name(());

        impl $name {
            /// # Safety
            ///
            /// The processor has these instructions.
            pub(super) unsafe fn assume() -> Self {
                Self(())
            }
        }

        impl Convert for $name {
            #[inline(always)]
            fn widen<const N: usize>(self, values: &[f16; N]) -> [f32; N] {
                const { assert!(N.is_multiple_of($lanes)) };
                let mut totals = [0.0; N];
                let lanes = values.as_chunks::<$lanes>().0;
                for (total, lanes) in totals.as_chunks_mut::<$lanes>().0.iter_mut().zip(lanes) {
                    // SAFETY: `self` says that the processor has the instructions.
                    unsafe { $widen(lanes, total) };
                }
                totals
            }

            #[inline(always)]
            fn narrow<const N: usize>(self, totals: &[f32; N]) -> [f16; N] {
                const { assert!(N.is_multiple_of($lanes)) };
                let mut values = [f16::ZERO; N];
                let lanes = totals.as_chunks::<$lanes>().0;
                for (value, lanes) in values.as_chunks_mut::<$lanes>().0.iter_mut().zip(lanes) {
                    // SAFETY: `self` says that the processor has the instructions.
                    unsafe { $narrow(lanes, value) };
                }
                values
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
convert!(Avx2, 8, widen_8, narrow_8);
#[cfg(target_arch = "x86_64")]
convert!(Avx512, 16, widen_16, narrow_16);

#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx,f16c")]
fn widen_8(values: &[f16; 8], totals: &mut [f32; 8]) {
    // SAFETY: eight values of 16 bits are read and eight of 32 bits are written, wherever they lie.
    unsafe {
        let values = _mm_loadu_si128(values.as_ptr().cast());
        _mm256_storeu_ps(totals.as_mut_ptr(), _mm256_cvtph_ps(values));
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx,f16c")]
fn narrow_8(totals: &[f32; 8], values: &mut [f16; 8]) {
    // SAFETY: eight values of 32 bits are read and eight of 16 bits are written, wherever they lie.
    unsafe {
        let totals = _mm256_loadu_ps(totals.as_ptr());
        let rounded = _mm256_cvtps_ph::<NEAREST>(totals);
        _mm_storeu_si128(values.as_mut_ptr().cast(), rounded);
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
fn widen_16(values: &[f16; 16], totals: &mut [f32; 16]) {
    // SAFETY: 16 values of 16 bits are read and 16 of 32 bits are written, wherever they lie.
    unsafe {
        let values = _mm256_loadu_si256(values.as_ptr().cast());
        _mm512_storeu_ps(totals.as_mut_ptr(), _mm512_cvtph_ps(values));
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
fn narrow_16(totals: &[f32; 16], values: &mut [f16; 16]) {
    // SAFETY: 16 values of 32 bits are read and 16 of 16 bits are written, wherever they lie.
    unsafe {
        let totals = _mm512_loadu_ps(totals.as_ptr());
        let rounded = _mm512_cvtps_ph::<NEAREST>(totals);
        _mm256_storeu_si256(values.as_mut_ptr().cast(), rounded);
    }
}

/// The rounding of the arithmetic, whatever the processor's mode.
#[cfg(target_arch = "x86_64")]
const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
