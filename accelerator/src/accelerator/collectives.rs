use core::fmt;

use accelerator_collective::{Partition, ProcessGroup, ReduceOp};
use burn::tensor::kind::Basic;
use burn::tensor::{DType, ElementConversion, Tensor, TensorData};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Accelerator;
use crate::core::agreement::{short, sides};
use crate::core::error::{Error, Result};
use crate::core::tensors::{TensorMap, Tensors};
use crate::data::Batch;
use crate::metric::{self, Metric};

/// Tensors, metrics and objects of all ranks. Every rank must call the same operation.
impl Accelerator {
    /// Returns the metric over all ranks, by one reduction. The metrics of a tuple are reduced together.
    ///
    /// The batches of the metrics are not compared: where a rank has left its loop early, or evaluated another epoch,
    /// the result covers the samples that were counted, without a warning.
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`] on every rank, with what each has, when ranks reduce other metrics, or of another
    /// size, that have as many sums in all; [`Error::is_collective`] when they have more or fewer, or another rank is lost.
    #[track_caller]
    pub fn reduce_metric<T: Metric>(&self, metric: T) -> Result<T> {
        self.shared.context.check_forward()?;
        self.shared.uncounted.warn();
        metric::reduce(&self.shared.context.group, metric)
    }

    /// Returns the sum, mean, minimum or maximum of a tensor over the ranks, element by element.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use burn::tensor::Tensor;
    ///
    /// let sums = launch(2, |accelerator| {
    ///     let tensor = Tensor::<1>::from_floats([1.0, 2.0], &accelerator.device());
    ///     let sum = accelerator.reduce(tensor, ReduceOp::Sum)?;
    ///     Ok(sum.into_data().try_to_vec::<f32>().unwrap_or_default())
    /// })?;
    /// assert_eq!(sums, [[2.0, 4.0], [2.0, 4.0]]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`] on every rank, with what each has, when tensors differ in shape or type, or
    /// ranks ask for different reductions; [`Error::is_collective`] when another rank is lost.
    #[track_caller]
    pub fn reduce<const D: usize>(&self, tensor: Tensor<D>, op: ReduceOp) -> Result<Tensor<D>> {
        let (device, mut data) = (tensor.device(), tensor.into_data());
        let group = &self.shared.context.group;
        check(group, format_args!("all_reduce {op}"), &data)?;
        let dtype = data.dtype();
        match dtype {
            DType::F64 => group.all_reduce(floats::<f64>(&mut data)?, op)?,
            DType::F32 | DType::Flex32 => group.all_reduce(floats::<f32>(&mut data)?, op)?,
            DType::F16 => group.all_reduce(floats::<half::f16>(&mut data)?, op)?,
            DType::BF16 => group.all_reduce(floats::<half::bf16>(&mut data)?, op)?,
            other => return Err(not_a_float("all_reduce", other)),
        }
        Ok(Tensor::from_data(data, (&device, dtype)))
    }

    /// Returns the tensors of all ranks, joined along the first dimension in rank order. The first dimension may
    /// differ between ranks; the others must be equal.
    ///
    /// ```
    /// use burn::tensor::Tensor;
    ///
    /// let gathered = accelerator::launch(2, |accelerator| {
    ///     // One row of rank 0, two of rank 1.
    ///     let (rank, device) = (accelerator.rank(), accelerator.device());
    ///     let rows = Tensor::<2>::full([1 + rank, 1], rank as f64, &device);
    ///     let all = accelerator.gather(rows)?;
    ///     Ok(all.into_data().try_to_vec::<f32>().unwrap_or_default())
    /// })?;
    /// assert_eq!(gathered, [[0.0, 1.0, 1.0]; 2]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`] on every rank, with what each has, when shapes do not fit together or types
    /// differ; [`Error::is_collective`] when another rank is lost.
    #[track_caller]
    pub fn gather<T: Tensors>(&self, tensors: T) -> Result<T> {
        tensors.map_tensors(&mut GatherRows {
            accelerator: self,
            rows: RowsOf::All,
        })
    }

    /// Gathers the rows of `tensors` that belong to samples, like [`gather`](Self::gather) but without padding and
    /// idle batches. Over an epoch, each sample comes exactly once.
    ///
    /// ```
    /// # use burn::data::dataset::InMemDataset;
    /// use accelerator::prelude::*;
    /// use burn::tensor::Tensor;
    ///
    /// let answers = launch(2, |accelerator| {
    ///     let loader = LoaderBuilder::from_fn(|items: Vec<u32>, _| items)
    ///         .batch_size(2)
    ///         .build(InMemDataset::new((0..5).collect()));
    ///     let mut all = Vec::new();
    ///     for batch in accelerator.prepare(loader)?.epoch(0) {
    ///         let batch = batch?;
    ///         // What a model would say of each sample.
    ///         let mine: Vec<f32> = batch.iter().map(|&item| 10.0 * item as f32).collect();
    ///         let mine = Tensor::<1>::from_floats(mine.as_slice(), &accelerator.device());
    ///         let gathered = accelerator.gather_for_metrics(mine, &batch)?;
    ///         all.extend(gathered.into_data().try_to_vec::<f32>().unwrap_or_default());
    ///     }
    ///     Ok(all)
    /// })?;
    /// assert_eq!(answers, [[0.0, 10.0, 20.0, 30.0, 40.0]; 2]);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`gather`](Self::gather), and [`Error::is_misuse`] on every rank when some rank's `tensor` does
    /// not have a row for each sample of its batch, or the batch is of a loader with
    /// [`TailPolicy::Uneven`](crate::plan::TailPolicy::Uneven), under which other ranks may have had
    /// their last batch: keep rows of such a loader until its end, and gather once then.
    #[track_caller]
    pub fn gather_for_metrics<T: Tensors, O>(&self, tensors: T, batch: &Batch<O>) -> Result<T> {
        self.gather_of(tensors, batch, RowsOf::Samples)
    }

    #[track_caller]
    fn gather_of<T: Tensors, O>(
        &self,
        tensors: T,
        batch: &Batch<O>,
        rows: fn(BatchRows) -> RowsOf,
    ) -> Result<T> {
        if batch.is_uneven() {
            return Err(Error::misuse(
                "gather_for_metrics: this batch is of a loader with the tail policy `uneven`, under \
                 which ranks may run different numbers of steps; keep what belongs to \
                 `batch.real()` until the epoch has ended, and call `gather_object` once then, or \
                 use metrics and `reduce`",
            ));
        }
        tensors.map_tensors(&mut GatherRows {
            accelerator: self,
            rows: rows(BatchRows {
                real: batch.real(),
                all: batch.num_samples(),
            }),
        })
    }

    /// The same of tensors of which some are about the batch, such as its loss: they have rows of their own.
    #[cfg(feature = "burn-train")]
    #[track_caller]
    pub(crate) fn gather_output<T: Tensors>(&self, tensors: T, batch: &Batch<()>) -> Result<T> {
        self.gather_of(tensors, batch, RowsOf::SamplesOrBatch)
    }

    /// Returns the tensor of rank `root` on every rank. The other ranks' tensors give only the shape.
    ///
    /// ```
    /// use burn::tensor::Tensor;
    ///
    /// let values = accelerator::launch(3, |accelerator| {
    ///     let mine = Tensor::<1>::full([2], accelerator.rank() as f64, &accelerator.device());
    ///     let of_rank_1 = accelerator.broadcast(mine, 1)?;
    ///     Ok(of_rank_1.into_data().try_to_vec::<f32>().unwrap_or_default())
    /// })?;
    /// assert_eq!(values, [[1.0, 1.0]; 3]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`] on every rank, with what each has, when tensors differ in shape or type, or
    /// ranks name different roots; [`Error::is_collective`] when another rank is lost.
    #[track_caller]
    pub fn broadcast<const D: usize, K: Basic>(
        &self,
        tensor: Tensor<D, K>,
        root: usize,
    ) -> Result<Tensor<D, K>> {
        let device = tensor.device();
        let data = tensor.into_data();
        let group = &self.shared.context.group;
        check(group, format_args!("broadcast from rank {root}"), &data)?;
        let (mut bytes, shape, dtype) = data.into_parts();
        group.broadcast::<u8>(&mut bytes, root)?;
        let data = TensorData::from_bytes(bytes, shape, dtype);
        Ok(Tensor::from_data(data, (&device, dtype)))
    }

    /// Gathers the first `rows` rows, which may be none: Burn has no tensor without rows. The tensor has
    /// one for each of `samples`, where that is said.
    #[track_caller]
    fn gather_rows<const D: usize, K: Basic>(
        &self,
        tensor: Tensor<D, K>,
        rows: usize,
        samples: Option<usize>,
    ) -> Result<Tensor<D, K>> {
        self.shared.context.check_forward()?;
        let (device, data) = (tensor.device(), tensor.into_data());
        let dtype = data.dtype();
        let mut shape: Vec<usize> = data.shape().to_vec();
        // What does not fit is exchanged too, so that no rank waits for one that has returned.
        let told = (shape.clone(), format!("{dtype:?}"), samples, rows);
        let group = self.shared.context.group.for_purpose("gather");
        let all = group.all_gather_object(&told)?;
        if all
            .iter()
            .any(|(dims, _, samples, _)| samples.is_some_and(|samples| samples != dims[0]))
        {
            let all = all.iter().map(|(dims, _, samples, _)| match samples {
                Some(samples) => format!("{dims:?} for {samples} samples"),
                None => format!("{dims:?}"),
            });
            return Err(Error::misuse(format!(
                "gather_for_metrics: expected one row for each sample of the batch, found {}; gather other \
                 tensors with `gather`",
                sides(all)
            )));
        }
        let (first, first_dtype, ..) = &all[0];
        if all
            .iter()
            .any(|(dims, dtype, ..)| (dims.get(1..), dtype) != (first.get(1..), first_dtype))
        {
            let all = all
                .iter()
                .map(|(dims, dtype, ..)| format!("gather of {dims:?} of {dtype}"));
            return Err(differing("rows", all));
        }
        let kept = data.bytes().len() / shape[0].max(1) * rows;
        let pieces = self.group().all_gather_varied(&data.bytes()[..kept])?;
        shape[0] = all.iter().map(|(.., rows)| rows).sum();
        let data = TensorData::from_bytes_vec(pieces.concat(), shape, dtype);
        Ok(Tensor::from_data(data, (&device, dtype)))
    }

    /// Returns the values of all ranks, in rank order, on every rank.
    ///
    /// ```
    /// let names = accelerator::launch(2, |accelerator| {
    ///     accelerator.gather_object(&format!("rank {}", accelerator.rank()))
    /// })?;
    /// assert_eq!(names[0], ["rank 0", "rank 1"]);
    /// # assert_eq!(names[1], names[0]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`] when another rank is lost or a value cannot be serialised.
    #[track_caller]
    pub fn gather_object<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>> {
        let group = self.shared.context.group.for_purpose("gather_object");
        Ok(group.all_gather_object(value)?)
    }

    /// Returns the value of rank `root` on every rank.
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`] when another rank is lost or the value cannot be serialised.
    #[track_caller]
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(
        &self,
        value: &T,
        root: usize,
    ) -> Result<T> {
        let mine = (self.rank() == root).then_some(value);
        let group = self.shared.context.group.for_purpose("broadcast_object");
        Ok(group.broadcast_object(mine, root)?)
    }
}

struct GatherRows<'a> {
    accelerator: &'a Accelerator,
    rows: RowsOf,
}

#[derive(Clone, Copy)]
enum RowsOf {
    All,
    /// One row per sample of the batch.
    Samples(BatchRows),
    /// One row per sample, or rows about the whole batch.
    #[cfg(feature = "burn-train")]
    SamplesOrBatch(BatchRows),
}

#[derive(Clone, Copy)]
struct BatchRows {
    /// The number of rows that belong to samples, counted from the first.
    real: usize,
    all: usize,
}

impl TensorMap for GatherRows<'_> {
    #[track_caller]
    fn map<const D: usize, K: Basic + 'static>(
        &mut self,
        tensor: Tensor<D, K>,
    ) -> Result<Tensor<D, K>> {
        let found = tensor.dims()[0];
        let (rows, samples) = match self.rows {
            RowsOf::All => (found, None),
            RowsOf::Samples(BatchRows { real, all }) => (real, Some(all)),
            #[cfg(feature = "burn-train")]
            RowsOf::SamplesOrBatch(BatchRows { real, all }) => {
                let is_about_batch = real > 0 && found != all;
                (if is_about_batch { found } else { real }, None)
            }
        };
        self.accelerator.gather_rows(tensor, rows, samples)
    }
}

fn floats<E: burn::tensor::Element>(data: &mut TensorData) -> Result<&mut [E]> {
    let dtype = data.dtype();
    data.as_mut_slice::<E>()
        .map_err(|_| not_a_float("the operation", dtype))
}

fn not_a_float(operation: &str, dtype: DType) -> Error {
    Error::misuse(format!(
        "{operation} takes tensors of f64, f32, f16 or bf16, found {dtype:?}; cast it first"
    ))
}

/// The side on which [`Accelerator::pad_across_processes`] adds what is missing.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum PadSide {
    /// Pads before the first element.
    Start,
    /// Pads after the last element.
    #[default]
    End,
}

/// Tensors of the same size on every rank.
impl Accelerator {
    /// Pads the tensor with `value` in dimension `dim` to the longest length of any rank. Sequences of different
    /// lengths can then be [gathered](Self::gather).
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use burn::tensor::{Int, Tensor};
    ///
    /// let padded = launch(2, |accelerator| {
    ///     // [0, 1, 2] on rank 0, [0, 1] on rank 1.
    ///     let tensor = Tensor::<1, Int>::arange(0..3 - accelerator.rank() as i64, &accelerator.device());
    ///     let padded = accelerator.pad_across_processes(tensor, 0, -1, PadSide::End)?;
    ///     Ok(padded.into_data().convert::<i64>().try_to_vec::<i64>().unwrap_or_default())
    /// })?;
    /// assert_eq!(padded, [[0, 1, 2], [0, 1, -1]]);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`] on every rank, with what each has, when there is no such dimension, or ranks name
    /// different ones, or tensors of different types or numbers of dimensions; [`Error::is_collective`] when another rank is lost.
    #[track_caller]
    pub fn pad_across_processes<const D: usize, K: Basic>(
        &self,
        tensor: Tensor<D, K>,
        dim: usize,
        value: impl ElementConversion,
        side: PadSide,
    ) -> Result<Tensor<D, K>> {
        let mut shape = tensor.dims();
        // Wrong dimensions are exchanged too, so that no rank waits for one that has returned.
        let told = (dim, shape.to_vec(), format!("{:?}", tensor.dtype()));
        let group = self.group().for_purpose("pad_across_processes");
        let all = group.all_gather_object(&told)?;
        let (first_dim, first, first_dtype) = &all[0];
        let fits = all.iter().all(|(dim, dims, dtype)| {
            dim < &dims.len() && (dim, dims.len(), dtype) == (first_dim, first.len(), first_dtype)
        });
        if !fits {
            let all = all.iter();
            let all =
                all.map(|(dim, dims, dtype)| format!("dimension {dim} of {dims:?} of {dtype}"));
            return Err(Error::misuse(format!(
                "pad_across_processes: expected one dimension of tensors of one type on every rank, found {}; \
                 dimensions count from 0",
                sides(all)
            )));
        }
        let own = shape[dim];
        let longest = all.iter().map(|(dim, dims, _)| dims[*dim]).max();
        let missing = longest.unwrap_or(own) - own;
        if missing == 0 {
            return Ok(tensor);
        }
        shape[dim] = missing;
        let padding = Tensor::full(shape, value, (&tensor.device(), tensor.dtype()));
        let parts = match side {
            PadSide::Start => vec![padding, tensor],
            PadSide::End => vec![tensor, padding],
        };
        Ok(Tensor::cat(parts, dim))
    }
}

