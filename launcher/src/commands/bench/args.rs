//! The arguments of `accel-launch bench`.

use std::num::NonZeroUsize;

use accelerator_collective::{DType, TransportKind};
use clap::{Args, Subcommand, ValueEnum};

use super::size::Size;

/// What is to be measured.
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(super) what: What,
}

impl BenchArgs {
    /// Whether the ranks are processes.
    pub(crate) fn starts_processes(&self) -> bool {
        let What::AllReduce(arguments) = &self.what;
        arguments.transport != TransportKind::Threads
    }
}

#[derive(Clone, Debug, Subcommand)]
pub(super) enum What {
    /// Time all-reduces (sums) of several sizes, and check their results.
    AllReduce(AllReduceArgs),
}

/// Times all-reduces (sums) of several sizes, and checks their results.
///
/// Every rank gets another input before each operation, and ends with the whole sum in memory of its
/// own. Every sum of the warm-up and the last one are compared with what is known beforehand, element
/// by element, and one element of each other one; a wrong sum is an error.
#[derive(Args, Clone, Debug)]
#[command(after_help = BENCH_HELP)]
pub(crate) struct AllReduceArgs {
    /// How many ranks; one is enough for --device cuda.
    #[arg(short = 'n', long, value_name = "N", default_value = "2", value_parser = processes)]
    pub(super) num_processes: NonZeroUsize,

    /// Whose memory is reduced: the CPU's, or that of the ranks' NVIDIA GPUs, by NCCL.
    #[arg(long, value_name = "DEVICE", value_enum, default_value_t = BenchDevice::Cpu)]
    pub(super) device: BenchDevice,

    /// How they are connected: auto, shm, tcp, hierarchical, or threads of one process.
    #[arg(long, value_name = "KIND", default_value_t, value_parser = transport)]
    pub(super) transport: TransportKind,

    /// The sizes, separated by commas: bytes, KiB, MiB, GiB, KB, MB or GB.
    #[arg(
        long,
        value_name = "SIZE,...",
        value_delimiter = ',',
        default_value = "4KiB,64KiB,1MiB,4MiB,25MB,100MB"
    )]
    pub(super) sizes: Vec<Size>,

    /// The element types, separated by commas: bf16, f16, f32, f64, i8 to i64, u8 to u64.
    #[arg(
        long,
        value_name = "TYPE,...",
        value_delimiter = ',',
        default_value = "f32",
        value_parser = dtype
    )]
    pub(super) dtype: Vec<DType>,

    /// Which all-reduce is called, and so which memory is reduced.
    #[arg(long, value_name = "CALL", value_enum, default_value_t = Call::Buffer)]
    pub(super) call: Call,

    /// How many operations of each size are timed [default: 400 MB in all, 20 to 10,000].
    #[arg(long, value_name = "N", value_parser = iterations, allow_negative_numbers = true)]
    pub(super) iterations: Option<NonZeroUsize>,

    /// How many untimed operations come first.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = warmup, allow_negative_numbers = true)]
    pub(super) warmup: usize,

    /// Print one JSON object; the README beside the source of this command explains its fields.
    #[arg(long)]
    pub(super) json: bool,

    /// Have the last rank contribute something wrong, to see that it is noticed.
    #[arg(long, hide = true)]
    pub(super) sabotage: bool,
}

/// Where what is reduced lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum BenchDevice {
    /// In the memory of this machine, by the group itself.
    Cpu,
    /// On GPUs, one a rank, by NCCL. Needs a build with the feature `cuda`.
    Cuda,
}

/// Which of the group's all-reduces is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Call {
    /// In place in a buffer of the group, on the rank's own thread.
    Buffer,
    /// In place in plain memory of the rank.
    Slice,
    /// In a buffer of the group, started on the communication thread and waited for.
    Started,
}

fn processes(text: &str) -> std::result::Result<NonZeroUsize, String> {
    match text.parse::<usize>() {
        Ok(count) if (1..=MOST).contains(&count) => {
            NonZeroUsize::new(count).ok_or_else(String::new)
        }
        _ => Err(format!("expected a number of processes from 2 to {MOST}")),
    }
}

fn iterations(text: &str) -> std::result::Result<NonZeroUsize, String> {
    let count = text.parse().ok().filter(|count| *count <= MAX_ITERATIONS);
    count
        .and_then(NonZeroUsize::new)
        .ok_or_else(|| format!("expected a number of operations from 1 to {MAX_ITERATIONS}"))
}

fn warmup(text: &str) -> std::result::Result<usize, String> {
    let count = text.parse().ok().filter(|count| *count <= MAX_ITERATIONS);
    count.ok_or_else(|| format!("expected a number of operations from 0 to {MAX_ITERATIONS}"))
}

fn transport(text: &str) -> std::result::Result<TransportKind, String> {
    text.parse()
        .map_err(|error: accelerator_collective::Error| error.to_string())
}

fn dtype(text: &str) -> std::result::Result<DType, String> {
    let found = DTYPES.into_iter().find(|dtype| dtype.name() == text);
    found.ok_or_else(|| {
        let names = DTYPES.map(DType::name);
        format!("expected one of {}", names.join(", "))
    })
}

/// More ranks would have sums that the smallest types cannot hold.
pub(super) const MOST: usize = 32;

/// The most operations of a size: hours of even the shortest ones.
const MAX_ITERATIONS: usize = 1_000_000_000;

const DTYPES: [DType; 12] = [
    DType::BF16,
    DType::F16,
    DType::F32,
    DType::F64,
    DType::I8,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::U8,
    DType::U16,
    DType::U32,
    DType::U64,
];

const BENCH_HELP: &str = "\
Iterations run back to back and are timed in up to 100 blocks; the time of a block is that of its
slowest rank. The table shows the median over blocks, the minimum and the 95th percentile, for one operation.
Every operation gets new inputs on every rank, and the time to write them is part of the figures.

Algorithm bandwidth is bytes / time; bus bandwidth is that x 2 (N - 1) / N.

The bound is an all-reduce in place without synchronization: each rank reads 1/N of N arrays and writes the
sum back to all N, which is `bytes` read and `bytes` written a rank. It is timed in the same run, on all ranks
at once, each on N arrays of its own in the kind of memory that is reduced (buffers of the group, or the heap
with --call slice). It is a plain loop without the widest vectors: what fits into the caches can be faster,
above 100 %.

With --device cuda (in a build with the feature `cuda`: cargo install ... --features cuda) local rank R uses
GPU R, and NCCL reduces: operations are enqueued back to back, and a block ends with its last one. Inputs are
not written in between, so bandwidths are those of NVIDIA's nccl-tests. There is no bound. The driver and NCCL
are loaded at run time.

With --json the figures are one object: seconds, bytes, and bytes a second. The README in the folder
launcher/src/commands/bench has a table of all fields with their units. On an overloaded machine (`load_1m`
above `cores`) the figures include time spent waiting for a core.

Exit code: 0, or 1 where a sum is wrong, a rank fails, the ranks cannot be connected in this way, or the
output cannot be written; 2 for a wrong command line or environment.

Examples:
  accel-launch bench all-reduce --num-processes 2
  accel-launch bench all-reduce -n 4 --transport tcp --sizes 1MiB,25MB --dtype f32,bf16 --json
  accel-launch bench all-reduce -n 8 --device cuda --sizes 1MiB,64MiB,1GiB --dtype bf16";
