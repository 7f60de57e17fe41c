//! `accel-launch runs export`.

use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use accelerator_host::fs::write_output;
use accelerator_track::{CsvFile, Point, RunHistory, RunStatus, TensorBoard, internal::export};
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::{RunsFolder, failed};
use crate::error::{Error, Result};

#[derive(Args, Clone, Debug)]
pub(super) struct ExportArgs {
    /// The run: its folder's name, its id or the beginning of that, its name, or a path.
    #[arg(value_name = "RUN")]
    run: String,

    #[command(flatten)]
    place: RunsFolder,

    /// What to write.
    #[arg(long, value_enum, default_value_t = ExportFormat::Csv)]
    format: ExportFormat,

    /// Where to write: a file, or for `tensorboard` a folder; standard output without it.
    #[arg(short, long, value_name = "PATH")]
    output: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum ExportFormat {
    /// The points of all metrics, a row each.
    Csv,
    /// The points of all metrics, a JSON object a line.
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

pub(super) fn run(arguments: &ExportArgs) -> Result<ExitCode> {
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

/// A file is written as a whole or not at all; what is no file, such as a pipe, is written to. A closed one is no error on
/// standard output.
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
