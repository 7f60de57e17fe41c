//! `accel-launch tune`: searches hyperparameters of any program, and shows searches.

use std::path::{self, Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, thread};

use accelerator_tune::{
    Config, Mode, Number, Search, SearchEnd, SearchFolder, SearchSpec, TrialStatus,
};
use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use crate::error::{Error, Result};
use crate::event::{Channel, Event};
use crate::supervisor::shim::{self, LivenessPipe};
use crate::supervisor::signals::{self, Relay, Route};
use crate::text::{columns, json, note, plain, print};

/// Searches the hyperparameters of a program that prints its metrics as JSON lines.
///
/// SPEC is a TOML or JSON file with the metric, the search space, the scheduler and the rules that stop trials. In the
/// program's arguments, placeholders stand for the parameters of a trial (`{lr}`, `{optimizer/name}`), its name
/// `{trial}`, its folder `{folder}`, a JSON file with all parameters `{params}`, and the checkpoint to resume from
/// `{checkpoint}`. A line of the program's output is a report if it is a JSON object with the metric. The same command
/// resumes a search that was interrupted.
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
    search: Option<SearchArgs>,
}

#[derive(Clone, Debug, Subcommand)]
enum TuneCommand {
    /// List the searches in a folder.
    List(ListSearchesArgs),
    /// Show the trials of a search.
    Show(ShowSearchArgs),
    /// Print the best result of a search, with its trial, configuration and checkpoint.
    Best(BestArgs),
    /// Resume an interrupted search, with the specification and program that it began with.
    Resume(ResumeArgs),
    /// Pause a running search: its trials save at their next report.
    Stop {
        /// The search's folder.
        folder: PathBuf,
    },
}

#[derive(Args, Clone, Debug)]
struct BestArgs {
    /// The search's folder.
    folder: PathBuf,

    /// The metric [default: the search's].
    #[arg(long)]
    metric: Option<String>,

    /// Prefer smaller (min) or larger (max) values of the metric [default: the search's mode].
    #[arg(long, value_parser = mode)]
    mode: Option<Mode>,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The fields are those of the JSON object.
#[derive(Serialize)]
struct ShownBest<'a> {
    metric: &'a str,
    mode: Mode,
    value: Option<Number>,
    trial: &'a str,
    training_iteration: u64,
    config: &'a Config,
    checkpoint: Option<&'a Path>,
    checkpoint_iteration: Option<u64>,
}

impl TuneArgs {
    /// Returns `true` if processes are started that must not outlive the launcher.
    pub(crate) fn starts_processes(&self) -> bool {
        matches!(self.action, None | Some(TuneCommand::Resume(_)))
    }
}

/// Runs the command; `liveness` is the pipe from the launcher's shim.
///
/// # Errors
/// When a specification, a folder or an argument cannot be used, or no trial started.
pub(crate) fn run(arguments: &TuneArgs, liveness: Option<LivenessPipe>) -> Result<ExitCode> {
    match &arguments.action {
        None => match &arguments.search {
            Some(search) => begin(search, liveness),
            None => Err(Error::usage(
                "a search takes a specification and a program: accel-launch tune SPEC -- PROGRAM {lr}",
            )),
        },
        Some(TuneCommand::List(arguments)) => list(arguments),
        Some(TuneCommand::Show(arguments)) => show(arguments),
        Some(TuneCommand::Best(arguments)) => best(arguments),
        Some(TuneCommand::Resume(arguments)) => resume(arguments, liveness),
        Some(TuneCommand::Stop { folder }) => stop(folder),
    }
}

fn best(arguments: &BestArgs) -> Result<ExitCode> {
    let search = SearchFolder::open(&arguments.folder).map_err(tune_error)?;
    let objective = search.spec().objective();
    let metric = arguments.metric.as_deref().unwrap_or(&objective.metric);
    let mode = arguments.mode.unwrap_or(objective.mode);
    let Some(found) = search.results().best_result(metric, mode) else {
        return Err(Error::usage(format!(
            "no trial of {} has reported a number as `{metric}`",
            shown(&arguments.folder)
        )));
    };
    let best = ShownBest {
        metric,
        mode,
        value: found.result.value(metric).map(Number),
        trial: &found.trial.name,
        training_iteration: found.result.training_iteration,
        config: &found.config,
        checkpoint: found.checkpoint.as_ref().map(|(path, _)| path.as_path()),
        checkpoint_iteration: found.checkpoint.as_ref().map(|(_, iteration)| *iteration),
    };
    if arguments.json {
        return print(&json(&best)?);
    }
    let row = |name: &str, text: String| [name.to_owned(), plain(&text)];
    let value = best.value.map(|value| value.0.to_string());
    let checkpoint = match (best.checkpoint, best.checkpoint_iteration) {
        (Some(path), Some(saved)) if saved != best.training_iteration => {
            format!("{} (of iteration {saved})", shown(path))
        }
        (Some(path), _) => shown(path),
        (None, _) => "none".to_owned(),
    };
    print(&columns(&[
        row(metric, value.unwrap_or_default()),
        row("trial", best.trial.to_owned()),
        row("iteration", best.training_iteration.to_string()),
        row("config", best.config.to_string()),
        row("checkpoint", checkpoint),
    ]))
}

