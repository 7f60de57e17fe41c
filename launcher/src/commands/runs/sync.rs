//! `accel-launch runs sync`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use accelerator_track::{CsvFile, Sink, TensorBoard, deliver};
use clap::Args;

use super::{RunsFolder, failed, label};
use crate::error::{Error, Result, chain};
use crate::text::{note, print};

#[derive(Args, Clone, Debug)]
pub(super) struct SyncArgs {
    /// The runs: names of their folders, ids or beginnings of those, names, or paths.
    #[arg(id = "run_names", value_name = "RUN", required_unless_present = "all")]
    names: Vec<String>,

    /// All runs of the folder.
    #[arg(long, conflicts_with = "run_names")]
    all: bool,

    #[command(flatten)]
    place: RunsFolder,

    /// Where to deliver them: `csv`, to `metrics.csv` in the run's folder; `tensorboard`, to event files there, or
    /// `tensorboard:DIR`, to a folder for each run in DIR.
    #[arg(long, value_name = "PLACE")]
    to: Destination,

    /// Say only what would be delivered.
    #[arg(long)]
    dry_run: bool,
}

#[derive(Clone, Debug)]
enum Destination {
    Csv,
    TensorBoard(Option<PathBuf>),
}

pub(super) fn run(arguments: &SyncArgs) -> Result<ExitCode> {
    let folders = match arguments.all {
        true => {
            let runs = arguments.place.open()?.list().map_err(failed)?;
            runs.into_iter().map(|run| run.folder).collect()
        }
        false => {
            let found = arguments.names.iter().map(|x| arguments.place.find(x));
            found.collect::<Result<Vec<_>>>()?
        }
    };
    let mut text = String::new();
    let mut has_failed = false;
    for folder in &folders {
        let mut sink = arguments.to.sink(folder);
        let (name, place) = (label(folder), sink.name());
        if arguments.dry_run {
            text.push_str(&format!("{name}: would be delivered to {place}\n"));
            continue;
        }
        // The others are delivered all the same.
        match deliver(folder, &mut *sink).map_err(failed) {
            Ok(()) => text.push_str(&format!("{name}: delivered to {place}\n")),
            Err(error) => {
                has_failed = true;
                note(&format!(
                    "{name}: not delivered to {place}: {}",
                    chain(&error)
                ));
            }
        }
    }
    print(&text)?;
    match has_failed {
        true => Err(Error::system("not all runs were delivered")),
        false => Ok(ExitCode::SUCCESS),
    }
}

impl Destination {
    fn sink(&self, run: &Path) -> Box<dyn Sink> {
        match self {
            Self::Csv => Box::new(CsvFile::in_run()),
            Self::TensorBoard(None) => Box::new(TensorBoard::in_run()),
            Self::TensorBoard(Some(folder)) => Box::new(TensorBoard::new(folder.join(label(run)))),
        }
    }
}

impl FromStr for Destination {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.split_once(':') {
            None if text == "csv" => Ok(Self::Csv),
            None if text == "tensorboard" => Ok(Self::TensorBoard(None)),
            Some(("tensorboard", folder)) if !folder.is_empty() => {
                Ok(Self::TensorBoard(Some(folder.into())))
            }
            _ => Err("expected csv, tensorboard or tensorboard:DIR".to_owned()),
        }
    }
}
