//! The side of the ranks: what is timed.

use std::hash::{DefaultHasher, Hasher};
use std::hint::black_box;
use std::io::Write;
use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use accelerator_collective::{
    Buffer, DType, Element, GroupOptions, Launch, ProcessGroup, ReduceOp,
};
use half::{bf16, f16};

use super::args::{AllReduceArgs, BenchDevice, Call};
use super::bound;
use super::cuda;
use super::figures::BenchReport;
use super::input::Input;
use super::sample::{BLOCKS, Sample, TRAFFIC, iterations};
use super::size::Size;
use crate::error::{BoxResult as Result, Error, chain};
use crate::number::Small;
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
/// The first rank's that failed.
pub(super) fn threads(arguments: &AllReduceArgs) -> crate::error::Result<ExitCode> {
    let refused = "the ranks could not be started as threads";
    let options = GroupOptions::new().with_transport(arguments.transport);
    let groups = ProcessGroup::threads(arguments.num_processes.get(), &options)
        .map_err(|error| Error::system(refused).with_source(error))?;
    thread::scope(|scope| {
        let ranks = groups.iter().map(|group| {
            thread::Builder::new()
                .name(format!("rank {}", group.rank()))
                .spawn_scoped(scope, || measure(group, arguments))
        });
        let ranks: Vec<_> = ranks.collect();
        let mut outcome = Ok(ExitCode::SUCCESS);
        for (rank, thread) in ranks.into_iter().enumerate() {
            let ended = match thread.map(thread::ScopedJoinHandle::join) {
                Ok(Ok(Ok(()))) => continue,
                Ok(Ok(Err(error))) => Error::system(chain(&*error)),
                Ok(Err(_)) => Error::system(format!("rank {rank} panicked")),
                Err(error) => {
                    // The others need not wait for it.
                    groups[rank].abort("its thread could not be started");
                    Error::system(refused).with_source(error)
                }
            };
            outcome = outcome.and(Err(ended));
        }
        outcome
    })
}

/// Measures all that was asked for.
fn measure(group: &ProcessGroup, arguments: &AllReduceArgs) -> Result<()> {
    // Where something fails, the group knows before GPUs are given back, which would wait for others.
    let mut ranks = None;
    let outcome = each(group, arguments, &mut ranks);
    if let Err(error) = &outcome {
        group.abort(chain(&**error));
    }
    outcome
}

fn each(
    group: &ProcessGroup,
    arguments: &AllReduceArgs,
    ranks: &mut Option<cuda::GpuRank>,
) -> Result<()> {
    *ranks = match arguments.device {
        BenchDevice::Cpu => None,
        BenchDevice::Cuda => Some(cuda::GpuRank::connect(group)?),
    };
    let gpus = ranks.as_ref().map(cuda::GpuRank::gpus);
    let mut report = BenchReport::new(arguments, group, gpus);
    let shown = group.rank() == 0 && !arguments.json;
    if shown {
        if let Some(warning) = report.warning() {
            let _ = write!(std::io::stderr(), "{warning}");
        }
        print(&report.head())?;
    }
    for &dtype in &arguments.dtype {
        for &size in &arguments.sizes {
            let samples = Samples {
                group,
                arguments,
                size,
                gpu: ranks.as_ref(),
            };
            let sample = match dtype {
                DType::BF16 => samples.of::<bf16>()?,
                DType::F16 => samples.of::<f16>()?,
                DType::F32 => samples.of::<f32>()?,
                DType::F64 => samples.of::<f64>()?,
                DType::I8 => samples.of::<i8>()?,
                DType::I16 => samples.of::<i16>()?,
                DType::I32 => samples.of::<i32>()?,
                DType::I64 => samples.of::<i64>()?,
                DType::U8 => samples.of::<u8>()?,
                DType::U16 => samples.of::<u16>()?,
                DType::U32 => samples.of::<u32>()?,
                DType::U64 => samples.of::<u64>()?,
                other => return Err(format!("{other} cannot be measured").into()),
            };
            let samples = group.all_gather_object(&sample)?;
            let line = report.add(size, dtype, &samples)?;
            if shown {
                print(&line)?;
            }
        }
    }
    if group.rank() == 0 && arguments.json {
        print(&report.to_json())?;
    }
    // Who is ready first does not leave those that still end NCCL's part.
    *ranks = None;
    group.barrier()?;
    Ok(group.close()?)
}

/// One size on this rank.
struct Samples<'a> {
    group: &'a ProcessGroup,
    arguments: &'a AllReduceArgs,
    size: Size,
    gpu: Option<&'a cuda::GpuRank>,
}

impl Samples<'_> {
    /// Measures it, in one type.
    fn of<T: Small>(&self) -> Result<Sample> {
        match self.gpu {
            Some(ranks) => ranks.sample::<T>(self.arguments, self.size),
            None => sample::<T>(self.group, self.arguments, self.size),
        }
    }
}

