use core::fmt;

use accelerator_collective::ProcessGroup;
use burn::tensor::TensorData;

use crate::core::agreement::sides;
use crate::core::error::{Error, Result};
use crate::core::short_hash::short;

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

/// Makes the error of an operation that needs `wanted`, and got tensors that do not fit together.
pub(super) fn differing<T: fmt::Display>(wanted: &str, all: impl IntoIterator<Item = T>) -> Error {
    Error::misuse(format!(
        "the ranks pass tensors that do not fit together ({}): give every rank {wanted} of the same shape and \
         type; `pad_across_processes` makes sizes equal",
        sides(all)
    ))
}

/// Describes a tensor by its shape and type.
pub(super) fn described(tensor: &TensorData) -> String {
    format!("{:?} of {:?}", &tensor.shape()[..], tensor.dtype())
}
