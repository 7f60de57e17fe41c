//! What is measured on a machine with a GPU, as one program that is packed and carried there.
//!
//! `benches/gpu.md` says what each command measures; `benches/gpu/run` calls them.

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

/// Measures what only a machine with a GPU can tell; each command prints one JSON object.
#[derive(Debug, Parser)]
struct Args {
    /// Also writes the JSON object to this file
    #[arg(long, global = true, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// What the device is, what it computes in, and how exactly it multiplies
    Probe(probe::Args),
    /// A plain Burn loop beside the prepared one, in one process, in pairs of rounds
    PlainAndPrepared(plain_and_prepared::Args),
    /// The losses of a training in half precision beside those in f32
    LossCurves(loss_curves::Args),
    /// Two ranks on one device against one rank: the same parameters, and what communication costs
    SharedGpu(shared_gpu::Args),
    /// One of the ranks of `shared-gpu`
    #[command(hide = true)]
    Rank(shared_gpu::RankArgs),
    /// Puts the JSON objects of a folder together as tables in Markdown
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
