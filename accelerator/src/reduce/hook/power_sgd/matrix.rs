//! A gradient M and its factors P and Q, in plain loops over rows.
//!
//! M is `rows × columns` and lies row by row, as a gradient does. P and Q have as many columns each, and lie column by
//! column: a column of P has `rows` elements, one of Q `columns`. Every sum has one fixed order, so that ranks with the
//! same numbers get the same bits.

use core::ops::{AddAssign, Mul, SubAssign};

use accelerator_collective::Element;
use safetensors::Dtype;

/// A floating-point type that gradients are reduced in.
pub(super) trait MatrixFloat:
    Element + AddAssign + Default + Mul<Output = Self> + SubAssign
{
    /// The relative length below which the rest of a column, without its parts along others, is rounding.
    const ROUNDING: f64;
    /// The type's name in files.
    const STORED: Dtype;

    fn narrowed(value: f64) -> Self;

    fn widened(self) -> f64;

    fn append_to(self, bytes: &mut Vec<u8>);

    /// Reads a value from as many bytes as it has.
    fn of_bytes(bytes: &[u8]) -> Self;
}

macro_rules! matrix_floats {
    ($($float:ident: $rounding:literal, $stored:ident;)+) => {
        $(
            impl MatrixFloat for $float {
                const ROUNDING: f64 = $rounding;
                const STORED: Dtype = Dtype::$stored;

                fn narrowed(value: f64) -> Self {
                    value as Self
                }

                fn widened(self) -> f64 {
                    self.into()
                }

                fn append_to(self, bytes: &mut Vec<u8>) {
                    bytes.extend_from_slice(&self.to_le_bytes());
                }

                fn of_bytes(bytes: &[u8]) -> Self {
                    let mut own = [0; size_of::<Self>()];
                    own.copy_from_slice(bytes);
                    Self::from_le_bytes(own)
                }
            }
        )+
    };
}

matrix_floats! {
    f32: 1e-5, F32;
    f64: 1e-13, F64;
}

pub(super) fn is_finite<T: MatrixFloat>(values: &[T]) -> bool {
    // Without an early end, so that it is done in vectors.
    values
        .iter()
        .fold(true, |finite, value| finite & value.widened().is_finite())
}

/// `p = m · q`.
pub(super) fn times<T: MatrixFloat>(m: &[T], columns: usize, q: &[T], p: &mut [T]) {
    let rows = m.len() / columns;
    for (at, row) in m.chunks_exact(columns).enumerate() {
        let cells = p.iter_mut().skip(at).step_by(rows);
        for (cell, q) in cells.zip(q.chunks_exact(columns)) {
            *cell = dot(row, q);
        }
    }
}

/// `q = mᵀ · p`.
pub(super) fn transposed_times<T: MatrixFloat>(m: &[T], columns: usize, p: &[T], q: &mut [T]) {
    let rows = m.len() / columns;
    q.fill(T::default());
    for (at, row) in m.chunks_exact(columns).enumerate() {
        let cells = p.iter().skip(at).step_by(rows);
        for (&cell, q) in cells.zip(q.chunks_exact_mut(columns)) {
            for (q, &value) in q.iter_mut().zip(row) {
                *q += cell * value;
            }
        }
    }
}

/// `m = p · qᵀ`.
pub(super) fn multiply<T: MatrixFloat>(p: &[T], q: &[T], columns: usize, m: &mut [T]) {
    m.fill(T::default());
    for_each_product(p, q, columns, m, |value, product| *value += product);
}

/// `m -= p · qᵀ`.
pub(super) fn subtract<T: MatrixFloat>(p: &[T], q: &[T], columns: usize, m: &mut [T]) {
    for_each_product(p, q, columns, m, |value, product| *value -= product);
}

/// Gives each element of `m` the products that make up its element of `p · qᵀ`.
fn for_each_product<T: MatrixFloat>(
    p: &[T],
    q: &[T],
    columns: usize,
    m: &mut [T],
    give: impl Fn(&mut T, T),
) {
    let rows = m.len() / columns;
    for (at, row) in m.chunks_exact_mut(columns).enumerate() {
        let cells = p.iter().skip(at).step_by(rows);
        for (&cell, q) in cells.zip(q.chunks_exact(columns)) {
            for (value, &q) in row.iter_mut().zip(q) {
                give(value, cell * q);
            }
        }
    }
}

