//! The ranks: processes or threads, and the device of each.

use std::io::Write;
use std::process::ExitCode;
use std::thread;

use accelerator_collective::{DType, GroupOptions, Launch, ProcessGroup};
use half::{bf16, f16};

use super::args::{AllReduceArgs, BenchDevice};
use super::cuda::GpuRank;
use super::figures::{BenchReport, Sample};
use super::measure::{Bound, HostOperand, Number, TRAFFIC, time_blocks};
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

/// The device of a rank.
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
