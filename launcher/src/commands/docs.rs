//! `accel-launch completions` and `accel-launch man`: what a package installs beside the program.

use std::process::ExitCode;

use clap::{Args, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::cli::Cli;
use crate::error::{Error, Result};
use crate::text::print;

/// Arguments of `accel-launch completions`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CompletionsArgs {
    /// The shell.
    shell: Shell,
}

/// Prints the completions of a shell.
///
/// # Errors
/// When standard output cannot be written.
pub(crate) fn completions(arguments: &CompletionsArgs) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(
        arguments.shell,
        &mut Cli::command(),
        "accel-launch",
        &mut script,
    );
    print(&String::from_utf8_lossy(&script))
}

/// Prints the manual page, in the format of `man`.
///
/// # Errors
/// When standard output cannot be written.
pub(crate) fn man() -> Result<ExitCode> {
    let mut page = Vec::new();
    Man::new(Cli::command())
        .render(&mut page)
        .map_err(|error| Error::system("the manual page cannot be written").with_source(error))?;
    print(&String::from_utf8_lossy(&page))
}
