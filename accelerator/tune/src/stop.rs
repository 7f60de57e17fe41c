//! Rules that end trials.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::TrialId;
use crate::error::{Error, Result};
use crate::fields;
use crate::objective::{Mode, Objective};
use crate::view::TrialResult;

/// Ends trials: any of its conditions is enough.
///
/// In a file it is a table as Ray Tune's `stop`, of metrics and their thresholds: `training_iteration = 100`,
/// `mean_accuracy = 0.99`, `loss = "<= 0.1"`. A plain number is reached from below; of the objective of a search that
/// minimizes, from above. The key `plateau` holds a [`Plateau`].
///
/// ```
/// use accelerator_tune::Stop;
///
/// let stop = Stop::new()
///     .iterations(100)
///     .at_least("mean_accuracy", 0.99)
///     .when(|_trial, result| result.metrics.value("loss").is_some_and(f64::is_nan));
/// let same: Stop = serde_json::from_str(r#"{"training_iteration": 100, "mean_accuracy": 0.99}"#)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(try_from = "Map<String, Value>", into = "Map<String, Value>")]
pub struct Stop {
    thresholds: Vec<(String, Threshold)>,
    plateau: Option<Plateau>,
    closures: Vec<StopFn>,
}

impl Stop {
    /// Creates rules that never end a trial.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends a trial after that many iterations.
    #[must_use]
    pub fn iterations(self, iterations: u32) -> Self {
        self.at_least(ITERATION, f64::from(iterations))
    }

    /// Ends a trial once the metric is that large. Of `time_total_s`, that is after so many seconds of its own time.
    #[must_use]
    pub fn at_least(mut self, metric: impl Into<String>, value: f64) -> Self {
        self.thresholds
            .push((metric.into(), Threshold::AtLeast(value)));
        self
    }

    /// Ends a trial once the metric is that small.
    #[must_use]
    pub fn at_most(mut self, metric: impl Into<String>, value: f64) -> Self {
        self.thresholds
            .push((metric.into(), Threshold::AtMost(value)));
        self
    }

    /// Ends a trial once a metric does not move any more.
    #[must_use]
    pub fn plateau(mut self, plateau: Plateau) -> Self {
        self.plateau = Some(plateau);
        self
    }

    /// Stops trials when a closure returns true. A search that is resumed knows its earlier answers, and calls it for
    /// new results only.
    #[must_use]
    pub fn when(
        mut self,
        stops: impl Fn(TrialId, &TrialResult) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.closures.push(StopFn(Arc::new(stops)));
        self
    }

    /// The metrics that it looks at, but for closures.
    pub(crate) fn metrics(&self) -> impl Iterator<Item = &str> {
        let thresholds = self.thresholds.iter().map(|(metric, _)| &**metric);
        let plateau = self.plateau.iter().map(|plateau| &*plateau.metric);
        thresholds.chain(plateau)
    }

    /// Fails if a journal cannot represent it.
    pub(crate) fn check(&self) -> Result<()> {
        let std = self.plateau.as_ref().map(|plateau| plateau.std);
        match std.filter(|std| !std.is_finite()) {
            None => Ok(()),
            Some(std) => Err(Error::misuse(format!(
                "`stop.plateau.std` is {std}; it must be a finite number"
            ))),
        }
    }

    /// Returns the number of results of a trial that it looks at.
    pub(crate) fn window(&self) -> usize {
        self.plateau.as_ref().map_or(0, |plateau| plateau.results)
    }

    /// Returns true if the trial ends, closures aside. `recent` holds its results up to the window, the newest last.
    pub(crate) fn is_due(&self, objective: &Objective, recent: &[TrialResult]) -> bool {
        let Some(result) = recent.last() else {
            return false;
        };
        let reached = self.thresholds.iter().any(|(metric, threshold)| {
            let Some(value) = result.value(metric) else {
                return false;
            };
            match *threshold {
                Threshold::AtLeast(least) => value >= least,
                Threshold::AtMost(most) => value <= most,
                Threshold::Plain(at) => {
                    let minimizes = objective.mode == Mode::Min && *metric == objective.metric;
                    match minimizes {
                        true => value <= at,
                        false => value >= at,
                    }
                }
            }
        });
        let is_flat = || {
            let plateau = self.plateau.as_ref();
            plateau.is_some_and(|plateau| plateau.holds(recent))
        };
        reached || is_flat()
    }

    pub(crate) fn closures_say(&self, trial: TrialId, result: &TrialResult) -> bool {
        self.closures.iter().any(|stops| (stops.0)(trial, result))
    }
}

