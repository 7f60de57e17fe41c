//! The report of a search: one HTML file.

use accelerator_host::machine::unix_time;
use accelerator_track::{
    Number,
    internal::{HtmlPage, downsample},
};
use serde::Serialize;
use serde_json::Value;

use super::table::{Rows, status};
use super::trial_folder::read_results;
use crate::config::TrialId;
use crate::error::{Error, Kind, Result};
use crate::objective::Mode;
use crate::view::{Rung, SearchEnd, SearchView, Trial, TrialResult, TrialStatus};

#[cfg(test)]
mod tests;

/// The page. Curves are those that trials' folders have.
pub(super) fn html(view: &SearchView, ending: SearchEnd, best: Option<&Trial>) -> Result<String> {
    let metric = &view.objective.metric;
    let points = (ALL_POINTS / view.trials.len().max(1)).clamp(LEAST_POINTS, MOST_POINTS);
    let trials = view.trials.iter().map(|trial| {
        let curve = Curve::of(&read_results(&trial.folder)?, metric, points);
        Ok(PageTrial::of(trial, view, curve))
    });
    let page = SearchPage {
        name: &view.name,
        folder: view.folder.display().to_string(),
        generated_ms: unix_time().as_millis(),
        ending: match ending {
            SearchEnd::Finished => "finished",
            SearchEnd::Interrupted => "not finished",
            SearchEnd::OutOfTime => "out of time",
        },
        metric,
        mode: view.objective.mode,
        scheduler: &view.scheduler,
        expected: view.expected,
        parameters: &view.parameters,
        best: best.map(|best| best.id),
        best_config: best.map_or_else(Vec::new, |best| best.best_config.leaves()),
        trials: trials.collect::<Result<_>>()?,
        rungs: view.rungs.iter().map(PageRung::of).collect(),
    };
    let data = serde_json::to_string(&page).map_err(|error| Error::of(Kind::Io, error))?;
    let page = HtmlPage {
        title: &view.name,
        data: &data,
        program: PROGRAM,
        style: STYLE,
        text: &status(view, Rows::All),
    };
    Ok(page.html())
}

const PROGRAM: &str = concat!(
    include_str!("page/parallel.js"),
    include_str!("page/app.js")
);
const STYLE: &str = include_str!("page/style.css");
/// The points of all curves together, about, and of one.
const ALL_POINTS: usize = 200_000;
const LEAST_POINTS: usize = 20;
const MOST_POINTS: usize = 1000;

#[derive(Serialize)]
struct SearchPage<'a> {
    name: &'a str,
    folder: String,
    generated_ms: u128,
    ending: &'a str,
    metric: &'a str,
    mode: Mode,
    scheduler: &'a [String],
    expected: Option<usize>,
    parameters: &'a [String],
    best: Option<TrialId>,
    best_config: Vec<(String, &'a Value)>,
    trials: Vec<PageTrial<'a>>,
    rungs: Vec<PageRung>,
}

#[derive(Serialize)]
struct PageTrial<'a> {
    id: TrialId,
    name: &'a str,
    status: TrialStatus,
    /// The values, in the order of the page's parameters.
    parameters: Vec<Option<&'a Value>>,
    best: Option<Number>,
    best_at: Option<u64>,
    last: Option<Number>,
    iterations: u64,
    seconds: f64,
    error: Option<&'a str>,
    #[serde(flatten)]
    curve: Curve,
}

impl<'a> PageTrial<'a> {
    fn of(trial: &'a Trial, view: &'a SearchView, curve: Curve) -> Self {
        let metric = &view.objective.metric;
        let value = |result: &Option<TrialResult>| result.as_ref()?.value(metric).map(Number);
        let last = trial.last.as_ref();
        Self {
            id: trial.id,
            name: &trial.name,
            status: trial.status,
            parameters: view
                .parameters
                .iter()
                .map(|path| trial.best_config.value(path))
                .collect(),
            best: value(&trial.best),
            best_at: trial.best.as_ref().map(|best| best.training_iteration),
            last: value(&trial.last),
            iterations: last.map_or(0, |last| last.training_iteration),
            seconds: last.map_or(0.0, |last| last.time_total_s),
            error: trial.error.as_deref(),
            curve,
        }
    }
}

#[derive(Serialize)]
struct Curve {
    x: Vec<u64>,
    y: Vec<Number>,
}

impl Curve {
    fn of(results: &[TrialResult], metric: &str, limit: usize) -> Self {
        let values = results
            .iter()
            .filter_map(|result| Some((result.training_iteration, result.value(metric)?)));
        let (iterations, values): (Vec<_>, Vec<_>) = values.unzip();
        let kept = downsample(&values, limit);
        Self {
            x: kept.iter().map(|&at| iterations[at]).collect(),
            y: kept.iter().map(|&at| rounded(values[at])).collect(),
        }
    }
}

#[derive(Serialize)]
struct PageRung {
    time: f64,
    entries: Vec<(TrialId, Number)>,
    cutoff: Option<Number>,
}

impl PageRung {
    fn of(rung: &Rung) -> Self {
        let entries = rung.entries.iter();
        Self {
            time: rung.time,
            entries: entries
                .map(|(trial, value)| (*trial, rounded(*value)))
                .collect(),
            cutoff: rung.cutoff.map(Number),
        }
    }
}

/// Rounds a value for charts: more digits would make the page large.
fn rounded(value: f64) -> Number {
    Number(format!("{value:.5e}").parse().unwrap_or(value))
}
