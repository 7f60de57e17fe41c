//! Searching, with the signals that the launcher's shim receives.

use std::env;
use std::path::{self, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use accelerator_tune::{Search, SearchEnd, SearchFolder, SearchSpec};
use clap::Args;

use super::of_tune;
use crate::error::{Error, Result};
use crate::event::{Channel, Event};
use crate::supervisor::shim::{self, LivenessPipe};
use crate::supervisor::signals::{self, Relay, Route};
use crate::text::{note, plain, print};

#[derive(Args, Clone, Debug)]
pub(super) struct SearchArgs {
    /// The specification, a TOML or JSON file.
    spec: PathBuf,

    /// Where the search's files are [default: tune/NAME, by the specification's name].
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,

    /// How many trials run at the same time [default: the specification's `slots`, or what fits this machine].
    #[arg(long, value_name = "N")]
    slots: Option<usize>,

    /// How many configurations are drawn [default: the specification's `num_samples`].
    #[arg(long, value_name = "N")]
    num_samples: Option<u32>,

    /// The program and its arguments, with placeholders [default: the specification's `program`].
    #[arg(last = true, value_name = "PROGRAM")]
    program: Vec<String>,
}

#[derive(Args, Clone, Debug)]
pub(super) struct ResumeArgs {
    /// The search's folder.
    folder: PathBuf,

    /// How many trials run at the same time [default: as before].
    #[arg(long, value_name = "N")]
    slots: Option<usize>,
}

pub(super) fn run(arguments: &SearchArgs, liveness: Option<LivenessPipe>) -> Result<ExitCode> {
    let mut spec = SearchSpec::from_file(&arguments.spec).map_err(of_tune)?;
    spec.slots = arguments.slots.or(spec.slots);
    spec.num_samples = arguments.num_samples.unwrap_or(spec.num_samples);
    if !arguments.program.is_empty() {
        spec.program.clone_from(&arguments.program);
    }
    search(spec, arguments.folder.clone(), liveness)
}

pub(super) fn resume(arguments: &ResumeArgs, liveness: Option<LivenessPipe>) -> Result<ExitCode> {
    let before = SearchFolder::open(&arguments.folder).map_err(of_tune)?;
    let mut spec = before.spec().clone();
    if spec.program.is_empty() {
        return Err(Error::usage(format!(
            "the trials of the search in {} are processes of the program that searches: start that program again, as it was \
             started, and it goes on",
            plain(&arguments.folder.display().to_string())
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
                plain(&directory.display().to_string())
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
    let results = search.run_programs(program).map_err(of_tune);
    while shim::is_over() {
        // The thread that ends the processes of the search ends this one, too.
        thread::park();
    }
    let results = results?;
    let folder = plain(&results.folder().display().to_string());
    match results.ending() {
        SearchEnd::Finished => {}
        SearchEnd::Interrupted | SearchEnd::OutOfTime => {
            note(&format!(
                "the search is paused; go on with: accel-launch tune resume {folder}"
            ));
            // As a job that is to be started again.
            return Ok(ExitCode::from(accelerator_env::PREEMPTED_EXIT_CODE));
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
