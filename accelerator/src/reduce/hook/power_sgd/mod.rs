mod matrix;

use core::ops::Range;
use std::collections::BTreeMap;

use accelerator_collective::ReduceOp;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};

use self::matrix::{MatrixFloat, StepRng};
use super::{
    BucketParameter, BucketValues, CommunicationHook, GradientBucket, HookError, Ranks, SavedBy,
};
use crate::core::error::Result;

/// Prefixes of a parameter's path in the saved state, a safetensors file: of Q, with one column per row, and of the error.
const Q: &str = "right/";
const ERROR: &str = "rest/";

/// Sends gradients as products of thin matrices: PowerSGD (Vogels, Karimireddy, Jaggi 2019, "PowerSGD:
/// Practical Low-Rank Gradient Compression for Distributed Optimization").
///
/// The gradient of a parameter is read as a matrix of `rows`, its first dimension, by `columns`, all others
/// together. Of `rows · columns` values, `rank · (rows + columns)` travel: one step of a power iteration
/// finds the directions in which the sum of all ranks is largest. In the paper's names, a gradient M is replaced by P · Qᵀ.
/// What is not sent is not lost: each rank adds its error, the part that was not sent, to its next gradient (error
/// feedback), and the iteration continues from the Q of the step before (warm start).
///
/// If it does not pay, for biases and small parameters among others, gradients are sent exactly. A bucket takes two
/// all-reduces: one of the exact values and each P, and one of each Q.
///
/// Each rank keeps its error of every compressed parameter, as much memory as the gradient has, and each Q. They go into
/// checkpoints: a run that continues with as many ranks repeats the bits of one that was not interrupted. With another number
/// of ranks, each Q is kept, and the errors start at zero.
///
/// Gradients are approximate, so losses differ from those of exact training; the learning rate and the
/// length of the exact beginning (`start_after`) are worth a look. Worth it where the network is slow
/// beside the gradients: the products cost about `4 · rank` operations an element.
///
/// | PyTorch's `PowerSGDState` | here | default there and here |
/// |---|---|---|
/// | `matrix_approximation_rank` | [`new`](Self::new) | 1 |
/// | `start_powerSGD_iter` | [`start_after`](Self::start_after) | 1000 |
/// | `min_compression_rate` | [`min_compression`](Self::min_compression) | 2 |
/// | `use_error_feedback=False` | [`without_error_feedback`](Self::without_error_feedback) | it is used |
/// | `warm_start=False` | [`without_warm_start`](Self::without_warm_start) | it is warm |
/// | `random_seed` | [`seed`](Self::seed) | 0 |
/// | `orthogonalization_epsilon` | nothing | columns that depend on others are found by what is left of them |
///
/// Ranks and checkpoints compare its name, which holds every setting.
#[derive(Debug)]
#[must_use]
pub struct PowerSgd {
    settings: PowerSgdSettings,
    start_after: u64,
    double: PowerSgdState<f64>,
    single: PowerSgdState<f32>,
}

#[derive(Clone, Copy, Debug)]
struct PowerSgdSettings {
    feeds_errors_back: bool,
    min_compression: f64,
    rank: usize,
    seed: u64,
    /// Set if a step's iteration starts at the end of the step before, not at random directions.
    starts_warm: bool,
}

impl PowerSgd {
    /// Creates the hook with factors of `rank` columns; 1 to 4 are usual. 0 counts as 1, and more than a gradient has
    /// rows or columns counts as that number.
    pub fn new(rank: usize) -> Self {
        Self {
            settings: PowerSgdSettings {
                feeds_errors_back: true,
                min_compression: 2.0,
                rank: rank.max(1),
                seed: 0,
                starts_warm: true,
            },
            start_after: 1000,
            double: PowerSgdState::default(),
            single: PowerSgdState::default(),
        }
    }

    /// Sets the number of the job's first steps that are reduced exactly, before any is compressed: early gradients
    /// are large and change fast. Default: 1000, as in PyTorch.
    pub fn start_after(mut self, steps: u64) -> Self {
        self.start_after = steps;
        self
    }

