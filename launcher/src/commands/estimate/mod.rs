//! `accel-launch estimate-memory`: what a model takes to train, from its file alone.

mod header;
mod memory;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use self::memory::MemoryEstimate;
use crate::error::Result;
use crate::text::{json, print};

/// Arguments of `accel-launch estimate-memory`.
#[derive(Args, Clone, Debug)]
pub(crate) struct EstimateArgs {
    /// A safetensors file, or the index of one in shards (`….safetensors.index.json`).
    ///
    /// Only headers are read, whatever the size.
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Print JSON, in bytes.
    #[arg(long)]
    json: bool,
}

/// Reads the headers and prints what they come to.
///
/// # Errors
/// When the file is not there or no safetensors file, or standard output cannot be written.
pub(crate) fn run(arguments: &EstimateArgs) -> Result<ExitCode> {
    let report = MemoryEstimate::of(&header::read(&arguments.file)?);
    print(&if arguments.json {
        json(&report)?
    } else {
        report.text(&arguments.file)
    })
}
