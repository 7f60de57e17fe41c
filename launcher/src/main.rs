//! `accel-launch` starts a training program on many processes of this machine.

#[cfg(not(unix))]
compile_error!("accel-launch supervises process groups, which only Unix systems have");

mod cargo;
mod cli;
mod commands;
mod error;
mod event;
mod gpu;
mod number;
mod output;
mod process;
mod report;
mod selftest;
mod settings;
mod supervisor;
mod text;
mod variables;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use cli::Invocation;
use error::{Error, Result, chain};
use supervisor::shim::{self, LivenessPipe};

fn main() -> ExitCode {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let liveness = LivenessPipe::take(&mut arguments);
    let invocation = match Invocation::parse(arguments.iter().cloned()) {
        Ok(invocation) => invocation,
        Err(error) => {
            // A closed pipe is no error.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    if liveness.is_none()
        && invocation.runs_a_job()
        && let Some(code) = shim::run(&arguments)
    {
        return code;
    }
    dispatch(&invocation, &arguments, liveness).unwrap_or_else(|error| {
        let _ = writeln!(std::io::stderr(), "error: {}", chain(&error));
        error.exit_code()
    })
}

/// `command` is the command line, and `liveness` the pipe from its shim.
fn dispatch(
    invocation: &Invocation,
    command: &[OsString],
    liveness: Option<LivenessPipe>,
) -> Result<ExitCode> {
    match invocation {
        Invocation::Launch { options, arguments } => {
            commands::launch::run(options, arguments, command, liveness)
        }
        Invocation::Env(arguments) => commands::env::run(arguments),
        Invocation::Estimate(arguments) => commands::estimate::run(arguments),
        Invocation::Checkpoint(arguments) => commands::checkpoint::run(arguments),
        Invocation::Plan(arguments) => {
            let mut stdout = std::io::stdout().lock();
            commands::plan::run(arguments, &mut stdout)
                .map_err(|error| Error::usage(error.to_string()))?;
            Ok(ExitCode::SUCCESS)
        }
        Invocation::Completions(arguments) => commands::docs::completions(arguments),
        Invocation::Man => commands::docs::man(),
        Invocation::Test(arguments) => selftest::run(arguments),
        Invocation::Rank(arguments) => Ok(selftest::rank(arguments)),
        Invocation::Bench(arguments) => commands::bench::run(arguments, command, liveness),
        Invocation::BenchRank(arguments) => Ok(commands::bench::rank(arguments)),
    }
}
