//! The ranks, which are processes or threads: the operations that each times on memory of the host or of a GPU, and the
//! bound that memory sets. NCCL reduces on GPUs.

use std::hint::black_box;
use std::io::Write;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use accelerator_collective::{
    Buffer, DType, Element, GroupOptions, Launch, ProcessGroup, ReduceOp,
};
use accelerator_nccl::internal::DeviceMemory;
use accelerator_nccl::{Communicator, Gpu, GpuLocation, Library};
use half::{bf16, f16};

use super::args::{AllReduceArgs, BenchDevice, MOST};
use super::figures::{BenchReport, GpuInfo, Sample};
use crate::error::{BoxResult as Result, Error, chain};
use crate::text::print;

/// Runs one rank as a process; rank 0 prints the report.
pub(crate) fn run(arguments: &AllReduceArgs) -> ExitCode {
    let options = GroupOptions::new().with_transport(arguments.transport);
    let connect = || Ok(ProcessGroup::connect(&Launch::from_env()?, &options)?);
    match connect().and_then(|group| measure(&group, arguments)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {}", chain(&*error));
            ExitCode::FAILURE
        }
    }
}

/// Runs all ranks as threads of this process.
///
/// # Errors
/// The error of the first rank that failed.
pub(super) fn threads(arguments: &AllReduceArgs) -> crate::error::Result<ExitCode> {
    let options = GroupOptions::new().with_transport(arguments.transport);
    let groups =
        ProcessGroup::threads(arguments.num_processes.get(), &options).map_err(|error| {
            Error::system("the ranks could not be started as threads").with_source(error)
        })?;
    thread::scope(|scope| {
        let ranks = groups
            .iter()
            .map(|group| scope.spawn(|| measure(group, arguments)));
        let ranks: Vec<_> = ranks.collect();
        let mut outcome = Ok(ExitCode::SUCCESS);
        for (rank, thread) in ranks.into_iter().enumerate() {
            let error = match thread.join() {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => chain(&*error),
                Err(_) => format!("rank {rank} panicked"),
            };
            outcome = outcome.and(Err(Error::system(error)));
        }
        outcome
    })
}

/// Measures all that was asked for.
fn measure(group: &ProcessGroup, arguments: &AllReduceArgs) -> Result<()> {
    {
        let device = Device::open(group, arguments.device)?;
        // The group knows of a failure before a GPU is given back, which would wait for other ranks.
        each(group, arguments, &device).inspect_err(|error| group.abort(chain(&**error)))?;
    }
    // A rank that is ready first does not leave those that still end NCCL's part.
    group.barrier()?;
    Ok(group.close()?)
}

fn each(group: &ProcessGroup, arguments: &AllReduceArgs, device: &Device) -> Result<()> {
    let gpus = match device {
        Device::Host => None,
        Device::Gpu(gpu) => Some(gpu.gpus()),
    };
    let mut report = BenchReport::new(group, gpus);
    let shown = group.rank() == 0 && !arguments.json;
    if shown {
        print(&report.head())?;
    }
    for &dtype in &arguments.dtype {
        for &size in &arguments.sizes {
            let iterations = match arguments.iterations {
                Some(iterations) => iterations as usize,
                None => (TRAFFIC / size).clamp(20, 10_000),
            };
            let sample = match dtype {
                DType::BF16 => device.sample::<bf16>(group, size, iterations)?,
                DType::F16 => device.sample::<f16>(group, size, iterations)?,
                DType::F64 => device.sample::<f64>(group, size, iterations)?,
                // The only other one that can be asked for.
                _ => device.sample::<f32>(group, size, iterations)?,
            };
            let samples = group.all_gather_object(&sample)?;
            let line = report.add(size, dtype, iterations, &samples);
            if shown {
                print(&line)?;
            }
        }
    }
    if group.rank() == 0 && arguments.json {
        print(&report.to_json())?;
    }
    Ok(())
}

