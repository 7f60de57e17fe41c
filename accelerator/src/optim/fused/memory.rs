//! Tensors as plain memory, and loops over it.

use core::ops::{Add, Div, Mul, Sub};

use burn::tensor::{DType, Device, Element, Tensor, TensorData};

/// The numbers that the loops work on. A factor reaches them through `f64`, as in Burn.
pub(super) trait Real:
    Element
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + PartialOrd
{
    const ZERO: Self;

    fn of(value: f64) -> Self;

    fn root(self) -> Self;
}

impl Real for f32 {
    const ZERO: Self = 0.0;

    fn of(value: f64) -> Self {
        value as Self
    }

    fn root(self) -> Self {
        self.sqrt()
    }
}

impl Real for f64 {
    const ZERO: Self = 0.0;

    fn of(value: f64) -> Self {
        value
    }

    fn root(self) -> Self {
        self.sqrt()
    }
}

/// What the loops can work on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Reach {
    F32,
    F64,
    /// Other devices and types.
    None,
}

impl Reach {
    /// Of tensors that belong together.
    pub(super) fn of<const D: usize>(tensors: &[&Tensor<D>]) -> Self {
        let Some(dtype) = tensors.first().map(|tensor| tensor.dtype()) else {
            return Self::None;
        };
        let near = |tensor: &&Tensor<D>| tensor.dtype() == dtype && is_plain_memory(tensor);
        match dtype {
            DType::F32 if tensors.iter().all(near) => Self::F32,
            DType::F64 if tensors.iter().all(near) => Self::F64,
            _ => Self::None,
        }
    }
}

#[cfg(feature = "flex")]
fn is_plain_memory<const D: usize>(tensor: &Tensor<D>) -> bool {
    use burn::backend::{BackendTensor, DispatchTensorKind};
    matches!(
        tensor.clone().into_dispatch().kind,
        DispatchTensorKind::Flex(BackendTensor::Float(_))
    )
}

#[cfg(not(feature = "flex"))]
fn is_plain_memory<const D: usize>(_tensor: &Tensor<D>) -> bool {
    false
}

/// The elements of a tensor, taken out of it: moved where nobody else holds them, and copied else.
pub(super) struct Taken<E> {
    data: TensorData,
    device: Device,
    _elements: core::marker::PhantomData<E>,
}

impl<E: Real> Taken<E> {
    pub(super) fn from<const D: usize>(tensor: Tensor<D>) -> Self {
        let device = tensor.device();
        let mut data = tensor.into_data();
        if data.as_mut_slice::<E>().is_err() {
            // A view into a file, which lies anywhere in memory.
            let shape = data.shape().clone();
            data = TensorData::new(data.iter::<E>().collect::<Vec<E>>(), shape);
        }
        Self::of(data, device)
    }

    /// New elements in the shape of others.
    pub(super) fn like(other: &Self, elements: Vec<E>) -> Self {
        let data = TensorData::new(elements, other.data.shape().clone());
        Self::of(data, other.device.clone())
    }

    fn of(data: TensorData, device: Device) -> Self {
        Self {
            data,
            device,
            _elements: core::marker::PhantomData,
        }
    }

    #[expect(
        clippy::expect_used,
        reason = "`from` and `like` make data of this type"
    )]
    pub(super) fn slice(&self) -> &[E] {
        self.data.as_slice().expect("elements of this type")
    }

    #[expect(
        clippy::expect_used,
        reason = "`from` and `like` make data of this type"
    )]
    pub(super) fn slice_mut(&mut self) -> &mut [E] {
        self.data.as_mut_slice().expect("elements of this type")
    }

    pub(super) fn into_tensor<const D: usize>(self) -> Tensor<D> {
        Tensor::from_data(self.data, (&self.device, E::dtype()))
    }
}

/// Runs a loop compiled for the widest vectors that the processor has. Bits do not depend on it.
#[inline(always)]
pub(super) fn vectorised<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(feature = "flex")]
    return macerator::AutoArch::new().dispatch(work);
    #[cfg(not(feature = "flex"))]
    work()
}
