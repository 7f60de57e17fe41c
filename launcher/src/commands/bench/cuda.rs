//! The benchmark on GPUs: each rank has one, and NCCL reduces.

use std::time::Duration;

use accelerator_collective::{Element, ProcessGroup, ReduceOp};
use accelerator_nccl::{Communicator, DeviceMemory, Gpu, GpuLocation, Library};

use super::figures::GpuInfo;
use super::measure::Operand;
use crate::error::BoxResult;

/// This rank, with its GPU.
#[derive(Debug)]
pub(super) struct GpuRank {
    communicator: Communicator,
    gpu: Gpu,
    nccl: String,
    bus_ids: Vec<String>,
}

impl GpuRank {
    /// Connects the GPUs of the group, each rank's that of its local rank.
    ///
    /// # Errors
    /// When there is no GPU, or ranks share one, or they do not come together.
    pub(super) fn connect(group: &ProcessGroup) -> BoxResult<Self> {
        let library = Library::load()?;
        // With fewer GPUs than ranks, some share one, which is an error below, on all of them.
        let ordinal = group.topology().local_rank() % library.gpu_count()?.max(1);
        let gpu = Gpu::open(&library, ordinal)?;
        let places = group.all_gather_object(&GpuLocation::of(&gpu, group))?;
        if let Some(reason) = GpuLocation::nccl_unavailable(&places) {
            return Err(format!(
                "NCCL cannot connect the ranks: {reason}; start as many ranks as there are GPUs (`accel-launch env` \
                 lists them), with one version of NCCL"
            )
            .into());
        }
        let communicator = Communicator::connect_group(&gpu, group, CONNECT_TIMEOUT)??;
        let bus_ids = places.iter().map(|place| place.bus_id().to_owned());
        Ok(Self {
            communicator,
            gpu,
            nccl: library.version().to_string(),
            bus_ids: bus_ids.collect(),
        })
    }

    /// Returns the GPUs' versions and bus ids, for the report.
    pub(super) fn gpus(&self) -> GpuInfo {
        let driver = self.gpu.driver_version();
        GpuInfo {
            nccl: self.nccl.clone(),
            cuda: format!("{}.{}", driver.major(), driver.minor()),
            bus_ids: self.bus_ids.clone(),
        }
    }

    /// Takes memory of the GPU.
    ///
    /// # Errors
    /// When it has too little.
    pub(super) fn operand<T: Element>(&self, len: usize) -> BoxResult<GpuOperand<'_, T>> {
        Ok(GpuOperand {
            rank: self,
            memory: DeviceMemory::new(&self.gpu, len * size_of::<T>())?,
            values: vec![T::zeroed(); len],
        })
    }
}

/// Memory of a GPU, and as much of the host to write and read it.
#[derive(Debug)]
pub(super) struct GpuOperand<'a, T> {
    rank: &'a GpuRank,
    memory: DeviceMemory,
    values: Vec<T>,
}

impl<T: Element> Operand<T> for GpuOperand<'_, T> {
    fn fill(&mut self, value: impl Fn(usize) -> T) -> BoxResult<()> {
        for (index, element) in self.values.iter_mut().enumerate() {
            *element = value(index);
        }
        Ok(self.memory.write(bytemuck::cast_slice(&self.values))?)
    }

    fn reduce(&mut self, operations: usize) -> BoxResult<()> {
        let communicator = &self.rank.communicator;
        let memory = &mut self.memory;
        Ok(communicator.all_reduce_memory(memory, T::DTYPE, ReduceOp::Sum, operations)?)
    }

    fn values(&mut self) -> BoxResult<&[T]> {
        self.memory
            .read(bytemuck::cast_slice_mut(&mut self.values))?;
        Ok(&self.values)
    }
}

/// The time that NCCL may take to connect ranks, which have joined their group already.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(120);
