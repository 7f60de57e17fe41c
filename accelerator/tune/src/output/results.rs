//! The results of a search, and the table of its trials.

use std::path::{Path, PathBuf};
use std::{fmt, fs};

use accelerator_host::fs::Durability;
use serde_json::Value;

use super::report;
use super::table::{Rows, status};
use super::trial_folder::{csv_line, read_results, read_rows};
use crate::appended::replace;
use crate::checkpoint_folder;
use crate::config::{Config, TrialId};
use crate::error::{Error, Result};
use crate::objective::Mode;
use crate::value::json_number;
use crate::view::{SearchEnd, SearchView, Trial, TrialResult};

/// The results of a search: Ray Tune's `ExperimentAnalysis`.
///
/// ```
/// use accelerator_tune::{Mode, Results, SearchEnd};
///
/// fn tell(results: &Results) {
///     if results.ending() == SearchEnd::Finished {
///         println!("Best config is: {:?}", results.best_config("mean_accuracy", Mode::Max));
///     }
/// }
/// ```
#[derive(Debug)]
pub struct Results {
    view: SearchView,
    ending: SearchEnd,
}

/// The best value of a metric, as returned by [`Results::best_result`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BestResult<'a> {
    /// The trial that has reported it.
    pub trial: &'a Trial,
    /// The report that contains it.
    pub result: TrialResult,
    /// The configuration that the trial had at this report.
    pub config: Config,
    /// The trial's checkpoint with the best value of the search's metric, and its iteration, which is another one than that
    /// of the report if the trial did not save then. For a function or a class, the path is the folder that it saved to; for
    /// a program, the file or folder that it reported.
    pub checkpoint: Option<(PathBuf, u64)>,
}

/// The value of a trial that counts.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Scope {
    /// The best that it reported.
    #[default]
    Best,
    /// The last.
    Last,
    /// The mean of all.
    Average,
    /// The mean of so many of the last.
    LastAverage(usize),
}

impl Results {
    pub(crate) fn new(view: SearchView, ending: SearchEnd) -> Self {
        Self { view, ending }
    }

    /// Returns the reason for which the search has ended.
    #[must_use]
    pub fn ending(&self) -> SearchEnd {
        self.ending
    }

