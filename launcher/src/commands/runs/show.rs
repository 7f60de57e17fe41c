//! `accel-launch runs show`, `compare` and `diff`.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

use accelerator_track::internal::{Difference, Provenance};
use accelerator_track::{
    MediaContent, Number, RunAttempt, RunHistory, RunStatus, RunSummary, Series,
};
use clap::Args;
use serde::Serialize;
use serde_json::Value;

use super::{RunsFolder, label, row, value_text};
use crate::error::{Error, Result};
use crate::text::{age, columns, duration, figure, json, note, plain, print, short, size, utc};

#[derive(Args, Clone, Debug)]
pub(super) struct ShowArgs {
    /// The run: its name, its folder's name or path, or its id or the beginning of its id.
    #[arg(value_name = "RUN")]
    run: String,

    #[command(flatten)]
    place: RunsFolder,

    /// Show all points of a metric, such as `train/loss`; can be repeated.
    #[arg(long = "metric", value_name = "KEY")]
    metrics: Vec<String>,

    /// Also show the environment variables in which launchers and schedulers gave the program its rank.
    #[arg(long)]
    all: bool,

    /// Print everything as JSON.
    #[arg(long)]
    json: bool,
}

/// The fields are those of the JSON object.
#[derive(Serialize)]
struct RunDetails<'a> {
    #[serde(flatten)]
    summary: RunSummary,
    starts: &'a [RunAttempt],
    checkpoints: &'a [Option<u64>],
    media: BTreeMap<&'static str, usize>,
    /// The last value of each measurement, by rank.
    system: BTreeMap<usize, BTreeMap<&'a str, Number>>,
    /// The largest value of each measurement, by rank.
    system_max: BTreeMap<usize, BTreeMap<&'a str, Number>>,
    /// The points of the requested metrics.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    points: Vec<&'a Series>,
}

pub(super) fn run(arguments: &ShowArgs) -> Result<ExitCode> {
    let history = arguments.place.history(&arguments.run)?;
    let details = RunDetails::of(&history, &arguments.metrics)?;
    print(&match (arguments.json, details.points.is_empty()) {
        (true, _) => json(&details)?,
        (false, true) => details.text(&history, arguments),
        (false, false) => details.points.iter().map(|x| points(x)).collect(),
    })
}

impl<'a> RunDetails<'a> {
    fn of(history: &'a RunHistory, metrics: &[String]) -> Result<Self> {
        let mut media = BTreeMap::new();
        for medium in &history.media {
            let kind = match medium.content {
                MediaContent::Text(_) => "texts",
                MediaContent::Histogram(_) => "histograms",
                MediaContent::Image { .. } => "images",
                MediaContent::Plot { .. } => "plots",
            };
            *media.entry(kind).or_default() += 1;
        }
        let points = metrics.iter().map(|key| {
            history
                .series(key)
                .ok_or_else(|| unknown_metric(history, key))
        });
        Ok(Self {
            summary: RunSummary::of(history),
            starts: &history.attempts,
            checkpoints: &history.checkpoints,
            media,
            system: measurements(history, |_, value| value),
            system_max: measurements(history, f64::max),
            points: points.collect::<Result<_>>()?,
        })
    }

    fn text(&self, history: &RunHistory, arguments: &ShowArgs) -> String {
        let run = &self.summary;
        let mut rows: Vec<[String; 2]> = Vec::new();
        let mut row = |name: &str, value: String| rows.push([name.to_owned(), value]);
        row("run", run.folder.display().to_string());
        row("id", run.id.to_string());
        row("name", plain(&run.name));
        row("status", run.status.to_string());
        row("created", time(run.created_ms));
        row("age", duration(age(run.created_ms / 1000)));
        row("duration", duration(run.duration_ms / 1000));
        row("ranks", run.world.to_string());
        if let Some(step) = run.last_step {
            row("step", step.to_string());
        }
        if let Some(Some(step)) = self.checkpoints.last() {
            let count = self.checkpoints.len();
            row(
                "checkpoints",
                format!("{count}, the last after the metrics of step {step}"),
            );
        }
        if run.lost_entries > 0 {
            row(
                "lost",
                format!("{} entries could not be written", run.lost_entries),
            );
        }
        let failure = run.end.as_ref().and_then(|end| end.failure.as_ref());
        if let Some(failure) = failure {
            row("failure", short(&value_text(failure)));
        }
        for (kind, count) in &self.media {
            row(kind, count.to_string());
        }
        for (key, value) in &run.tags {
            row(&format!("tag {}", plain(key)), short(&plain(value)));
        }
        let mut text = columns(&rows);
        section(&mut text, "hyperparameters", self.hyperparameters());
        section(&mut text, "metrics", self.metrics());
        section(&mut text, "attempts", self.attempts());
        section(&mut text, "artifacts", self.artifacts());
        section(&mut text, "system", self.measured());
        let last = history.last_attempt();
        let mut provenance = last.map_or(Value::Null, |x| x.provenance.clone());
        if let Some(Value::Object(environment)) = provenance.get_mut("environment")
            && !arguments.all
        {
            let known = Provenance::of(history);
            let own: Vec<&str> = known.own_environment().collect();
            environment.retain(|name, _| own.contains(&name.as_str()));
        }
        section(&mut text, "provenance", facts(&provenance));
        if run.status == RunStatus::Interrupted {
            text.push_str("\nIt ended without saying how: it was killed, or its host was lost.\n");
        }
        text
    }

