//! `accel-launch completions` and `accel-launch man`: what a package installs beside the program.

use std::process::ExitCode;

use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::error::{Error, Result};
use crate::text::print;

/// Arguments of `accel-launch completions`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CompletionsArgs {
    /// The shell.
    shell: Shell,
}

/// Prints the completions of a shell for `command`.
///
/// # Errors
/// When standard output cannot be written.
pub(crate) fn completions(arguments: &CompletionsArgs, mut command: Command) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "accel-launch", &mut script);
    print(&String::from_utf8_lossy(&script))
}

/// Prints the manual page of `command`, in the format of `man`.
///
/// # Errors
/// When standard output cannot be written.
pub(crate) fn man(command: Command) -> Result<ExitCode> {
    let mut page = Vec::new();
    Man::new(command)
        .render(&mut page)
        .map_err(|error| Error::system("the manual page cannot be written").with_source(error))?;
    print(&String::from_utf8_lossy(&page))
}
