//! `accel-launch submit` and `accel-launch jobs`, which are those of `accel-jobs`: a program of its own, so that clients of
//! engines stay out of the launcher that supervises.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use accelerator_host::process::find_installed;
use clap::Args;

use crate::error::{Error, Result};

/// The arguments of the other program, which reads them.
#[derive(Args, Clone, Debug)]
#[command(disable_help_flag = true)]
pub(crate) struct JobsArgs {
    #[arg(
        value_name = "ARGS",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    arguments: Vec<OsString>,
}

/// Becomes `accel-jobs`, with `command` before the arguments.
///
/// # Errors
/// When it is not installed, or cannot be started.
pub(crate) fn run(command: Option<&str>, arguments: &JobsArgs) -> Result<ExitCode> {
    const PROGRAM: &str = "accel-jobs";
    let program = find_installed(PROGRAM).unwrap_or_else(|| PathBuf::from(PROGRAM));
    let words = command.map(OsStr::new).into_iter();
    let words = words.chain(arguments.arguments.iter().map(OsString::as_os_str));
    let error = Command::new(&program).args(words).exec();
    Err(match error.kind() {
        std::io::ErrorKind::NotFound => Error::usage(format!(
            "{PROGRAM} is neither beside accel-launch nor on the PATH; install it: cargo install --path launcher/jobs"
        )),
        _ => Error::system(format!("{} cannot be started", program.display())).with_source(error),
    })
}