    /// Compresses only parameters for which fewer than 1/`times` of the values travel; with 0, every parameter of two
    /// or more dimensions. Default: 2.
    pub fn min_compression(mut self, times: f64) -> Self {
        self.settings.min_compression = times;
        self
    }

    /// Sets the seed of the random directions, which are drawn from it and the parameter's path. Default: 0.
    pub fn seed(mut self, seed: u64) -> Self {
        self.settings.seed = seed;
        self
    }

    /// Forgets the part of the gradients that was not sent. It saves memory, but training may not converge.
    pub fn without_error_feedback(mut self) -> Self {
        self.settings.feeds_errors_back = false;
        self
    }

    /// Begins each step with random directions. Only the errors are kept from step to step, and the approximation is
    /// worse.
    pub fn without_warm_start(mut self) -> Self {
        self.settings.starts_warm = false;
        self
    }
}

impl CommunicationHook for PowerSgd {
    fn name(&self) -> String {
        let PowerSgdSettings {
            feeds_errors_back,
            min_compression,
            rank,
            seed,
            starts_warm,
        } = self.settings;
        let feedback = match feeds_errors_back {
            true => "error feedback",
            false => "no error feedback",
        };
        let start = if starts_warm { "warm" } else { "cold" };
        format!(
            "PowerSGD of rank {rank} after {} steps, {start} start, {feedback}, where it saves \
             {min_compression} times, seed {seed}",
            self.start_after
        )
    }

    fn reduce(
        &mut self,
        bucket: &mut GradientBucket<'_>,
        ranks: &Ranks<'_>,
    ) -> Result<(), HookError> {
        let step = bucket.step();
        let sent = if step < self.start_after {
            PendingFactors::Nothing
        } else {
            let settings = &self.settings;
            match bucket.parts_mut() {
                (parameters, BucketValues::F32(values)) => self
                    .single
                    .reduce(settings, step, parameters, values, ranks)?,
                (parameters, BucketValues::F64(values)) => self
                    .double
                    .reduce(settings, step, parameters, values, ranks)?,
            }
        };
        match sent {
            PendingFactors::Nothing => Ok(bucket.all_reduce(ranks)?),
            PendingFactors::Everything => Ok(()),
        }
    }

    fn save(&self) -> Result<Vec<u8>, HookError> {
        let mut saved = fields(&self.single);
        saved.extend(fields(&self.double));
        if saved.is_empty() {
            return Ok(Vec::new());
        }
        let views = saved.iter().map(|(name, dtype, shape, bytes)| {
            TensorView::new(*dtype, shape.to_vec(), bytes).map(|view| (name, view))
        });
        Ok(serialize(views.collect::<Result<Vec<_>, _>>()?, None)?)
    }

    fn restore(&mut self, saved: &[u8], saved_by: SavedBy) -> Result<(), HookError> {
        if saved.is_empty() {
            return Ok(());
        }
        for (name, view) in SafeTensors::deserialize(saved)?.iter() {
            match view.dtype() {
                Dtype::F64 => take(&mut self.double, saved_by, name, &view),
                _ => take(&mut self.single, saved_by, name, &view),
            }
        }
        Ok(())
    }
}

/// The state of the parameters of one type, and memory to work in. Names are the paper's: a gradient M is approximated
/// by the product of its factors P and Qᵀ.
#[derive(Debug, Default)]
struct PowerSgdState<T> {
    tensors: BTreeMap<String, Tensor<T>>,
    /// The values of the first all-reduce: those that are sent exactly, and each P.
    exact_and_p: Vec<T>,
    /// The values of the second all-reduce: each Q.
    q: Vec<T>,
    /// This rank's part of the sums in `q`.
    own_q: Vec<T>,
}

/// The state of a parameter from step to step.
#[derive(Debug)]
struct Tensor<T> {
    /// Q, column by column: the same on every rank. A column of zeros is to be drawn.
    q: Vec<T>,
    /// The error: what of this rank's gradients was not sent yet; empty without error feedback.
    error: Vec<T>,
    /// The number of elements in a row of M.
    columns: usize,
}

