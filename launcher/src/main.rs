//! `accel-launch` starts a training program on many processes of this machine.

#[cfg(not(unix))]
compile_error!("accel-launch supervises process groups, which only Unix systems have");

mod allocator;
mod argv;
mod cargo;
mod cli;
mod env;
mod environment;
mod error;
mod failure;
mod job;
mod launch;
mod output;
mod plan;
mod rendezvous;
mod settings;
mod signals;
mod spawn;
mod supervise;
mod target;
mod text;
mod threads;
mod tool;

use std::io::Write;
use std::process::ExitCode;

use cli::Invocation;
use error::{Error, Result, chain};

fn main() -> ExitCode {
    let invocation = match Invocation::parse(std::env::args_os()) {
        Ok(invocation) => invocation,
        Err(error) => {
            // That nobody reads the help is no error.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    dispatch(&invocation).unwrap_or_else(|error| {
        let _ = writeln!(std::io::stderr(), "error: {}", chain(&error));
        error.exit_code()
    })
}

fn dispatch(invocation: &Invocation) -> Result<ExitCode> {
    match invocation {
        Invocation::Launch { options, arguments } => launch::run(options, arguments),
        Invocation::Env(arguments) => env::run(arguments),
        Invocation::Plan(arguments) => {
            let mut stdout = std::io::stdout().lock();
            plan::run(arguments, &mut stdout).map_err(|error| Error::usage(error.to_string()))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}