/// A metric that does not move: the standard deviation of its newest values is small.
///
/// ```
/// use accelerator_tune::{Plateau, Stop};
///
/// let plateau = Plateau { metric: "loss".into(), std: 0.01, results: 4, grace_period: 4 };
/// let stop = Stop::new().plateau(plateau);
/// ```
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Plateau {
    /// The metric.
    pub metric: String,
    /// The standard deviation below which it does not move.
    #[serde(default = "default_std")]
    pub std: f64,
    /// The number of newest values that are looked at.
    #[serde(default = "default_results")]
    pub results: usize,
    /// The iteration before which a plateau ends no trial.
    #[serde(default = "default_grace")]
    pub grace_period: u64,
}

impl Plateau {
    fn holds(&self, recent: &[TrialResult]) -> bool {
        let Some(last) = recent.last() else {
            return false;
        };
        if last.training_iteration < self.grace_period || recent.len() < self.results {
            return false;
        }
        let newest = &recent[recent.len() - self.results..];
        let Some(values) = newest
            .iter()
            .map(|result| result.value(&self.metric))
            .collect::<Option<Vec<_>>>()
        else {
            return false;
        };
        #[expect(clippy::cast_precision_loss, reason = "a few values")]
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values
            .iter()
            .map(|value| (value - mean).powi(2))
            .sum::<f64>()
            / count;
        variance.sqrt() < self.std
    }
}

/// The number of iterations, which the search counts.
pub(crate) const ITERATION: &str = "training_iteration";
const PLATEAU: &str = "plateau";

#[derive(Clone, Copy, Debug, PartialEq)]
enum Threshold {
    AtLeast(f64),
    AtMost(f64),
    /// A limit in the direction of the objective.
    Plain(f64),
}

#[derive(Clone)]
struct StopFn(Arc<Stops>);

type Stops = dyn Fn(TrialId, &TrialResult) -> bool + Send + Sync;

impl fmt::Debug for StopFn {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("closure")
    }
}

impl TryFrom<Map<String, Value>> for Stop {
    type Error = Error;

    fn try_from(table: Map<String, Value>) -> Result<Self> {
        let mut stop = Self::new();
        for (metric, value) in table {
            if metric == PLATEAU {
                let plateau = fields::parse(value);
                let plateau =
                    plateau.map_err(|error| Error::misuse(format!("`{PLATEAU}`: {error}")))?;
                stop.plateau = Some(plateau);
                continue;
            }
            let values = match &value {
                Value::Array(values) => values.as_slice(),
                value => std::slice::from_ref(value),
            };
            for value in values {
                let threshold = match value {
                    Value::Number(number) => number.as_f64().map(Threshold::Plain),
                    Value::String(text) => parse_threshold(text),
                    _ => None,
                };
                let threshold = threshold.ok_or_else(|| {
                    Error::misuse(format!(
                        "`{metric}` is {value}; use a number, a text such as \">= 0.99\" or \"<= 0.1\", or a list of these"
                    ))
                })?;
                stop.thresholds.push((metric.clone(), threshold));
            }
        }
        Ok(stop)
    }
}

impl From<Stop> for Map<String, Value> {
    fn from(stop: Stop) -> Self {
        let mut table = Self::new();
        for (metric, threshold) in stop.thresholds {
            let value = match threshold {
                Threshold::Plain(at) => at.into(),
                Threshold::AtLeast(at) => format!(">= {at}").into(),
                Threshold::AtMost(at) => format!("<= {at}").into(),
            };
            // One metric may have several thresholds.
            match table.get_mut(&metric) {
                None => {
                    table.insert(metric, value);
                }
                Some(Value::Array(values)) => values.push(value),
                Some(first) => *first = Value::Array(vec![first.take(), value]),
            }
        }
        if let Some(plateau) = stop.plateau
            && let Ok(plateau) = serde_json::to_value(plateau)
        {
            table.insert(PLATEAU.to_owned(), plateau);
        }
        table
    }
}

fn parse_threshold(text: &str) -> Option<Threshold> {
    let text = text.trim();
    let (make, number): (fn(f64) -> Threshold, _) = if let Some(number) = text.strip_prefix(">=") {
        (Threshold::AtLeast, number)
    } else {
        (Threshold::AtMost, text.strip_prefix("<=")?)
    };
    number.trim().parse().ok().map(make)
}

fn default_std() -> f64 {
    0.01
}

fn default_results() -> usize {
    4
}

fn default_grace() -> u64 {
    4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_of_one_metric_are_all_written() {
        let stop = Stop::new()
            .iterations(9)
            .at_least("loss", 1e9)
            .at_most("loss", 0.1)
            .at_least("acc", f64::INFINITY);
        let written = serde_json::to_value(stop).unwrap();
        let expected = serde_json::json!({
            "training_iteration": ">= 9", "loss": [">= 1000000000", "<= 0.1"], "acc": ">= inf",
        });
        assert_eq!(written, expected);
        let again: Stop = serde_json::from_value(written).unwrap();
        assert_eq!(serde_json::to_value(again).unwrap(), expected);
    }
}
