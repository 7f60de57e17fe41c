//! `accel-jobs` submits a training program to the engine that a site runs, and shows its jobs.
//!
//! `accel-launch submit …` and `accel-launch jobs …` call it. See docs/jobs.md.

use std::path::PathBuf;
use std::process::ExitCode;

#[cfg(not(unix))]
compile_error!("accel-jobs starts and signals processes as Unix systems do");

mod cli;
mod engine;
#[cfg(feature = "image")]
mod image;
mod job;
mod output;
mod spec;

fn main() -> ExitCode {
    accelerator_host::reset_signals();
    let mut arguments = std::env::args_os();
    let done = match (arguments.nth(1), arguments.next()) {
        (Some(command), Some(folder)) if command == engine::local::SUPERVISE => {
            engine::local::supervise(&PathBuf::from(folder)).map(|()| ExitCode::SUCCESS)
        }
        _ => cli::run(std::env::args_os()),
    };
    done.unwrap_or_else(|error| error.report())
}