    /// The folder with everything that it has written.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.view.folder
    }

    /// All trials, by number.
    #[must_use]
    pub fn trials(&self) -> &[Trial] {
        &self.view.trials
    }

    /// Everything that a trial has reported, from its folder.
    ///
    /// # Errors
    /// [`Error::is_io`] if the folder cannot be read.
    pub fn history(&self, trial: TrialId) -> Result<Vec<TrialResult>> {
        match self.view.trials.get(trial.index()) {
            Some(trial) => read_results(&trial.folder),
            None => Ok(Vec::new()),
        }
    }

    /// The configuration with which a trial has reported the best value of a metric.
    #[must_use]
    pub fn best_config(&self, metric: &str, mode: Mode) -> Option<Config> {
        Some(self.best_result(metric, mode)?.config)
    }

    /// Returns the best value of a metric that any trial has reported, at any iteration.
    #[must_use]
    pub fn best_result(&self, metric: &str, mode: Mode) -> Option<BestResult<'_>> {
        let (trial, _) = self.best_trial(metric, mode, Scope::Best)?;
        let (result, config) = match self.is_objective(metric, mode) {
            true => (trial.best.clone()?, trial.best_config.clone()),
            false => {
                let rows = read_rows(&trial.folder).ok()?.into_iter();
                let scored = rows.filter_map(|row| {
                    let value = row.0.value(metric)?;
                    Some((row, value))
                });
                mode.best(scored)?.0
            }
        };
        let checkpoint = trial.best_checkpoint.as_ref();
        let checkpoint = checkpoint.and_then(|(folder, result)| {
            let path = match self.view.runs_programs {
                true => checkpoint_folder::named(folder)?,
                false => folder.clone(),
            };
            Some((path, result.training_iteration))
        });
        Some(BestResult {
            trial,
            result,
            config,
            checkpoint,
        })
    }

    /// The best trial, and its value. Trials that never reported a number are out of the question.
    #[must_use]
    pub fn best_trial(&self, metric: &str, mode: Mode, scope: Scope) -> Option<(&Trial, f64)> {
        let scored = self.view.trials.iter().filter_map(|trial| {
            let value = self.value(trial, metric, mode, scope)?;
            Some((trial, value))
        });
        mode.best(scored)
    }

    /// The last result of each trial, with its configuration.
    #[must_use]
    pub fn dataframe(&self) -> DataFrame {
        let metric = &self.view.objective.metric;
        let rows = self.view.trials.iter().map(|trial| {
            let mut row: Vec<(String, Value)> = Vec::new();
            let mut add = |name: &str, value: Value| row.push((name.to_owned(), value));
            if let Some(last) = &trial.last {
                for (name, value) in last.metrics.iter() {
                    add(name, json_number(value));
                }
                let best = trial.best.as_ref().and_then(|best| best.value(metric));
                add(
                    &format!("best_{metric}"),
                    best.map_or(Value::Null, json_number),
                );
                for (name, value) in TrialResult::FILLED.into_iter().zip(last.filled()) {
                    add(name, value);
                }
            }
            add("trial_id", trial.id.to_string().into());
            add("trial_name", trial.name.as_str().into());
            let status = serde_json::to_value(trial.status);
            add("status", status.unwrap_or(Value::Null));
            add("failures", trial.failures.into());
            for (path, value) in trial.config.leaves() {
                add(&format!("config/{path}"), value.clone());
            }
            row
        });
        DataFrame::new(rows.collect())
    }

    /// The table that is shown while the search runs, with every trial.
    #[must_use]
    pub fn status(&self) -> String {
        status(&self.view, Rows::All)
    }

    /// Writes the report to a file, which it replaces whole or not at all: one HTML page that loads nothing from the
    /// network, with the best configuration, parameters beside the objective, rungs, learning curves, and a table of
    /// all trials.
    ///
    /// # Errors
    /// [`Error::is_io`] if the results of a trial cannot be read, or the file cannot be written.
    pub fn write_report(&self, path: impl AsRef<Path>) -> Result<()> {
        let objective = &self.view.objective;
        let best = self.best_trial(&objective.metric, objective.mode, Scope::Best);
        let page = report::html(&self.view, self.ending, best.map(|(trial, _)| trial))?;
        replace(path.as_ref(), page.as_bytes(), Durability::Cached)
    }

    fn is_objective(&self, metric: &str, mode: Mode) -> bool {
        let objective = &self.view.objective;
        objective.metric == metric && objective.mode == mode
    }

    fn value(&self, trial: &Trial, metric: &str, mode: Mode, scope: Scope) -> Option<f64> {
        let of = |result: &Option<TrialResult>| result.as_ref()?.value(metric);
        if scope == Scope::Last {
            return of(&trial.last);
        }
        if scope == Scope::Best && self.is_objective(metric, mode) {
            return of(&trial.best);
        }
        let history = read_results(&trial.folder).ok()?;
        let values = history.iter().filter_map(|result| result.value(metric));
        let values: Vec<_> = values.collect();
        let mean = |values: &[f64]| {
            #[expect(clippy::cast_precision_loss, reason = "a count of results")]
            let count = values.len() as f64;
            (!values.is_empty()).then(|| values.iter().sum::<f64>() / count)
        };
        match scope {
            Scope::Best => mode
                .best(values.into_iter().map(|value| ((), value)))
                .map(|best| best.1),
            Scope::Last => values.last().copied(),
            Scope::Average => mean(&values),
            Scope::LastAverage(count) => mean(&values[values.len().saturating_sub(count)..]),
        }
    }
}

/// A table of results: a row for each trial.
#[derive(Clone, Debug, PartialEq)]
pub struct DataFrame {
    columns: Vec<String>,
    /// The rows, with null for each missing value.
    rows: Vec<Vec<Value>>,
}

impl DataFrame {
    /// Creates a table of rows with named values; columns are in the order in which they first appear.
    fn new(rows: Vec<Vec<(String, Value)>>) -> Self {
        let mut columns: Vec<String> = Vec::new();
        for (name, _) in rows.iter().flatten() {
            if !columns.contains(name) {
                columns.push(name.clone());
            }
        }
        let rows = rows.into_iter().map(|row| {
            let value = |column: &String| {
                let found = row.iter().find(|(name, _)| name == column);
                found.map_or(Value::Null, |(_, value)| value.clone())
            };
            columns.iter().map(value).collect()
        });
        let rows = rows.collect();
        Self { columns, rows }
    }

    /// Writes comma-separated values.
    ///
    /// # Errors
    /// [`Error::is_io`] if the file cannot be written.
    pub fn to_csv(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        fs::write(path, self.to_string()).map_err(|error| Error::io("write", path, error))
    }

    /// A JSON array of objects, without what is missing.
    #[must_use]
    pub fn json(&self) -> Value {
        let object = |row: &Vec<Value>| {
            let fields = self.columns.iter().cloned().zip(row.iter().cloned());
            Value::Object(fields.filter(|(_, value)| !value.is_null()).collect())
        };
        self.rows.iter().map(object).collect()
    }
}

impl fmt::Display for DataFrame {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let header = self.columns.iter().map(|name| name.as_str().into());
        formatter.write_str(&csv_line(header))?;
        let mut rows = self.rows.iter().cloned();
        rows.try_for_each(|row| formatter.write_str(&csv_line(row)))
    }
}
