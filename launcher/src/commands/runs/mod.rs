//! `accel-launch runs`: lists, shows and compares tracked runs, delivers them elsewhere, starts them again.

mod deliver;
mod gc;
mod list;
mod reproduce;
mod show;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use accelerator_track::{RunHistory, RunSummary, Runs};
use clap::{Args, Subcommand};

use crate::error::{Error, Result};
use crate::text::plain;

/// Arguments of `accel-launch runs`.
#[derive(Args, Clone, Debug)]
#[command(disable_help_subcommand = true)]
pub(crate) struct RunsArgs {
    #[command(subcommand)]
    action: RunsCommand,
}

#[derive(Clone, Debug, Subcommand)]
enum RunsCommand {
    /// List the runs in a folder.
    List(list::ListArgs),
    /// Show everything about a run.
    Show(show::ShowArgs),
    /// Show the hyperparameters and metrics of several runs side by side, with the differences marked.
    Compare(show::CompareArgs),
    /// Name the inputs that differ between two runs: sources, program, arguments, hyperparameters, data, artifacts.
    Diff(show::DiffArgs),
    /// Write a run to a file.
    Export(deliver::ExportArgs),
    /// Write a self-contained HTML page that shows a run or compares several.
    Report(deliver::ReportArgs),
    /// Serve the page of `report` for all runs in a folder, and update it while runs are written.
    ///
    /// Only this machine can open the page. The command prints its address, which has a new token each time. If you are
    /// logged in over SSH, forward the port: `ssh -L PORT:127.0.0.1:PORT HOST`.
    Board(deliver::BoardArgs),
    /// Copy runs, with the artifacts that they made and used, to another folder of runs. Skips what is already there.
    Upload(deliver::UploadArgs),
    /// Write runs to a CSV table, TensorBoard or MLflow; only the parts that are missing there are sent.
    Sync(deliver::SyncArgs),
    /// Remove runs, and leftover data that nothing needs.
    ///
    /// Removes the runs that all given options select; without such options, removes no run. Never removes runs that
    /// are being written, runs with the tag `keep`, or files in a run's folder that the run did not write.
    Gc(gc::GcArgs),
    /// Start the program of a recorded run again, and compare the bits of its results.
    ///
    /// The exit code is 0 if all bits are the same, 1 if not, and 2 if the program could not be run.
    Reproduce(reproduce::ReproduceArgs),
}

/// The place of the runs.
#[derive(Args, Clone, Debug)]
struct RunsFolder {
    /// The folder of all runs.
    #[arg(long = "runs", value_name = "DIR", default_value = "runs")]
    folder: PathBuf,
}

/// Runs the subcommand.
///
/// # Errors
/// If there is no such folder or run, a journal is damaged, or standard output cannot be written.
pub(crate) fn run(arguments: &RunsArgs) -> Result<ExitCode> {
    match &arguments.action {
        RunsCommand::List(arguments) => list::run(arguments),
        RunsCommand::Show(arguments) => show::run(arguments),
        RunsCommand::Compare(arguments) => show::compare(arguments),
        RunsCommand::Diff(arguments) => show::diff(arguments),
        RunsCommand::Export(arguments) => deliver::run_export(arguments),
        RunsCommand::Report(arguments) => deliver::report(arguments),
        RunsCommand::Board(arguments) => deliver::board(arguments),
        RunsCommand::Upload(arguments) => deliver::run_upload(arguments),
        RunsCommand::Sync(arguments) => deliver::sync(arguments),
        RunsCommand::Gc(arguments) => gc::run(arguments),
        RunsCommand::Reproduce(arguments) => reproduce::run(arguments),
    }
}

impl RunsFolder {
    fn open(&self) -> Result<Runs> {
        Runs::open(&self.folder).map_err(failed)
    }

    /// Returns the folder of a run, by a name that [`Runs::find`] knows, or by its path.
    fn find(&self, run: &str) -> Result<PathBuf> {
        let path = Path::new(run);
        let is_path = run.contains('/') || matches!(run, "." | "..");
        if is_path && path.is_dir() {
            return Ok(path.to_owned());
        }
        self.open()?.find(run).map_err(failed)
    }

    fn history(&self, run: &str) -> Result<RunHistory> {
        RunHistory::read(self.find(run)?).map_err(failed)
    }

    fn summary(&self, run: &str) -> Result<RunSummary> {
        RunSummary::read(self.find(run)?).map_err(failed)
    }
}

/// Converts an error: exit code 2 if something does not exist or the request is wrong, 1 if something cannot be read or
/// written.
fn failed(error: accelerator_track::Error) -> Error {
    let message = error.to_string();
    let is_usage = error.is_not_found() || error.is_misuse();
    let told = match is_usage {
        true => Error::usage(message),
        false => Error::system(message),
    };
    told.with_source(error)
}

/// Returns the name of a run's folder, by which it is shown and found.
fn label(folder: &Path) -> String {
    // `.` has no name.
    let whole = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let name = whole.file_name().unwrap_or(whole.as_os_str());
    plain(&name.to_string_lossy())
}

/// Formats a value of JSON for a table: text without quotes.
fn value_text(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::String(text) => plain(text),
        other => plain(&other.to_string()),
    }
}

/// Makes a row of a table of texts.
fn row<'a>(cells: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    cells.into_iter().map(str::to_owned).collect()
}