    fn hyperparameters(&self) -> Vec<Vec<String>> {
        let parameters = self.summary.hyperparameters.iter();
        let rows = parameters.map(|(key, parameter)| {
            let earlier: Vec<String> = parameter.earlier.iter().map(value_text).collect();
            let earlier = match earlier.is_empty() {
                true => String::new(),
                false => format!("before: {}", earlier.join(", ")),
            };
            vec![plain(key), short(&value_text(&parameter.value)), earlier]
        });
        rows.collect()
    }

    fn metrics(&self) -> Vec<Vec<String>> {
        let mut rows = vec![row(["name", "points", "steps", "last", "min", "max"])];
        rows.extend(self.summary.series.iter().map(|series| {
            vec![
                plain(&series.key),
                series.points.to_string(),
                format!("{} to {}", series.first_step, series.last_step),
                figure(series.last.0),
                figure(series.min.0),
                figure(series.max.0),
            ]
        }));
        only_with_rows(rows)
    }

    fn attempts(&self) -> Vec<Vec<String>> {
        let mut rows = vec![row(["number", "started", "ranks", "from", "end"])];
        let last = self.starts.len();
        rows.extend(self.starts.iter().zip(1..).map(|(start, number)| {
            let from = match start.resumed {
                None => "the start".to_owned(),
                Some(None) => "the start again".to_owned(),
                Some(Some(step)) => format!("step {step}"),
            };
            let status = match &start.end {
                _ if number == last => self.summary.status.to_string(),
                None => RunStatus::Interrupted.to_string(),
                Some(end) => RunStatus::from(end.status).to_string(),
            };
            let failure = start.end.as_ref().and_then(|end| end.failure.as_ref());
            let end = match failure {
                None => status,
                Some(failure) => format!("{status}: {}", short(&value_text(failure))),
            };
            vec![
                start.attempt.to_string(),
                time(start.started_ms),
                start.world.to_string(),
                from,
                end,
            ]
        }));
        only_with_rows(rows)
    }

    fn artifacts(&self) -> Vec<Vec<String>> {
        let mut rows = vec![row(["role", "artifact", "digest"])];
        rows.extend(self.summary.artifacts.iter().map(|artifact| {
            vec![
                artifact.role.to_string(),
                format!("{}:v{}", plain(&artifact.name), artifact.version),
                artifact.digest.clone(),
            ]
        }));
        only_with_rows(rows)
    }

    fn measured(&self) -> Vec<Vec<String>> {
        let mut rows = vec![row(["rank", "what", "last", "max"])];
        for (rank, values) in &self.system {
            rows.extend(values.iter().map(|(name, last)| {
                let shown = |value: f64| match name.ends_with("memory") {
                    true => size(value as u64),
                    false => figure(value),
                };
                let max = self
                    .system_max
                    .get(rank)
                    .and_then(|values| values.get(name));
                let max = max.map_or_else(String::new, |max| shown(max.0));
                vec![rank.to_string(), plain(name), shown(last.0), max]
            }));
        }
        only_with_rows(rows)
    }
}

/// Reduces the values of each measurement to one number with `reduce`, by rank.
fn measurements(
    history: &RunHistory,
    reduce: fn(f64, f64) -> f64,
) -> BTreeMap<usize, BTreeMap<&str, Number>> {
    let mut ranks: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
    for (&rank, measurements) in &history.system {
        for (name, points) in measurements {
            let values = points.iter().map(|point| point.value);
            if let Some(number) = values.reduce(reduce) {
                let of_rank = ranks.entry(rank).or_default();
                of_rank.insert(name.as_str(), Number(number));
            }
        }
    }
    ranks
}

