//! `accel-launch runs compare` and `diff`.

use std::collections::BTreeMap;
use std::process::ExitCode;

use accelerator_track::{
    RunSummary,
    internal::{Difference, Provenance},
};
use clap::Args;
use serde::Serialize;
use serde_json::Value;

use super::{RunsFolder, label, row, value_text};
use crate::error::Result;
use crate::text::{columns, figure, json, note, plain, print, short};

#[derive(Args, Clone, Debug)]
pub(super) struct CompareArgs {
    /// The runs: names of their folders, ids or beginnings of those, names, or paths.
    #[arg(value_name = "RUN", required = true, num_args = 2..)]
    runs: Vec<String>,

    #[command(flatten)]
    place: RunsFolder,

    /// Show only this metric; may be given several times.
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
            // In JSON what is no number is a word, and equal to itself.
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
    /// The one run: its folder's name, its id or the beginning of that, its name, or a path.
    #[arg(value_name = "A")]
    a: String,

    /// The other run.
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