/// Measures one size of one type, in the memory of this machine.
fn sample<T: Small>(group: &ProcessGroup, arguments: &AllReduceArgs, size: Size) -> Result<Sample> {
    let bytes = size.bytes();
    let iterations = iterations(arguments, size);
    let is_sabotaged = arguments.sabotage && group.rank() + 1 == group.world_size();
    let input = Input::new(group.rank(), group.world_size());
    let write = |values: &mut [T], operation: usize| {
        input.write(values, operation);
        if is_sabotaged {
            values[0] = T::small(100);
        }
    };

    let mut bound = Bound::new(group, arguments.call, bytes)?;
    bound.measure(group)?;
    let mut operand = Operand::new(group, arguments.call, bytes / size_of::<T>());
    let mut operation = 0;
    for _ in 0..arguments.warmup {
        write(operand.values()?, operation);
        operand.all_reduce()?;
        input.check(operand.values()?, operation)?;
        operation += 1;
    }

    let blocks = iterations.min(BLOCKS);
    let mut seconds = Vec::with_capacity(blocks);
    group.barrier()?;
    let began = Instant::now();
    for block in 0..blocks {
        let operations = iterations * (block + 1) / blocks - iterations * block / blocks;
        let start = Instant::now();
        for operation in operation..operation + operations {
            write(operand.values()?, operation);
            operand.all_reduce()?;
        }
        seconds.push(start.elapsed().as_secs_f64() / operations as f64);
        operation += operations;
        input.check_one(operand.values()?, operation - 1)?;
    }
    let elapsed = began.elapsed().as_secs_f64();
    input.check(operand.values()?, operation - 1)?;
    let mut hasher = DefaultHasher::new();
    hasher.write(operand.bytes()?);
    drop(operand);
    bound.measure(group)?;
    Ok(Sample {
        seconds,
        elapsed,
        bound: bound.seconds,
        iterations,
        inputs: (input.modulus(), Some(input.period())),
        checksum: format!("{:016x}", hasher.finish()),
    })
}

/// Memory of the kind that a call reduces.
enum Memory<T> {
    /// None while a started operation has it.
    Group(Option<Buffer>),
    Heap(Vec<T>),
}

impl<T: Element> Memory<T> {
    fn new(group: &ProcessGroup, call: Call, len: usize) -> Self {
        match call {
            Call::Buffer | Call::Started => Self::Group(Some(group.buffer(T::DTYPE, len))),
            Call::Slice => Self::Heap(vec![T::zeroed(); len]),
        }
    }

    fn values(&mut self) -> Result<&mut [T]> {
        match self {
            Self::Group(Some(buffer)) => Ok(buffer.as_mut_slice()?),
            Self::Group(None) => Err("the buffer did not come back".into()),
            Self::Heap(values) => Ok(values),
        }
    }
}

/// What is reduced.
struct Operand<'a, T> {
    group: &'a ProcessGroup,
    call: Call,
    memory: Memory<T>,
}

impl<'a, T: Element> Operand<'a, T> {
    fn new(group: &'a ProcessGroup, call: Call, len: usize) -> Self {
        let memory = Memory::new(group, call, len);
        Self {
            group,
            call,
            memory,
        }
    }

    fn values(&mut self) -> Result<&mut [T]> {
        self.memory.values()
    }

    fn bytes(&mut self) -> Result<&[u8]> {
        match &self.memory {
            Memory::Group(Some(buffer)) => Ok(buffer.bytes()),
            Memory::Group(None) => Err("the buffer did not come back".into()),
            Memory::Heap(values) => Ok(bytemuck::cast_slice(values)),
        }
    }

    fn all_reduce(&mut self) -> Result<()> {
        match &mut self.memory {
            Memory::Group(held) if self.call == Call::Started => {
                let buffer = held.take().ok_or("the buffer did not come back")?;
                let pending = self.group.start_all_reduce(buffer, ReduceOp::Sum)?;
                *held = Some(pending.wait()?);
            }
            Memory::Group(Some(buffer)) => self.group.all_reduce_buffer(buffer, ReduceOp::Sum)?,
            Memory::Group(None) => return Err("the buffer did not come back".into()),
            Memory::Heap(values) => self.group.all_reduce(values, ReduceOp::Sum)?,
        }
        Ok(())
    }
}

/// Times the [bound](bound::pass) on this rank, together with the others.
struct Bound {
    arrays: Vec<Memory<u64>>,
    bytes: usize,
    seconds: Vec<f64>,
}

impl Bound {
    fn new(group: &ProcessGroup, call: Call, bytes: usize) -> Result<Self> {
        let ranks = group.world_size();
        let len = bytes.div_ceil(ranks * size_of::<u64>());
        let mut arrays: Vec<_> = (0..ranks).map(|_| Memory::new(group, call, len)).collect();
        for array in &mut arrays {
            array.values()?.fill(1);
        }
        Ok(Self {
            arrays,
            bytes,
            seconds: Vec::new(),
        })
    }

    /// The number of times does not depend on the iterations that were asked for, so that these can
    /// be timed from outside.
    fn measure(&mut self, group: &ProcessGroup) -> Result<()> {
        let passes = (SHORT / self.bytes).clamp(1, 100);
        let mut arrays = Vec::with_capacity(self.arrays.len());
        for array in &mut self.arrays {
            arrays.push(array.values()?);
        }
        for _ in 0..WARM {
            bound::pass(black_box(&mut arrays));
        }
        for _ in 0..(TRAFFIC / 4 / self.bytes).clamp(10, 100) {
            group.barrier()?;
            let start = Instant::now();
            for _ in 0..passes {
                bound::pass(black_box(&mut arrays));
            }
            self.seconds
                .push(start.elapsed().as_secs_f64() / passes as f64);
        }
        Ok(())
    }
}

/// In bytes. Below, several passes of the bound are timed together: one is too short for the clock.
const SHORT: usize = 1 << 20;

/// How often the bound's loop runs before it counts.
const WARM: usize = 3;
