//! Functions of single numbers that the compiler can vectorise, and sums in a fixed order.

/// The number of partial sums of [`sum`], whatever vectors the processor has.
const LANES: usize = 16;

/// Returns the exponential to 2 units in the last place. Infinite above 88.37, and 0 below -87.33.
///
/// The polynomial is that of Cephes' `expf`.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    let bounded = x.clamp(-87.33, 88.37);
    // The integer next to it is in the last bits of the shifted number.
    let shifted = bounded.mul_add(core::f32::consts::LOG2_E, SHIFT);
    let n = shifted - SHIFT;
    let r = n.mul_add(-0.693_359_4, bounded);
    let r = n.mul_add(2.121_944_4e-4, r);
    let p = 1.987_569_2e-4_f32.mul_add(r, 1.398_199_9e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 0.5);
    let y = p.mul_add(r * r, r) + 1.0;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    let y = y * power;
    let y = if x > 88.37 { f32::INFINITY } else { y };
    if x < -87.33 { 0.0 } else { y }
}

/// Returns the logistic function, `1 / (1 + e^-x)`.
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Returns the hyperbolic tangent to 3 units in the last place.
///
/// The polynomial for small numbers is that of Cephes' `tanhf`.
#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    let s = x * x;
    let p = s.mul_add(-5.704_988_7e-3, 2.063_909e-2);
    let p = s.mul_add(p, -5.373_971_6e-2);
    let p = s.mul_add(p, 1.333_144_2e-1);
    let p = s.mul_add(p, -3.333_328e-1);
    let small = (p * s).mul_add(x, x);
    let e = exp(-2.0 * x.abs());
    let large = ((1.0 - e) / (1.0 + e)).copysign(x);
    if x.abs() < 0.625 { small } else { large }
}

/// Returns the error function to 2e-7.
///
/// The rational function is that of Eigen's `perf`.
#[inline(always)]
pub(super) fn erf(x: f32) -> f32 {
    let bounded = x.clamp(-4.0, 4.0);
    let s = bounded * bounded;
    let p = s.mul_add(-2.726_142e-10, 2.770_681_4e-8);
    let p = s.mul_add(p, -2.101_024e-6);
    let p = s.mul_add(p, -5.692_506_3e-5);
    let p = s.mul_add(p, -7.349_906e-4);
    let p = s.mul_add(p, -2.954_6e-3);
    let p = s.mul_add(p, -1.609_603_3e-2);
    let q = s.mul_add(-1.456_607_2e-5, -2.133_740_6e-4);
    let q = s.mul_add(q, -1.682_827e-3);
    let q = s.mul_add(q, -7.373_329_2e-3);
    let q = s.mul_add(q, -1.426_473_9e-2);
    let y = bounded * p / q;
    // One at once, so that a large negative number times `1 + erf` is none.
    if x >= 4.0 {
        1.0
    } else if x <= -4.0 {
        -1.0
    } else {
        y
    }
}

/// Returns the sum of `of` over all values, added up in an order that depends on their number alone.
#[inline(always)]
pub(super) fn sum(values: &[f32], of: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest: f32 = chunks.remainder().iter().map(|&value| of(value)).sum();
    for chunk in chunks {
        for at in 0..LANES {
            lanes[at] += of(chunk[at]);
        }
    }
    lanes.iter().sum::<f32>() + rest
}

/// Returns the sum of products, in the order of [`sum`].
#[inline(always)]
pub(super) fn dot(left: &[f32], right: &[f32]) -> f32 {
    sum_of_pairs(left, right, |sum, left, right| left.mul_add(right, sum))
}

/// Folds all pairs with `add`, which gets the sum so far, in the order of [`sum`].
#[inline(always)]
pub(super) fn sum_of_pairs(left: &[f32], right: &[f32], add: impl Fn(f32, f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let (lefts, rights) = (left.chunks_exact(LANES), right.chunks_exact(LANES));
    let rest = lefts.remainder().iter().zip(rights.remainder());
    let rest = rest.fold(0.0, |sum, (&left, &right)| add(sum, left, right));
    for (left, right) in lefts.zip(rights) {
        for at in 0..LANES {
            lanes[at] = add(lanes[at], left[at], right[at]);
        }
    }
    lanes.iter().sum::<f32>() + rest
}

/// Returns the largest value, or NaN if there is one.
#[inline(always)]
pub(super) fn largest(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let larger = |top: f32, value: f32| {
        if value > top || value.is_nan() {
            value
        } else {
            top
        }
    };
    let chunks = values.chunks_exact(LANES);
    let rest = chunks
        .remainder()
        .iter()
        .copied()
        .fold(f32::NEG_INFINITY, larger);
    for chunk in chunks {
        for at in 0..LANES {
            lanes[at] = larger(lanes[at], chunk[at]);
        }
    }
    lanes.into_iter().fold(rest, larger)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns numbers of all sizes, and of both signs.
    fn numbers() -> impl Iterator<Item = f32> {
        (-40_000..=40_000).map(|k| k as f32 * 2.5e-3)
    }

    #[test]
    fn functions_are_as_close_as_they_say() {
        for x in numbers() {
            let wide = f64::from(x);
            let relative = (f64::from(exp(x)) / wide.exp() - 1.0).abs();
            if (-87.3..88.3).contains(&x) {
                assert!(relative < 2.4e-7, "exp({x}): {relative:e}");
            }
            for x in [x, x * 1e-2, x * 1e-6] {
                let exact = f64::from(x).tanh();
                let off = (f64::from(tanh(x)) - exact).abs();
                assert!(off <= 3.6e-7 * exact.abs(), "tanh({x}): {off:e}");
            }
        }
    }

    #[test]
    fn functions_hand_on_what_is_no_number() {
        assert!(
            [exp, erf, tanh, sigmoid]
                .iter()
                .all(|of| of(f32::NAN).is_nan())
        );
        assert_eq!((tanh(f32::INFINITY), tanh(f32::NEG_INFINITY)), (1.0, -1.0));
        assert_eq!(
            (exp(f32::INFINITY), exp(f32::NEG_INFINITY)),
            (f32::INFINITY, 0.0)
        );
        assert_eq!((erf(f32::INFINITY), erf(f32::NEG_INFINITY)), (1.0, -1.0));
        assert!(largest(&[1.0, f32::NAN, 2.0]).is_nan());
    }

    #[test]
    fn erf_has_known_values() {
        for (x, expected) in [
            (0.1, 0.112_462_92),
            (0.5, 0.520_499_9),
            (1.0, 0.842_700_8),
            (2.5, 0.999_593),
        ] {
            assert!((erf(x) - expected).abs() < 2e-7, "erf({x}) = {}", erf(x));
            assert_eq!(erf(-x), -erf(x));
        }
    }
}
