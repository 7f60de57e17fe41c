//! `accel-launch runs sync` and `upload`.

use std::error::Error as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use accelerator_track::{CsvFile, Sink, TensorBoard, internal::deliver, upload};
#[cfg(feature = "mlflow")]
use accelerator_track::{MlflowServer, MlflowSink};
use clap::Args;

use super::{RunsFolder, failed, label};
use crate::error::{Error, Result, chain};
use crate::text::{note, plain, print, size};

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
    /// `tensorboard:DIR`, to a folder for each run in DIR; `mlflow:URL`, to an MLflow server, or `mlflow`, to the one that
    /// MLFLOW_TRACKING_URI names.
    #[arg(long, value_name = "PLACE")]
    to: Destination,

    /// The experiment on the MLflow server, which is made where it is not there [default: that of
    /// MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID, else Default]
    #[arg(long, value_name = "NAME")]
    experiment: Option<String>,

    /// Deliver to MLflow also what follows the last checkpoint of a run that has not ended, though the server can take
    /// nothing back if the run resumes.
    #[arg(long)]
    live: bool,

    /// Say only which runs would be delivered where, without asking whether anything of them is missing there.
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
    /// The run: its folder's name, its id or the beginning of that, its name, or a path.
    #[arg(value_name = "RUN")]
    run: String,

    /// The other folder of runs, which exists.
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
