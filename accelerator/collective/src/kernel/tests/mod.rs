mod speed;

use std::fmt::Debug;

use proptest::{prelude::*, sample::select};

use super::*;
use crate::element::Element;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 64 }))]

    #[test]
    fn every_path_equals_the_oracle(
        op in select(&ReduceOp::ALL),
        world in 1_usize..=6,
        len in length(),
        skip in 0_usize..17,
        seed: u64,
    ) {
        let case = Case { op, world, len, skip, seed };
        case.check::<bf16>();
        case.check::<f16>();
        case.check::<f32>();
        case.check::<f64>();
        case.check::<i8>();
        case.check::<i16>();
        case.check::<i32>();
        case.check::<i64>();
        case.check::<u8>();
        case.check::<u16>();
        case.check::<u32>();
        case.check::<u64>();
    }
}

/// Generates lengths around the ends of blocks, and some blocks further.
fn length() -> impl Strategy<Value = usize> {
    let blocks = select(&[0_usize, 8, 16, 32, 64, 128, 256][..]);
    (blocks, 0_usize..3, -2_isize..=2)
        .prop_map(|(block, times, off)| (block * times).saturating_add_signed(off))
}

struct Case {
    op: ReduceOp,
    world: usize,
    len: usize,
    /// The number of elements before the first one, so that blocks start anywhere in a vector.
    skip: usize,
    seed: u64,
}

impl Case {
    fn check<T: Oracle>(&self) {
        let Self { op, world, len, .. } = *self;
        let mut seed = self.seed;
        let ranks: Vec<Vec<T>> = (0..world)
            .map(|_| {
                (0..self.skip + len + 3)
                    .map(|_| T::draw(&mut seed))
                    .collect()
            })
            .collect();
        let values = |index: usize| ranks.iter().map(move |rank| rank[self.skip + index]);
        let expected: Vec<u64> = (0..len)
            .map(|index| T::reduce(op, values(index)).image())
            .collect();
        for level in SimdLevel::all() {
            // Folds into all ranks' buffers at once.
            let mut buffers = ranks.clone();
            let targets: Vec<*mut u8> = buffers
                .iter_mut()
                .map(|buffer| buffer[self.skip..].as_mut_ptr().cast())
                .collect();
            let sources: Vec<_> = targets.iter().map(|target| target.cast_const()).collect();
            // SAFETY: each buffer has `skip + len + 3` elements and belongs to the test.
            unsafe { fold_by(level, T::DTYPE, op, &sources, &targets, len) };
            for (rank, buffer) in buffers.iter().enumerate() {
                let (head, tail) = (self.skip, self.skip + len);
                assert_eq!(
                    images(&buffer[head..tail]),
                    expected,
                    "{op} of {} by {level:?}, rank {rank} of {world}",
                    T::DTYPE
                );
                assert_eq!(images(&buffer[..head]), images(&ranks[rank][..head]));
                assert_eq!(images(&buffer[tail..]), images(&ranks[rank][tail..]));
            }
            // Folds into a buffer that is not a source.
            let mut out = ranks[0].clone();
            let target: *mut u8 = out[self.skip..].as_mut_ptr().cast();
            let sources: Vec<*const u8> = ranks
                .iter()
                .map(|rank| rank[self.skip..].as_ptr().cast())
                .collect();
            // SAFETY: as above, and the sources are not written.
            unsafe { fold_by(level, T::DTYPE, op, &sources, &[target], len) };
            assert_eq!(images(&out[self.skip..self.skip + len]), expected);
            // Combines slices into that of one rank.
            for own in 0..world {
                let range = self.skip..self.skip + len;
                let mut out = ranks[own].clone();
                let shares: Vec<Slice<'_>> = ranks
                    .iter()
                    .enumerate()
                    .map(|(rank, values)| {
                        Slice((rank != own).then(|| bytemuck::cast_slice(&values[range.clone()])))
                    })
                    .collect();
                let bytes = bytemuck::cast_slice_mut(&mut out[range.clone()]);
                combine_by(level, T::DTYPE, op, &shares, bytes);
                assert_eq!(images(&out[range]), expected);
            }
        }
    }
}

#[test]
fn many_ranks_are_combined() {
    let values: Vec<[i32; 3]> = (0..300).map(|rank| [rank, -rank, 1]).collect();
    let shares: Vec<_> = values
        .iter()
        .map(|values| Slice(Some(bytemuck::cast_slice(values))))
        .collect();
    let mut out = [0_i32; 3];
    combine(
        DType::I32,
        ReduceOp::Sum,
        &shares,
        bytemuck::cast_slice_mut(&mut out),
    );
    assert_eq!(out, [44_850, -44_850, 300]);
}

#[test]
#[should_panic = "a share as long as the output"]
fn a_shorter_share_is_refused() {
    let shares = [Slice(Some(&[0; 3])), Slice(None)];
    combine(DType::U8, ReduceOp::Sum, &shares, &mut [0; 4]);
}

