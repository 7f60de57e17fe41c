//! The figures, for people and for programs.

use std::num::NonZeroUsize;

use accelerator_collective::{DType, ProcessGroup, TransportKind};
use serde::Serialize;

use super::args::{AllReduceArgs, Call};
use super::sample::Sample;
use super::size::Size;
use crate::settings::threads;

/// What was measured so far.
#[derive(Debug, Serialize)]
pub(super) struct BenchReport {
    operation: &'static str,
    num_processes: usize,
    device: &'static str,
    /// Of ranks that have some.
    gpus: Option<GpuInfo>,
    transport: String,
    asked: String,
    call: &'static str,
    warmup: usize,
    cores: NonZeroUsize,
    /// Where the system reports it.
    load_1m: Option<f64>,
    bound: Option<&'static str>,
    bound_memory: Option<&'static str>,
    version: &'static str,
    results: Vec<SizeResult>,
}

/// The GPUs of the ranks, and what drives them.
#[derive(Debug, Serialize)]
pub(super) struct GpuInfo {
    /// The version of NCCL.
    pub(super) nccl: String,
    /// The latest CUDA that the driver knows.
    pub(super) cuda: String,
    /// Of each rank.
    pub(super) bus_ids: Vec<String>,
}

/// One size of one type. Times are of one operation.
#[derive(Debug, Serialize)]
struct SizeResult {
    bytes: usize,
    dtype: &'static str,
    /// The median over blocks of iterations.
    seconds: f64,
    seconds_min: f64,
    seconds_p95: f64,
    seconds_mean: f64,
    algorithm_bandwidth: f64,
    bus_bandwidth: f64,
    bound_seconds: Option<f64>,
    bound_fraction: Option<f64>,
    iterations: usize,
    blocks: usize,
    input_values: usize,
    /// After how many operations inputs are written as a whole.
    input_period: Option<usize>,
    /// All iterations, on the rank that took longest.
    loop_seconds: f64,
    checksums: Vec<String>,
}

impl BenchReport {
    pub(super) fn new(
        arguments: &AllReduceArgs,
        group: &ProcessGroup,
        gpus: Option<GpuInfo>,
    ) -> Self {
        let (call, bound_memory) = match arguments.call {
            Call::Buffer => ("buffer", BUFFERS),
            Call::Slice => ("slice", "the heap"),
            Call::Started => ("started", BUFFERS),
        };
        let on_gpus = gpus.is_some();
        let transport = group.transport().to_string();
        Self {
            operation: "all-reduce sum",
            num_processes: group.world_size(),
            device: if on_gpus { "cuda" } else { "cpu" },
            gpus,
            transport: if on_gpus { "nccl".into() } else { transport },
            asked: arguments.transport.to_string(),
            call: if on_gpus { "nccl" } else { call },
            warmup: arguments.warmup,
            cores: threads::cores(),
            load_1m: load(),
            bound: (!on_gpus).then_some(BOUND),
            bound_memory: (!on_gpus).then_some(bound_memory),
            version: env!("CARGO_PKG_VERSION"),
            results: Vec::new(),
        }
    }

    /// The heading of the table.
    pub(super) fn head(&self) -> String {
        let place = match &self.gpus {
            Some(gpus) => format!("over NCCL {}, GPUs {}", gpus.nccl, gpus.bus_ids.join(", ")),
            None => format!(
                "over {}{}, call {}",
                self.transport,
                self.remark(),
                self.call
            ),
        };
        let ranks = if self.num_processes == 1 {
            "rank"
        } else {
            "ranks"
        };
        let columns = line([
            "size",
            "type",
            "median",
            "min",
            "p95",
            "algorithm",
            "bus",
            "bound",
            "of bound",
        ]);
        format!(
            "{} on {} {ranks} {place}; times are the slowest rank's\n\n{columns}",
            self.operation, self.num_processes,
        )
    }

    /// Why the transport is not the one that was asked for.
    fn remark(&self) -> String {
        let Self {
            asked, transport, ..
        } = self;
        if asked == transport || *asked == TransportKind::Auto.to_string() {
            return String::new();
        }
        format!(" (asked for {asked}; one host, so {transport})")
    }

    /// A warning, where the machine is busy.
    pub(super) fn warning(&self) -> Option<String> {
        let load = self
            .load_1m
            .filter(|load| *load > self.cores.get() as f64)?;
        Some(format!(
            "warning: the load of the last minute is {load:.1}, and there are {} cores: the figures \
             show waiting as well\n",
            self.cores
        ))
    }

