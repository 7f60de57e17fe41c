//! `accel-launch runs list`.

use std::cmp::{Ordering, Reverse};
use std::path::PathBuf;
use std::process::ExitCode;

use accelerator_track::{RunStatus, RunSummary};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde::Serialize;

use super::{RunsFolder, failed, label, row};
use crate::error::{Error, Result};
use crate::text::{age, columns, duration, figure, json, plain, print};

#[derive(Args, Clone, Debug)]
pub(super) struct ListArgs {
    #[command(flatten)]
    place: RunsFolder,

    #[command(flatten)]
    filter: RunFilter,

    /// Sort by name, status, age, duration, step, a hyperparameter, or the last value of a metric. Metrics are sorted
    /// best first: smallest first for a loss or an error, greatest first for others.
    #[arg(long, value_name = "KEY", default_value = "age")]
    sort: String,

    /// Reverse the order.
    #[arg(long)]
    reverse: bool,

    /// A metric to show; can be repeated [default: up to three that most runs have, validation metrics first].
    #[arg(long = "metric", value_name = "KEY")]
    metrics: Vec<String>,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The choice of runs of a folder.
#[derive(Args, Clone, Debug)]
pub(super) struct RunFilter {
    /// Select only runs with this status; can be repeated.
    #[arg(long = "status", value_name = "STATUS", value_parser = status())]
    statuses: Vec<RunStatus>,

    /// Select only runs with this tag, with any value or with VALUE; can be repeated.
    #[arg(long = "tag", value_name = "KEY[=VALUE]")]
    tags: Vec<String>,
}

/// The fields are those of the JSON object.
#[derive(Serialize)]
struct RunsList {
    runs: Vec<RunSummary>,
    damaged: Vec<UnreadRun>,
    /// The runs of a format that this program does not know.
    newer: Vec<UnreadRun>,
    /// The number of runs, including those that are not selected.
    #[serde(skip)]
    count: usize,
}

#[derive(Serialize)]
struct UnreadRun {
    folder: PathBuf,
    error: String,
}

pub(super) fn run(arguments: &ListArgs) -> Result<ExitCode> {
    let mut list = RunsList::read(&arguments.place)?;
    list.check_sorting(&arguments.sort)?;
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
            newer: Vec::new(),
            count: 0,
        };
        for run in place.open()?.list().map_err(failed)? {
            list.count += 1;
            let error = match run.head.and_then(|_| RunSummary::read(&run.folder)) {
                Ok(summary) => {
                    list.runs.push(summary);
                    continue;
                }
                Err(error) => error,
            };
            let unread = match error.is_incompatible() {
                true => &mut list.newer,
                false => &mut list.damaged,
            };
            unread.push(UnreadRun {
                folder: run.folder,
                error: error.to_string(),
            });
        }
        Ok(list)
    }

    /// Checks that the runs can be sorted by `key`; without runs, every key is accepted.
    fn check_sorting(&self, key: &str) -> Result<()> {
        let mut known = vec!["age", "name", "status", "duration", "step"];
        for run in &self.runs {
            let parameters = run.hyperparameters.keys();
            let metrics = run.series.iter().map(|series| &series.key);
            for name in parameters.chain(metrics) {
                if !known.contains(&name.as_str()) {
                    known.push(name);
                }
            }
        }
        if self.runs.is_empty() || known.contains(&key) {
            return Ok(());
        }
        Err(Error::usage(format!(
            "nothing of the runs is called {key:?}; they can be sorted by {}",
            plain(&known.join(", "))
        )))
    }

    fn text(&self, arguments: &ListArgs) -> String {
        let unread = [("damaged", &self.damaged), ("newer", &self.newer)];
        let unread = unread.map(|(word, runs)| runs.iter().map(move |run| (word, run)));
        let unread: Vec<_> = unread.into_iter().flatten().collect();
        if self.runs.is_empty() && unread.is_empty() {
            let folder = arguments.place.folder.display();
            return match self.count {
                0 => format!(
                    "there are no runs in the folder `{folder}`: a program writes them with `init_trackers`; \
                     `--runs` names another folder\n"
                ),
                count => format!("none of the {count} runs in {folder} is selected\n"),
            };
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
        for (word, run) in &unread {
            table.push(row([&*label(&run.folder), word]));
        }
        let mut text = columns(&table);
        for (word, run) in &unread {
            text.push_str(&format!("{word}: {}\n", plain(&run.error)));
        }
        text
    }

    /// Returns the metrics that the most runs have; of equally common ones, those of validation first.
    fn common_metrics(&self) -> Vec<&str> {
        const SHOWN: usize = 3;
        let mut counts: Vec<(&str, usize)> = Vec::new();
        for series in self.runs.iter().flat_map(|run| &run.series) {
            match counts.iter_mut().find(|(key, _)| *key == series.key) {
                Some((_, count)) => *count += 1,
                None => counts.push((&series.key, 1)),
            }
        }
        counts.sort_by_key(|&(key, count)| (Reverse(count), !is_of_validation(key)));
        counts.into_iter().map(|(key, _)| key).take(SHOWN).collect()
    }
}

fn cells(run: &RunSummary, metrics: &[&str]) -> Vec<String> {
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let mut cells = vec![
        label(&run.folder),
        run.status.to_string(),
        duration(age(run.created_ms / 1000)),
        duration(run.duration_ms / 1000),
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
        // Runs of one millisecond are in the order in which a process began them.
        "age" => (b.created_ms, b.id).cmp(&(a.created_ms, a.id)),
        "name" => a.folder.cmp(&b.folder),
        "status" => a.status.cmp(&b.status),
        "duration" => a.duration_ms.cmp(&b.duration_ms),
        "step" => a.last_step.cmp(&b.last_step),
        metric => {
            let number = |run: &RunSummary| {
                let of_parameter = || run.hyperparameters.get(metric)?.value.as_f64();
                let last = run.series(metric).map(|x| x.last.0);
                let of_series = last.map(|x| if is_better_greater(metric) { -x } else { x });
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

/// Returns true if a metric is one of validation or of a test, by its name.
fn is_of_validation(metric: &str) -> bool {
    let words = ["val", "eval", "test"];
    let mut parts = metric.split(['/', '_', '.', ' ', '-']);
    parts.any(|part| {
        words.iter().any(|word| part.eq_ignore_ascii_case(word)) || part.starts_with("valid")
    })
}

/// Returns true if the greater value of a metric is the better one, by the last word of its name.
fn is_better_greater(metric: &str) -> bool {
    const SMALLER: [&str; 7] = ["loss", "error", "err", "perplexity", "mae", "mse", "rmse"];
    let word = metric
        .rsplit(['/', '_', '.', ' ', '-'])
        .next()
        .unwrap_or(metric);
    !SMALLER
        .iter()
        .any(|smaller| word.eq_ignore_ascii_case(smaller))
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_the_direction_of_a_metric_and_those_of_validation() {
        for (metric, greater, validation) in [
            ("train/loss", false, false),
            ("valid/loss", false, true),
            ("eval_loss", false, true),
            ("validation accuracy", true, true),
            ("test/RMSE", false, true),
            ("latest", true, false),
            ("f1", true, false),
        ] {
            assert_eq!(is_better_greater(metric), greater, "{metric}");
            assert_eq!(is_of_validation(metric), validation, "{metric}");
        }
    }
}