enum Device {
    Host,
    Gpu(GpuRank),
}

impl Device {
    fn open(group: &ProcessGroup, device: BenchDevice) -> Result<Self> {
        match device {
            BenchDevice::Cpu => Ok(Self::Host),
            BenchDevice::Cuda => {
                let gpu = GpuRank::connect(group);
                let gpu = gpu.inspect_err(|error| group.abort(chain(&**error)));
                Ok(Self::Gpu(gpu?))
            }
        }
    }

    /// Measures one size of one type on this rank.
    fn sample<T: Number>(
        &self,
        group: &ProcessGroup,
        bytes: usize,
        iterations: usize,
    ) -> Result<Sample> {
        let len = bytes / size_of::<T>();
        match self {
            Self::Host => {
                let mut bound = Bound::new(group, bytes)?;
                bound.measure(group)?;
                let buffer = group.buffer(T::DTYPE, len);
                let seconds = time_blocks::<T>(group, HostOperand { group, buffer }, iterations)?;
                // Once more, in case the machine has changed meanwhile.
                bound.measure(group)?;
                let bound = bound.seconds;
                Ok(Sample { seconds, bound })
            }
            Self::Gpu(gpu) => Ok(Sample {
                seconds: time_blocks(group, gpu.operand::<T>(len)?, iterations)?,
                bound: Vec::new(),
            }),
        }
    }
}

/// Memory that all ranks reduce.
trait Operand<T> {
    /// Writes a value to each element.
    fn fill(&mut self, value: impl Fn(usize) -> T) -> Result<()>;

    /// Reduces the sums again and again.
    fn reduce(&mut self, operations: usize) -> Result<()>;

    fn values(&mut self) -> Result<&[T]>;
}

/// A type that holds whole numbers up to 255.
trait Number: Element + PartialEq + From<u8> {}

impl<T: Element + PartialEq + From<u8>> Number for T {}

/// Returns the time of an operation in each block of them.
fn time_blocks<T: Number>(
    group: &ProcessGroup,
    mut operand: impl Operand<T>,
    iterations: usize,
) -> Result<Vec<f64>> {
    for _ in 0..WARMUP {
        check(group, &mut operand)?;
    }
    // Sums of zeros stay zeros, however often they are summed.
    operand.fill(|_| T::from(0))?;
    // A barrier on the device, too: no rank begins before all are ready.
    operand.reduce(1)?;
    let blocks = iterations.min(BLOCKS);
    let mut seconds = Vec::with_capacity(blocks);
    for block in 0..blocks {
        let operations = iterations * (block + 1) / blocks - iterations * block / blocks;
        let start = Instant::now();
        operand.reduce(operations)?;
        seconds.push(start.elapsed().as_secs_f64() / operations as f64);
    }
    check(group, &mut operand)?;
    Ok(seconds)
}

/// Reduces known values, and compares every sum.
fn check<T: Number>(group: &ProcessGroup, operand: &mut impl Operand<T>) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.world_size());
    let value = |index: usize, rank: usize| ((index + rank) % VALUES) as u8;
    operand.fill(|index| T::from(value(index, rank)))?;
    operand.reduce(1)?;
    let sums: Vec<T> = (0..VALUES)
        .map(|index| T::from((0..ranks).map(|rank| value(index, rank)).sum::<u8>()))
        .collect();
    let mut sums = (0..).zip(operand.values()?).zip(sums.iter().cycle());
    match sums.find(|((_, found), expected)| found != expected) {
        None => Ok(()),
        Some(((index, found), expected)) => Err(format!(
            "the sum at index {index} is wrong on rank {rank}: expected {expected:?}, found {found:?}"
        )
        .into()),
    }
}

#[derive(Debug)]
struct HostOperand<'a> {
    group: &'a ProcessGroup,
    buffer: Buffer,
}