/// Shares out work without a loader: prompts, files, folds.
impl Accelerator {
    /// Returns this rank's contiguous share of `items`. If they do not divide evenly, the first ranks get one more;
    /// if there are fewer items than ranks, the last ranks get none. Nothing is communicated.
    ///
    /// Lists of one length are cut alike. [`Partition`](crate::collective::Partition) gives the range for anything else,
    /// such as the rows of a tensor.
    ///
    /// ```
    /// let shares = accelerator::launch(2, |accelerator| {
    ///     Ok(accelerator.split_between_processes(&["A", "B", "C"]).to_vec())
    /// })?;
    /// assert_eq!(shares, [vec!["A", "B"], vec!["C"]]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn split_between_processes<'a, T>(&self, items: &'a [T]) -> &'a [T] {
        // Within the items: the ranges partition them.
        &items[Partition::new(items.len(), self.world_size()).range(self.rank())]
    }
}

/// Fails on every rank alike, and names what each has, where ranks pass tensors of different shapes or
/// types, or call different operations of this kind. The group lives on.
///
/// Eight bytes of each rank travel; the rest does where they differ.
#[track_caller]
pub(super) fn check(
    group: &ProcessGroup,
    operation: impl fmt::Display,
    tensor: &TensorData,
) -> Result<()> {
    if group.world_size() == 1 {
        return Ok(());
    }
    let mine = format!("{operation} of {}", described(tensor));
    let all = group.all_gather(&[short(&blake3::hash(mine.as_bytes()))])?;
    if all.iter().all(|digest| *digest == all[0]) {
        return Ok(());
    }
    let tensors = group.for_purpose("tensors that do not fit together");
    Err(differing("one tensor", tensors.all_gather_object(&mine)?))
}

pub(super) fn differing<T: fmt::Display>(wanted: &str, all: impl IntoIterator<Item = T>) -> Error {
    Error::misuse(format!(
        "the ranks pass tensors that do not fit together ({}): give every rank {wanted} of the same shape and \
         type; `pad_across_processes` makes sizes equal",
        sides(all)
    ))
}

pub(super) fn described(tensor: &TensorData) -> String {
    format!("{:?} of {:?}", &tensor.shape()[..], tensor.dtype())
}
