//! `accel-launch runs report`.

use std::path::PathBuf;
use std::process::ExitCode;

use accelerator_track::Report;
use clap::Args;

use super::{RunsFolder, failed, label};
use crate::error::Result;
use crate::text::{plain, print};

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
