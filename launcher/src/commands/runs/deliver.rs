//! `accel-launch runs export`, `report`, `board`, `sync` and `upload`: tracked runs for other programs and places.

use std::error::Error as _;
use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use accelerator_host::fs::write_output;
use accelerator_track::internal::{Board, deliver, export};
use accelerator_track::{CsvFile, Point, Report, RunHistory, RunStatus, Sink, TensorBoard, upload};
#[cfg(feature = "mlflow")]
use accelerator_track::{MlflowServer, MlflowSink};
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::{RunsFolder, failed, label};
use crate::error::{Error, Result, chain};
use crate::text::{note, plain, print, size};

#[derive(Args, Clone, Debug)]
pub(super) struct ExportArgs {
    /// The run: its name, its folder's name or path, or its id or the beginning of its id.
    #[arg(value_name = "RUN")]
    run: String,

    #[command(flatten)]
    place: RunsFolder,

    /// The content to write, and its format.
    #[arg(long, value_enum, default_value_t = ExportFormat::Csv)]
    format: ExportFormat,

    /// The file to write, or for `tensorboard` the folder [default: standard output].
    #[arg(short, long, value_name = "PATH")]
    output: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum ExportFormat {
    /// The points of all metrics, one row per point.
    Csv,
    /// The points of all metrics, one JSON object per line.
    Jsonl,
    /// Everything, as one JSON object.
    Json,
    /// Event files for TensorBoard.
    Tensorboard,
}

/// A line of `jsonl`.
#[derive(Serialize)]
struct ExportedPoint<'a> {
    key: &'a str,
    #[serde(flatten)]
    point: &'a Point,
}

/// The object of `json`.
#[derive(Serialize)]
struct ExportedRun<'a> {
    status: RunStatus,
    #[serde(flatten)]
    history: &'a RunHistory,
}