    /// Adds what each rank measured; returns the line for it.
    ///
    /// # Errors
    /// Text where the ranks ended with different sums.
    pub(super) fn add(
        &mut self,
        size: Size,
        dtype: DType,
        samples: &[Sample],
    ) -> Result<String, String> {
        let checksums: Vec<String> = samples
            .iter()
            .map(|sample| sample.checksum.clone())
            .collect();
        if let Some(rank) = checksums
            .iter()
            .position(|checksum| *checksum != checksums[0])
        {
            return Err(format!(
                "rank 0 ended with other bits than rank {rank}: the checksums are {}",
                checksums.join(", ")
            ));
        }
        let times = BlockTimes::of(slowest(samples, |sample| &sample.seconds));
        let bound = slowest(samples, |sample| &sample.bound);
        let bound = (!bound.is_empty()).then(|| BlockTimes::of(bound).median);
        let iterations = samples.first().map_or(0, |sample| sample.iterations);
        let (input_values, input_period) =
            samples.first().map_or((0, None), |sample| sample.inputs);
        let elapsed = samples.iter().map(|sample| sample.elapsed);
        let loop_seconds = elapsed.fold(0.0, f64::max);
        let (bytes, ranks) = (size.bytes(), samples.len() as f64);
        let algorithm_bandwidth = bytes as f64 / times.median;
        let figures = SizeResult {
            bytes,
            dtype: dtype.name(),
            seconds: times.median,
            seconds_min: times.min,
            seconds_p95: times.p95,
            seconds_mean: loop_seconds / iterations as f64,
            algorithm_bandwidth,
            bus_bandwidth: algorithm_bandwidth * 2.0 * (ranks - 1.0) / ranks,
            bound_seconds: bound,
            bound_fraction: bound.map(|bound| bound / times.median),
            iterations,
            blocks: times.count,
            input_values,
            input_period,
            loop_seconds,
            checksums,
        };
        let text = line([
            &size.to_string(),
            figures.dtype,
            &time(figures.seconds),
            &time(figures.seconds_min),
            &time(figures.seconds_p95),
            &bandwidth(figures.algorithm_bandwidth),
            &bandwidth(figures.bus_bandwidth),
            &figures.bound_seconds.map_or_else(none, time),
            &figures
                .bound_fraction
                .map_or_else(none, |fraction| format!("{:.1} %", 100.0 * fraction)),
        ]);
        self.results.push(figures);
        Ok(text)
    }

    pub(super) fn to_json(&self) -> String {
        // Text and numbers, which JSON always takes.
        let text = serde_json::to_string(self).unwrap_or_default();
        format!("{text}\n")
    }
}

/// How many threads ran or waited for a core, on average over the last minute, where the system
/// tells.
fn load() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    text.split_whitespace().next()?.parse().ok()
}

/// Of each block, the time of the rank that took longest.
fn slowest(samples: &[Sample], of: impl Fn(&Sample) -> &Vec<f64>) -> Vec<f64> {
    let blocks = samples.iter().map(|sample| of(sample).len()).min();
    (0..blocks.unwrap_or(0))
        .map(|block| {
            let times = samples.iter().map(|sample| of(sample)[block]);
            times.fold(0.0, f64::max)
        })
        .collect()
}

/// Statistics of many times.
#[derive(Clone, Copy, Debug, PartialEq)]
struct BlockTimes {
    median: f64,
    min: f64,
    p95: f64,
    count: usize,
}

impl BlockTimes {
    fn of(mut times: Vec<f64>) -> Self {
        for time in &mut times {
            // No clock is finer, and nothing is divided by zero.
            *time = time.max(1e-9);
        }
        times.sort_unstable_by(f64::total_cmp);
        let count = times.len();
        let at = |index: usize| times.get(index).copied().unwrap_or(f64::NAN);
        Self {
            median: (at((count.max(1) - 1) / 2) + at(count / 2)) / 2.0,
            min: at(0),
            p95: at((count * 95).div_ceil(100).max(1) - 1),
            count,
        }
    }
}

fn line(cells: [&str; 9]) -> String {
    let [size, dtype, cells @ ..] = cells;
    let mut text = format!("{size:>9}  {dtype:<4}");
    for cell in cells {
        text.push_str(&format!("  {cell:>10}"));
    }
    text.push('\n');
    text
}

/// The cell where there is no figure.
fn none() -> String {
    "-".into()
}

fn time(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 1e-6 => format!("{:.0} ns", seconds * 1e9),
        seconds if seconds < 1e-3 => format!("{:.2} µs", seconds * 1e6),
        seconds if seconds < 1.0 => format!("{:.3} ms", seconds * 1e3),
        seconds => format!("{seconds:.3} s"),
    }
}

