//! Measures how much communication overlaps with the backward pass, over a slow link between two hosts.
//!
//! `cargo bench -p accelerator-benches --bench exposed -- --help`. It creates network namespaces with
//! `benches/shaped_link.sh`, so it needs root.

use std::error::Error;
use std::fmt;
use std::path::PathBuf;
use std::process::Command;

use accelerator::prelude::*;
use accelerator_benches::{Interval, Model, Output, Pair, Step};
use accelerator_host::allocator::ALLOCATOR_VARIABLES;
use clap::Parser;
use serde::{Deserialize, Serialize};

/// Measure how much communication overlaps with the backward pass
#[derive(Debug, Parser)]
struct Args {
    /// The network
    #[arg(long, default_value = "cnn")]
    model: Model,
    /// The rows of a transformer's batch [default: 1,024]
    #[arg(long)]
    rows: Option<usize>,
    /// The rate of the link in each direction, as `tc` reads it
    #[arg(long, default_value = "1gbit")]
    rate: String,
    /// The number of starts of two ranks with overlap, and as many without
    #[arg(long, default_value_t = 3)]
    starts: usize,
    /// The number of pairs of rounds per start
    #[arg(long, default_value_t = 8)]
    rounds: usize,
    /// The number of steps per round
    #[arg(long, default_value_t = 6)]
    steps: usize,
    /// Be a rank, and write what it measures to this file
    #[arg(long, hide = true)]
    report: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

/// The rounds of a rank, in milliseconds per step.
#[derive(Debug, Default, Deserialize, Serialize)]
struct Rounds {
    /// The step without communication, in plain Burn.
    alone: Vec<f64>,
    /// The backward pass of that step.
    backward: Vec<f64>,
    /// The time that communication adds to a step.
    exposed: Vec<f64>,
}

/// The result, in milliseconds per step.
#[derive(Debug, Serialize)]
struct Outcome {
    model: Model,
    alone: Interval,
    backward: Interval,
    exposed_off: Interval,
    exposed_on: Interval,
    /// `(exposed_off − exposed_on) / min(backward, exposed_off)`: the share of the communication that is hidden, of all
    /// that could be. Without overlap all communication is exposed, so `exposed_off` is its duration.
    hidden: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    if let Some(report) = &args.report {
        return rank(&args, report);
    }
    let (mut off, mut on) = (Rounds::default(), Rounds::default());
    for _ in 0..args.starts {
        off.join(start(&args, "off")?);
        on.join(start(&args, "on")?);
    }
    let (alone, backward) = (
        [off.alone, on.alone].concat(),
        [off.backward, on.backward].concat(),
    );
    let (exposed_off, exposed_on) = (Interval::of(off.exposed), Interval::of(on.exposed));
    let backward = Interval::of(backward);
    let hideable = backward.median.min(exposed_off.median);
    let outcome = Outcome {
        model: args.model,
        alone: Interval::of(alone),
        backward,
        exposed_off,
        exposed_on,
        hidden: (exposed_off.median - exposed_on.median) / hideable,
    };
    let rate = &args.rate;
    args.output
        .header(format_args!("two hosts of one rank, {rate} between them"));
    args.output.print(&outcome)?;
    Ok(())
}

/// Starts two ranks on two hosts, and returns the measurements of rank 0.
fn start(args: &Args, overlap: &str) -> Result<Rounds, Box<dyn Error>> {
    let report = std::env::temp_dir().join(format!("exposed-{}.json", std::process::id()));
    let status = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/shaped_link.sh"))
        .args(["--pin", "--rate", &args.rate, "--"])
        .arg(std::env::current_exe()?)
        .args(["--model", args.model.name()])
        .args(args.rows.map(|rows| format!("--rows={rows}")))
        .args(["--rounds", &args.rounds.to_string()])
        .args(["--steps", &args.steps.to_string()])
        .arg("--report")
        .arg(&report)
        .env("ACCEL_OVERLAP", overlap)
        .env("RAYON_NUM_THREADS", "1")
        .envs(ALLOCATOR_VARIABLES)
        .status()?;
    if !status.success() {
        return Err(format!("the ranks ended with {status}").into());
    }
    let rounds = serde_json::from_slice(&std::fs::read(&report)?)?;
    std::fs::remove_file(&report)?;
    Ok(rounds)
}

/// Measures as one of the two ranks.
fn rank(args: &Args, report: &std::path::Path) -> Result<(), Box<dyn Error>> {
    let accelerator = Accelerator::builder()
        .device(BackendKind::Flex)
        .allow_same_batches()
        .build()?;
    let mut pair = Pair::with_rows(&accelerator, args.model, args.rows, args.steps)?;
    pair.plain()?;
    pair.prepared()?;
    let mut rounds = Rounds::default();
    for _ in 0..args.rounds {
        // Both ranks compute at the same time in either round.
        accelerator.wait_for_everyone()?;
        let alone = pair.plain()?;
        accelerator.wait_for_everyone()?;
        let together = pair.prepared()?;
        rounds.add(alone, together);
    }
    if accelerator.rank() == 0 {
        std::fs::write(report, serde_json::to_vec(&rounds)?)?;
    }
    Ok(accelerator.finish()?)
}

impl Rounds {
    fn add(&mut self, alone: Step, together: Step) {
        self.alone.push(alone.whole * 1e3);
        self.backward.push(alone.backward * 1e3);
        self.exposed.push((together.whole - alone.whole) * 1e3);
    }

    fn join(&mut self, other: Self) {
        self.alone.extend(other.alone);
        self.backward.extend(other.backward);
        self.exposed.extend(other.exposed);
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, milliseconds a step", self.model.name())?;
        writeln!(f, "without communication:            {:.1}", self.alone)?;
        writeln!(f, "of that, backward:                {:.1}", self.backward)?;
        writeln!(
            f,
            "communication exposed, no overlap: {:.1}",
            self.exposed_off
        )?;
        writeln!(
            f,
            "communication exposed, overlap:    {:.1}",
            self.exposed_on
        )?;
        write!(
            f,
            "hidden of what could be:          {:.0} %",
            self.hidden * 100.0
        )
    }
}
