//! Values of every element type, and a plain oracle for their reduction.

use accelerator_collective::{Element, ReduceOp};
use half::{bf16, f16};

pub(crate) trait Sample: Element + PartialEq {
    /// Returns a rank's value at an index: fractions of many magnitudes, both signs and, for integers, the extremes.
    fn sample(rank: usize, index: usize) -> Self;

    /// Reduces one value of each rank, host by host with `per_host` ranks each.
    fn oracle(values: &[Self], per_host: usize, op: ReduceOp) -> Self;
}

/// Returns the buffer of one rank.
pub(crate) fn buffer<T: Sample>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|index| T::sample(rank, index)).collect()
}

/// Returns the expected result of a reduction, host by host with `per_host` ranks each.
pub(crate) fn reduced<T: Sample>(
    world_size: usize,
    per_host: usize,
    len: usize,
    op: ReduceOp,
) -> Vec<T> {
    (0..len)
        .map(|index| {
            let values: Vec<T> = (0..world_size).map(|rank| T::sample(rank, index)).collect();
            T::oracle(&values, per_host, op)
        })
        .collect()
}

/// Asserts that the values are equal to the last bit. A NaN equals a NaN.
pub(crate) fn assert_same<T: Sample>(found: &[T], expected: &[T], what: impl std::fmt::Display) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    if bytemuck::cast_slice::<T, u8>(found) == bytemuck::cast_slice::<T, u8>(expected) {
        return;
    }
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        #[expect(clippy::eq_op, reason = "only a NaN differs from itself")]
        let nan = found != found && expected != expected;
        let same = bytemuck::bytes_of(found) == bytemuck::bytes_of(expected);
        assert!(
            same || nan,
            "{what}: index {index}: {found:?}, expected {expected:?}"
        );
    }
}

/// Returns a pseudorandom number below 2^64.
fn noise(rank: usize, index: usize) -> u64 {
    let mut x = (rank as u64 + 1) << 40 | index as u64;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Returns a number between -1 and 1, scaled by a power of ten that differs from rank to rank.
fn fraction(rank: usize, index: usize) -> f64 {
    let unit = noise(rank, index) as f64 / u64::MAX as f64 * 2.0 - 1.0;
    unit * [1.0, 1000.0, 0.01][(rank + index) % 3]
}

macro_rules! floats {
    ($($element:ty, $from:expr);* $(;)?) => {
        $(
            impl Sample for $element {
                fn sample(rank: usize, index: usize) -> Self {
                    if index % 101 == 7 && rank == index % 5 {
                        return $from(f64::NAN);
                    }
                    $from(fraction(rank, index))
                }

                fn oracle(values: &[Self], per_host: usize, op: ReduceOp) -> Self {
                    let nan = values.iter().find(|x| x.is_nan());
                    match op {
                        ReduceOp::Sum => {
                            let hosts = values.chunks(per_host);
                            let sums = hosts.map(|x| x[1..].iter().fold(x[0], |a, b| a + b));
                            sums.reduce(|a, b| a + b).unwrap()
                        }
                        ReduceOp::Mean => {
                            Self::oracle(values, per_host, ReduceOp::Sum) / $from(values.len() as f64)
                        }
                        ReduceOp::Max => *nan.unwrap_or_else(|| {
                            values.iter().max_by(|a, b| a.total_cmp(b)).unwrap()
                        }),
                        ReduceOp::Min => *nan.unwrap_or_else(|| {
                            values.iter().min_by(|a, b| a.total_cmp(b)).unwrap()
                        }),
                        _ => unreachable!("{op}"),
                    }
                }
            }
        )*
    };
}

floats! {
    f32, |x: f64| x as f32;
    f64, |x: f64| x;
}

macro_rules! halves {
    ($($element:ty),*) => {
        $(
            impl Sample for $element {
                fn sample(rank: usize, index: usize) -> Self {
                    Self::from_f64(fraction(rank, index))
                }

                fn oracle(values: &[Self], per_host: usize, op: ReduceOp) -> Self {
                    let wide: Vec<f32> = values.iter().map(|x| x.to_f32()).collect();
                    Self::from_f32(f32::oracle(&wide, per_host, op))
                }
            }
        )*
    };
}

halves!(bf16, f16);

macro_rules! integers {
    ($($element:ty),*) => {
        $(
            impl Sample for $element {
                fn sample(rank: usize, index: usize) -> Self {
                    match index % 13 {
                        3 => Self::MAX,
                        8 => Self::MIN,
                        _ => noise(rank, index) as Self,
                    }
                }

                fn oracle(values: &[Self], _per_host: usize, op: ReduceOp) -> Self {
                    match op {
                        ReduceOp::Sum => values.iter().fold(0, |a, b| a.wrapping_add(*b)),
                        ReduceOp::Mean => {
                            let sum: i128 = values.iter().map(|x| i128::from(*x)).sum();
                            (sum / values.len() as i128).try_into().unwrap()
                        }
                        ReduceOp::Max => *values.iter().max().unwrap(),
                        ReduceOp::Min => *values.iter().min().unwrap(),
                        _ => unreachable!("{op}"),
                    }
                }
            }
        )*
    };
}

integers!(i8, i16, i32, i64, u8, u16, u32, u64);