/// Makes columns of that length orthonormal, one after the other (Gram-Schmidt, twice for each, which is
/// enough: Giraud et al. 2005). One that depends on those before it, to rounding, is drawn anew where
/// there are `draws`, and is zero otherwise.
pub(super) fn orthonormalize<T: MatrixFloat>(
    columns: &mut [T],
    length: usize,
    mut draws: Option<&mut StepRng>,
) {
    let count = columns.len() / length;
    for at in 0..count {
        let (before, rest) = columns.split_at_mut(at * length);
        let column = &mut rest[..length];
        if normalize(before, column) {
            continue;
        }
        let drawn = draws.as_mut().is_some_and(|draws| {
            (0..ATTEMPTS).any(|_| {
                column.fill_with(|| T::narrowed(draws.next()));
                normalize(before, column)
            })
        });
        if !drawn {
            column.fill(T::default());
        }
    }
}

/// The number of times that a column is drawn that has nothing new in it.
const ATTEMPTS: usize = 8;

/// Takes the parts along orthonormal columns out of another one, and gives it the length 1; `false` if
/// nothing is left to do that with.
fn normalize<T: MatrixFloat>(before: &[T], column: &mut [T]) -> bool {
    let norm = |column: &[T]| wide_dot(column, column).sqrt();
    let whole = norm(column);
    for _ in 0..2 {
        for other in before.chunks_exact(column.len()) {
            let along = T::narrowed(wide_dot(other, column));
            for (value, &other) in column.iter_mut().zip(other) {
                *value -= along * other;
            }
        }
    }
    let left = norm(column);
    // Of what is not a number, nothing is left either.
    if !(left > T::ROUNDING * whole && left.is_finite()) {
        return false;
    }
    for value in column {
        *value = T::narrowed(value.widened() / left);
    }
    true
}

fn dot<T: MatrixFloat>(left: &[T], right: &[T]) -> T {
    sum_of_products(left, right, |left, right| left * right)
}

/// The same in f64, where squares of small f32 values do not vanish.
fn wide_dot<T: MatrixFloat>(left: &[T], right: &[T]) -> f64 {
    sum_of_products(left, right, |left, right| left.widened() * right.widened())
}

/// Adds up in eight lanes, which the compiler can turn into vector instructions.
fn sum_of_products<T: Copy, R: AddAssign + Copy + Default>(
    left: &[T],
    right: &[T],
    product: impl Fn(T, T) -> R,
) -> R {
    let mut lanes = [R::default(); 8];
    let (lefts, rights) = (left.chunks_exact(8), right.chunks_exact(8));
    let rest = lefts.remainder().iter().zip(rights.remainder());
    for (left, right) in lefts.zip(rights) {
        for (lane, (&left, &right)) in lanes.iter_mut().zip(left.iter().zip(right)) {
            *lane += product(left, right);
        }
    }
    for (lane, (&left, &right)) in lanes.iter_mut().zip(rest) {
        *lane += product(left, right);
    }
    let mut sum = R::default();
    for lane in lanes {
        sum += lane;
    }
    sum
}

/// Random numbers that depend on nothing but a seed, the path of a parameter and a step: every rank draws
/// the same, whatever was drawn before. SplitMix64 (Steele et al. 2014), begun at a hash.
#[derive(Clone, Debug)]
pub(super) struct StepRng {
    state: u64,
}