fn bandwidth(bytes_per_second: f64) -> String {
    format!("{:.3} GB/s", bytes_per_second / 1e9)
}

/// Notes in the JSON that explain its figures.
const BOUND: &str = "the least traffic of an all-reduce in place: all ranks at once, each reads \
    1/num_processes of num_processes arrays and writes the sum back to each of them (bytes read and \
    bytes written a rank), waiting for nobody; on memory of the rank's own, warmed";

const BUFFERS: &str = "buffers of the group, touched by their own rank alone";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_machine_and_another_transport_are_told() {
        let mut report = BenchReport {
            operation: "all-reduce sum",
            num_processes: 2,
            device: "cpu",
            gpus: None,
            transport: "shm".into(),
            asked: "hierarchical".into(),
            call: "buffer",
            warmup: 5,
            cores: NonZeroUsize::MIN,
            load_1m: Some(1.5),
            bound: Some(BOUND),
            bound_memory: Some(BUFFERS),
            version: "0",
            results: Vec::new(),
        };
        let head = "over shm (asked for hierarchical; one host, so shm), call";
        assert!(report.head().contains(head), "{}", report.head());
        assert!(report.warning().unwrap().contains("1.5"));
        report.asked = "auto".into();
        report.load_1m = Some(1.0);
        assert!(report.head().contains("over shm, call"));
        assert_eq!(report.warning(), None);
    }

    #[test]
    fn gpus_are_named_and_have_no_bound() {
        let mut report = BenchReport {
            operation: "all-reduce sum",
            num_processes: 2,
            device: "cuda",
            gpus: Some(GpuInfo {
                nccl: "2.27.3".into(),
                cuda: "12.9".into(),
                bus_ids: vec!["0000:1B:00.0".into(), "0000:43:00.0".into()],
            }),
            transport: "nccl".into(),
            asked: "auto".into(),
            call: "nccl",
            warmup: 5,
            cores: NonZeroUsize::MIN,
            load_1m: None,
            bound: None,
            bound_memory: None,
            version: "0",
            results: Vec::new(),
        };
        let head = "on 2 ranks over NCCL 2.27.3, GPUs 0000:1B:00.0, 0000:43:00.0; times";
        assert!(report.head().contains(head), "{}", report.head());
        let sample = || Sample {
            seconds: vec![0.5],
            elapsed: 1.0,
            bound: Vec::new(),
            iterations: 2,
            inputs: (7, None),
            checksum: "a".into(),
        };
        let line = report.add("1GB".parse().unwrap(), DType::F32, &[sample(), sample()]);
        assert!(
            line.unwrap()
                .ends_with("2.000 GB/s  2.000 GB/s           -           -\n")
        );
        let json: serde_json::Value = serde_json::from_str(&report.to_json()).unwrap();
        assert_eq!(json["gpus"]["bus_ids"][1], "0000:43:00.0");
        assert_eq!(json["results"][0]["bus_bandwidth"], 2e9);
        assert!(json["results"][0]["bound_seconds"].is_null());
    }

    #[test]
    fn a_block_is_as_slow_as_its_slowest_rank() {
        let sample = |seconds: &[f64]| Sample {
            seconds: seconds.to_vec(),
            elapsed: 9.0,
            bound: vec![0.5; seconds.len()],
            iterations: 6,
            inputs: (7, Some(61)),
            checksum: "a".into(),
        };
        let samples = [sample(&[2.0, 4.0, 4.0]), sample(&[6.0, 2.0, 5.0])];
        assert_eq!(slowest(&samples, |sample| &sample.seconds), [6.0, 4.0, 5.0]);
        let times = BlockTimes::of(vec![6.0, 4.0, 5.0]);
        assert_eq!((times.median, times.min, times.p95), (5.0, 4.0, 6.0));
        assert_eq!(times.count, 3);
    }

    #[test]
    fn medians_and_percentiles_are_of_sorted_times() {
        let times = BlockTimes::of((1..=20).rev().map(f64::from).collect());
        assert_eq!((times.median, times.min, times.p95), (10.5, 1.0, 19.0));
        assert_eq!(BlockTimes::of(vec![3.0]).p95, 3.0);
    }

    #[test]
    fn times_are_shown_in_a_unit_that_fits() {
        assert_eq!(time(1.2e-7), "120 ns");
        assert_eq!(time(1.234e-6), "1.23 µs");
        assert_eq!(time(0.0123), "12.300 ms");
        assert_eq!(time(2.0), "2.000 s");
    }
}
