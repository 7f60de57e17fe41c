//! `accel-launch checkpoint`: lists, shows and verifies checkpoints.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use accelerator_manifest::{
    Checkpoint, CheckpointKind, LoaderState, Manifest, VerifyLevel, internal::Place,
};
use clap::{Args, Subcommand};
use serde::Serialize;

use crate::error::{Error, Result};
use crate::text::{age, columns, duration, json, print, short, size};

/// Arguments of `accel-launch checkpoint`.
#[derive(Args, Clone, Debug)]
#[command(disable_help_subcommand = true)]
pub(crate) struct CheckpointArgs {
    #[command(subcommand)]
    action: CheckpointCommand,
}

#[derive(Clone, Debug, Subcommand)]
enum CheckpointCommand {
    /// List the checkpoints in a folder, and show which of them lack files.
    ///
    /// Does not read the contents of the files; `verify` does.
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
    /// The exit code is 0 if no file is damaged, and 1 otherwise.
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

/// A choice among the checkpoints of a folder.
#[derive(Clone, Copy, Debug)]
enum Which {
    Latest,
    Number(u64),
}

/// Runs the command.
///
/// # Errors
/// When there is no such folder or checkpoint, or standard output cannot be written.
pub(crate) fn run(arguments: &CheckpointArgs) -> Result<ExitCode> {
    match &arguments.action {
        CheckpointCommand::List(place) => list(&find(&place.place)?, place.json),
        CheckpointCommand::Show { place, which } => {
            show(&choose(&find(&place.place)?, *which)?, place.json)
        }
        CheckpointCommand::Verify(place) => verify(&find(&place.place)?, place.json),
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
        // The folder is called `000003`.
        digits => digits
            .strip_prefix("checkpoint-")
            .unwrap_or(digits)
            .parse()
            .map(Which::Number)
            .map_err(|_| "expected the number of a checkpoint, or `latest`".to_owned()),
    }
}

fn list(place: &Place, as_json: bool) -> Result<ExitCode> {
    let list = CheckpointList::read(place)?;
    print(&if as_json { json(&list)? } else { list.text() })
}

/// The fields are those of the JSON object.
#[derive(Serialize)]
struct CheckpointList {
    place: PathBuf,
    /// The content of the text file `latest`.
    latest: Option<u64>,
    checkpoints: Vec<ListedCheckpoint>,
    /// Drafts, and checkpoints that are being removed.
    unfinished: Vec<PathBuf>,
}

#[derive(Serialize)]
struct ListedCheckpoint {
    number: u64,
    path: PathBuf,
    /// True if the manifest is good and all files are there in their lengths.
    whole: bool,
    /// True if a file could not be read, so that the checkpoint may be whole.
    unreadable: bool,
    defects: Vec<String>,
    #[serde(flatten)]
    summary: Option<ManifestSummary>,
}

/// The fields that are known if the manifest can be read.
#[derive(Serialize)]
struct ManifestSummary {
    step: u64,
    epoch: u64,
    world_size: usize,
    bytes: u64,
    created: u64,
    kind: CheckpointKind,
}

impl CheckpointList {
    fn read(place: &Place) -> Result<Self> {
        let rows = checkpoints_of(place)?;
        let (latest, unfinished) = match place {
            Place::Checkpoint(_) => (None, Vec::new()),
            Place::Folder(folder) => {
                let unfinished = folder.unfinished();
                let unfinished = unfinished.map_err(|error| wrong_place(place.path(), error))?;
                (folder.latest_hint(), unfinished)
            }
        };
        Ok(Self {
            place: place.path().to_owned(),
            latest,
            checkpoints: rows.iter().map(ListedCheckpoint::read).collect(),
            unfinished,
        })
    }

