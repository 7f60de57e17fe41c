//! Dropout whose mask is a function of a seed and the place of a value, so that it need not be kept for backward.

use burn_flex::FlexTensor;

use super::loops::{TASK, for_parts, shape, tensor, values, vectorised};
use crate::backend::{Backprop, Forward};

/// A dropout of fixed numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dropout {
    pub(crate) seed: u64,
    /// The probability of a value to become zero.
    pub(crate) probability: f64,
}

impl Dropout {
    pub(crate) fn forward(self) -> Forward<1> {
        Box::new(move |[x]| {
            let y = self.apply(x);
            let back: Backprop<1> = Box::new(move |gradient, _| [Some(self.apply(gradient))]);
            (y, back)
        })
    }

    fn apply(self, x: FlexTensor) -> FlexTensor {
        let x = x.to_contiguous();
        let mut out = values(&x).to_vec();
        for_parts(&mut out, TASK, |part, out| self.apply_to(out, part * TASK));
        tensor(out, shape(&x))
    }

    /// Applies dropout to the values that begin at the place `first` of a tensor.
    pub(super) fn apply_to(self, part: &mut [f32], first: usize) {
        let limit = (self.probability * (1_u64 << 32) as f64) as u32;
        let scale = (1.0 / (1.0 - self.probability)) as f32;
        let keys = [self.seed as u32, (self.seed >> 32) as u32];
        vectorised(
            #[inline(always)]
            || {
                for (at, value) in part.iter_mut().enumerate() {
                    let is_kept = number((first + at) as u32, keys) >= limit;
                    *value = if is_kept { *value * scale } else { 0.0 };
                }
            },
        );
    }
}

/// Returns an evenly distributed number for a place, by the finalizer of MurmurHash3 with two keys.
#[inline(always)]
fn number(place: u32, [first, second]: [u32; 2]) -> u32 {
    let mut hash = place.wrapping_mul(0x9E37_79B1) ^ first;
    hash ^= hash >> 16;
    hash = hash.wrapping_mul(0x85EB_CA6B) ^ second;
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(0xC2B2_AE35);
    hash ^ (hash >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_spread_evenly_and_differ_with_the_seed() {
        let count = 1 << 16;
        let mut same = 0;
        for key in 0..8_u32 {
            let keys = [key, key.wrapping_mul(77)];
            let next = [key + 1, key.wrapping_mul(77)];
            let mut below = 0;
            let mut pairs = 0;
            for place in 0..count {
                let is_below = number(place, keys) < u32::MAX / 4;
                below += u32::from(is_below);
                pairs += u32::from(is_below && number(place + 1, keys) < u32::MAX / 4);
                same += u32::from(number(place, keys) == number(place, next));
            }
            // Five standard deviations.
            let share = f64::from(below) / f64::from(count);
            assert!((share - 0.25).abs() < 0.0085, "{share}");
            let share = f64::from(pairs) / f64::from(count);
            assert!((share - 0.0625).abs() < 0.0048, "{share}");
        }
        assert!(same < 16, "{same}");
    }
}
