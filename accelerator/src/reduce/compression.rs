use core::fmt;
use core::ops::Range;
use core::str::FromStr;

use accelerator_collective::{Buffer, DType};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::bucket_storage::{slice, slice_mut};
use crate::core::error::{Error, Result, named};

/// The type in which gradients travel between ranks. A half-precision type halves the bytes, and rounds the values.
///
/// Gradients are added up over the micro-steps of a window in `f32`, rounded once when they are
/// sent, summed over the ranks in `f32` and rounded once more. All ranks get the same bits. Gradients
/// of `f64` parameters travel as they are; so does everything where there is one rank only.
///
/// | | bits of precision | what is too large or too small |
/// |---|---|---|
/// | [`F16`](Self::F16) | 11 | below about 2·10⁻⁷ precision fades, below 10⁻¹⁰ all is 0; above 256 the step is reduced again in `f32` |
/// | [`Bf16`](Self::Bf16) | 8 | as in `f32` |
///
/// The limits are those of elements of the mean gradient: `f16` carries a multiple of it, by a power of
/// two that all ranks derive from the weight of the whole window. If one sum is not finite, the
/// whole step is reduced once more in `f32`, on all ranks alike: either it fits now, or the gradient was
/// not finite in the first place.
///
/// The weight of the window travels ahead of the gradients. With [`Overlap`](crate::Overlap), buckets wait
/// for it: where backward is shorter than this exchange, none leaves before backward ends (see
/// [`OverlapReport`](crate::OverlapReport)).
///
/// If NCCL sums `bf16` from GPU to GPU, it rounds after each addition. Sums of `f16` always go through memory.
///
/// It pays if the network is slow. Within a host, memory is faster than the conversion. As text, the
/// settings have the names of `ACCEL_COMPRESSION`.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Compression {
    /// The same exponents as `f32` and fewer digits. Nothing can overflow.
    Bf16,
    /// More digits, and a narrow range.
    F16,
    /// Sends gradients as computed.
    #[default]
    None,
}

/// The factor of a sum before it is rounded, and its divisor afterwards: a power of two, so that it adds no error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct CompressionScale {
    exponent: i32,
}

impl Compression {
    const ALL: [Self; 3] = [Self::Bf16, Self::F16, Self::None];

    /// The type in which a bucket of that type travels, if it is another one.
    pub(super) fn wire(self, bucket: DType) -> Option<DType> {
        match (self, bucket) {
            (Self::Bf16, DType::F32) => Some(DType::BF16),
            (Self::F16, DType::F32) => Some(DType::F16),
            _ => None,
        }
    }

    /// The scale for sums of `weight · gradient`, whose weights add up to `total` over all ranks.
    ///
    /// Only exponents count, so that ranks agree whatever their mathematical library does.
    pub(super) fn scale(self, total: f64) -> CompressionScale {
        let exponent = match self {
            Self::F16 => HEADROOM - exponent(total),
            Self::Bf16 | Self::None => 0,
        };
        CompressionScale { exponent }
    }
}

impl CompressionScale {
    fn factor(self) -> f32 {
        power_of_two(self.exponent)
    }

    fn inverse(self) -> f32 {
        power_of_two(-self.exponent)
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::None => "none",
        })
    }
}

impl FromStr for Compression {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        named("compression", name, &Self::ALL)
    }
}

/// Rounds `sums`, scaled, into `wire`.
pub(super) fn compress(sums: &Buffer, wire: &mut Buffer, scale: CompressionScale) {
    let sums = slice::<f32>(sums);
    match wire.dtype() {
        DType::F16 => narrow::<f16>(sums, slice_mut(wire), scale),
        _ => narrow::<bf16>(sums, slice_mut(wire), scale),
    }
}

/// Puts what `wire` holds in a range back into `sums`, without the scale.
pub(super) fn expand(
    wire: &Buffer,
    sums: &mut Buffer,
    range: Range<usize>,
    scale: CompressionScale,
) {
    let sums = &mut slice_mut::<f32>(sums)[range.clone()];
    match wire.dtype() {
        DType::F16 => slice::<f16>(wire)[range].convert_to_f32_slice(sums),
        _ => slice::<bf16>(wire)[range].convert_to_f32_slice(sums),
    }
    let inverse = scale.inverse();
    if inverse != 1.0 {
        for sum in sums {
            *sum *= inverse;
        }
    }
}

