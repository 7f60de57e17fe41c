use core::ops::Range;
use std::collections::BTreeMap;

use accelerator_collective::ReduceOp;

use super::matrix::{self, MatrixFloat};
use super::rng::StepRng;
use super::{ErrorFeedback, IterationStart, PowerSgdSettings};
use crate::core::error::Result;
use crate::reduce::hook::{BucketParameter, Ranks};

/// What is kept of the parameters of one type, and memory to work in.
#[derive(Debug)]
pub(super) struct PowerSgdState<T> {
    /// By path.
    pub(super) tensors: BTreeMap<String, Tensor<T>>,
    /// What travels first: values that are sent as they are, and left factors.
    first: Vec<T>,
    /// What travels then: right factors.
    second: Vec<T>,
    /// This rank's part of that.
    own: Vec<T>,
}

/// What is kept of a parameter from step to step.
#[derive(Debug)]
pub(super) struct Tensor<T> {
    /// The right factor, column by column: the same on every rank. A column of zeros is to be drawn.
    pub(super) right: Vec<T>,
    /// What of this rank's gradients was not sent yet; empty without error feedback.
    pub(super) rest: Vec<T>,
    /// How many elements a row has.
    pub(super) columns: usize,
}

/// What a bucket still needs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum PendingFactors {
    /// Nothing: it holds the sum of all ranks.
    Everything,
    /// An exact sum of what it holds.
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
            first: Vec::new(),
            second: Vec::new(),
            own: Vec::new(),
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
        self.first.clear();
        for parameter in exact() {
            self.first
                .extend_from_slice(&values[parameter.range.clone()]);
        }
        let lefts = self.first.len();
        for matrix in &matrices {
            let tensor = tensor_of(&mut self.tensors, matrix, settings);
            let wide = &mut values[matrix.range.clone()];
            for (value, &rest) in wide.iter_mut().zip(&tensor.rest) {
                *value += rest;
            }
            if settings.start == IterationStart::Cold {
                tensor.right.fill(T::default());
            }
            let mut draws = StepRng::new(settings.seed, matrix.path, step);
            matrix::orthonormalize(&mut tensor.right, matrix.columns, Some(&mut draws));
            let left = grown(&mut self.first, matrix.rows * matrix.rank);
            matrix::times(wide, matrix.columns, &tensor.right, left);
        }
        ranks.all_reduce(&mut self.first, ReduceOp::Sum)?;
        if !matrix::is_finite(&self.first) {
            return Ok(self.give_up(&matrices));
        }
        self.second.clear();
        let mut left = &mut self.first[lefts..];
        for matrix in &matrices {
            let (mine, others) = left.split_at_mut(matrix.rows * matrix.rank);
            left = others;
            matrix::orthonormalize(mine, matrix.rows, None);
            let wide = &values[matrix.range.clone()];
            let right = grown(&mut self.second, matrix.columns * matrix.rank);
            matrix::transposed_times(wide, matrix.columns, mine, right);
        }
        self.own.clone_from(&self.second);
        ranks.all_reduce(&mut self.second, ReduceOp::Sum)?;
        if !matrix::is_finite(&self.second) {
            return Ok(self.give_up(&matrices));
        }
        let mut sums = &self.first[..];
        for parameter in exact() {
            let (mine, others) = sums.split_at(parameter.range.len());
            sums = others;
            values[parameter.range.clone()].copy_from_slice(mine);
        }
        let (mut lefts, mut rights, mut own) = (sums, &self.second[..], &self.own[..]);
        for matrix in &matrices {
            let left = cut(&mut lefts, matrix.rows * matrix.rank);
            let right = cut(&mut rights, matrix.columns * matrix.rank);
            let own = cut(&mut own, matrix.columns * matrix.rank);
            let tensor = tensor_of(&mut self.tensors, matrix, settings);
            let wide = &mut values[matrix.range.clone()];
            if settings.error_feedback == ErrorFeedback::On {
                tensor.rest.copy_from_slice(wide);
                matrix::subtract(left, own, matrix.columns, &mut tensor.rest);
            }
            matrix::multiply(left, right, matrix.columns, wide);
            tensor.right.copy_from_slice(right);
        }
        Ok(PendingFactors::Everything)
    }

    /// Values whose products leave the range of their type are to be sent as they are, with what was left
    /// of earlier steps, so that nothing is left of them.
    fn give_up(&mut self, matrices: &[Matrix<'_>]) -> PendingFactors {
        for matrix in matrices {
            if let Some(tensor) = self.tensors.get_mut(matrix.path) {
                tensor.rest.fill(T::default());
                tensor.right.fill(T::default());
            }
        }
        PendingFactors::Nothing
    }
}

impl<'a> Matrix<'a> {
    /// As which matrix a parameter is sent, where that pays.
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

/// What is kept of a parameter: zeros, where nothing of that form is.
fn tensor_of<'a, T: MatrixFloat>(
    tensors: &'a mut BTreeMap<String, Tensor<T>>,
    matrix: &Matrix<'_>,
    settings: &PowerSgdSettings,
) -> &'a mut Tensor<T> {
    let right = matrix.columns * matrix.rank;
    let rest = match settings.error_feedback {
        ErrorFeedback::Off => 0,
        ErrorFeedback::On => matrix.rows * matrix.columns,
    };
    if !tensors.contains_key(matrix.path) {
        let blank = Tensor {
            right: Vec::new(),
            rest: Vec::new(),
            columns: matrix.columns,
        };
        tensors.insert(matrix.path.to_owned(), blank);
    }
    // There since the line above at the latest; `entry` would copy the path in each step.
    #[expect(clippy::expect_used, reason = "it was inserted where it was missing")]
    let tensor = tensors.get_mut(matrix.path).expect("it is there");
    tensor.columns = matrix.columns;
    if tensor.right.len() != right {
        tensor.right = vec![T::default(); right];
    }
    if tensor.rest.len() != rest {
        tensor.rest = vec![T::default(); rest];
    }
    tensor
}

/// So many zeros more, at the end.
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