fn stop(folder: &Path) -> Result<ExitCode> {
    let search = SearchFolder::open(folder).map_err(tune_error)?;
    let folder = shown(folder);
    match search.interrupt().map_err(tune_error)? {
        true => note(&format!(
            "the search in {folder} pauses when its trials have reported; continue with: accel-launch tune resume {folder}"
        )),
        false => note(&format!(
            "no process of this host carries out the search in {folder}"
        )),
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Args, Clone, Debug)]
struct SearchArgs {
    /// The specification, a TOML or JSON file.
    spec: PathBuf,

    /// The folder for the search's files [default: tune/NAME, where NAME is the specification's].
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,

    /// Number of trials to run at the same time [default: the specification's `slots`, or as many as fit this machine].
    #[arg(long, value_name = "N")]
    slots: Option<usize>,

    /// The number of configurations to draw [default: the specification's `num_samples`].
    #[arg(long, value_name = "N")]
    num_samples: Option<u32>,

    /// The program and its arguments, with placeholders [default: the specification's `program`].
    #[arg(last = true, value_name = "PROGRAM")]
    program: Vec<String>,
}

#[derive(Args, Clone, Debug)]
struct ResumeArgs {
    /// The search's folder.
    folder: PathBuf,

    /// Number of trials to run at the same time [default: as before].
    #[arg(long, value_name = "N")]
    slots: Option<usize>,
}

fn begin(arguments: &SearchArgs, liveness: Option<LivenessPipe>) -> Result<ExitCode> {
    let mut spec = SearchSpec::from_file(&arguments.spec).map_err(tune_error)?;
    spec.slots = arguments.slots.or(spec.slots);
    spec.num_samples = arguments.num_samples.unwrap_or(spec.num_samples);
    if !arguments.program.is_empty() {
        spec.program.clone_from(&arguments.program);
    }
    search(spec, arguments.folder.clone(), liveness)
}

fn resume(arguments: &ResumeArgs, liveness: Option<LivenessPipe>) -> Result<ExitCode> {
    let before = SearchFolder::open(&arguments.folder).map_err(tune_error)?;
    let mut spec = before.spec().clone();
    if spec.program.is_empty() {
        return Err(Error::usage(format!(
            "the trials of the search in {} are processes of the program that searches: start that program again, as it was \
             started, and it continues",
            shown(&arguments.folder)
        )));
    }
    spec.slots = arguments.slots.or(spec.slots);
    let folder = path::absolute(&arguments.folder);
    let folder = folder.map_err(|error| Error::system(format!("no working directory: {error}")))?;
    if let Some(directory) = before.directory() {
        // Its program and what that reads may be named from there.
        env::set_current_dir(directory).map_err(|error| {
            Error::usage(format!(
                "the search was begun in {}, where its program is to run, and which cannot be entered: {error}",
                shown(directory)
            ))
        })?;
    }
    search(spec, Some(folder), liveness)
}

