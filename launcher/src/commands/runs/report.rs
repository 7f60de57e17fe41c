//! `accel-launch runs report` and `board`.

use std::path::PathBuf;
use std::process::ExitCode;

use accelerator_track::{Report, internal::Board};
use clap::Args;

use super::{RunsFolder, failed, label};
use crate::error::Result;
use crate::text::{note, plain, print};

#[derive(Args, Clone, Debug)]
pub(super) struct ReportArgs {
    /// The runs: names of their folders, ids or beginnings of those, names, or paths.
    #[arg(value_name = "RUN", required = true)]
    names: Vec<String>,

    #[command(flatten)]
    place: RunsFolder,

    /// The file to write.
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    output: PathBuf,
}

pub(super) fn report(arguments: &ReportArgs) -> Result<ExitCode> {
    let runs = arguments.names.iter().map(|x| arguments.place.history(x));
    let runs = runs.collect::<Result<Vec<_>>>()?;
    let output = &arguments.output;
    Report::of(&runs).write(output).map_err(failed)?;
    let what = match runs.as_slice() {
        [run] => format!("the report of {}", label(&run.folder)),
        runs => format!("the report of {} runs", runs.len()),
    };
    // What is no file may be standard output itself.
    match output.is_file() {
        true => print(&format!(
            "{}: {what}\n",
            plain(&output.display().to_string())
        )),
        false => Ok(ExitCode::SUCCESS),
    }
}

#[derive(Args, Clone, Debug)]
pub(super) struct BoardArgs {
    #[command(flatten)]
    place: RunsFolder,

    /// The port; 0 picks a free one.
    #[arg(long, value_name = "N", default_value_t = 0)]
    port: u16,
}

/// Serves until it is interrupted.
pub(super) fn board(arguments: &BoardArgs) -> Result<ExitCode> {
    let folder = &arguments.place.folder;
    let board = Board::bind(folder, arguments.port).map_err(failed)?;
    print(&format!("{}\n", board.url()))?;
    note(&format!(
        "open this address in a browser to see the runs in {}; Ctrl-C ends the board",
        plain(&folder.display().to_string())
    ));
    board.serve()
}