fn unknown_metric(history: &RunHistory, key: &str) -> Error {
    let keys: Vec<&str> = history.series.iter().map(|x| x.key.as_str()).collect();
    Error::usage(format!(
        "the run in {} has no metric {key:?}; it has {}",
        history.folder.display(),
        match keys.is_empty() {
            true => "none".to_owned(),
            false => plain(&keys.join(", ")),
        }
    ))
}

/// Formats the points of a series in full digits.
fn points(series: &Series) -> String {
    let mut table = vec![row([
        &*plain(&series.key),
        "step",
        "epoch",
        "time",
        "samples",
    ])];
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    table.extend(series.points.iter().map(|point| {
        vec![
            point.value.to_string(),
            point.step.to_string(),
            or_none(point.epoch.map(|x| x.to_string())),
            time(point.ms),
            or_none(point.count.map(|x| x.to_string())),
        ]
    }));
    columns(&table)
}

/// The leaves of a JSON object, with their paths.
fn facts(value: &Value) -> Vec<Vec<String>> {
    fn collect(path: &str, value: &Value, rows: &mut Vec<Vec<String>>) {
        let below = |key: &str| match path {
            "" => key.to_owned(),
            path => format!("{path}.{key}"),
        };
        match value {
            Value::Null => {}
            Value::Object(fields) => {
                for (key, value) in fields {
                    collect(&below(key), value, rows);
                }
            }
            Value::Array(values) => {
                let words: Vec<String> = values.iter().map(value_text).collect();
                rows.push(vec![plain(path), short(&words.join(" "))]);
            }
            value => rows.push(vec![plain(path), short(&value_text(value))]),
        }
    }
    let mut rows = Vec::new();
    collect("", value, &mut rows);
    rows
}

fn only_with_rows(rows: Vec<Vec<String>>) -> Vec<Vec<String>> {
    if rows.len() > 1 { rows } else { Vec::new() }
}

fn section(text: &mut String, title: &str, rows: Vec<Vec<String>>) {
    if rows.is_empty() {
        return;
    }
    text.push_str(&format!("\n{title}\n"));
    for line in columns(&rows).lines() {
        text.push_str(&format!("  {line}\n"));
    }
}

fn time(ms: u64) -> String {
    // A time after the year 9999 has no text.
    const LAST: u64 = 253_402_300_799;
    utc(UNIX_EPOCH + Duration::from_secs((ms / 1000).min(LAST)))
}

#[derive(Args, Clone, Debug)]
pub(super) struct CompareArgs {
    /// The runs: names, folder names or paths, or ids or beginnings of ids.
    #[arg(value_name = "RUN", required = true, num_args = 2..)]
    runs: Vec<String>,

    #[command(flatten)]
    place: RunsFolder,

    /// Show only this metric; can be repeated.
    #[arg(long = "metric", value_name = "KEY")]
    metrics: Vec<String>,