impl<T: Element> Operand<T> for HostOperand<'_> {
    fn fill(&mut self, value: impl Fn(usize) -> T) -> Result<()> {
        for (index, element) in self.buffer.as_mut_slice()?.iter_mut().enumerate() {
            *element = value(index);
        }
        Ok(())
    }

    fn reduce(&mut self, operations: usize) -> Result<()> {
        for _ in 0..operations {
            self.group
                .all_reduce_buffer(&mut self.buffer, ReduceOp::Sum)?;
        }
        Ok(())
    }

    fn values(&mut self) -> Result<&[T]> {
        Ok(self.buffer.as_slice()?)
    }
}

/// The bound that memory sets: an all-reduce in place reads and writes every element of every rank once, and the ranks
/// share the work. The loop does just that, without synchronization.
#[derive(Debug)]
struct Bound {
    /// This rank's share of the buffers of all ranks.
    arrays: Vec<Buffer>,
    bytes: usize,
    /// The time of each pass.
    seconds: Vec<f64>,
}

impl Bound {
    /// Takes memory of the group.
    fn new(group: &ProcessGroup, bytes: usize) -> Result<Self> {
        let ranks = group.world_size();
        let len = bytes.div_ceil(ranks * size_of::<u64>());
        let mut arrays: Vec<_> = (0..ranks).map(|_| group.buffer(DType::U64, len)).collect();
        for array in &mut arrays {
            array.as_mut_slice::<u64>()?.fill(1);
        }
        Ok(Self {
            arrays,
            bytes,
            seconds: Vec::new(),
        })
    }

    /// Times the loop, together with the other ranks; how often does not depend on the iterations that were asked for.
    fn measure(&mut self, group: &ProcessGroup) -> Result<()> {
        let mut arrays = Vec::with_capacity(self.arrays.len());
        for array in &mut self.arrays {
            arrays.push(array.as_mut_slice::<u64>()?);
        }
        // One pass of little memory is too short for the clock.
        let passes = ((1 << 20) / self.bytes).clamp(1, 100);
        for _ in 0..3 {
            add_up(black_box(&mut arrays));
        }
        for _ in 0..(TRAFFIC / 4 / self.bytes).clamp(10, 100) {
            group.barrier()?;
            let start = Instant::now();
            for _ in 0..passes {
                add_up(black_box(&mut arrays));
            }
            let seconds = start.elapsed().as_secs_f64();
            self.seconds.push(seconds / passes as f64);
        }
        Ok(())
    }
}

/// Adds up the arrays, element by element, and writes the sums back to each.
fn add_up(arrays: &mut [&mut [u64]]) {
    // 4 KiB: sums stay in the first-level cache.
    let mut sums = [0_u64; 512];
    let len = arrays.first().map_or(0, |array| array.len());
    for start in (0..len).step_by(sums.len()) {
        let range = start..len.min(start + sums.len());
        let sums = &mut sums[..range.len()];
        sums.fill(0);
        for array in arrays.iter() {
            for (sum, value) in sums.iter_mut().zip(&array[range.clone()]) {
                *sum = sum.wrapping_add(*value);
            }
        }
        for array in arrays.iter_mut() {
            array[range.clone()].copy_from_slice(sums);
        }
    }
}

/// The number of untimed operations that come first; all their sums are compared.
const WARMUP: usize = 5;

/// The numbers from 0 are summed up to the last before this one: even sums of [`MOST`] ranks fit in every type.
const VALUES: usize = 3;
const _: () = assert!(MOST * (VALUES - 1) <= u8::MAX as usize);

/// The largest number of blocks in which the iterations are timed.
const BLOCKS: usize = 100;

/// The number of bytes reduced per size if the number of iterations is left open.
const TRAFFIC: usize = 400_000_000;

