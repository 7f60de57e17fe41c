//! The arguments of `accel-launch bench`.

use std::num::NonZeroUsize;

use accelerator_collective::{DType, TransportKind};
use clap::{Args, Subcommand, ValueEnum};

/// The collective to measure.
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(super) what: What,
}

impl BenchArgs {
    /// Returns `true` if the ranks are processes.
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
/// Compares the sums of the warm-up and of one operation after the timed ones with the known
/// results, element by element; a wrong sum is an error.
#[derive(Args, Clone, Debug)]
#[command(after_help = BENCH_HELP)]
pub(crate) struct AllReduceArgs {
    /// Number of ranks; with --device cuda, one is enough.
    #[arg(short = 'n', long, value_name = "N", default_value = "2", value_parser = processes)]
    pub(super) num_processes: NonZeroUsize,

    /// The memory to reduce: that of the CPU, or (with NCCL) that of the ranks' NVIDIA GPUs.
    #[arg(long, value_name = "DEVICE", value_enum, default_value_t = BenchDevice::Cpu)]
    pub(super) device: BenchDevice,

    /// The connection between ranks: auto, shm, tcp, hierarchical, or threads of one process.
    #[arg(long, value_name = "KIND", default_value_t, value_parser = transport)]
    pub(super) transport: TransportKind,

    /// The sizes, separated by commas, in bytes, KiB, MiB, GiB, KB, MB or GB.
    #[arg(
        long,
        value_name = "SIZE,...",
        value_delimiter = ',',
        default_value = "4KiB,64KiB,1MiB,4MiB,25MB,100MB",
        value_parser = size
    )]
    pub(super) sizes: Vec<usize>,

    /// The element types, separated by commas: bf16, f16, f32, f64.
    #[arg(
        long,
        value_name = "TYPE,...",
        value_delimiter = ',',
        default_value = "f32",
        value_parser = dtype
    )]
    pub(super) dtype: Vec<DType>,

    /// The number of timed operations of each size [default: as many as reduce 400 MB, but
    /// at least 20 and at most 10,000].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) iterations: Option<u32>,

    /// Print one JSON object; the README beside the source of this command explains its fields.
    #[arg(long)]
    pub(super) json: bool,
}

/// The memory that is reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum BenchDevice {
    /// The memory of this machine, by the group itself.
    Cpu,
    /// The memory of GPUs, one per rank, by NCCL. Needs a build with the feature `cuda`.
    Cuda,
}

fn processes(text: &str) -> std::result::Result<NonZeroUsize, String> {
    let count = text.parse().ok().filter(|count| (1..=MOST).contains(count));
    count
        .and_then(NonZeroUsize::new)
        .ok_or_else(|| format!("expected a number of processes from 2 to {MOST}"))
}

/// Reads `4096`, `64KiB` or `25MB`.
fn size(text: &str) -> std::result::Result<usize, String> {
    let number_ends = text.find(|c: char| !c.is_ascii_digit());
    let (number, unit) = text.split_at(number_ends.unwrap_or(text.len()));
    let factor = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => Some(1),
        "kb" => Some(1_000),
        "kib" => Some(1 << 10),
        "mb" => Some(1_000_000),
        "mib" => Some(1 << 20),
        "gb" => Some(1_000_000_000),
        "gib" => Some(1 << 30),
        _ => None,
    };
    let number: Option<usize> = number.parse().ok().filter(|number| *number > 0);
    let bytes = number.zip(factor);
    bytes
        .and_then(|(number, factor)| number.checked_mul(factor))
        .ok_or_else(|| "expected a whole number of bytes, such as 4096, 64KiB or 25MB".into())
}

fn transport(text: &str) -> std::result::Result<TransportKind, String> {
    text.parse()
        .map_err(|error: accelerator_collective::Error| error.to_string())
}

fn dtype(text: &str) -> std::result::Result<DType, String> {
    let found = DTYPES.into_iter().find(|dtype| dtype.name() == text);
    found.ok_or_else(|| format!("expected one of {}", DTYPES.map(DType::name).join(", ")))
}

/// The element types of gradients.
const DTYPES: [DType; 4] = [DType::BF16, DType::F16, DType::F32, DType::F64];

/// The largest number of ranks: with more, sums of numbers up to 2 could exceed 255.
pub(super) const MOST: usize = 127;

const BENCH_HELP: &str = "\
Iterations run back to back and are timed in up to 100 blocks; the time of a block is that of its
slowest rank. The table shows the median, the minimum and the 95th percentile over the blocks, per operation.
As in NVIDIA's nccl-tests, inputs are not written between operations.

Algorithm bandwidth is bytes / time; bus bandwidth is algorithm bandwidth x 2 (N - 1) / N.

The bound is an all-reduce in place without synchronization: each rank reads 1/N of N arrays and writes the
sum back to all N, which is `bytes` read and `bytes` written per rank. It is timed in the same run, on all ranks
at once, each on N arrays of its own. The bound is a plain loop without the widest vector instructions, so
arrays that fit into the caches can exceed 100 %.

With --device cuda, local rank R uses GPU R, and NCCL reduces. Operations are enqueued back to back, and a block
ends when its last operation does. There is no bound. The driver and NCCL are loaded at run time.

With --json, the figures are one object, in seconds, bytes, and bytes per second. The README in the folder
launcher/src/commands/bench has a table of all fields with their units.

Exit code: 0 on success; 1 if a sum is wrong, a rank fails, the ranks cannot be connected by --transport, or the
output cannot be written; 2 for a wrong command line or environment.

Examples:
  accel-launch bench all-reduce --num-processes 2
  accel-launch bench all-reduce -n 4 --transport tcp --sizes 1MiB,25MB --dtype f32,bf16 --json
  accel-launch bench all-reduce -n 8 --device cuda --sizes 1MiB,64MiB,1GiB --dtype bf16";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_numbers_of_bytes() {
        for (text, bytes) in [
            ("1", 1),
            ("4096", 4096),
            ("4KiB", 4096),
            ("4 kib", 4096),
            ("64kb", 64_000),
            ("25MB", 25_000_000),
            ("25MiB", 26_214_400),
            ("1GB", 1_000_000_000),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in [
            "",
            "0",
            "0KiB",
            "MiB",
            "-1",
            "1M",
            "1.5KiB",
            "4KiBs",
            "99999999999GiB",
        ] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
