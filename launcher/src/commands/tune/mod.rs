//! `accel-launch tune`: searches hyperparameters of any program, and shows searches.

mod list;
mod search;
mod show;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use accelerator_tune::{Config, Mode, Number, SearchFolder};
use clap::{Args, Subcommand};
use serde::Serialize;

use crate::error::{Error, Result};
use crate::supervisor::shim::LivenessPipe;
use crate::text::{columns, json, note, plain, print};

/// Searches the hyperparameters of a program that prints its metrics as JSON lines.
///
/// SPEC, a TOML or JSON file, names the metric, the space, the scheduler and when trials stop. The program's arguments
/// are filled with the parameters of each trial: `{lr}`, `{optimizer/name}`; `{trial}`, `{folder}`, `{params}` (a JSON file with all of them) and
/// `{checkpoint}`. A line that it prints is a report where it is a JSON object with the metric. The same command resumes a
/// search that was interrupted, by whatever.
#[derive(Args, Clone, Debug)]
#[command(
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true,
    override_usage = "accel-launch tune [OPTIONS] SPEC -- PROGRAM [ARGS]...\n       \
        accel-launch tune list|show|best|resume|stop DIR"
)]
pub(crate) struct TuneArgs {
    #[command(subcommand)]
    action: Option<TuneCommand>,
    #[command(flatten)]
    search: Option<search::SearchArgs>,
}

#[derive(Clone, Debug, Subcommand)]
enum TuneCommand {
    /// List the searches in a folder.
    List(list::ListSearchesArgs),
    /// Show the trials of a search.
    Show(show::ShowSearchArgs),
    /// Print the best result of a search, its trial, configuration and checkpoint.
    Best(BestArgs),
    /// Go on with a search that was interrupted, by the command that began it.
    Resume(search::ResumeArgs),
    /// Pause a search that runs: its trials save at their next report.
    Stop(StopArgs),
}

#[derive(Args, Clone, Debug)]
struct BestArgs {
    /// The search's folder.
    folder: PathBuf,

    /// The metric; the search's own otherwise.
    #[arg(long)]
    metric: Option<String>,

    /// Whether a larger or a smaller value is better; as in the search otherwise.
    #[arg(long, value_parser = mode)]
    mode: Option<Mode>,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The fields are those of the JSON object.
#[derive(Serialize)]
struct BestResult<'a> {
    metric: &'a str,
    mode: Mode,
    value: Option<Number>,
    trial: &'a str,
    training_iteration: u64,
    config: Config,
    checkpoint: Option<&'a Path>,
}

#[derive(Args, Clone, Debug)]
struct StopArgs {
    /// The search's folder.
    folder: PathBuf,
}

impl TuneArgs {
    /// Whether processes are started that must not outlive the launcher.
    pub(crate) fn starts_processes(&self) -> bool {
        matches!(self.action, None | Some(TuneCommand::Resume(_)))
    }
}

/// Does what was asked; `liveness` is the pipe from the launcher's shim.
///
/// # Errors
/// When a specification, a folder or an argument cannot be used, or no trial started.
pub(crate) fn run(arguments: &TuneArgs, liveness: Option<LivenessPipe>) -> Result<ExitCode> {
    match &arguments.action {
        None => match &arguments.search {
            Some(search) => search::run(search, liveness),
            None => Err(Error::usage(
                "a search takes a specification and a program: accel-launch tune SPEC -- PROGRAM {lr}",
            )),
        },
        Some(TuneCommand::List(arguments)) => list::run(arguments),
        Some(TuneCommand::Show(arguments)) => show::run(arguments),
        Some(TuneCommand::Best(arguments)) => best(arguments),
        Some(TuneCommand::Resume(arguments)) => search::resume(arguments, liveness),
        Some(TuneCommand::Stop(arguments)) => stop(arguments),
    }
}

fn best(arguments: &BestArgs) -> Result<ExitCode> {
    let search = SearchFolder::open(&arguments.folder).map_err(of_tune)?;
    let objective = search.spec().objective();
    let metric = arguments.metric.as_deref().unwrap_or(&objective.metric);
    let mode = arguments.mode.unwrap_or(objective.mode);
    let Some((trial, result, config)) = search.results().best_result(metric, mode) else {
        return Err(Error::usage(format!(
            "no trial of {} has reported a number as `{metric}`",
            plain(&arguments.folder.display().to_string())
        )));
    };
    let best = BestResult {
        metric,
        mode,
        value: result.value(metric).map(Number),
        trial: &trial.name,
        training_iteration: result.training_iteration,
        config,
        checkpoint: trial.checkpoint.as_deref(),
    };
    if arguments.json {
        return print(&json(&best)?);
    }
    let row = |name: &str, text: String| [name.to_owned(), plain(&text)];
    let value = best.value.map(|value| value.0.to_string());
    let checkpoint = best.checkpoint.map(|path| path.display().to_string());
    print(&columns(&[
        row(metric, value.unwrap_or_default()),
        row("trial", best.trial.to_owned()),
        row("iteration", best.training_iteration.to_string()),
        row("config", best.config.to_string()),
        row(
            "checkpoint",
            checkpoint.unwrap_or_else(|| "none".to_owned()),
        ),
    ]))
}

fn stop(arguments: &StopArgs) -> Result<ExitCode> {
    let search = SearchFolder::open(&arguments.folder).map_err(of_tune)?;
    let folder = plain(&arguments.folder.display().to_string());
    match search.interrupt().map_err(of_tune)? {
        true => note(&format!(
            "the search in {folder} pauses when its trials have reported; go on with: accel-launch tune resume {folder}"
        )),
        false => note(&format!(
            "no process of this host carries out the search in {folder}"
        )),
    }
    Ok(ExitCode::SUCCESS)
}

fn mode(word: &str) -> std::result::Result<Mode, String> {
    match word {
        "min" => Ok(Mode::Min),
        "max" => Ok(Mode::Max),
        _ => Err("expected `min` or `max`".to_owned()),
    }
}

fn of_tune(error: accelerator_tune::Error) -> Error {
    match error.is_misuse() || error.is_not_found() || error.is_conflict() {
        true => Error::usage(error.to_string()),
        false => Error::system(error.to_string()),
    }
}
