use burn::backend::{BackendTensor, DispatchTensor, DispatchTensorKind};

use crate::precision::Cast;

/// Returns `true` if a gradient that was seen is the one that its parameter has in the end, or one in half
/// precision that `cast` has made that of.
pub(in crate::reduce) fn is_of(
    seen: &DispatchTensor,
    gradient: &DispatchTensor,
    cast: Option<&Cast>,
) -> bool {
    match cast {
        Some(cast) => cast.has_made(gradient, seen, same),
        None => same(seen, gradient),
    }
}

/// Returns `true` if two gradients are the same values, because they are the same memory.
///
/// Both must be held when they are compared: nothing is written in place then, and no memory can
/// have been given to somebody else. If a backend cannot tell, they are taken for different.
pub(in crate::reduce) fn same(one: &DispatchTensor, other: &DispatchTensor) -> bool {
    match (&one.kind, &other.kind) {
        #[cfg(feature = "flex")]
        (
            DispatchTensorKind::Flex(BackendTensor::Float(one)),
            DispatchTensorKind::Flex(BackendTensor::Float(other)),
        ) => {
            std::sync::Arc::ptr_eq(&one.data_arc(), &other.data_arc())
                && one.layout() == other.layout()
        }
        #[cfg(feature = "ndarray")]
        (
            DispatchTensorKind::NdArray(BackendTensor::Float(one)),
            DispatchTensorKind::NdArray(BackendTensor::Float(other)),
        ) => ndarray(one).is_some_and(|one| ndarray(other) == Some(one)),
        #[cfg(any(feature = "cuda", feature = "wgpu"))]
        (
            DispatchTensorKind::Cube(BackendTensor::Float(one)),
            DispatchTensorKind::Cube(BackendTensor::Float(other)),
        ) => cube::same(one, other),
        _ => false,
    }
}

/// Returns where an array begins, with its shape and strides.
#[cfg(feature = "ndarray")]
#[allow(deprecated, reason = "ndarray is, and is served while it is there")]
fn ndarray(tensor: &burn_ndarray::NdArrayTensor) -> Option<(usize, Vec<usize>, Vec<isize>)> {
    use burn_ndarray::NdArrayTensor as N;
    macro_rules! of {
        ($storage:expr) => {{
            let view = $storage.view();
            Some((
                view.as_ptr() as usize,
                view.shape().to_vec(),
                view.strides().to_vec(),
            ))
        }};
    }
    match tensor {
        N::F64(storage) => of!(storage),
        N::F32(storage) => of!(storage),
        _ => None,
    }
}

#[cfg(any(feature = "cuda", feature = "wgpu"))]
mod cube {
    //! Features of other crates decide if Burn fuses operations, so both kinds of tensors are compared, and the
    //! compiler chooses.

    pub(super) fn same<T: Identity>(one: &T, other: &T) -> bool {
        one.is(other)
    }

    pub(super) trait Identity {
        fn is(&self, other: &Self) -> bool;
    }

    impl Identity for burn_cubecl::tensor::CubeTensor {
        fn is(&self, other: &Self) -> bool {
            let memory = |tensor: &Self| tensor.handle.clone().binding().memory.id().value;
            memory(self) == memory(other)
                && self.handle.offset_start == other.handle.offset_start
                && self.meta.shape() == other.meta.shape()
                && self.meta.strides() == other.meta.strides()
        }
    }

    // Every operation's result has an id of its own.
    impl<R: burn_fusion::FusionRuntime> Identity for burn_fusion::FusionTensor<R> {
        fn is(&self, other: &Self) -> bool {
            self.id == other.id
        }
    }
}
