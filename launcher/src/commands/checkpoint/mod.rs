//! `accel-launch checkpoint`: lists, shows and verifies checkpoints.

mod list;
mod show;
mod verify;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use accelerator_manifest::{Checkpoint, Folder, VerifyLevel};
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
        CheckpointCommand::List(place) => {
            list::run(&CheckpointPath::find(&place.place)?, place.json)
        }
        CheckpointCommand::Show { place, which } => show::run(
            &CheckpointPath::find(&place.place)?.choose(*which)?,
            place.json,
        ),
        CheckpointCommand::Verify(place) => {
            verify::run(&CheckpointPath::find(&place.place)?, place.json)
        }
    }
}

/// What a path on the command line is.
enum CheckpointPath {
    Folder(Folder),
    One(Checkpoint),
}

impl CheckpointPath {
    /// A folder with checkpoints is that; anything else with the name of a checkpoint, or with a
    /// manifest, is one checkpoint.
    fn find(path: &Path) -> Result<Self> {
        let wrong = |error| wrong_place(path, error);
        let folder = Folder::open(path).map_err(wrong)?;
        if !folder.checkpoints().map_err(wrong)?.is_empty() {
            return Ok(Self::Folder(folder));
        }
        // Without `.` and links, so that the name of a checkpoint is seen.
        let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        match Checkpoint::at(&whole) {
            Ok(checkpoint) => Ok(Self::One(checkpoint)),
            Err(error) if whole.join("manifest.json").exists() => Err(wrong(error)),
            Err(_) => Ok(Self::Folder(folder)),
        }
    }

    fn path(&self) -> &Path {
        match self {
            Self::Folder(folder) => folder.path(),
            Self::One(checkpoint) => checkpoint.path(),
        }
    }

    /// The oldest first.
    fn checkpoints(&self) -> Result<Vec<Checkpoint>> {
        match self {
            Self::Folder(folder) => folder
                .checkpoints()
                .map_err(|error| wrong_place(self.path(), error)),
            Self::One(checkpoint) => Ok(vec![checkpoint.clone()]),
        }
    }

    fn choose(self, which: Which) -> Result<Checkpoint> {
        let checkpoints = self.checkpoints()?;
        let count = checkpoints.len();
        let place = self.path().display();
        let chosen = match (which, self.is_one()) {
            (Which::Number(number), _) => checkpoints.into_iter().find(|x| x.number() == number),
            (Which::Latest, true) => checkpoints.into_iter().next(),
            (Which::Latest, false) => {
                let is_whole = |x: &Checkpoint| x.verify(VerifyLevel::Sizes).is_good();
                checkpoints.into_iter().rev().find(is_whole)
            }
        };
        chosen.ok_or_else(|| match which {
            Which::Number(number) => Error::usage(format!(
                "{place} has no checkpoint {number}; `accel-launch checkpoint list` shows those it has"
            )),
            Which::Latest if count == 0 => Error::usage(format!("{place} has no checkpoints")),
            Which::Latest => Error::system(format!(
                "none of the {count} checkpoints in {place} is whole; `accel-launch checkpoint verify` \
                 says what is wrong"
            )),
        })
    }

    fn is_one(&self) -> bool {
        matches!(self, Self::One(_))
    }
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
