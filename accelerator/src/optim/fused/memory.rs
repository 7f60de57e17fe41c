//! Tensors as plain memory, and loops over it.

use core::ops::{Add, Div, Mul, Sub};

use burn::backend::DispatchTensor;
use burn::optim::StateSource;
use burn::tensor::{DType, Device, Element, Shape, Tensor, TensorData};

use crate::core::tensor_rank::{any_rank, from_data};
use crate::reduce::{ElementValues, Summand, with_values};

/// The numbers that the loops work on. A factor reaches them through `f64`, as in Burn.
pub(super) trait Real:
    Element
    + accelerator_collective::Element
    + Summand
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + PartialOrd
{
    const ZERO: Self;

    fn of(value: f64) -> Self;

    fn root(self) -> Self;

    /// Values of this type.
    fn among(values: ElementValues<'_>) -> Option<&[Self]>;
}

impl Real for f32 {
    fn among(values: ElementValues<'_>) -> Option<&[Self]> {
        match values {
            ElementValues::F32(values) => Some(values),
            _ => None,
        }
    }

    const ZERO: Self = 0.0;

    fn of(value: f64) -> Self {
        value as Self
    }

    fn root(self) -> Self {
        self.sqrt()
    }
}

impl Real for f64 {
    fn among(values: ElementValues<'_>) -> Option<&[Self]> {
        match values {
            ElementValues::F64(values) => Some(values),
            _ => None,
        }
    }

    const ZERO: Self = 0.0;

    fn of(value: f64) -> Self {
        value
    }

    fn root(self) -> Self {
        self.sqrt()
    }
}

/// The tensors that the loops can work on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum KernelInput {
    F32,
    F64,
    /// Other devices and types.
    None,
}

impl KernelInput {
    /// Finds the kind of tensors that belong together.
    pub(super) fn of<const D: usize>(tensors: &[&Tensor<D>]) -> Self {
        let Some(dtype) = tensors.first().map(|tensor| tensor.dtype()) else {
            return Self::None;
        };
        let near = |tensor: &&Tensor<D>| {
            tensor.dtype() == dtype && is_plain_memory(&(*tensor).clone().into_dispatch())
        };
        match dtype {
            DType::F32 if tensors.iter().all(near) => Self::F32,
            DType::F64 if tensors.iter().all(near) => Self::F64,
            _ => Self::None,
        }
    }
}

#[cfg(feature = "flex")]
fn is_plain_memory(tensor: &DispatchTensor) -> bool {
    use burn::backend::{BackendTensor, DispatchTensorKind};
    matches!(
        tensor.kind,
        DispatchTensorKind::Flex(BackendTensor::Float(_))
    )
}

#[cfg(not(feature = "flex"))]
fn is_plain_memory(_tensor: &DispatchTensor) -> bool {
    false
}

/// The elements of a tensor, taken out of it: moved if nobody else holds them, and copied else.
pub(super) struct TakenElements<E> {
    data: TensorData,
    device: Device,
    _elements: core::marker::PhantomData<E>,
}

impl<E: Real> TakenElements<E> {
    pub(super) fn from(tensor: DispatchTensor) -> Self {
        let tensor = Tensor::<1>::from_dispatch(tensor);
        let device = tensor.device();
        let mut data = tensor.into_data();
        if data.as_mut_slice::<E>().is_err() {
            // A view into a file, which lies anywhere in memory.
            let shape = data.shape().clone();
            data = TensorData::new(data.iter::<E>().collect::<Vec<E>>(), shape);
        }
        Self::of(data, device)
    }

    fn of(data: TensorData, device: Device) -> Self {
        Self {
            data,
            device,
            _elements: core::marker::PhantomData,
        }
    }

    #[expect(clippy::expect_used, reason = "`from` makes data of this type")]
    pub(super) fn slice(&self) -> &[E] {
        self.data.as_slice().expect("elements of this type")
    }

    #[expect(clippy::expect_used, reason = "`from` makes data of this type")]
    pub(super) fn slice_mut(&mut self) -> &mut [E] {
        self.data.as_mut_slice().expect("elements of this type")
    }

    pub(super) fn into_tensor(self) -> DispatchTensor {
        from_data(self.data, &self.device)
    }
}

/// The shape of a tensor and where it is, for another one.
pub(super) struct TensorTemplate(Shape, Device);

impl TensorTemplate {
    pub(super) fn of(tensor: &DispatchTensor) -> Self {
        let tensor = any_rank(tensor);
        Self(tensor.shape(), tensor.device())
    }

    pub(super) fn cast<E: Real>(&self, elements: Vec<E>) -> DispatchTensor {
        from_data(TensorData::new(elements, self.0.clone()), &self.1)
    }

    pub(super) fn elements(&self) -> usize {
        self.0.num_elements()
    }
}

/// A tensor of a record, in the float type in which it was saved, if the device has that.
pub(super) fn saved<const D: usize>(
    src: &mut StateSource,
    prefix: &str,
    leaf: &str,
    device: &Device,
) -> Option<Tensor<D>> {
    let data = src.take_tensor(prefix, leaf)?;
    let dtype = data.dtype();
    Some(match dtype.is_float() && device.supports_dtype(dtype) {
        true => Tensor::from_data(data, (device, dtype)),
        false => Tensor::from_data(data, device),
    })
}

/// Lets `read` see the elements of a tensor: where they lie, if the device allows it.
pub(super) fn with_elements<E: Real>(tensor: &DispatchTensor, mut read: impl FnMut(&[E])) {
    with_values(core::iter::once((0, tensor)), |_, values| {
        if let Some(values) = E::among(values) {
            read(values);
        }
    });
}

/// Runs a loop compiled for the widest vectors that the processor has. Bits do not depend on it.
#[inline(always)]
pub(super) fn vectorised<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(feature = "flex")]
    return macerator::AutoArch::new().dispatch(work);
    #[cfg(not(feature = "flex"))]
    work()
}