impl StepRng {
    pub(super) fn new(seed: u64, path: &str, step: u64) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes());
        hasher.update(&step.to_le_bytes());
        hasher.update(path.as_bytes());
        let mut state = [0; 8];
        hasher.finalize_xof().fill(&mut state);
        Self {
            state: u64::from_le_bytes(state),
        }
    }

    /// A number from -1 to 1, uniformly: no function of the mathematical library is in it, whose last bits
    /// may differ between machines.
    pub(super) fn next(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.state;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^= bits >> 31;
        // 53 bits, which an f64 holds.
        (bits >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn drawn(count: usize, seed: u64) -> Vec<f64> {
        let mut draws = StepRng::new(seed, "a", 0);
        (0..count).map(|_| draws.next()).collect()
    }

    fn assert_orthonormal(columns: &[f64], length: usize, bound: f64) {
        for (at, left) in columns.chunks_exact(length).enumerate() {
            for (other, right) in columns.chunks_exact(length).enumerate() {
                let wanted = f64::from(u8::from(at == other));
                let found: f64 = left.iter().zip(right).map(|(a, b)| a * b).sum();
                assert!((found - wanted).abs() < bound, "{at} {other}: {found}");
            }
        }
    }

    proptest! {
        #[test]
        fn products_are_those_of_the_definition(
            rows in 1_usize..20, columns in 1_usize..40, rank in 1_usize..5, seed: u64,
        ) {
            let m = drawn(rows * columns, seed);
            let q = drawn(columns * rank, seed ^ 1);
            let mut p = vec![7.0; rows * rank];
            times(&m, columns, &q, &mut p);
            for row in 0..rows {
                for k in 0..rank {
                    let wanted: f64 = (0..columns)
                        .map(|column| m[row * columns + column] * q[k * columns + column])
                        .sum();
                    prop_assert!((p[k * rows + row] - wanted).abs() < 1e-12);
                }
            }
            let mut back = vec![7.0; columns * rank];
            transposed_times(&m, columns, &p, &mut back);
            for column in 0..columns {
                for k in 0..rank {
                    let wanted: f64 = (0..rows)
                        .map(|row| m[row * columns + column] * p[k * rows + row])
                        .sum();
                    prop_assert!((back[k * columns + column] - wanted).abs() < 1e-11);
                }
            }
            let mut product = vec![7.0; rows * columns];
            multiply(&p, &q, columns, &mut product);
            for row in 0..rows {
                for column in 0..columns {
                    let wanted: f64 = (0..rank)
                        .map(|k| p[k * rows + row] * q[k * columns + column])
                        .sum();
                    prop_assert!((product[row * columns + column] - wanted).abs() < 1e-12);
                }
            }
            let mut nothing = product.clone();
            subtract(&p, &q, columns, &mut nothing);
            prop_assert!(nothing.iter().all(|value| value.abs() < 1e-12));
        }

        #[test]
        fn columns_become_orthonormal(length in 4_usize..50, count in 1_usize..5, seed: u64) {
            let mut columns = drawn(length * count, seed);
            orthonormalize(&mut columns, length, None);
            assert_orthonormal(&columns, length, 1e-12);
        }
    }

    #[test]
    fn a_column_that_says_nothing_is_zero_or_drawn_anew() {
        let length = 9;
        let mut columns = drawn(3 * length, 1);
        let twice: Vec<f64> = columns[..length].iter().map(|value| value * -2.0).collect();
        columns[length..2 * length].copy_from_slice(&twice);
        let mut zeroed = columns.clone();
        orthonormalize(&mut zeroed, length, None);
        assert_eq!(zeroed[length..2 * length], [0.0; 9]);
        zeroed.drain(length..2 * length);
        assert_orthonormal(&zeroed, length, 1e-12);
        orthonormalize(&mut columns, length, Some(&mut StepRng::new(1, "b", 0)));
        assert_orthonormal(&columns, length, 1e-12);
        // There are only so many directions.
        let mut many = vec![0.0; 5 * 3];
        orthonormalize(&mut many, 3, Some(&mut StepRng::new(1, "c", 0)));
        assert_orthonormal(&many[..9], 3, 1e-12);
        assert_eq!(many[9..], [0.0; 6]);
    }

    #[test]
    fn small_columns_keep_their_direction() {
        let mut columns = vec![3e-30_f32, 4e-30, 0.0, 0.0, 0.0, 1e-38];
        orthonormalize(&mut columns, 3, None);
        assert_eq!(columns, [0.6, 0.8, 0.0, 0.0, 0.0, 1.0]);
    }
}
