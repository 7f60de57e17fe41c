use core::ops::Range;
use std::collections::BTreeMap;

use accelerator_collective::ReduceOp;

use super::matrix::{self, MatrixFloat};
use super::rng::StepRng;
use super::{ErrorFeedback, IterationStart, PowerSgdSettings};
use crate::core::error::Result;
use crate::reduce::hook::{BucketParameter, Ranks};

/// The state of the parameters of one type, and memory to work in. Names are the paper's: a gradient M is approximated
/// by the product of its factors P and Qᵀ.
#[derive(Debug)]
pub(super) struct PowerSgdState<T> {
    /// The state of each parameter, by path.
    pub(super) tensors: BTreeMap<String, Tensor<T>>,
    /// The values of the first all-reduce: those that are sent exactly, and each P.
    exact_and_p: Vec<T>,
    /// The values of the second all-reduce: each Q.
    q: Vec<T>,
    /// This rank's part of the sums in `q`.
    own_q: Vec<T>,
}

/// The state of a parameter from step to step.
#[derive(Debug)]
pub(super) struct Tensor<T> {
    /// Q, column by column: the same on every rank. A column of zeros is to be drawn.
    pub(super) q: Vec<T>,
    /// The error: what of this rank's gradients was not sent yet; empty without error feedback.
    pub(super) error: Vec<T>,
    /// The number of elements in a row of M.
    pub(super) columns: usize,
}

/// The part of a bucket that is summed already.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum PendingFactors {
    /// It holds the sum of all ranks.
    Everything,
    /// It still needs an exact sum of its values.
    Nothing,
}

/// A parameter that is worth it.
#[derive(Debug)]
struct Matrix<'a> {
    path: &'a str,
    range: Range<usize>,
    rows: usize,
    columns: usize,
    rank: usize,
}

// Not derived, which would ask for `T: Default`.
impl<T> Default for PowerSgdState<T> {
    fn default() -> Self {
        Self {
            tensors: BTreeMap::new(),
            exact_and_p: Vec::new(),
            q: Vec::new(),
            own_q: Vec::new(),
        }
    }
}

