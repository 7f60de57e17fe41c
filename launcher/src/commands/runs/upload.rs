//! `accel-launch runs upload`.

use std::path::PathBuf;
use std::process::ExitCode;

use accelerator_track::{MakeFolder, OnConflict, UploadOutcome, upload};
use clap::{Args, ValueEnum};

use super::{RunsFolder, failed, label};
use crate::error::Result;
use crate::text::{note, plain, print, size};

#[derive(Args, Clone, Debug)]
pub(super) struct UploadArgs {
    /// The run: its folder's name, its id or the beginning of that, its name, or a path.
    #[arg(value_name = "RUN")]
    run: String,

    /// The other folder of runs.
    #[arg(value_name = "DIR")]
    destination: PathBuf,

    #[command(flatten)]
    place: RunsFolder,

    /// Make the folder where it is not there.
    #[arg(long)]
    make_folder: bool,

    /// What to do where another run has the name there, or an artifact's version other contents.
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = ConflictRule::New)]
    on_conflict: ConflictRule,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ConflictRule {
    /// Leave what is there, and copy nothing.
    Skip,
    /// Fail.
    Error,
    /// Copy it by another name, or as another version.
    New,
    /// Replace what is there.
    Replace,
}

pub(super) fn run(arguments: &UploadArgs) -> Result<ExitCode> {
    let folder = arguments.place.find(&arguments.run)?;
    let make_folder = match arguments.make_folder {
        true => MakeFolder::Yes,
        false => MakeFolder::No,
    };
    let on_conflict = match arguments.on_conflict {
        ConflictRule::Skip => OnConflict::Skip,
        ConflictRule::Error => OnConflict::Error,
        ConflictRule::New => OnConflict::NewVersion,
        ConflictRule::Replace => OnConflict::Replace,
    };
    let uploaded = upload(&folder, &arguments.destination, make_folder, on_conflict);
    let report = uploaded.map_err(failed)?;
    for artifact in &report.missing {
        note(&plain(&format!(
            "the artifact {artifact} is not there any more, and was not copied"
        )));
    }
    let place = report.folder.display();
    print(&match report.outcome {
        UploadOutcome::Skipped => {
            format!(
                "{}: not copied, another run is in {place}\n",
                label(&folder)
            )
        }
        UploadOutcome::Uploaded => format!(
            "{}: in {place}, {} files of it copied and {} there already, {}\n",
            label(&folder),
            report.copied_files,
            report.present_files,
            size(report.copied_bytes)
        ),
    })
}
