//! `accel-launch` starts a training program on many processes, of one host or of several.

use std::ffi::OsString;
use std::process::ExitCode;

use cli::Cli;
use supervisor::shim::{self, Control, LivenessPipe};

#[cfg(not(unix))]
compile_error!("accel-launch supervises process groups, which only Unix systems have");

mod agent;
mod argv;
mod cargo;
pub(crate) mod cli;
mod commands;
mod error;
mod event;
mod gpu;
mod output;
mod process;
mod report;
mod settings;
mod supervisor;
mod text;
mod variables;

fn main() -> ExitCode {
    accelerator_host::reset_signals();
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let liveness = LivenessPipe::take(&mut arguments);
    let cli = match Cli::read(arguments.iter().cloned()) {
        Ok(cli) => cli,
        Err(error) => return cli::report(&error),
    };
    if liveness.is_none()
        && cli.runs_a_job()
        && let Some(code) = shim::run(&arguments, |_| {}, Control::Signals)
    {
        return code;
    }
    cli.run(&arguments, liveness)
        .unwrap_or_else(|error| error.report())
}
