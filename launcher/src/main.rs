//! `accel-launch` starts a training program on many processes of this machine.

#[cfg(not(unix))]
compile_error!("accel-launch supervises process groups, which only Unix systems have");

mod allocator;
mod argv;
mod attempt;
mod bench;
mod blame;
mod cargo;
mod checkpoint;
mod cli;
mod course;
mod descendants;
mod env;
mod environment;
mod error;
mod estimate;
mod failure;
mod gpu;
mod hearing;
mod job;
mod keeper;
mod launch;
mod number;
mod output;
mod plan;
mod rendezvous;
mod restart;
mod selftest;
mod settings;
mod signals;
mod spawn;
mod supervise;
mod target;
mod text;
mod threads;
mod tool;
mod variables;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use cli::Invocation;
use error::{Error, Result, chain};
use keeper::Bond;

fn main() -> ExitCode {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let bond = Bond::take(&mut arguments);
    let invocation = match Invocation::parse(arguments.iter().cloned()) {
        Ok(invocation) => invocation,
        Err(error) => {
            // That nobody reads the help is no error.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    if bond.is_none()
        && invocation.runs_a_job()
        && let Some(code) = keeper::keep(&arguments)
    {
        return code;
    }
    dispatch(&invocation, &arguments, bond).unwrap_or_else(|error| {
        let _ = writeln!(std::io::stderr(), "error: {}", chain(&error));
        error.exit_code()
    })
}

/// `command` is the command line, and `bond` what ties this process to its keeper.
fn dispatch(invocation: &Invocation, command: &[OsString], bond: Option<Bond>) -> Result<ExitCode> {
    match invocation {
        Invocation::Launch { options, arguments } => launch::run(options, arguments, command, bond),
        Invocation::Env(arguments) => env::run(arguments),
        Invocation::Estimate(arguments) => estimate::run(arguments),
        Invocation::Checkpoint(arguments) => checkpoint::run(arguments),
        Invocation::Plan(arguments) => {
            let mut stdout = std::io::stdout().lock();
            plan::run(arguments, &mut stdout).map_err(|error| Error::usage(error.to_string()))?;
            Ok(ExitCode::SUCCESS)
        }
        Invocation::Test(arguments) => selftest::run(arguments),
        Invocation::Rank(arguments) => Ok(selftest::rank(arguments)),
        Invocation::Bench(arguments) => bench::run(arguments, command, bond),
        Invocation::BenchRank(arguments) => Ok(bench::rank(arguments)),
    }
}
