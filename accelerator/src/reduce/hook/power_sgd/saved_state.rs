//! The state in checkpoints, a safetensors file: Q as `right/PATH`, one column per row, and the error as `rest/PATH`.

use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};

use super::matrix::MatrixFloat;
use super::{PowerSgdState, Tensor};
use crate::reduce::hook::{HookError, SavedBy};

/// The prefix of the path, in the file.
const Q: &str = "right/";
const ERROR: &str = "rest/";

pub(super) fn save(
    single: &PowerSgdState<f32>,
    double: &PowerSgdState<f64>,
) -> Result<Vec<u8>, HookError> {
    let mut fields = fields(single);
    fields.extend(self::fields(double));
    if fields.is_empty() {
        return Ok(Vec::new());
    }
    let views = fields.iter().map(|(name, dtype, shape, bytes)| {
        TensorView::new(*dtype, shape.to_vec(), bytes).map(|view| (name, view))
    });
    Ok(serialize(views.collect::<Result<Vec<_>, _>>()?, None)?)
}

pub(super) fn restore(
    saved: &[u8],
    saved_by: SavedBy,
    single: &mut PowerSgdState<f32>,
    double: &mut PowerSgdState<f64>,
) -> Result<(), HookError> {
    if saved.is_empty() {
        return Ok(());
    }
    for (name, view) in SafeTensors::deserialize(saved)?.iter() {
        match view.dtype() {
            Dtype::F64 => take(double, saved_by, name, &view),
            _ => take(single, saved_by, name, &view),
        }
    }
    Ok(())
}

/// A type that has a name in files.
trait StoredFloat: MatrixFloat {
    const DTYPE: Dtype;

    fn append_to(self, bytes: &mut Vec<u8>);

    /// Reads a value from as many bytes as it has.
    fn of_bytes(bytes: &[u8]) -> Self;
}

macro_rules! stored {
    ($($type:ident $dtype:ident),+) => {
        $(
            impl StoredFloat for $type {
                const DTYPE: Dtype = Dtype::$dtype;

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

stored!(f32 F32, f64 F64);

/// A name, with type, shape and bytes.
type Field = (String, Dtype, [usize; 2], Vec<u8>);

fn fields<T: StoredFloat>(state: &PowerSgdState<T>) -> Vec<Field> {
    let fields = state.tensors.iter().flat_map(|(path, tensor)| {
        // Nothing that was read may be divided by zero.
        let columns = tensor.columns.max(1);
        let field = move |kind: &str, values: &[T]| {
            let mut bytes = Vec::with_capacity(size_of_val(values));
            values.iter().for_each(|value| value.append_to(&mut bytes));
            let shape = [values.len() / columns, columns];
            (
                format!("{kind}{path}"),
                <T as StoredFloat>::DTYPE,
                shape,
                bytes,
            )
        };
        let error = (!tensor.error.is_empty()).then(|| field(ERROR, &tensor.error));
        core::iter::once(field(Q, &tensor.q)).chain(error)
    });
    fields.collect()
}

/// Restores a field. What does not fit the program's parameters is replaced when it is used.
fn take<T: StoredFloat>(
    state: &mut PowerSgdState<T>,
    saved_by: SavedBy,
    name: &str,
    view: &TensorView<'_>,
) {
    let values = || {
        let bytes = view.data().chunks_exact(size_of::<T>());
        bytes.map(T::of_bytes).collect::<Vec<_>>()
    };
    let blank = |columns| Tensor {
        q: Vec::new(),
        error: Vec::new(),
        columns,
    };
    let columns = view.shape().last().copied().unwrap_or(0);
    if let Some(path) = name.strip_prefix(Q) {
        let tensor = state.tensors.entry(path.to_owned());
        tensor.or_insert_with(|| blank(columns)).q = values();
    } else if let Some(path) = name.strip_prefix(ERROR)
        && saved_by == SavedBy::ThisRank
    {
        let tensor = state.tensors.entry(path.to_owned());
        tensor.or_insert_with(|| blank(columns)).error = values();
    }
}
