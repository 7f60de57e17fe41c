//! `accel-launch tune list`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use accelerator_tune::{Number, SearchEnd, SearchFolder, TrialStatus};
use clap::Args;
use serde::Serialize;

use crate::error::{Error, Result};
use crate::text::{columns, json, note, plain, print};

#[derive(Args, Clone, Debug)]
pub(super) struct ListSearchesArgs {
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

pub(super) fn run(arguments: &ListSearchesArgs) -> Result<ExitCode> {
    let folder = &arguments.folder;
    let entries = folder.read_dir().map_err(|error| {
        let shown = plain(&folder.display().to_string());
        Error::usage(format!("the folder {shown} cannot be read: {error}"))
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
        return Err(Error::usage(format!(
            "{} has no search",
            plain(&folder.display().to_string())
        )));
    }
    let mut rows =
        vec![["FOLDER", "STATUS", "TRIALS", "FAILED", "METRIC", "BEST"].map(str::to_owned)];
    rows.extend(searches.iter().map(|search| {
        [
            plain(&search.folder.display().to_string()),
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
    let count = |statuses: &[TrialStatus]| {
        let trials = results.trials().iter();
        trials
            .filter(|trial| statuses.contains(&trial.status))
            .count()
    };
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
        ended: count(&[TrialStatus::Terminated, TrialStatus::Error]),
        failed: count(&[TrialStatus::Error]),
        metric: objective.metric.clone(),
        best: best.map(|(_, best)| Number(best)),
    })
}
