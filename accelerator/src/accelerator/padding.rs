use burn::tensor::kind::Basic;
use burn::tensor::{ElementConversion, Tensor};

use super::Accelerator;
use crate::core::agreement::sides;
use crate::core::error::{Error, Result};

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
    /// The tensor, as long in dimension `dim` as the longest of all ranks: what is missing is filled
    /// with `value`. Sequences of different lengths can be [gathered](Self::gather) then.
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
        let group = self
            .shared
            .context
            .group
            .for_purpose("pad_across_processes");
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