    fn text(&self) -> String {
        if self.checkpoints.is_empty() && self.unfinished.is_empty() {
            return format!("no checkpoints in {}\n", self.place.display());
        }
        let mut table = vec![
            [
                "number", "step", "epoch", "ranks", "size", "age", "kind", "state",
            ]
            .map(str::to_owned),
        ];
        table.extend(self.checkpoints.iter().map(|row| row.cells(self.latest)));
        let mut text = columns(&table);
        let is_there = |number| self.checkpoints.iter().any(|x| x.number == number);
        if let Some(number) = self.latest.filter(|&x| !is_there(x)) {
            text.push_str(&format!(
                "`latest` names checkpoint {number}, which is not there\n"
            ));
        }
        for path in &self.unfinished {
            text.push_str(&format!("unfinished: {}\n", path.display()));
        }
        text
    }
}

impl ListedCheckpoint {
    fn read(checkpoint: &Checkpoint) -> Self {
        let report = checkpoint.verify(VerifyLevel::Sizes);
        let summary = checkpoint.manifest().ok().map(|manifest| ManifestSummary {
            step: manifest.metadata.step,
            epoch: manifest.metadata.epoch,
            world_size: manifest.metadata.world_size.get(),
            bytes: manifest.bytes(),
            created: manifest.created,
            kind: manifest.metadata.kind,
        });
        Self {
            number: checkpoint.number(),
            path: checkpoint.path().to_owned(),
            whole: report.is_good(),
            unreadable: report.unreadable().is_some(),
            defects: report.defects.iter().map(ToString::to_string).collect(),
            summary,
        }
    }