impl<T> Tensor<T> {
    fn empty(columns: usize) -> Self {
        Self {
            q: Vec::new(),
            error: Vec::new(),
            columns,
        }
    }
}

/// The part of a bucket that is summed already.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum PendingFactors {
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

impl<T: MatrixFloat> PowerSgdState<T> {
    /// Replaces this rank's share of a bucket by an approximation of the sum.
    ///
    /// Every decision in it depends on what is the same on all ranks: shapes, settings, and sums.
    fn reduce(
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
            if !settings.starts_warm {
                tensor.q.fill(T::default());
            }
            let mut draws = StepRng::new(settings.seed, matrix.path, step);
            matrix::orthonormalize(&mut tensor.q, matrix.columns, Some(&mut draws));
            let p = grown(&mut self.exact_and_p, matrix.rows * matrix.rank);
            matrix::times(m, matrix.columns, &tensor.q, p);
        }
        ranks.all_reduce(&mut self.exact_and_p, ReduceOp::Sum)?;
        if !matrix::is_finite(&self.exact_and_p) {
            return Ok(self.send_uncompressed(&matrices));
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
            return Ok(self.send_uncompressed(&matrices));
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
            if settings.feeds_errors_back {
                tensor.error.copy_from_slice(m);
                matrix::subtract(p, own_q, matrix.columns, &mut tensor.error);
            }
            matrix::multiply(p, q, matrix.columns, m);
            tensor.q.copy_from_slice(q);
        }
        Ok(PendingFactors::Everything)
    }

    /// Returns that a bucket whose products leave the range of their type is to be sent exactly. Its values hold the
    /// errors of earlier steps already, so those are cleared.
    fn send_uncompressed(&mut self, matrices: &[Matrix<'_>]) -> PendingFactors {
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
    let error_len = match settings.feeds_errors_back {
        true => matrix.rows * matrix.columns,
        false => 0,
    };
    if !tensors.contains_key(matrix.path) {
        tensors.insert(matrix.path.to_owned(), Tensor::empty(matrix.columns));
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

/// Takes the first `count` of what is left.
fn cut<'a, T>(left: &mut &'a [T], count: usize) -> &'a [T] {
    let (mine, others) = left.split_at(count);
    *left = others;
    mine
}

/// A name, with type, shape and bytes.
type Field = (String, Dtype, [usize; 2], Vec<u8>);

fn fields<T: MatrixFloat>(state: &PowerSgdState<T>) -> Vec<Field> {
    let fields = state.tensors.iter().flat_map(|(path, tensor)| {
        // Nothing that was read may be divided by zero.
        let columns = tensor.columns.max(1);
        let field = move |kind: &str, values: &[T]| {
            let mut bytes = Vec::with_capacity(size_of_val(values));
            values.iter().for_each(|value| value.append_to(&mut bytes));
            let shape = [values.len() / columns, columns];
            (format!("{kind}{path}"), T::STORED, shape, bytes)
        };
        let error = (!tensor.error.is_empty()).then(|| field(ERROR, &tensor.error));
        core::iter::once(field(Q, &tensor.q)).chain(error)
    });
    fields.collect()
}

/// Restores a field. What does not fit the program's parameters is replaced when it is used.
fn take<T: MatrixFloat>(
    state: &mut PowerSgdState<T>,
    saved_by: SavedBy,
    name: &str,
    view: &TensorView<'_>,
) {
    let values = || {
        let bytes = view.data().chunks_exact(size_of::<T>());
        bytes.map(T::of_bytes).collect::<Vec<_>>()
    };
    let columns = view.shape().last().copied().unwrap_or(0);
    if let Some(path) = name.strip_prefix(Q) {
        let tensor = state.tensors.entry(path.to_owned());
        tensor.or_insert_with(|| Tensor::empty(columns)).q = values();
    } else if let Some(path) = name.strip_prefix(ERROR)
        && saved_by == SavedBy::ThisRank
    {
        let tensor = state.tensors.entry(path.to_owned());
        tensor.or_insert_with(|| Tensor::empty(columns)).error = values();
    }
}

#[cfg(test)]
mod tests;