fn search(
    spec: SearchSpec,
    folder: Option<PathBuf>,
    liveness: Option<LivenessPipe>,
) -> Result<ExitCode> {
    let program = spec.program.clone();
    let objective = spec.objective();
    let mut search = Search::from(spec).interrupted_by(count_signals(liveness)?);
    if let Some(folder) = folder {
        search = search.folder(folder);
    }
    let results = search.run_programs(program).map_err(tune_error);
    while shim::is_over() {
        // The thread that ends the processes of the search ends this one, too.
        thread::park();
    }
    let results = results?;
    let folder = shown(results.folder());
    match results.ending() {
        SearchEnd::Finished => {}
        SearchEnd::Interrupted | SearchEnd::OutOfTime => {
            note(&format!(
                "the search is paused; continue with: accel-launch tune resume {folder}"
            ));
            // As a job that is to be started again.
            return Ok(ExitCode::from(accelerator_host::PREEMPTED_EXIT_CODE));
        }
    }
    match results.best_config(&objective.metric, objective.mode) {
        Some(config) => print(&format!("Best config is: {config}\n")),
        None => {
            note(&format!(
                "no trial has reported a number as `{}`: a report is a line of standard output that is a JSON object with it; \
                 what trials print is in {folder}/*/output.log",
                plain(&objective.metric)
            ));
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Counts signals that ask the search to end, whichever of the launcher's two processes receives them.
fn count_signals(liveness: Option<LivenessPipe>) -> Result<Arc<AtomicU32>> {
    let Channel { sender, events } = Channel::new();
    let relay = Relay::new(sender);
    let mut received = signals::receive(&[])?;
    let count = Arc::new(AtomicU32::new(0));
    if let Some(liveness) = liveness {
        let counted = Arc::clone(&count);
        // Trials that end with this process have not failed.
        liveness.listen(relay.clone(), move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
    }
    let counted = Arc::clone(&count);
    let started = thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for signal in received.forever() {
                relay.deliver(signal, Route::Direct);
            }
        });
    let counting = thread::Builder::new()
        .name("requests".into())
        .spawn(move || {
            for event in events {
                if matches!(event, Event::Signal(_)) {
                    counted.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    started.and(counting).map_err(|error| {
        Error::system("a thread for signals could not be started").with_source(error)
    })?;
    Ok(count)
}

#[derive(Args, Clone, Debug)]
struct ListSearchesArgs {
    /// The folder of the searches.
    #[arg(default_value = "tune")]
    folder: PathBuf,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The fields are those of the JSON object.
#[derive(Serialize)]
struct ListedSearch {
    folder: PathBuf,
    name: String,
    status: &'static str,
    trials: usize,
    ended: usize,
    failed: usize,
    metric: String,
    best: Option<Number>,
}

fn list(arguments: &ListSearchesArgs) -> Result<ExitCode> {
    let folder = &arguments.folder;
    let entries = folder.read_dir().map_err(|error| {
        Error::usage(format!(
            "the folder {} cannot be read: {error}",
            shown(folder)
        ))
    })?;
    let paths = entries.flatten().map(|entry| entry.path());
    let mut folders: Vec<_> = paths.filter(|path| path.is_dir()).collect();
    folders.push(folder.clone());
    folders.sort();
    let mut searches = Vec::new();
    for path in folders {
        match listed(&path) {
            Ok(search) => searches.push(search),
            // Other folders.
            Err(error) if error.is_not_found() => {}
            Err(error) => note(&plain(&error.to_string())),
        }
    }
    if arguments.json {
        return print(&json(&searches)?);
    }
    if searches.is_empty() {
        return Err(Error::usage(format!("{} has no search", shown(folder))));
    }
    let mut rows =
        vec![["FOLDER", "STATUS", "TRIALS", "FAILED", "METRIC", "BEST"].map(str::to_owned)];
    rows.extend(searches.iter().map(|search| {
        [
            shown(&search.folder),
            search.status.to_owned(),
            format!("{}/{}", search.ended, search.trials),
            search.failed.to_string(),
            plain(&search.metric),
            search
                .best
                .map_or_else(|| "-".to_owned(), |best| best.0.to_string()),
        ]
    }));
    print(&columns(&rows))
}

fn listed(path: &Path) -> accelerator_tune::Result<ListedSearch> {
    let search = SearchFolder::open(path)?;
    let results = search.results();
    let objective = search.spec().objective();
    let count = |status: TrialStatus| {
        let trials = results.trials().iter();
        trials.filter(|trial| trial.status == status).count()
    };
    let failed = count(TrialStatus::Error);
    let best = results.best_trial(&objective.metric, objective.mode, Default::default());
    Ok(ListedSearch {
        folder: path.to_owned(),
        name: search.spec().name.clone(),
        status: match (results.ending(), search.process()) {
            (SearchEnd::Finished, _) => "finished",
            (_, Some(_)) => "running",
            _ => "paused",
        },
        trials: results.trials().len(),
        ended: count(TrialStatus::Terminated) + failed,
        failed,
        metric: objective.metric.clone(),
        best: best.map(|(_, best)| Number(best)),
    })
}

#[derive(Args, Clone, Debug)]
struct ShowSearchArgs {
    /// The search's folder.
    folder: PathBuf,

    /// The format: the table that a running search shows, comma-separated values, or JSON.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,

    /// Print JSON: the same as `--format json`.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Table,
    Csv,
    Json,
}

fn show(arguments: &ShowSearchArgs) -> Result<ExitCode> {
    let search = SearchFolder::open(&arguments.folder).map_err(tune_error)?;
    let results = search.results();
    print(&match (arguments.json, arguments.format) {
        (true, _) | (_, Format::Json) => json(&results.dataframe().json())?,
        (_, Format::Csv) => results.dataframe().to_string(),
        (_, Format::Table) => results.status(),
    })
}

fn mode(word: &str) -> std::result::Result<Mode, String> {
    match word {
        "min" => Ok(Mode::Min),
        "max" => Ok(Mode::Max),
        _ => Err("expected `min` or `max`".to_owned()),
    }
}

fn shown(path: &Path) -> String {
    plain(&path.display().to_string())
}

fn tune_error(error: accelerator_tune::Error) -> Error {
    match error.is_misuse() || error.is_not_found() || error.is_conflict() {
        true => Error::usage(error.to_string()),
        false => Error::system(error.to_string()),
    }
}