    fn cells(&self, latest: Option<u64>) -> [String; 8] {
        let found = if self.unreadable {
            "unreadable"
        } else {
            "broken"
        };
        let mut state = match self.defects.as_slice() {
            [] => "sizes ok".to_owned(),
            [defect] => format!("{found}: {defect}"),
            [defect, more @ ..] => format!("{found}: {defect}; and {} more", more.len()),
        };
        if latest == Some(self.number) {
            state = format!("latest, {state}");
        }
        let number = self.number.to_string();
        let Some(summary) = &self.summary else {
            let [a, b, c, d, e, f] = ["-"; 6].map(str::to_owned);
            return [number, a, b, c, d, e, f, state];
        };
        [
            number,
            summary.step.to_string(),
            summary.epoch.to_string(),
            summary.world_size.to_string(),
            size(summary.bytes),
            duration(age(summary.created)),
            summary.kind.to_string(),
            state,
        ]
    }
}

fn show(checkpoint: &Checkpoint, as_json: bool) -> Result<ExitCode> {
    let manifest = checkpoint.manifest();
    let manifest = manifest.map_err(|error| unreadable(checkpoint, error))?;
    print(&if as_json {
        json(manifest)?
    } else {
        shown(checkpoint, manifest)
    })
}

fn shown(checkpoint: &Checkpoint, manifest: &Manifest) -> String {
    let metadata = &manifest.metadata;
    let mut rows: Vec<[String; 2]> = Vec::new();
    let mut row = |name: &str, value: String| rows.push([name.to_owned(), value]);
    row("checkpoint", checkpoint.path().display().to_string());
    row("number", checkpoint.number().to_string());
    if manifest.number != checkpoint.number() {
        row("written as", manifest.number.to_string());
    }
    row("kind", metadata.kind.to_string());
    row("age", duration(age(manifest.created)));
    row(
        "library",
        format!("{} (format {})", manifest.library, manifest.format),
    );
    row("step", metadata.step.to_string());
    row("epoch", metadata.epoch.to_string());
    row("ranks", metadata.world_size.to_string());
    row(
        "seed",
        metadata
            .seed
            .map_or_else(|| "none".to_owned(), |x| x.to_string()),
    );
    for (index, loader) in metadata.loaders.iter().enumerate() {
        row(&format!("loader {index}"), loader_text(loader));
    }
    if !metadata.parameters.is_empty() {
        let elements = metadata
            .parameters
            .iter()
            .map(|x| x.shape.iter().fold(1, |a, &b| b.saturating_mul(a)));
        let elements = elements.fold(0_u64, u64::saturating_add);
        row(
            "parameters",
            format!("{} with {elements} elements", metadata.parameters.len()),
        );
    }
    for (name, value) in &metadata.extra {
        row(name, short(&value.to_string()));
    }
    let mut text = columns(&rows);

    let count = manifest.files.len();
    text.push_str(&format!("\n{count} files, {}\n", size(manifest.bytes())));
    let mut files = vec![["name", "size", "role", "blake3"].map(str::to_owned)];
    files.extend(manifest.files.iter().map(|(name, entry)| {
        let sum = entry.blake3.to_string();
        [
            name.to_string(),
            size(entry.bytes),
            entry.role.to_string(),
            sum,
        ]
    }));
    text + &columns(&files)
}

fn loader_text(loader: &LoaderState) -> String {
    let state = if loader.finished { ", finished" } else { "" };
    format!(
        "epoch {}: {} of {} samples in {} batches of {}, {}, tail {}{state}",
        loader.epoch,
        loader.consumed,
        loader.samples,
        loader.step,
        loader.global_batch,
        loader.order,
        loader.tail,
    )
}

fn verify(place: &Place, as_json: bool) -> Result<ExitCode> {
    let checkpoints = checkpoints_of(place)?;
    let mut report = VerifyOutput {
        good: !checkpoints.is_empty(),
        checkpoints: Vec::new(),
    };
    for checkpoint in &checkpoints {
        let entry = VerifiedCheckpoint::read(checkpoint);
        report.good &= entry.good;
        if !as_json {
            // One by one, since reading may take its time.
            print(&entry.text())?;
        }
        report.checkpoints.push(entry);
    }
    if as_json {
        print(&json(&report)?)?;
    } else if checkpoints.is_empty() {
        print(&format!("no checkpoints in {}\n", place.path().display()))?;
    }
    Ok(if report.good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The fields are those of the JSON object.
#[derive(Serialize)]
struct VerifyOutput {
    good: bool,
    checkpoints: Vec<VerifiedCheckpoint>,
}

#[derive(Serialize)]
struct VerifiedCheckpoint {
    number: u64,
    path: PathBuf,
    good: bool,
    /// True if a file could not be read, so that the checkpoint may be good.
    unreadable: bool,
    files: Option<usize>,
    bytes: Option<u64>,
    defects: Vec<Defect>,
    /// Files that the manifest does not list; nothing reads them.
    untracked: Vec<String>,
}

#[derive(Serialize)]
struct Defect {
    file: String,
    what: String,
}

impl VerifiedCheckpoint {
    fn read(checkpoint: &Checkpoint) -> Self {
        let report = checkpoint.verify(VerifyLevel::Hashes);
        let manifest = checkpoint.manifest().ok();
        let defects = report.defects.iter().map(|defect| Defect {
            file: defect.file.clone(),
            what: defect.to_string(),
        });
        Self {
            number: report.number,
            good: report.is_good(),
            unreadable: report.unreadable().is_some(),
            files: manifest.map(|x| x.files.len()),
            bytes: manifest.map(accelerator_manifest::Manifest::bytes),
            defects: defects.collect(),
            untracked: report.untracked,
            path: report.path,
        }
    }

    fn text(&self) -> String {
        let state = match (self.good, self.unreadable) {
            (true, _) => "good",
            (false, true) => "UNREADABLE",
            (false, false) => "BROKEN",
        };
        let mut text = format!("{}: {state}", self.path.display());
        if let (Some(files), Some(bytes)) = (self.files, self.bytes) {
            text.push_str(&format!(" ({files} files, {})", size(bytes)));
        }
        text.push('\n');
        for defect in &self.defects {
            text.push_str(&format!("  {}\n", defect.what));
        }
        for file in &self.untracked {
            text.push_str(&format!("  {file}: not in the manifest (is not read)\n"));
        }
        text
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
