//! How much of the communication hides behind backward, over a slow link between two hosts.
//!
//! `cargo bench -p accelerator-benches --bench exposed -- --help`. It makes network namespaces with
//! `benches/shaped_link.sh`, so it needs root.

#![allow(clippy::print_stdout, reason = "a bench prints its figures")]

use std::error::Error;
use std::fmt;
use std::path::PathBuf;
use std::process::Command;

use accelerator::prelude::*;
use accelerator_benches::{Interval, Model, Pair, Step};
use clap::Parser;
use serde::{Deserialize, Serialize};

/// Measures how much of the communication hides behind backward.
#[derive(Debug, Parser)]
struct Args {
    /// The network
    #[arg(long, default_value = "cnn")]
    model: Model,
    /// What the link carries in each direction, as `tc` reads it
    #[arg(long, default_value = "1gbit")]
    rate: String,
    /// How often two ranks are started with overlap, and as often without
    #[arg(long, default_value_t = 3)]
    starts: usize,
    /// Pairs of rounds of each start
    #[arg(long, default_value_t = 8)]
    rounds: usize,
    /// Steps of a round
    #[arg(long, default_value_t = 6)]
    steps: usize,
    /// Prints JSON
    #[arg(long)]
    json: bool,
    /// A rank writes what it measured to this file
    #[arg(long, hide = true)]
    report: Option<PathBuf>,
    #[arg(long, hide = true)]
    bench: bool,
}

/// A rank's rounds, in milliseconds a step.
#[derive(Debug, Default, Deserialize, Serialize)]
struct Rounds {
    /// Steps without communication, in plain Burn.
    alone: Vec<f64>,
    /// Backward in these.
    backward: Vec<f64>,
    /// What communication adds to a step.
    exposed: Vec<f64>,
}

/// What came out, in milliseconds a step.
#[derive(Debug, Serialize)]
struct Outcome {
    model: Model,
    alone: Interval,
    backward: Interval,
    exposed_off: Interval,
    exposed_on: Interval,
    /// `(exposed_off − exposed_on) / min(backward, exposed_off)`: of what could be hidden, the part
    /// that was. Without overlap all of the communication is exposed, so that is its length.
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
    if args.json {
        println!("{}", serde_json::to_string(&outcome)?);
    } else {
        println!("two hosts of one rank, {} between them", args.rate);
        println!("{outcome}");
    }
    Ok(())
}

/// Starts two ranks on two hosts, and gives what rank 0 measured.
fn start(args: &Args, overlap: &str) -> Result<Rounds, Box<dyn Error>> {
    let report = std::env::temp_dir().join(format!("exposed-{}.json", std::process::id()));
    let status = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/shaped_link.sh"))
        .args(["--pin", "--rate", &args.rate, "--"])
        .arg(std::env::current_exe()?)
        .args(["--model", args.model.name()])
        .args(["--rounds", &args.rounds.to_string()])
        .args(["--steps", &args.steps.to_string()])
        .arg("--report")
        .arg(&report)
        .env("ACCEL_OVERLAP", overlap)
        .env("RAYON_NUM_THREADS", "1")
        .envs(accelerator_benches::ALLOCATOR)
        .status()?;
    if !status.success() {
        return Err(format!("the ranks ended with {status}").into());
    }
    let rounds = serde_json::from_slice(&std::fs::read(&report)?)?;
    std::fs::remove_file(&report)?;
    Ok(rounds)
}

/// Measures as one of two ranks.
fn rank(args: &Args, report: &std::path::Path) -> Result<(), Box<dyn Error>> {
    let accelerator = Accelerator::builder()
        .device(BackendKind::Flex)
        .allow_same_batches()
        .build()?;
    let mut pair = Pair::new(&accelerator, args.model, args.steps)?;
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
