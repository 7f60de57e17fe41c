//! The benchmark on GPUs: each rank has one, and NCCL reduces.

use std::hash::{DefaultHasher, Hasher};
use std::time::{Duration, Instant};

use accelerator_collective::{DType, ProcessGroup, ReduceOp, TransportKind};
use accelerator_nccl::{Communicator, DeviceMemory, Gpu, GpuLocation, Library};

use super::args::{AllReduceArgs, Call};
use super::figures::GpuInfo;
use super::input::Input;
use super::sample::{BLOCKS, Sample, iterations};
use super::size::Size;
use crate::error::{BoxResult, Error, Result};
use crate::number::Small;

/// Refuses what cannot be measured on GPUs.
///
/// # Errors
/// A wrong command line.
pub(super) fn check(arguments: &AllReduceArgs) -> Result<()> {
    let known = Communicator::DTYPES;
    if let Some(other) = arguments.dtype.iter().find(|dtype| !known.contains(dtype)) {
        let message = format!(
            "--dtype {other} is not reduced on GPUs; expected one of {}",
            known.map(DType::name).join(", ")
        );
        return Err(Error::usage(message));
    }
    if arguments.transport == TransportKind::Threads {
        let message = "--transport threads has one process, and --device cuda one a GPU: leave one of them out";
        return Err(Error::usage(message));
    }
    if arguments.call != Call::Buffer {
        let message = "--call is about memory of the CPU: leave it out with --device cuda";
        return Err(Error::usage(message));
    }
    Ok(())
}

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
    /// Where there is no GPU, or ranks share one, or they do not come together.
    pub(super) fn connect(group: &ProcessGroup) -> BoxResult<Self> {
        let library = Library::load()?;
        // With fewer GPUs than ranks, some share one, which is an error below, on all of them.
        let ordinal = group.topology().local_rank() % library.gpu_count()?.max(1);
        let gpu = Gpu::open(&library, ordinal)?;
        let places = group.all_gather_object(&GpuLocation::of(&gpu, group))?;
        if let Some(reason) = GpuLocation::nccl_unavailable(&places) {
            return Err(refused(&reason).into());
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

    /// Their versions and bus ids, for the report.
    pub(super) fn gpus(&self) -> GpuInfo {
        let driver = self.gpu.driver_version();
        GpuInfo {
            nccl: self.nccl.clone(),
            cuda: format!("{}.{}", driver.major(), driver.minor()),
            bus_ids: self.bus_ids.clone(),
        }
    }

    /// Measures one size of one type.
    pub(super) fn sample<T: Small>(
        &self,
        arguments: &AllReduceArgs,
        size: Size,
    ) -> BoxResult<Sample> {
        let bytes = size.bytes();
        let iterations = iterations(arguments, size);
        let (rank, ranks) = (self.communicator.rank(), self.communicator.world_size());
        let is_sabotaged = arguments.sabotage && rank + 1 == ranks;
        let input = Input::new(rank, ranks);
        let mut values = vec![T::zeroed(); bytes / size_of::<T>()];
        let mut memory = DeviceMemory::new(&self.gpu, bytes)?;

        // One operation at a time, on inputs that are written as a whole, and every sum compared.
        let mut checked = |memory: &mut DeviceMemory, operation: usize| -> BoxResult<String> {
            let begun = operation * input.period();
            input.write(&mut values, begun);
            if is_sabotaged {
                values[0] = T::small(100);
            }
            memory.write(bytemuck::cast_slice(&values))?;
            self.reduce(memory, T::DTYPE, 1)?;
            memory.read(bytemuck::cast_slice_mut(&mut values))?;
            input.check(&values, begun)?;
            let mut hasher = DefaultHasher::new();
            hasher.write(bytemuck::cast_slice(&values));
            Ok(format!("{:016x}", hasher.finish()))
        };
        for operation in 0..arguments.warmup {
            checked(&mut memory, operation)?;
        }

        let blocks = iterations.min(BLOCKS);
        let mut seconds = Vec::with_capacity(blocks);
        // A barrier: no rank begins before all are ready.
        self.reduce(&mut memory, T::DTYPE, 1)?;
        let began = Instant::now();
        for block in 0..blocks {
            let operations = iterations * (block + 1) / blocks - iterations * block / blocks;
            let start = Instant::now();
            self.reduce(&mut memory, T::DTYPE, operations)?;
            seconds.push(start.elapsed().as_secs_f64() / operations as f64);
        }
        let elapsed = began.elapsed().as_secs_f64();
        let checksum = checked(&mut memory, arguments.warmup)?;
        Ok(Sample {
            seconds,
            elapsed,
            bound: Vec::new(),
            iterations,
            inputs: (input.modulus(), None),
            checksum,
        })
    }

    fn reduce(&self, memory: &mut DeviceMemory, dtype: DType, times: usize) -> BoxResult<()> {
        let reduced = self
            .communicator
            .all_reduce_memory(memory, dtype, ReduceOp::Sum, times);
        Ok(reduced?)
    }
}

/// The error of all ranks, and what to do.
fn refused(reason: &str) -> String {
    format!(
        "NCCL cannot connect the ranks: {reason}; start as many ranks as there are GPUs (`accel-launch env` lists \
         them), with one version of NCCL"
    )
}

/// How long NCCL may take to connect ranks, which have joined their group already.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(120);