#[derive(Debug)]
struct GpuRank {
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
    fn connect(group: &ProcessGroup) -> Result<Self> {
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
    fn gpus(&self) -> GpuInfo {
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
    fn operand<T: Element>(&self, len: usize) -> Result<GpuOperand<'_, T>> {
        Ok(GpuOperand {
            rank: self,
            memory: DeviceMemory::new(&self.gpu, len * size_of::<T>())?,
            values: vec![T::zeroed(); len],
        })
    }
}

/// Memory of a GPU, and as much of the host to write and read it.
#[derive(Debug)]
struct GpuOperand<'a, T> {
    rank: &'a GpuRank,
    memory: DeviceMemory,
    values: Vec<T>,
}

impl<T: Element> Operand<T> for GpuOperand<'_, T> {
    fn fill(&mut self, value: impl Fn(usize) -> T) -> Result<()> {
        for (index, element) in self.values.iter_mut().enumerate() {
            *element = value(index);
        }
        Ok(self.memory.write(bytemuck::cast_slice(&self.values))?)
    }

    fn reduce(&mut self, operations: usize) -> Result<()> {
        let communicator = &self.rank.communicator;
        let memory = &mut self.memory;
        Ok(communicator.all_reduce_memory(memory, T::DTYPE, ReduceOp::Sum, operations)?)
    }

    fn values(&mut self) -> Result<&[T]> {
        self.memory
            .read(bytemuck::cast_slice_mut(&mut self.values))?;
        Ok(&self.values)
    }
}

/// The time that NCCL may take to connect ranks, which have joined their group already.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(120);

#[cfg(test)]
mod tests {
    use std::thread;

    use accelerator_collective::GroupOptions;

    use super::*;

    /// Memory in which a sum goes wrong after some operations.
    struct Faulty<'a> {
        operand: HostOperand<'a>,
        operations: usize,
        wrong_from: usize,
    }

    impl Operand<f32> for Faulty<'_> {
        fn fill(&mut self, value: impl Fn(usize) -> f32) -> Result<()> {
            self.operand.fill(value)
        }

        fn reduce(&mut self, operations: usize) -> Result<()> {
            Operand::<f32>::reduce(&mut self.operand, operations)?;
            self.operations += operations;
            if self.operations >= self.wrong_from {
                self.operand.buffer.as_mut_slice::<f32>()?[999] += 1.0;
            }
            Ok(())
        }

        fn values(&mut self) -> Result<&[f32]> {
            self.operand.values()
        }
    }

    #[test]
    fn a_wrong_sum_is_an_error() {
        // One operation of the warm-up, a timed one, the last one; none.
        for (wrong_from, is_error) in [
            (3, true),
            (8, true),
            (WARMUP + 1 + 7 + 1, true),
            (100, false),
        ] {
            let groups = ProcessGroup::threads(2, &GroupOptions::new()).unwrap();
            let measure = |group: &ProcessGroup| {
                let buffer = group.buffer(f32::DTYPE, 1000);
                let operand = Faulty {
                    operand: HostOperand { group, buffer },
                    operations: 0,
                    wrong_from,
                };
                time_blocks(group, operand, 7).map_err(|error| error.to_string())
            };
            let outcomes: Vec<_> = thread::scope(|scope| {
                let ranks = groups
                    .iter()
                    .map(|group| scope.spawn(move || measure(group)));
                let ranks: Vec<_> = ranks.collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            for outcome in outcomes {
                match outcome {
                    Ok(seconds) => assert!(!is_error && seconds.len() == 7, "{wrong_from}"),
                    Err(error) => assert!(is_error && error.contains("at index 999"), "{error}"),
                }
            }
        }
    }

    #[test]
    fn every_array_ends_with_the_sums() {
        for count in 2..6_u64 {
            let mut arrays: Vec<Vec<u64>> = (1..=count).map(|value| vec![value; 1300]).collect();
            let mut views: Vec<&mut [u64]> = arrays.iter_mut().map(Vec::as_mut_slice).collect();
            add_up(&mut views);
            let sums = vec![count * (count + 1) / 2; 1300];
            assert!(arrays.iter().all(|array| *array == sums));
        }
    }
}
