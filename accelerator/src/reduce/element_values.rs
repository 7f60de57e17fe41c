#[cfg(feature = "flex")]
use burn::backend::BackendTensor;
use burn::backend::DispatchTensor;
#[cfg(any(feature = "flex", feature = "ndarray"))]
use burn::backend::DispatchTensorKind;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor, TensorData, Transaction};

use crate::core::tensor::{any_rank, register, with_rank};
use crate::model::Trainable;

/// Returns the gradient of a parameter, which stays in `gradients`.
pub(super) fn peek(gradients: &GradientsParams, parameter: &Trainable) -> Option<DispatchTensor> {
    with_rank!(parameter.shape.len(), D => {
        gradients.get::<D>(parameter.id).map(Tensor::into_dispatch)
    })
}

/// Removes the gradient of a parameter from `gradients`.
pub(super) fn take(
    gradients: &mut GradientsParams,
    parameter: &Trainable,
) -> Option<DispatchTensor> {
    with_rank!(parameter.shape.len(), D => {
        gradients.remove::<D>(parameter.id).map(Tensor::into_dispatch)
    })
}

/// Puts what becomes of a gradient, each element for itself, in its place.
pub(super) fn change(
    gradients: &mut GradientsParams,
    parameter: &Trainable,
    change: impl FnOnce(Tensor<1>) -> Tensor<1>,
) {
    if let Some(gradient) = take(gradients, parameter) {
        let changed = change(Tensor::from_dispatch(gradient));
        register(gradients, parameter.id, changed.into_dispatch());
    }
}

/// The elements of a gradient, in row-major order.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ElementValues<'a> {
    Bf16(&'a [half::bf16]),
    F16(&'a [half::f16]),
    F32(&'a [f32]),
    F64(&'a [f64]),
}

impl<'a> ElementValues<'a> {
    pub(super) fn of(data: &'a TensorData) -> Self {
        match data.dtype() {
            DType::BF16 => Self::Bf16(slice(data)),
            DType::F16 => Self::F16(slice(data)),
            DType::F32 | DType::Flex32 => Self::F32(slice(data)),
            DType::F64 => Self::F64(slice(data)),
            other => not_a_float(other),
        }
    }

    pub(super) fn is_finite(self) -> bool {
        // Without an early end, so that it is done in vectors.
        fn all<T: Copy>(values: &[T], is_finite: impl Fn(T) -> bool) -> bool {
            let finite = values.iter().map(|&value| is_finite(value));
            finite.fold(true, |all, is_finite| all & is_finite)
        }
        match self {
            Self::Bf16(values) => all(values, half::bf16::is_finite),
            Self::F16(values) => all(values, half::f16::is_finite),
            Self::F32(values) => all(values, f32::is_finite),
            Self::F64(values) => all(values, f64::is_finite),
        }
    }
}

/// Lets `read` see the elements of each of `gradients`, with its number: where they lie, if the
/// device allows it, or else a copy of them. What must be fetched from a device is fetched at once.
pub(crate) fn with_values<'a>(
    gradients: impl Iterator<Item = (usize, &'a DispatchTensor)>,
    mut read: impl FnMut(usize, ElementValues<'_>),
) {
    let mut fetched = Vec::new();
    let mut transaction = Transaction::default();
    for (number, gradient) in gradients {
        match &gradient.kind {
            #[cfg(feature = "flex")]
            DispatchTensorKind::Flex(BackendTensor::Float(tensor)) => {
                if let Some((start, end)) = tensor.layout().contiguous_offsets() {
                    let values = match tensor.dtype() {
                        DType::BF16 => ElementValues::Bf16(&tensor.storage()[start..end]),
                        DType::F16 => ElementValues::F16(&tensor.storage()[start..end]),
                        DType::F32 => ElementValues::F32(&tensor.storage()[start..end]),
                        DType::F64 => ElementValues::F64(&tensor.storage()[start..end]),
                        other => not_a_float(other),
                    };
                    read(number, values);
                } else {
                    read(number, ElementValues::of(&any_rank(gradient).into_data()));
                }
            }
            #[cfg(feature = "ndarray")]
            DispatchTensorKind::NdArray(_) => {
                read(number, ElementValues::of(&any_rank(gradient).into_data()));
            }
            _ => {
                transaction = transaction.register(any_rank(gradient));
                fetched.push(number);
            }
        }
    }
    if !fetched.is_empty() {
        for (number, data) in fetched.into_iter().zip(transaction.execute()) {
            read(number, ElementValues::of(&data));
        }
    }
}

#[expect(
    clippy::expect_used,
    reason = "the callers match on the data's type first"
)]
fn slice<E: burn::tensor::Element>(data: &TensorData) -> &[E] {
    data.as_slice().expect("data of the type that was matched")
}

#[expect(
    clippy::unreachable,
    reason = "a parameter of another type is not listed as trainable"
)]
fn not_a_float(dtype: DType) -> ! {
    unreachable!("a gradient of type {dtype:?}")
}
