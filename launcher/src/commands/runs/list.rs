//! `accel-launch runs list`.

use std::cmp::Ordering;
use std::path::PathBuf;
use std::process::ExitCode;

use accelerator_track::{RunStatus, RunSummary};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde::Serialize;

use super::{RunsFolder, failed, label, row};
use crate::error::Result;
use crate::text::{age, columns, duration, figure, json, plain, print};

#[derive(Args, Clone, Debug)]
pub(super) struct ListArgs {
    #[command(flatten)]
    place: RunsFolder,

    #[command(flatten)]
    filter: RunFilter,

    /// Sort by name, status, age, duration, step, a hyperparameter, or the last value of a metric.
    #[arg(long, value_name = "KEY", default_value = "age")]
    sort: String,

    /// The greatest first; by age, the oldest.
    #[arg(long)]
    reverse: bool,

    /// A metric to show; may be given several times. Without it, up to three that most runs have.
    #[arg(long = "metric", value_name = "KEY")]
    metrics: Vec<String>,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Which runs of a folder.
#[derive(Args, Clone, Debug)]
pub(super) struct RunFilter {
    /// Only runs of this status; may be given several times.
    #[arg(long = "status", value_name = "STATUS", value_parser = status())]
    statuses: Vec<RunStatus>,

    /// Only runs with this tag, `key` or `key=value`; may be given several times.
    #[arg(long = "tag", value_name = "KEY[=VALUE]")]
    tags: Vec<String>,
}

/// The fields are those of the JSON object.
#[derive(Serialize)]
struct RunsList {
    runs: Vec<RunSummary>,
    damaged: Vec<DamagedRun>,
}

#[derive(Serialize)]
struct DamagedRun {
    folder: PathBuf,
    error: String,
}

pub(super) fn run(arguments: &ListArgs) -> Result<ExitCode> {
    let mut list = RunsList::read(&arguments.place)?;
    list.runs.retain(|run| arguments.filter.takes(run));
    let by_key = |a: &RunSummary, b: &RunSummary| compare_by(&arguments.sort, a, b);
    list.runs.sort_by(by_key);
    if arguments.reverse {
        list.runs.reverse();
    }
    print(&match arguments.json {
        true => json(&list)?,
        false => list.text(arguments),
    })
}

impl RunFilter {
    pub(super) fn takes(&self, run: &RunSummary) -> bool {
        let has_status = self.statuses.is_empty() || self.statuses.contains(&run.status);
        let has = |tag: &String| match tag.split_once('=') {
            Some((key, value)) => run.tags.get(key).is_some_and(|x| x == value),
            None => run.tags.contains_key(tag),
        };
        has_status && self.tags.iter().all(has)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.statuses.is_empty() && self.tags.is_empty()
    }
}

impl RunsList {
    fn read(place: &RunsFolder) -> Result<Self> {
        let mut list = Self {
            runs: Vec::new(),
            damaged: Vec::new(),
        };
        for run in place.open()?.list().map_err(failed)? {
            match run.head.and_then(|_| RunSummary::read(&run.folder)) {
                Ok(summary) => list.runs.push(summary),
                Err(error) => list.damaged.push(DamagedRun {
                    folder: run.folder,
                    error: error.to_string(),
                }),
            }
        }
        Ok(list)
    }

    fn text(&self, arguments: &ListArgs) -> String {
        if self.runs.is_empty() && self.damaged.is_empty() {
            return format!("no runs in {}\n", arguments.place.folder.display());
        }
        let metrics = match arguments.metrics.as_slice() {
            [] => self.common_metrics(),
            given => given.iter().map(String::as_str).collect(),
        };
        let head = [
            "name", "status", "age", "duration", "attempts", "ranks", "step",
        ];
        let mut table = vec![row(head.iter().chain(&metrics).copied())];
        table.extend(self.runs.iter().map(|run| cells(run, &metrics)));
        for damaged in &self.damaged {
            table.push(row([&*label(&damaged.folder), "damaged"]));
        }
        let mut text = columns(&table);
        for damaged in &self.damaged {
            text.push_str(&format!("damaged: {}\n", plain(&damaged.error)));
        }
        text
    }

    /// Those that the most runs have; of equally many, those that come first.
    fn common_metrics(&self) -> Vec<&str> {
        const SHOWN: usize = 3;
        let mut counts: Vec<(&str, usize)> = Vec::new();
        for series in self.runs.iter().flat_map(|run| &run.series) {
            match counts.iter_mut().find(|(key, _)| *key == series.key) {
                Some((_, count)) => *count += 1,
                None => counts.push((&series.key, 1)),
            }
        }
        counts.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
        counts.into_iter().map(|(key, _)| key).take(SHOWN).collect()
    }
}

fn cells(run: &RunSummary, metrics: &[&str]) -> Vec<String> {
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let mut cells = vec![
        label(&run.folder),
        run.status.to_string(),
        duration(age(run.created_ms / 1000)),
        duration(run.duration_ms() / 1000),
        run.attempts.to_string(),
        run.world.to_string(),
        or_none(run.last_step.map(|x| x.to_string())),
    ];
    let last = |key: &&str| or_none(run.series(key).map(|x| figure(x.last.0)));
    cells.extend(metrics.iter().map(last));
    cells
}

fn compare_by(key: &str, a: &RunSummary, b: &RunSummary) -> Ordering {
    match key {
        "age" => b.created_ms.cmp(&a.created_ms),
        "name" => a.folder.cmp(&b.folder),
        "status" => a.status.cmp(&b.status),
        "duration" => a.duration_ms().cmp(&b.duration_ms()),
        "step" | "steps" => a.last_step.cmp(&b.last_step),
        metric => {
            let number = |run: &RunSummary| {
                let of_parameter = || run.hyperparameters.get(metric)?.value.as_f64();
                let of_series = run.series(metric).map(|x| x.last.0);
                let found = of_series.or_else(of_parameter).filter(|x| !x.is_nan());
                found.unwrap_or(f64::NAN)
            };
            let text = |run: &RunSummary| {
                let parameter = run.hyperparameters.get(metric);
                parameter.map(|x| x.value.to_string())
            };
            // Not a number is greater than every one.
            let by_number = number(a).total_cmp(&number(b));
            by_number.then_with(|| text(a).cmp(&text(b)))
        }
    }
}

/// The parser of a status.
fn status() -> impl TypedValueParser<Value = RunStatus> {
    let statuses = [
        RunStatus::Running,
        RunStatus::Finished,
        RunStatus::Failed,
        RunStatus::Preempted,
        RunStatus::Interrupted,
    ];
    let words = statuses.map(|status| status.to_string());
    PossibleValuesParser::new(words).try_map(move |word| {
        let found = statuses.into_iter().find(|x| x.to_string() == word);
        found.ok_or("expected a status")
    })
}
