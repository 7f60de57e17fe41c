//! `accel-launch bench`: measures collectives between ranks of this machine.
//!
//! The ranks are processes of this very program, which the launcher starts and supervises as it does any other
//! (`rank.rs`), or threads of this one. Rank 0 prints the figures. The README in this folder says what is timed.

mod args;
mod figures;
mod rank;

use std::ffi::OsString;
use std::process::ExitCode;

use accelerator_collective::TransportKind;
use accelerator_host::machine::Memory;

use super::launch;
use crate::error::{Error, Result};
use crate::output::OnOutputError;
use crate::settings::options::{Options, Processes};
use crate::supervisor::shim::LivenessPipe;
use crate::variables;
pub(crate) use args::{AllReduceArgs, BenchArgs};
use args::{BenchDevice, MOST, What};
pub(crate) use rank::run as rank;

/// Runs the measurement.
///
/// `command` is the launcher's own command line, which the ranks get too; `liveness` is
/// the pipe from its shim, if it has one.
///
/// # Errors
/// When the ranks cannot be started, or threads fail; how processes end is in the exit code.
pub(crate) fn run(
    arguments: &BenchArgs,
    command: &[OsString],
    liveness: Option<LivenessPipe>,
) -> Result<ExitCode> {
    let processes = arguments.starts_processes();
    let What::AllReduce(arguments) = &arguments.what;
    check(arguments)?;
    variables::check()?;
    if !processes {
        return rank::threads(arguments);
    }
    let program = std::env::current_exe()
        .map_err(|error| Error::system("this program cannot find itself").with_source(error))?;
    let options = Options {
        script: Some(program),
        num_processes: Some(Processes::exactly(arguments.num_processes)),
        no_prefix: true,
        quiet: true,
        on_output_error: OnOutputError::EndJob,
        ..Options::default()
    };
    // The options of "accel-launch bench all-reduce OPTIONS...".
    let own = command.iter().skip(3).cloned();
    let own: Vec<OsString> = std::iter::once("__bench".into()).chain(own).collect();
    launch::run(&options, &own, command, liveness)
}

/// Checks the options together.
fn check(arguments: &AllReduceArgs) -> Result<()> {
    match arguments.device {
        BenchDevice::Cpu if arguments.num_processes.get() == 1 => {
            return Err(Error::usage(format!(
                "--num-processes 1: expected a number of processes from 2 to {MOST}; one rank alone \
                 reduces nothing"
            )));
        }
        BenchDevice::Cpu => {}
        BenchDevice::Cuda if arguments.transport == TransportKind::Threads => {
            return Err(Error::usage(
                "--transport threads has one process, and --device cuda one per GPU: leave one of them out",
            ));
        }
        BenchDevice::Cuda => {}
    }
    for size in &arguments.sizes {
        let mut dtypes = arguments.dtype.iter();
        if let Some(dtype) = dtypes.find(|dtype| size % dtype.size() != 0) {
            return Err(Error::usage(format!(
                "--sizes {size} is no whole number of {dtype}, which takes {} bytes",
                dtype.size()
            )));
        }
    }
    let ranks = arguments.num_processes.get();
    let largest = arguments.sizes.iter().max().copied().unwrap_or(0);
    // The buffer that is reduced, and as much again for the bound.
    let needed = largest.saturating_mul(2 * ranks);
    let available = Memory::of_this_machine().map(|memory| memory.available);
    match available {
        Some(available) if needed as u64 > available => Err(Error::usage(format!(
            "the largest of --sizes takes {:.1} GB on {ranks} ranks, and this machine has \
             {:.1} GB of memory available; give smaller --sizes or fewer --num-processes",
            needed as f64 / 1e9,
            available as f64 / 1e9
        ))),
        _ => Ok(()),
    }
}