#[test]
#[should_panic = "a share aligned to its elements"]
fn a_share_between_elements_is_refused() {
    let words = [0_u32; 3];
    let shares = [
        Slice(Some(&bytemuck::cast_slice(&words)[1..9])),
        Slice(None),
    ];
    let mut out = [0_u32; 2];
    combine(
        DType::U32,
        ReduceOp::Sum,
        &shares,
        bytemuck::cast_slice_mut(&mut out),
    );
}

struct Slice<'a>(Option<&'a [u8]>);

impl ReduceInput for Slice<'_> {
    fn bytes(&self) -> Option<&[u8]> {
        self.0
    }
}

fn images<T: Oracle>(values: &[T]) -> Vec<u64> {
    values.iter().map(|value| value.image()).collect()
}

/// Reduces one element at a time, as [`ReduceOp`] specifies.
trait Oracle: Element + Debug {
    fn reduce(op: ReduceOp, values: impl ExactSizeIterator<Item = Self>) -> Self;

    /// Returns the bits.
    fn image(self) -> u64;

    /// Draws small numbers, arbitrary bit patterns, and special values.
    fn draw(seed: &mut u64) -> Self;
}

fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut x = *seed;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

macro_rules! float_oracle {
    ($($float:ty: $bits:ty as $wide:ty, |$value:ident| $widen:expr, |$total:ident| $narrow:expr);*) => {
        $(
            impl Oracle for $float {
                fn reduce(op: ReduceOp, values: impl ExactSizeIterator<Item = Self>) -> Self {
                    let world = values.len();
                    let join = |total: $wide, value: $wide| match op {
                        ReduceOp::Sum | ReduceOp::Mean => total + value,
                        _ if total.is_nan() => total,
                        ReduceOp::Max if total > value => total,
                        ReduceOp::Min if total < value => total,
                        _ => value,
                    };
                    let $total = values.map(|$value| $widen).reduce(join).expect("a rank");
                    let $total = match op {
                        ReduceOp::Mean => $total / world as $wide,
                        _ => $total,
                    };
                    let sums = matches!(op, ReduceOp::Sum | ReduceOp::Mean);
                    let $total = if sums && $total.is_nan() { <$wide>::NAN } else { $total };
                    $narrow
                }

                fn image(self) -> u64 {
                    self.to_bits().into()
                }

                fn draw(seed: &mut u64) -> Self {
                    let (kind, bits) = (random(seed) % 8, random(seed));
                    let $total = match kind {
                        0 => 0.0,
                        1 => -0.0,
                        2 => <$wide>::INFINITY,
                        3 => <$wide>::NEG_INFINITY,
                        4 | 5 => return Self::from_bits(bits as $bits),
                        _ => (bits % 2001) as $wide / 8.0 - 125.0,
                    };
                    $narrow
                }
            }
        )*
    };
}

float_oracle! {
    f32: u32 as f32, |value| value, |total| total;
    f64: u64 as f64, |value| value, |total| total;
    f16: u16 as f32, |value| value.to_f32(), |total| f16::from_f32(total);
    bf16: u16 as f32, |value| value.to_f32(), |total| bf16::from_f32(total)
}

macro_rules! integer_oracle {
    ($($integer:ty),*) => {
        $(
            impl Oracle for $integer {
                fn reduce(op: ReduceOp, values: impl ExactSizeIterator<Item = Self>) -> Self {
                    let world = values.len() as i128;
                    let sum = |values: &mut dyn Iterator<Item = Self>| -> i128 {
                        values.map(i128::from).sum()
                    };
                    let mut values = values;
                    match op {
                        ReduceOp::Max => values.max().expect("a rank"),
                        ReduceOp::Min => values.min().expect("a rank"),
                        ReduceOp::Sum => sum(&mut values) as Self,
                        ReduceOp::Mean => (sum(&mut values) / world) as Self,
                    }
                }

                fn image(self) -> u64 {
                    self as u64
                }

                fn draw(seed: &mut u64) -> Self {
                    match random(seed) % 4 {
                        0 => Self::MAX,
                        1 => Self::MIN,
                        _ => random(seed) as Self,
                    }
                }
            }
        )*
    };
}

integer_oracle!(i8, i16, i32, i64, u8, u16, u32, u64);

#[test]
fn sums_follow_the_order_of_ranks() {
    let ranks: [&[f32]; 3] = [&[1e8], &[1.0], &[-1e8]];
    for own in 0..3 {
        assert_eq!(reduce(ReduceOp::Sum, &ranks, own), [(1e8 + 1.0) - 1e8]);
    }
}

#[test]
fn halves_are_summed_in_f32_and_rounded_once() {
    // In f16, 2048 + 1 + 1 stays 2048. In f32 it is 2050, which f16 can represent.
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

/// Returns the reduction of the ranks' values as rank `own` computes it.
fn reduce<T: Element>(op: ReduceOp, ranks: &[&[T]], own: usize) -> Vec<T> {
    let others = ranks.iter().enumerate();
    let shares: Vec<Slice<'_>> = others
        .map(|(rank, values)| Slice((rank != own).then(|| bytemuck::cast_slice(values))))
        .collect();
    let mut out = ranks[own].to_vec();
    combine(T::DTYPE, op, &shares, bytemuck::cast_slice_mut(&mut out));
    out
}
