//! Measures the time to ask a plan for a batch, by the size of the data set, and the memory that the process takes for
//! it.
//!
//! `cargo bench -p accelerator-benches --bench plan_cost`

use std::error::Error;
use std::fmt;
use std::hint::black_box;
use std::time::Instant;

use accelerator_benches::{Interval, Output, peak_memory};
use accelerator_plan::{BatchSize, Order, Plan, PlanConfig};
use clap::Parser;
use serde::Serialize;

/// Measure the cost of an index of a plan
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    output: Output,
}

/// The result for a data set.
#[derive(Debug, Serialize)]
struct Line {
    samples: u64,
    /// Nanoseconds per index, in the order of the data.
    in_order: Interval,
    /// Nanoseconds per index, shuffled.
    shuffled: Interval,
    /// The peak memory of the process so far, in KiB.
    peak: u64,
}

const BATCH: usize = 64;
const RANKS: usize = 8;
/// The batches to ask for in a round, from all over the epoch.
const BATCHES: u64 = 512;
const ROUNDS: usize = 20;

fn main() -> Result<(), Box<dyn Error>> {
    let Args { output } = Args::parse();
    output.header(format_args!(
        "ns an index, batches of {BATCH} on rank 3 of {RANKS}, anywhere in the epoch\n{:>15}  {:>24}  {:>24}  {:>12}",
        "samples", "in order", "shuffled", "peak memory"
    ));
    for exponent in [3, 4, 5, 6, 8, 10, 12] {
        let samples = 10_u64.pow(exponent);
        output.print(&Line {
            samples,
            in_order: cost(samples, Order::Sequential)?,
            shuffled: cost(samples, Order::Shuffled { seed: 42 })?,
            peak: peak_memory().unwrap_or(0),
        })?;
    }
    Ok(())
}

fn cost(samples: u64, order: Order) -> Result<Interval, Box<dyn Error>> {
    let plan: Plan = PlanConfig::new(samples, BatchSize::per_rank(BATCH)?)
        .with_world_size(RANKS)
        .with_order(order)
        .init()?;
    let epoch = plan.epoch(1);
    let steps = epoch.steps(3).max(1);
    let rounds = (0..ROUNDS as u64).map(|round| {
        let start = Instant::now();
        let mut indices = 0;
        for number in 0..BATCHES {
            // A prime stride reaches all parts of the epoch.
            let step = (round * BATCHES + number).wrapping_mul(2_147_483_647) % steps;
            if let Some(batch) = black_box(epoch.batch(3, step)) {
                indices += batch.indices.len();
            }
        }
        start.elapsed().as_secs_f64() * 1e9 / indices as f64
    });
    Ok(Interval::of(rounds.collect()))
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [in_order, shuffled] = [self.in_order, self.shuffled].map(|cost| format!("{cost:.1}"));
        write!(
            f,
            "{:>15}  {in_order:>24}  {shuffled:>24}  {:>8} KiB",
            self.samples, self.peak
        )
    }
}
