//! `accel-launch runs report`.

use std::path::PathBuf;
use std::process::ExitCode;

use accelerator_track::Report;
use clap::Args;

use super::{RunsFolder, failed};
use crate::error::Result;

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

pub(super) fn run(arguments: &ReportArgs) -> Result<ExitCode> {
    let runs = arguments.names.iter().map(|x| arguments.place.history(x));
    let runs = runs.collect::<Result<Vec<_>>>()?;
    Report::of(&runs).write(&arguments.output).map_err(failed)?;
    Ok(ExitCode::SUCCESS)
}
