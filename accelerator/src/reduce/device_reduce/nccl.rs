//! Reductions from GPU to GPU.

use core::any::Any;
use core::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_collective::{DType, ProcessGroup, ReduceOp};
use accelerator_nccl::{Communicator, DevicePointer, Gpu, Library};
use burn::backend::{BackendTensor, DispatchDevice, DispatchTensorKind};
use burn::tensor::{DType as TensorDType, Device, Tensor};
use burn_cubecl::cubecl::cuda::CudaRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use cubecl_runtime::runtime::Runtime;

use crate::core::device::BackendKind;
use crate::core::error::{Error, Kind, Result};

pub(super) use accelerator_nccl::GpuLocation;

/// `true` in a program that is built with NCCL.
pub(super) const IS_BUILT: bool = true;

/// The time limit for ranks to connect to each other.
const CONNECT: Duration = Duration::from_secs(60);

/// The time limit for the last sums at the end of a program.
const REST: Duration = Duration::from_secs(10);

/// NCCL among all ranks.
#[derive(Debug)]
pub(in crate::reduce) struct Nccl {
    communicator: Arc<Communicator>,
    is_sound: AtomicBool,
}

/// The requirements of NCCL on a rank.
#[derive(Debug)]
pub(super) struct NcclSetup {
    gpu: Gpu,
}

/// A tensor that ranks are adding up, in place.
pub(in crate::reduce) struct PendingReduce {
    communicator: Arc<Communicator>,
    /// Held until nothing of NCCL's touches it.
    memory: Option<DeviceMemory>,
    tensor: Tensor<1>,
}

impl NcclSetup {
    /// Finds them for that device, or returns what the rank has instead.
    pub(super) fn find(kind: BackendKind, device: &Device) -> core::result::Result<Self, String> {
        let Some(ordinal) = ordinal(device) else {
            return Err(format!("the device `{kind}`"));
        };
        let missing = |error| format!("no NCCL: {error}");
        let library = Library::load().map_err(missing)?;
        let gpu = Gpu::open(&library, ordinal).map_err(missing)?;
        Ok(Self { gpu })
    }

    pub(super) fn place(&self, group: &ProcessGroup) -> GpuLocation {
        GpuLocation::of(&self.gpu, group)
    }

    /// Connects all ranks. All of them call it, and get the same outcome: why one of them could not, or an error
    /// where the group has failed.
    #[track_caller]
    pub(super) fn connect(
        &self,
        group: &ProcessGroup,
    ) -> Result<core::result::Result<Nccl, String>> {
        match Communicator::connect_group(&self.gpu, group, CONNECT)? {
            Ok(communicator) => Ok(Ok(Nccl {
                communicator: Arc::new(communicator),
                is_sound: AtomicBool::new(true),
            })),
            Err(error) => Ok(Err(error.to_string())),
        }
    }
}

impl Nccl {
    /// Adds the ranks' values up, in place, after all that the device was given before. The tensor is
    /// nobody else's.
    pub(in crate::reduce) fn all_reduce(&self, tensor: Tensor<1>) -> Result<PendingReduce> {
        let memory = of(&tensor)?;
        let dtype = match memory.dtype() {
            TensorDType::BF16 => DType::BF16,
            TensorDType::F16 => DType::F16,
            TensorDType::F32 => DType::F32,
            TensorDType::F64 => DType::F64,
            other => {
                let message =
                    format!("gradients of type {other:?} are not reduced from GPU to GPU");
                return Err(Error::new(Kind::Device, message));
            }
        };
        let at = DevicePointer(memory.pointer());
        #[expect(unsafe_code, reason = "the memory is CubeCL's")]
        // SAFETY: `memory` is of so many elements of that type on the device of this communicator, and holds
        // them in place. It is let go of in `PendingReduce::finish` or its drop, after `order_after`: whatever gets
        // the memory then is enqueued behind the operation. Until then nobody has the tensor but `PendingReduce`.
        let started = unsafe {
            self.communicator
                .all_reduce(at, memory.elements(), dtype, ReduceOp::Sum)
        };
        started.map_err(failed)?;
        Ok(PendingReduce {
            communicator: self.communicator.clone(),
            memory: Some(memory),
            tensor,
        })
    }

    /// Orders what the device is given from now on behind what was sent.
    pub(in crate::reduce) fn order_after(&self) -> Result<()> {
        self.communicator.order_after().map_err(failed)
    }

    /// Waits until the device has done it, for as long as that may take where all is well.
    pub(super) fn rest(&self) {
        let until = Instant::now() + REST;
        // Where it failed, nothing is under way.
        while matches!(self.communicator.is_done(), Ok(false)) && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for the sums that were stepped with. Fails if they are not complete.
    pub(super) fn confirm(&self) -> Result<()> {
        self.communicator.wait().map_err(failed)
    }

    /// Notes that another window begins: what was stepped with so far is known to be complete, or is not.
    pub(super) fn window_begins(&self) {
        let is_done = matches!(self.communicator.is_done(), Ok(true));
        self.is_sound.store(is_done, Ordering::Release);
    }

    /// Notes that the window may be stepped with, though its sums are still on their way.
    pub(super) fn window_ends(&self) {
        self.is_sound.store(false, Ordering::Release);
    }

    /// Returns `true` if all that was stepped with is complete, as far as that is known once NCCL has ended.
    pub(super) fn is_sound(&self) -> bool {
        self.communicator.wait().is_ok() || self.is_sound.load(Ordering::Acquire)
    }
}

impl PendingReduce {
    /// The sums, for what the device is given after [`Nccl::order_after`].
    pub(in crate::reduce) fn finish(mut self) -> Tensor<1> {
        self.memory = None;
        self.tensor.clone()
    }
}

impl Drop for PendingReduce {
    fn drop(&mut self) {
        // Given up: what gets the memory next comes after the operation. Where that cannot be had, NCCL is being
        // aborted, and may not have let go of it: nobody gets it.
        if self.memory.is_some() && self.communicator.order_after().is_err() {
            core::mem::forget(self.memory.take());
        }
    }
}

impl fmt::Debug for PendingReduce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingReduce")
            .field("is_held", &self.memory.is_some())
            .finish_non_exhaustive()
    }
}

fn failed(error: accelerator_nccl::Error) -> Error {
    let message = "gradients could not be reduced from GPU to GPU; continue from a checkpoint, since the last step may \
                   have been taken with sums that were not complete";
    Error::new(Kind::Collective, message).with_source(error)
}

/// The type is nameable in this way alone.
type CudaServer = <CudaRuntime as Runtime>::Server;

/// The memory of a tensor, which stays where it is.
pub(super) struct DeviceMemory {
    dtype: TensorDType,
    elements: usize,
    /// Keeps the memory.
    _guard: Box<dyn Any + Send>,
    pointer: u64,
}

impl DeviceMemory {
    pub(super) fn dtype(&self) -> TensorDType {
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