/// Returns `true` if everything in a range of `wire` is finite.
pub(super) fn is_finite(wire: &Buffer, range: Range<usize>) -> bool {
    // Infinities and NaN have all bits of the exponent.
    let (bits, exponent) = match wire.dtype() {
        DType::F16 => (slice::<f16>(wire)[range].reinterpret_cast(), 0x7c00),
        _ => (slice::<bf16>(wire)[range].reinterpret_cast(), 0x7f80),
    };
    let magnitudes = bits.iter().map(|bits| bits & 0x7fff);
    magnitudes.fold(0_u16, Ord::max) < exponent
}

/// The exponent of the factor by which `f16` values travel above the mean gradient: the largest value is 2¹⁶, and
/// gradients are mostly small.
const HEADROOM: i32 = 8;

/// The least exponent whose power of two is more than `value`, which is positive; 0 for
/// anything else. Held within what an `f32` can be scaled by.
fn exponent(value: f64) -> i32 {
    if !(value > 0.0 && value.is_finite()) {
        return 0;
    }
    let biased = (value.to_bits() >> 52) & 0x7ff;
    // Eleven bits.
    (biased as i32 - 1022).clamp(-100, 100)
}

/// `2^exponent`, for exponents of normal numbers.
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent.clamp(-126, 127)) as u32) << 23)
}

fn narrow<T: Copy>(sums: &[f32], wire: &mut [T], scale: CompressionScale)
where
    [T]: HalfFloatSliceExt,
{
    let factor = scale.factor();
    let mut block = [0.0_f32; 512];
    for (sums, wire) in sums.chunks(block.len()).zip(wire.chunks_mut(512)) {
        let block = &mut block[..sums.len()];
        for (scaled, sum) in block.iter_mut().zip(sums) {
            *scaled = sum * factor;
        }
        wire.convert_from_f32_slice(block);
    }
}

#[cfg(test)]
mod tests {
    use accelerator_collective::ProcessGroup;
    use proptest::prelude::*;

    use super::*;

    fn buffer(dtype: DType, len: usize) -> Buffer {
        ProcessGroup::single().buffer(dtype, len)
    }

    fn wire_of(compression: Compression, sums: &[f32], scale: CompressionScale) -> Buffer {
        let mut from = buffer(DType::F32, sums.len());
        from.as_mut_slice().unwrap().copy_from_slice(sums);
        let dtype = compression.wire(DType::F32).unwrap();
        let mut wire = buffer(dtype, sums.len());
        compress(&from, &mut wire, scale);
        assert_eq!(2 * wire.bytes().len(), from.bytes().len());
        wire
    }

    fn back(wire: &Buffer, scale: CompressionScale) -> Vec<f32> {
        let mut sums = buffer(DType::F32, wire.len());
        expand(wire, &mut sums, 0..wire.len(), scale);
        sums.as_slice().unwrap().to_vec()
    }

    fn is_all_finite(wire: &Buffer) -> bool {
        is_finite(wire, 0..wire.len())
    }

    #[test]
    fn f64_travels_as_it_is() {
        for compression in Compression::ALL {
            assert_eq!(compression.wire(DType::F64), None);
        }
        assert_eq!(Compression::None.wire(DType::F32), None);
    }

    #[test]
    fn every_element_of_a_long_bucket_is_converted() {
        let sums: Vec<f32> = (0..2 * 512 + 3).map(|i| i as f32).collect();
        let scale = Compression::F16.scale(256.0);
        let wire = wire_of(Compression::F16, &sums, scale);
        assert_eq!(back(&wire, scale), sums);
    }

    #[test]
    fn one_value_that_is_not_finite_is_found() {
        for compression in [Compression::F16, Compression::Bf16] {
            let scale = compression.scale(1.0);
            for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
                let mut sums = [1.0; 40];
                assert!(is_all_finite(&wire_of(compression, &sums, scale)));
                sums[39] = odd;
                assert!(!is_all_finite(&wire_of(compression, &sums, scale)), "{odd}");
            }
        }
    }

    proptest! {
        #[test]
        fn the_mean_gradient_travels_within_its_range(total in 1e-3_f64..1e12, mean in -250.0_f32..250.0) {
            let scale = Compression::F16.scale(total);
            let sums = [mean * total as f32];
            let wire = wire_of(Compression::F16, &sums, scale);
            prop_assert!(is_all_finite(&wire));
            let found = back(&wire, scale)[0];
            prop_assert!((found - sums[0]).abs() <= sums[0].abs() / 2048.0 + 1e-10 * total as f32);
        }

        #[test]
        fn exponents_bound_their_values(value in 1e-20_f64..1e20) {
            let exponent = exponent(value);
            prop_assert!(value < 2.0_f64.powi(exponent) && value >= 2.0_f64.powi(exponent - 1));
        }
    }
}