    /// Show only what differs.
    #[arg(long)]
    changed: bool,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The fields are those of the JSON object; values are in the order of the runs.
#[derive(Serialize)]
struct Comparison {
    runs: Vec<RunSummary>,
    rows: Vec<ComparedRow>,
}

#[derive(Serialize)]
struct ComparedRow {
    name: String,
    differs: bool,
    values: Vec<Option<Value>>,
    #[serde(skip)]
    shown: Vec<String>,
}

pub(super) fn compare(arguments: &CompareArgs) -> Result<ExitCode> {
    let runs = arguments.runs.iter().map(|x| arguments.place.summary(x));
    let runs = runs.collect::<Result<Vec<_>>>()?;
    let mut rows = parameter_rows(&runs);
    rows.extend(metric_rows(&runs, &arguments.metrics));
    if arguments.changed {
        rows.retain(|row| row.differs);
    }
    let comparison = Comparison { runs, rows };
    print(&match arguments.json {
        true => json(&comparison)?,
        false => comparison.text(),
    })
}

impl Comparison {
    fn text(&self) -> String {
        let names: Vec<String> = self.runs.iter().map(|run| label(&run.folder)).collect();
        let head = ["", ""].into_iter().chain(names.iter().map(String::as_str));
        let statuses = self.runs.iter().map(|run| run.status.to_string());
        let mut table = vec![row(head)];
        table.push(row(["", "status"]).into_iter().chain(statuses).collect());
        for row in &self.rows {
            let mark = if row.differs { "*" } else { "" };
            let cells = [mark.to_owned(), plain(&row.name)];
            table.push(cells.into_iter().chain(row.shown.iter().cloned()).collect());
        }
        columns(&table)
    }
}

impl ComparedRow {
    fn new(name: String, values: Vec<Option<Value>>, show: impl Fn(&Value) -> String) -> Self {
        let or_none = |value: &Option<Value>| match value {
            Some(value) => show(value),
            None => "-".to_owned(),
        };
        Self {
            differs: values.windows(2).any(|pair| pair[0] != pair[1]),
            shown: values.iter().map(or_none).collect(),
            name,
            values,
        }
    }
}

fn parameter_rows(runs: &[RunSummary]) -> Vec<ComparedRow> {
    let all = runs.iter().flat_map(|run| &run.hyperparameters);
    let keys: BTreeMap<&String, ()> = all.map(|(key, _)| (key, ())).collect();
    let of = |run: &RunSummary, key| Some(run.hyperparameters.get(key)?.value.clone());
    let rows = keys.into_keys().map(|key| {
        let values = runs.iter().map(|run| of(run, key)).collect();
        ComparedRow::new(key.clone(), values, |value| short(&value_text(value)))
    });
    rows.collect()
}

fn metric_rows(runs: &[RunSummary], only: &[String]) -> Vec<ComparedRow> {
    let mut keys: Vec<&str> = Vec::new();
    for series in runs.iter().flat_map(|run| &run.series) {
        let is_asked = only.is_empty() || only.contains(&series.key);
        if is_asked && !keys.contains(&series.key.as_str()) {
            keys.push(&series.key);
        }
    }
    let mut rows = Vec::new();
    for key in keys {
        for name in ["last", "min", "max"] {
            // In JSON, a value such as NaN is a word, and equal to itself.
            let of = |run: &RunSummary| {
                let series = run.series(key)?;
                let figure = match name {
                    "last" => series.last,
                    "min" => series.min,
                    _ => series.max,
                };
                serde_json::to_value(figure).ok()
            };
            let values = runs.iter().map(of).collect();
            rows.push(ComparedRow::new(format!("{key} {name}"), values, |value| {
                value.as_f64().map_or_else(|| value_text(value), figure)
            }));
        }
    }
    rows
}

#[derive(Args, Clone, Debug)]
pub(super) struct DiffArgs {
    /// The first run: its name, its folder's name or path, or its id or the beginning of its id.
    #[arg(value_name = "A")]
    a: String,

    /// The second run, named in the same way.
    #[arg(value_name = "B")]
    b: String,

    #[command(flatten)]
    place: RunsFolder,

    /// End with exit code 1 if the inputs differ.
    #[arg(long)]
    exit_code: bool,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The fields are those of the JSON object.
#[derive(Serialize)]
struct InputDiff {
    a: String,
    b: String,
    differences: Vec<Difference>,
}

pub(super) fn diff(arguments: &DiffArgs) -> Result<ExitCode> {
    let a = arguments.place.history(&arguments.a)?;
    let b = arguments.place.history(&arguments.b)?;
    let diff = InputDiff {
        a: label(&a.folder),
        b: label(&b.folder),
        differences: accelerator_track::internal::diff(&a, &b),
    };
    for run in [&a, &b] {
        if Provenance::of(run) == Provenance::default() {
            note(&format!(
                "the run {} does not record where it came from: only its hyperparameters and artifacts are compared",
                label(&run.folder)
            ));
        }
    }
    let code = print(&match arguments.json {
        true => json(&diff)?,
        false => diff.text(),
    })?;
    Ok(match arguments.exit_code && !diff.differences.is_empty() {
        true => ExitCode::from(1),
        false => code,
    })
}

impl InputDiff {
    fn text(&self) -> String {
        if self.differences.is_empty() {
            return "the same inputs\n".to_owned();
        }
        let mut table = vec![row(["input", &*self.a, &*self.b])];
        let cell = |side: &Option<String>| match side {
            Some(text) => short(&plain(text)),
            None => "-".to_owned(),
        };
        table.extend(
            self.differences
                .iter()
                .map(|x| vec![plain(&x.what), cell(&x.a), cell(&x.b)]),
        );
        columns(&table)
    }
}
