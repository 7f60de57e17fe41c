//! The figures, for people and for programs.

use accelerator_collective::{DType, ProcessGroup};
use serde::{Deserialize, Serialize};

/// The figures so far.
#[derive(Debug, Serialize)]
pub(super) struct BenchReport {
    operation: &'static str,
    num_processes: usize,
    device: &'static str,
    /// The GPUs of the ranks, if they have some.
    gpus: Option<GpuInfo>,
    transport: String,
    version: &'static str,
    results: Vec<SizeResult>,
}

/// The times of one size on one rank, in seconds per operation.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Sample {
    /// One time per block of operations.
    pub(super) seconds: Vec<f64>,
    /// The times of the same work without waiting; empty on GPUs.
    pub(super) bound: Vec<f64>,
}

/// The GPUs of the ranks, and the versions of their drivers.
#[derive(Debug, Serialize)]
pub(super) struct GpuInfo {
    pub(super) nccl: String,
    /// The latest CUDA that the driver knows.
    pub(super) cuda: String,
    /// One per rank.
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
    algorithm_bandwidth: f64,
    bus_bandwidth: f64,
    bound_seconds: Option<f64>,
    bound_fraction: Option<f64>,
    iterations: usize,
    blocks: usize,
}

impl BenchReport {
    pub(super) fn new(group: &ProcessGroup, gpus: Option<GpuInfo>) -> Self {
        Self {
            operation: "all-reduce sum",
            num_processes: group.world_size(),
            device: gpus.as_ref().map_or("cpu", |_| "cuda"),
            transport: match gpus {
                Some(_) => "nccl".into(),
                None => group.transport().to_string(),
            },
            gpus,
            version: env!("CARGO_PKG_VERSION"),
            results: Vec::new(),
        }
    }

    /// Returns the heading of the table.
    pub(super) fn head(&self) -> String {
        let place = match &self.gpus {
            Some(gpus) => format!("NCCL {}, GPUs {}", gpus.nccl, gpus.bus_ids.join(", ")),
            None => self.transport.clone(),
        };
        let columns = line([
            "bytes",
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
            "{} on {} rank(s) over {place}; times are the slowest rank's\n\n{columns}",
            self.operation, self.num_processes,
        )
    }

    /// Adds the measurements of each rank; returns the line for them.
    pub(super) fn add(
        &mut self,
        bytes: usize,
        dtype: DType,
        iterations: usize,
        samples: &[Sample],
    ) -> String {
        let times = BlockTimes::of(slowest(samples, |sample| &sample.seconds));
        let bound = slowest(samples, |sample| &sample.bound);
        let bound = (!bound.is_empty()).then(|| BlockTimes::of(bound).median);
        let ranks = samples.len() as f64;
        let algorithm_bandwidth = bytes as f64 / times.median;
        let figures = SizeResult {
            bytes,
            dtype: dtype.name(),
            seconds: times.median,
            seconds_min: times.min,
            seconds_p95: times.p95,
            algorithm_bandwidth,
            bus_bandwidth: algorithm_bandwidth * 2.0 * (ranks - 1.0) / ranks,
            bound_seconds: bound,
            bound_fraction: bound.map(|bound| bound / times.median),
            iterations,
            blocks: times.count,
        };
        let none = || "-".to_owned();
        let percent = |fraction| format!("{:.1} %", 100.0 * fraction);
        let text = line([
            &bytes.to_string(),
            figures.dtype,
            &time(figures.seconds),
            &time(figures.seconds_min),
            &time(figures.seconds_p95),
            &bandwidth(figures.algorithm_bandwidth),
            &bandwidth(figures.bus_bandwidth),
            &figures.bound_seconds.map_or_else(none, time),
            &figures.bound_fraction.map_or_else(none, percent),
        ]);
        self.results.push(figures);
        text
    }

    pub(super) fn to_json(&self) -> String {
        // Text and numbers, which JSON always takes.
        let text = serde_json::to_string(self).unwrap_or_default();
        format!("{text}\n")
    }
}

/// Returns, per block, the time of the rank that took longest.
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
    let mut text = format!("{size:>10}  {dtype:<4}");
    for cell in cells {
        text.push_str(&format!("  {cell:>10}"));
    }
    text.push('\n');
    text
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

#[cfg(test)]
mod tests {
    use super::*;

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
            version: "0",
            results: Vec::new(),
        };
        let head = "on 2 rank(s) over NCCL 2.27.3, GPUs 0000:1B:00.0, 0000:43:00.0; times";
        assert!(report.head().contains(head), "{}", report.head());
        let sample = || Sample {
            seconds: vec![0.5],
            bound: Vec::new(),
        };
        let line = report.add(1_000_000_000, DType::F32, 2, &[sample(), sample()]);
        assert!(line.ends_with("2.000 GB/s  2.000 GB/s           -           -\n"));
        let json: serde_json::Value = serde_json::from_str(&report.to_json()).unwrap();
        assert_eq!(json["gpus"]["bus_ids"][1], "0000:43:00.0");
        assert_eq!(json["results"][0]["bus_bandwidth"], 2e9);
        assert!(json["results"][0]["bound_seconds"].is_null());
    }

    #[test]
    fn a_block_is_as_slow_as_its_slowest_rank() {
        let sample = |seconds: &[f64]| Sample {
            seconds: seconds.to_vec(),
            bound: Vec::new(),
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
