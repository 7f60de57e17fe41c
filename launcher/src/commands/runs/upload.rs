//! `accel-launch runs upload`.

use std::path::PathBuf;
use std::process::ExitCode;

use accelerator_track::upload;
use clap::Args;

use super::{RunsFolder, failed, label};
use crate::error::Result;
use crate::text::{note, plain, print, size};

#[derive(Args, Clone, Debug)]
pub(super) struct UploadArgs {
    /// The run: its folder's name, its id or the beginning of that, its name, or a path.
    #[arg(value_name = "RUN")]
    run: String,

    /// The other folder of runs, which exists.
    #[arg(value_name = "DIR")]
    destination: PathBuf,

    #[command(flatten)]
    place: RunsFolder,
}

pub(super) fn run(arguments: &UploadArgs) -> Result<ExitCode> {
    let folder = arguments.place.find(&arguments.run)?;
    let report = upload(&folder, &arguments.destination).map_err(failed)?;
    for artifact in &report.missing {
        note(&plain(&format!(
            "the artifact {artifact} was removed, and is not copied"
        )));
    }
    print(&format!(
        "{}: in {}, {} copied\n",
        label(&folder),
        plain(&report.folder.display().to_string()),
        size(report.copied_bytes)
    ))
}
