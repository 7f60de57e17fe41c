//! The address of a tensor on a CUDA device.

use core::any::Any;

use burn::backend::{BackendTensor, DispatchDevice, DispatchTensorKind};
use burn::tensor::{DType, Device, Tensor};
use burn_cubecl::cubecl::cuda::CudaRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use cubecl_runtime::runtime::Runtime;

use crate::core::error::{Error, Kind, Result};

/// The type is nameable in this way alone.
type CudaServer = <CudaRuntime as Runtime>::Server;

/// The memory of a tensor, which stays where it is.
pub(super) struct DeviceMemory {
    dtype: DType,
    elements: usize,
    /// Keeps the memory.
    _guard: Box<dyn Any + Send>,
    pointer: u64,
}

impl DeviceMemory {
    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(super) fn elements(&self) -> usize {
        self.elements
    }

    pub(super) fn pointer(&self) -> u64 {
        self.pointer
    }
}

/// The number of a CUDA device among those that this process sees.
pub(super) fn ordinal(device: &Device) -> Option<usize> {
    match device.clone().inner().as_dispatch() {
        DispatchDevice::Cube(CubeDevice::Cuda(device)) => Some(device.index),
        _ => None,
    }
}

/// The memory of a tensor, when all that is to be written there was given to the device.
pub(super) fn of(tensor: &Tensor<1>) -> Result<DeviceMemory> {
    let elements = tensor.shape().num_elements();
    let kind = tensor.clone().into_dispatch().kind;
    let DispatchTensorKind::Cube(BackendTensor::Float(tensor)) = kind else {
        return Err(elsewhere("a tensor of a CUDA device was expected"));
    };
    let plain = plain::of(tensor);
    let (address, bytes) = (plain.handle.clone(), elements * plain.dtype.size());
    if !plain.is_contiguous() || !plain.is_contiguous_buffer() {
        return Err(elsewhere("a bucket was expected to lie in one piece"));
    }
    let resource = plain.client.get_resource::<CudaServer>(address);
    let guard = resource.map_err(|error| elsewhere(&format!("{error:?}")))?;
    let (pointer, size) = (guard.resource().ptr, guard.resource().size);
    if size < bytes as u64 {
        return Err(elsewhere(&format!(
            "{bytes} bytes were expected at {pointer:#x}, and {size} are there"
        )));
    }
    Ok(DeviceMemory {
        dtype: plain.dtype,
        elements,
        _guard: Box::new((plain, guard)),
        pointer,
    })
}

fn elsewhere(why: &str) -> Error {
    Error::new(
        Kind::Device,
        format!("gradients do not lie where NCCL could reach them: {why}"),
    )
}

mod plain {
    //! Features of other crates decide if Burn fuses operations, so both kinds of tensors are handled, and the
    //! compiler chooses.

    use burn_fusion::{FusionBackend, FusionTensor};

    use super::{CubeBackend, CubeTensor};

    pub(super) fn of<T: Plain>(tensor: T) -> CubeTensor {
        tensor.plain()
    }

    pub(super) trait Plain {
        fn plain(self) -> CubeTensor;
    }

    impl Plain for CubeTensor {
        fn plain(self) -> CubeTensor {
            self
        }
    }

    impl Plain for FusionTensor<<CubeBackend as FusionBackend>::FusionRuntime> {
        fn plain(self) -> CubeTensor {
            // What was put off is given to the device.
            self.client
                .clone()
                .resolve_tensor_float::<CubeBackend>(self)
        }
    }
}
