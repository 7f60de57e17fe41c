//! `accel-launch board`: runs in a browser while they are written.

use std::path::PathBuf;
use std::process::ExitCode;

use accelerator_track::Board;
use clap::Args;

use crate::error::{Error, Result};
use crate::text::{note, plain, print};

/// Shows the runs of a folder in a browser, and follows them while they are written.
///
/// The page is served on this machine alone, at the address that is printed; its token is a new one each time. On a machine
/// that you reach by SSH, forward the port: `ssh -L PORT:127.0.0.1:PORT HOST`.
#[derive(Args, Clone, Debug)]
pub(crate) struct BoardArgs {
    /// The folder of the runs, or of one run.
    #[arg(long, value_name = "DIR", default_value = "runs")]
    runs: PathBuf,

    /// The port; 0 is a free one.
    #[arg(long, value_name = "N", default_value_t = 0)]
    port: u16,
}

/// Serves until it is interrupted.
///
/// # Errors
/// When there is no such folder, or the port is taken.
pub(crate) fn run(arguments: &BoardArgs) -> Result<ExitCode> {
    let board = Board::bind(&arguments.runs, arguments.port).map_err(of_track)?;
    print(&format!("{}\n", board.url()))?;
    note(&format!(
        "open this address in a browser to see the runs in {}; Ctrl-C ends the board",
        plain(&arguments.runs.display().to_string())
    ));
    board.serve().map_err(of_track)?;
    Ok(ExitCode::SUCCESS)
}

fn of_track(error: accelerator_track::Error) -> Error {
    match error.is_not_found() {
        true => Error::usage(error.to_string()),
        false => Error::system(error.to_string()),
    }
}
