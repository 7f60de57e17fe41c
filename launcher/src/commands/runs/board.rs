//! `accel-launch runs board`.

use std::process::ExitCode;

use accelerator_track::Board;
use clap::Args;

use super::{RunsFolder, failed};
use crate::error::Result;
use crate::text::{note, plain, print};

#[derive(Args, Clone, Debug)]
pub(super) struct BoardArgs {
    #[command(flatten)]
    place: RunsFolder,

    /// The port; 0 picks a free one.
    #[arg(long, value_name = "N", default_value_t = 0)]
    port: u16,
}

/// Serves until it is interrupted.
pub(super) fn run(arguments: &BoardArgs) -> Result<ExitCode> {
    let folder = &arguments.place.folder;
    let board = Board::bind(folder, arguments.port).map_err(failed)?;
    print(&format!("{}\n", board.url()))?;
    note(&format!(
        "open this address in a browser to see the runs in {}; Ctrl-C ends the board",
        plain(&folder.display().to_string())
    ));
    board.serve()
}
