//! `accel-launch checkpoint`: lists, shows and verifies checkpoints.

mod list;
mod show;
mod verify;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use accelerator_manifest::{Checkpoint, Place, VerifyLevel};
use clap::{Args, Subcommand};

use crate::error::{Error, Result};

/// Arguments of `accel-launch checkpoint`.
#[derive(Args, Clone, Debug)]
#[command(disable_help_subcommand = true)]
pub(crate) struct CheckpointArgs {
    #[command(subcommand)]
    action: CheckpointCommand,
}

#[derive(Clone, Debug, Subcommand)]
enum CheckpointCommand {
    /// List the checkpoints of a folder, and whether all files are there.
    ///
    /// Their content is not read; `verify` does that.
    List(PathArgs),
    /// Show the metadata and files of a checkpoint.
    Show {
        #[command(flatten)]
        place: PathArgs,

        /// The checkpoint's number, or `latest` for the newest complete one.
        #[arg(value_name = "NUMBER", default_value = "latest", value_parser = which)]
        which: Which,
    },
    /// Read all checkpoints, and name every damaged file.
    ///
    /// The exit code is 0 if everything is good, and 1 otherwise.
    Verify(PathArgs),
}

#[derive(Args, Clone, Debug)]
struct PathArgs {
    /// A folder of checkpoints, or one checkpoint.
    #[arg(value_name = "DIR")]
    place: PathBuf,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Which checkpoint of a folder.
#[derive(Clone, Copy, Debug)]
enum Which {
    Latest,
    Number(u64),
}

/// Does what was asked.
///
/// # Errors
/// When there is no such folder or checkpoint, or standard output cannot be written.
pub(crate) fn run(arguments: &CheckpointArgs) -> Result<ExitCode> {
    match &arguments.action {
        CheckpointCommand::List(place) => list::run(&find(&place.place)?, place.json),
        CheckpointCommand::Show { place, which } => {
            show::run(&choose(&find(&place.place)?, *which)?, place.json)
        }
        CheckpointCommand::Verify(place) => verify::run(&find(&place.place)?, place.json),
    }
}

fn find(path: &Path) -> Result<Place> {
    Place::open(path).map_err(|error| wrong_place(path, error))
}

/// Returns the checkpoints, oldest first.
fn checkpoints_of(place: &Place) -> Result<Vec<Checkpoint>> {
    let checkpoints = place.checkpoints();
    checkpoints.map_err(|error| wrong_place(place.path(), error))
}

fn choose(place: &Place, which: Which) -> Result<Checkpoint> {
    let checkpoints = checkpoints_of(place)?;
    let count = checkpoints.len();
    let path = place.path().display();
    let chosen = match (which, place) {
        (Which::Number(number), _) => checkpoints.into_iter().find(|x| x.number() == number),
        (Which::Latest, Place::Checkpoint(one)) => Some(one.clone()),
        (Which::Latest, Place::Folder(_)) => newest_whole(checkpoints)?,
    };
    chosen.ok_or_else(|| match which {
        Which::Number(number) => Error::usage(format!(
            "{path} has no checkpoint {number}; `accel-launch checkpoint list` shows those it has"
        )),
        Which::Latest if count == 0 => Error::usage(format!("{path} has no checkpoints")),
        Which::Latest => Error::system(format!(
            "none of the {count} checkpoints in {path} is whole; `accel-launch checkpoint verify` \
             says what is wrong"
        )),
    })
}

/// Returns the newest whole checkpoint; an unreadable one may be whole, so it is an error.
fn newest_whole(checkpoints: Vec<Checkpoint>) -> Result<Option<Checkpoint>> {
    for checkpoint in checkpoints.into_iter().rev() {
        let report = checkpoint.verify(VerifyLevel::Sizes);
        if let Some(defect) = report.unreadable() {
            return Err(unreadable(&checkpoint, defect.error.clone()));
        }
        if report.is_good() {
            return Ok(Some(checkpoint));
        }
    }
    Ok(None)
}

fn unreadable(checkpoint: &Checkpoint, error: accelerator_manifest::Error) -> Error {
    let path = checkpoint.path().display();
    Error::system(format!("cannot show the checkpoint {path}")).with_source(error)
}

fn wrong_place(path: &Path, error: accelerator_manifest::Error) -> Error {
    let message = format!(
        "expected a folder of checkpoints, or a checkpoint, at {}",
        path.display()
    );
    Error::usage(message).with_source(error)
}

fn which(text: &str) -> std::result::Result<Which, String> {
    match text {
        "latest" => Ok(Which::Latest),
        // `000003` is how the folder is called.
        digits => digits
            .strip_prefix("checkpoint-")
            .unwrap_or(digits)
            .parse()
            .map(Which::Number)
            .map_err(|_| "expected the number of a checkpoint, or `latest`".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_are_named_by_number_or_folder() {
        assert!(matches!(which("latest"), Ok(Which::Latest)));
        assert!(matches!(which("3"), Ok(Which::Number(3))));
        assert!(matches!(which("000003"), Ok(Which::Number(3))));
        assert!(matches!(which("checkpoint-000003"), Ok(Which::Number(3))));
        assert!(which("newest").is_err());
    }
}