pub(super) fn run_export(arguments: &ExportArgs) -> Result<ExitCode> {
    let folder = arguments.place.find(&arguments.run)?;
    let output = arguments.output.as_deref();
    match arguments.format {
        ExportFormat::Csv => write_csv(&folder, output)?,
        ExportFormat::Jsonl => {
            let history = RunHistory::read(&folder).map_err(failed)?;
            write(output, |out| write_points(out, &history))?;
        }
        ExportFormat::Json => {
            let history = RunHistory::read(&folder).map_err(failed)?;
            let run = ExportedRun {
                status: history.status(),
                history: &history,
            };
            write(output, |out| {
                serde_json::to_writer(&mut *out, &run)?;
                out.write_all(b"\n")
            })?;
        }
        ExportFormat::Tensorboard => {
            let output = output.ok_or_else(|| {
                Error::usage("TensorBoard's event files need a folder: give one with --output")
            })?;
            export(&folder, &mut TensorBoard::new(output)).map_err(failed)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn write_csv(folder: &Path, output: Option<&Path>) -> Result<()> {
    let Some(path) = output else {
        let temporary = tempfile::tempdir()
            .map_err(|error| Error::system("no temporary folder can be made").with_source(error))?;
        let table = temporary.path().join("metrics.csv");
        export(folder, &mut CsvFile::at(&table)).map_err(failed)?;
        return write(None, |out| {
            io::copy(&mut File::open(&table)?, out).map(|_| ())
        });
    };
    export(folder, &mut CsvFile::at(path)).map_err(failed)
}

fn write_points(out: &mut dyn Write, history: &RunHistory) -> io::Result<()> {
    for series in &history.series {
        for point in &series.points {
            let key = &series.key;
            serde_json::to_writer(&mut *out, &ExportedPoint { key, point })?;
            out.write_all(b"\n")?;
        }
    }
    Ok(())
}

/// A regular file is written as a whole or not at all; a pipe, or another special file, is written to. A closed one
/// is no error on standard output.
fn write(
    output: Option<&Path>,
    content: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<()> {
    let Some(path) = output else {
        let mut stdout = BufWriter::new(io::stdout().lock());
        let written = content(&mut stdout).and_then(|()| stdout.flush());
        return match written {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                Err(Error::system("standard output cannot be written").with_source(error))
            }
            _ => Ok(()),
        };
    };
    write_output(path, content).map_err(|error| {
        let message = format!("{} cannot be written", path.display());
        Error::system(message).with_source(error)
    })
}

#[derive(Args, Clone, Debug)]
pub(super) struct ReportArgs {
    /// The runs: names, folder names or paths, or ids or beginnings of ids.
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
    // A special file may be standard output itself.
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

#[derive(Args, Clone, Debug)]
pub(super) struct SyncArgs {
    /// The runs: names, folder names or paths, or ids or beginnings of ids.
    #[arg(id = "run_names", value_name = "RUN", required_unless_present = "all")]
    names: Vec<String>,

    /// Deliver all runs in the folder.
    #[arg(long, conflicts_with = "run_names")]
    all: bool,

    #[command(flatten)]
    place: RunsFolder,

    /// The destination: `csv` writes `metrics.csv` in the run's folder; `tensorboard` writes event files there, and
    /// `tensorboard:DIR` into a folder for each run in DIR; `mlflow:URL` sends to an MLflow server, and `mlflow` to the
    /// one that MLFLOW_TRACKING_URI names.
    #[arg(long, value_name = "PLACE")]
    to: Destination,

    /// The experiment on the MLflow server, which is created if it does not exist [default: the one in
    /// MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID, else Default]
    #[arg(long, value_name = "NAME")]
    experiment: Option<String>,

    /// For a run that has not ended, also send to MLflow what follows its last checkpoint. If the run resumes from that
    /// checkpoint, the server cannot take it back.
    #[arg(long)]
    live: bool,

    /// Only print which runs would be delivered where, without checking what is missing there.
    #[arg(long)]
    dry_run: bool,
}

#[derive(Clone, Debug)]
enum Destination {
    Csv,
    TensorBoard(Option<PathBuf>),
    /// An MLflow server; holds its address if one was given.
    Mlflow(Option<String>),
}

pub(super) fn sync(arguments: &SyncArgs) -> Result<ExitCode> {
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
    for (at, folder) in folders.iter().enumerate() {
        let mut sink = arguments.sink()?;
        let (name, place) = (label(folder), sink.name());
        if arguments.dry_run {
            text.push_str(&format!("{name}: would be delivered to {place}\n"));
            continue;
        }
        // The others are delivered all the same.
        if let Err(error) = deliver(folder, &mut *sink) {
            has_failed = true;
            // A server that refuses a run answers: there is no error below.
            let is_silent = error.is_remote() && error.source().is_some();
            let error = chain(&failed(error));
            note(&format!("{name}: not delivered to {place}: {error}"));
            let rest = folders.len() - at - 1;
            if is_silent && rest > 0 {
                note(&format!(
                    "{rest} more runs were not tried: give the same command again when the server answers"
                ));
                break;
            }
            continue;
        }
        text.push_str(&format!("{name}: delivered to {place}\n"));
    }
    print(&text)?;
    match has_failed {
        true => Err(Error::system("not all runs were delivered")),
        false => Ok(ExitCode::SUCCESS),
    }
}

impl SyncArgs {
    fn sink(&self) -> Result<Box<dyn Sink>> {
        Ok(match &self.to {
            Destination::Csv => Box::new(CsvFile::in_run()),
            Destination::TensorBoard(None) => Box::new(TensorBoard::in_run()),
            Destination::TensorBoard(Some(folder)) => Box::new(TensorBoard::below(folder)),
            Destination::Mlflow(address) => self.mlflow(address.as_deref())?,
        })
    }

    #[cfg(feature = "mlflow")]
    fn mlflow(&self, address: Option<&str>) -> Result<Box<dyn Sink>> {
        let server = match address {
            Some(address) => MlflowServer::new(address),
            None => MlflowServer::from_env(),
        };
        let server = server.map_err(failed)?;
        let sink = match &self.experiment {
            Some(name) => MlflowSink::new(server, name),
            None => MlflowSink::to(server),
        };
        Ok(Box::new(if self.live { sink.live() } else { sink }))
    }

    #[cfg(not(feature = "mlflow"))]
    fn mlflow(&self, _: Option<&str>) -> Result<Box<dyn Sink>> {
        Err(Error::usage(
            "this accel-launch is built without MLflow: build it with the feature `mlflow`",
        ))
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
            None if text == "mlflow" => Ok(Self::Mlflow(None)),
            Some(("mlflow", address)) if !address.is_empty() => {
                Ok(Self::Mlflow(Some(address.to_owned())))
            }
            _ => Err("expected csv, tensorboard, tensorboard:DIR, mlflow or mlflow:URL".to_owned()),
        }
    }
}

#[derive(Args, Clone, Debug)]
pub(super) struct UploadArgs {
    /// The run: its name, its folder's name or path, or its id or the beginning of its id.
    #[arg(value_name = "RUN")]
    run: String,

    /// The folder of runs to copy to, which must exist.
    #[arg(value_name = "DIR")]
    destination: PathBuf,

    #[command(flatten)]
    place: RunsFolder,
}

pub(super) fn run_upload(arguments: &UploadArgs) -> Result<ExitCode> {
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
