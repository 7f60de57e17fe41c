//! The measurements on a machine with a GPU, in one program that is packed and taken there.
//!
//! `benches/gpu.md` describes what each command measures; `benches/gpu/run` runs them.

#![allow(clippy::print_stdout, reason = "a bench prints its figures")]

mod loss_curves;
mod memory;
mod model;
mod outcome;
mod plain_and_prepared;
mod probe;
mod report;
mod setting;
mod shared_gpu;
mod spread;

use std::error::Error;
use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// Measure what only a machine with a GPU can tell; each command prints one JSON object
#[derive(Debug, Parser)]
struct Args {
    /// Also write the JSON object to this file
    #[arg(long, global = true, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Describe the device: its name, the precisions that it supports, and the error of its matrix products
    Probe(probe::Args),
    /// Compare a plain Burn loop with the prepared one, in one process, in pairs of rounds
    PlainAndPrepared(plain_and_prepared::Args),
    /// Compare the losses of a training in half precision with those in f32
    LossCurves(loss_curves::Args),
    /// Compare two ranks on one device with one rank: the difference of parameters, and the cost of communication
    SharedGpu(shared_gpu::Args),
    /// Run a rank of `shared-gpu`
    #[command(hide = true)]
    Rank(shared_gpu::RankArgs),
    /// Combine the JSON objects of a folder into tables in Markdown
    Report(report::Args),
}

fn main() -> Result<(), Box<dyn Error>> {
    let Args { out, command } = Args::parse();
    let out = out.as_deref();
    match command {
        Command::Probe(args) => outcome::tell(out, &probe::run(&args)?),
        Command::PlainAndPrepared(args) => outcome::tell(out, &plain_and_prepared::run(&args)?),
        Command::LossCurves(args) => {
            let curves = loss_curves::run(&args)?;
            outcome::tell(out, &curves)?;
            curves.check()
        }
        Command::SharedGpu(args) => {
            let shared = shared_gpu::run(&args)?;
            outcome::tell(out, &shared)?;
            shared.check()
        }
        Command::Rank(args) => shared_gpu::rank(&args),
        Command::Report(args) => report::run(&args),
    }
}
