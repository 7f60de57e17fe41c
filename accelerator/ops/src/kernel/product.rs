//! Products of matrices. The only module of this crate with `unsafe`: it calls `gemm`.

#![allow(unsafe_code, reason = "`gemm` takes pointers")]

/// A matrix in the values of a tensor.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Creates a matrix whose rows lie `stride` values apart.
    ///
    /// # Panics
    ///
    /// Panics if the matrix does not lie within `values`.
    pub(super) fn new(values: &'a [f32], [rows, columns]: [usize; 2], stride: usize) -> Self {
        Self::with_strides(values, [rows, columns], [stride, 1])
    }

    /// Creates a matrix with a stride of its rows, and one of its columns.
    ///
    /// # Panics
    ///
    /// Panics if the matrix does not lie within `values`.
    pub(super) fn with_strides(
        values: &'a [f32],
        [rows, columns]: [usize; 2],
        [row_stride, column_stride]: [usize; 2],
    ) -> Self {
        if rows > 0 && columns > 0 {
            let last = (rows - 1)
                .saturating_mul(row_stride)
                .saturating_add((columns - 1).saturating_mul(column_stride));
            assert!(last < values.len(), "a matrix lies within its values");
        }
        Self {
            values,
            rows,
            columns,
            row_stride,
            column_stride,
        }
    }

    pub(super) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// Tells what becomes of the values that are in the place of a product.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(super) enum Onto {
    Nothing,
    /// The product is added to them.
    Values,
}

/// Writes `left · right` into `out`, whose rows lie `stride` values apart.
///
/// # Panics
///
/// Panics if the shapes do not fit.
pub(super) fn product(
    out: &mut [f32],
    stride: usize,
    onto: Onto,
    left: Matrix<'_>,
    right: Matrix<'_>,
) {
    let (rows, columns) = (left.rows, right.columns);
    if rows == 0 || columns == 0 {
        return;
    }
    assert!(columns <= stride || rows == 1, "rows do not overlap");
    let last = (rows - 1).saturating_mul(stride).saturating_add(columns);
    assert!(last <= out.len(), "a product lies within its values");
    // SAFETY: `out` holds the rows, checked above, and nothing else refers to it. It is initialized.
    unsafe { write(out.as_mut_ptr(), stride, onto, left, right) };
}

/// Returns `left · right`.
///
/// # Panics
///
/// Panics if the shapes do not fit.
pub(super) fn multiplied(left: Matrix<'_>, right: Matrix<'_>) -> Vec<f32> {
    let count = left.rows.saturating_mul(right.columns);
    if count == 0 || left.columns == 0 {
        return vec![0.0; count];
    }
    let mut out = Vec::with_capacity(count);
    // SAFETY: the vector has room for the product, which is written whole, and without being read.
    unsafe {
        write(out.as_mut_ptr(), right.columns, Onto::Nothing, left, right);
        out.set_len(count);
    }
    out
}

/// Writes a product to memory.
///
/// # Safety
///
/// From `out`, there are `left.rows` rows of `right.columns` values, `stride` apart, to which nothing else refers. With
/// [`Onto::Values`], they are initialized.
unsafe fn write(out: *mut f32, stride: usize, onto: Onto, left: Matrix<'_>, right: Matrix<'_>) {
    let (m, n, k) = (left.rows, right.columns, left.columns);
    assert_eq!(k, right.rows, "the shapes of a product fit");
    // SAFETY: `left` and `right` lie within their values by construction, and `out` is as the caller promises.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out,
            1,
            stride as isize,
            onto == Onto::Values,
            left.values.as_ptr(),
            left.column_stride as isize,
            left.row_stride as isize,
            right.values.as_ptr(),
            right.column_stride as isize,
            right.row_stride as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            parallelism(m, n, k),
        );
    }
}

fn parallelism(m: usize, n: usize, k: usize) -> gemm::Parallelism {
    // Below this size, a product takes less time than waking the threads. Burn's limit is 192³.
    let is_large = m.saturating_mul(n).saturating_mul(k) >= 256 * 256 * 256;
    match is_large && super::loops::has_threads() {
        true => gemm::Parallelism::Rayon(0),
        false => gemm::Parallelism::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize) -> Vec<f32> {
        (0..count)
            .map(|k| ((k * 37 % 101) as f32 - 50.0) / 50.0)
            .collect()
    }

    #[test]
    fn products_have_the_same_bits_on_any_number_of_threads() {
        let [m, n, k] = [301, 257, 405];
        let (left, right) = (numbers(m * k), numbers(k * n));
        let on = |threads| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            pool.install(|| {
                multiplied(
                    Matrix::new(&left, [m, k], k),
                    Matrix::new(&right, [k, n], n),
                )
            })
        };
        let one = on(1);
        assert_eq!(on(2), one);
        assert_eq!(on(5), one);
    }

    #[test]
    fn a_product_is_that_of_the_definition_for_all_strides() {
        let (left, right) = (numbers(6), numbers(12));
        let left = Matrix::new(&left, [3, 2], 2).transposed();
        let right = Matrix::new(&right, [3, 2], 4);
        let mut out = [1.0; 7];
        product(&mut out, 4, Onto::Values, left, right);
        let at = |matrix: Matrix<'_>, row: usize, column: usize| {
            matrix.values[row * matrix.row_stride + column * matrix.column_stride]
        };
        for row in 0..2 {
            for column in 0..2 {
                let sum: f32 = (0..3)
                    .map(|k| at(left, row, k) * at(right, k, column))
                    .sum();
                assert!((out[row * 4 + column] - 1.0 - sum).abs() < 1e-6);
            }
        }
        assert_eq!([out[2], out[3], out[6]], [1.0; 3]);
    }

    #[test]
    #[should_panic(expected = "within its values")]
    fn a_matrix_beyond_its_values_is_refused() {
        let _ = Matrix::new(&[0.0; 5], [2, 3], 3);
    }
}