impl<T: MatrixFloat> PowerSgdState<T> {
    /// Replaces this rank's share of a bucket by an approximation of the sum.
    ///
    /// Every decision in it depends on what is the same on all ranks: shapes, settings, and sums.
    pub(super) fn reduce(
        &mut self,
        settings: &PowerSgdSettings,
        step: u64,
        parameters: &[BucketParameter<'_>],
        values: &mut [T],
        ranks: &Ranks<'_>,
    ) -> Result<PendingFactors> {
        let present = || parameters.iter().filter(|parameter| parameter.is_present);
        let matrices: Vec<_> = present()
            .filter_map(|parameter| Matrix::of(parameter, settings))
            .collect();
        if matrices.is_empty() {
            return Ok(PendingFactors::Nothing);
        }
        let exact = || present().filter(|parameter| Matrix::of(parameter, settings).is_none());
        self.exact_and_p.clear();
        for parameter in exact() {
            self.exact_and_p
                .extend_from_slice(&values[parameter.range.clone()]);
        }
        let exact_len = self.exact_and_p.len();
        for matrix in &matrices {
            let tensor = tensor_of(&mut self.tensors, matrix, settings);
            let m = &mut values[matrix.range.clone()];
            for (value, &error) in m.iter_mut().zip(&tensor.error) {
                *value += error;
            }
            if settings.start == IterationStart::Cold {
                tensor.q.fill(T::default());
            }
            let mut draws = StepRng::new(settings.seed, matrix.path, step);
            matrix::orthonormalize(&mut tensor.q, matrix.columns, Some(&mut draws));
            let p = grown(&mut self.exact_and_p, matrix.rows * matrix.rank);
            matrix::times(m, matrix.columns, &tensor.q, p);
        }
        ranks.all_reduce(&mut self.exact_and_p, ReduceOp::Sum)?;
        if !matrix::is_finite(&self.exact_and_p) {
            return Ok(self.send_exactly(&matrices));
        }
        self.q.clear();
        let mut ps = &mut self.exact_and_p[exact_len..];
        for matrix in &matrices {
            let (p, others) = ps.split_at_mut(matrix.rows * matrix.rank);
            ps = others;
            matrix::orthonormalize(p, matrix.rows, None);
            let m = &values[matrix.range.clone()];
            let q = grown(&mut self.q, matrix.columns * matrix.rank);
            matrix::transposed_times(m, matrix.columns, p, q);
        }
        self.own_q.clone_from(&self.q);
        ranks.all_reduce(&mut self.q, ReduceOp::Sum)?;
        if !matrix::is_finite(&self.q) {
            return Ok(self.send_exactly(&matrices));
        }
        let mut sums = &self.exact_and_p[..];
        for parameter in exact() {
            let (mine, others) = sums.split_at(parameter.range.len());
            sums = others;
            values[parameter.range.clone()].copy_from_slice(mine);
        }
        let (mut ps, mut qs, mut own_qs) = (sums, &self.q[..], &self.own_q[..]);
        for matrix in &matrices {
            let p = cut(&mut ps, matrix.rows * matrix.rank);
            let q = cut(&mut qs, matrix.columns * matrix.rank);
            let own_q = cut(&mut own_qs, matrix.columns * matrix.rank);
            let tensor = tensor_of(&mut self.tensors, matrix, settings);
            let m = &mut values[matrix.range.clone()];
            if settings.error_feedback == ErrorFeedback::On {
                tensor.error.copy_from_slice(m);
                matrix::subtract(p, own_q, matrix.columns, &mut tensor.error);
            }
            matrix::multiply(p, q, matrix.columns, m);
            tensor.q.copy_from_slice(q);
        }
        Ok(PendingFactors::Everything)
    }

    /// Lets a bucket whose products leave the range of their type be sent exactly. Its values hold the errors of earlier
    /// steps already, so those are cleared.
    fn send_exactly(&mut self, matrices: &[Matrix<'_>]) -> PendingFactors {
        for matrix in matrices {
            if let Some(tensor) = self.tensors.get_mut(matrix.path) {
                tensor.error.fill(T::default());
                tensor.q.fill(T::default());
            }
        }
        PendingFactors::Nothing
    }
}

impl<'a> Matrix<'a> {
    /// Returns the matrix as which a parameter is sent, if that pays.
    fn of(parameter: &'a BucketParameter<'_>, settings: &PowerSgdSettings) -> Option<Self> {
        let [rows, others @ ..] = parameter.shape else {
            return None;
        };
        if others.is_empty() {
            return None;
        }
        let (rows, columns) = (*rows, others.iter().product());
        let rank = settings.rank.min(rows).min(columns);
        let fewer = ((rows + columns) * rank) as f64;
        let pays = fewer * settings.min_compression < (rows * columns) as f64;
        // A parameter without elements has no rank.
        (rank > 0 && pays).then(|| Self {
            path: parameter.path,
            range: parameter.range.clone(),
            rows,
            columns,
            rank,
        })
    }
}

/// Returns the state of a parameter: zeros, if there is none of that shape.
fn tensor_of<'a, T: MatrixFloat>(
    tensors: &'a mut BTreeMap<String, Tensor<T>>,
    matrix: &Matrix<'_>,
    settings: &PowerSgdSettings,
) -> &'a mut Tensor<T> {
    let q_len = matrix.columns * matrix.rank;
    let error_len = match settings.error_feedback {
        ErrorFeedback::Off => 0,
        ErrorFeedback::On => matrix.rows * matrix.columns,
    };
    if !tensors.contains_key(matrix.path) {
        let blank = Tensor {
            q: Vec::new(),
            error: Vec::new(),
            columns: matrix.columns,
        };
        tensors.insert(matrix.path.to_owned(), blank);
    }
    // There since the line above at the latest; `entry` would copy the path in each step.
    #[expect(clippy::expect_used, reason = "it was inserted where it was missing")]
    let tensor = tensors.get_mut(matrix.path).expect("it is there");
    tensor.columns = matrix.columns;
    if tensor.q.len() != q_len {
        tensor.q = vec![T::default(); q_len];
    }
    if tensor.error.len() != error_len {
        tensor.error = vec![T::default(); error_len];
    }
    tensor
}

/// Appends this many zeros, and returns them.
fn grown<T: MatrixFloat>(values: &mut Vec<T>, count: usize) -> &mut [T] {
    let start = values.len();
    values.resize(start + count, T::default());
    &mut values[start..]
}

/// The first so many of what is left.
fn cut<'a, T>(left: &mut &'a [T], count: usize) -> &'a [T] {
    let (mine, others) = left.split_at(count);
    *left = others;
    mine
}
