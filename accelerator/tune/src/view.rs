//! The state of a search as people see it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::{Config, TrialId};
use crate::objective::Objective;
use crate::runner::Location;
use crate::value::Metrics;

/// The progress of a trial, in Ray's words.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum TrialStatus {
    /// It has not begun.
    Pending,
    /// It runs.
    Running,
    /// It waits, with a checkpoint, for a scheduler to continue it.
    Paused,
    /// It ran to its end, or was stopped.
    Terminated,
    /// It failed more often than it may.
    Error,
}

/// A result of a trial.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct TrialResult {
    /// The number of iterations done.
    pub training_iteration: u64,
    /// Seconds of this iteration.
    pub time_this_iter_s: f64,
    /// Seconds of all iterations.
    pub time_total_s: f64,
    /// Seconds since 1970 at which it was reported.
    pub timestamp: u64,
    /// The metrics that the trial reported.
    pub metrics: Metrics,
}

impl TrialResult {
    /// Ray's auto-filled metrics, which the search adds to those of the trial.
    pub(crate) const FILLED: [&str; 4] = [
        "training_iteration",
        "time_this_iter_s",
        "time_total_s",
        "timestamp",
    ];

    /// Returns the values of [`FILLED`](Self::FILLED).
    pub(crate) fn filled(&self) -> [Value; 4] {
        [
            self.training_iteration.into(),
            self.time_this_iter_s.into(),
            self.time_total_s.into(),
            self.timestamp.into(),
        ]
    }

    /// The value of a metric, of those that the search adds too.
    #[must_use]
    pub fn value(&self, metric: &str) -> Option<f64> {
        match Self::FILLED.iter().position(|name| *name == metric) {
            Some(at) => self.filled()[at].as_f64(),
            None => self.metrics.value(metric),
        }
    }

    /// Returns the result of a trial's next iteration, after its last result.
    pub(crate) fn next(
        last: Option<&Self>,
        iteration: u64,
        metrics: Metrics,
        seconds: f64,
        timestamp: u64,
    ) -> Self {
        Self {
            training_iteration: iteration,
            time_this_iter_s: seconds,
            time_total_s: last.map_or(0.0, |last| last.time_total_s) + seconds,
            timestamp,
            metrics,
        }
    }
}

/// A trial of a search.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Trial {
    /// Its number.
    pub id: TrialId,
    /// Its name, such as `MnistTrainable_358bb_00006`.
    pub name: String,
    /// Its status.
    pub status: TrialStatus,
    pub(crate) location: Option<Location>,
    /// The configuration that it tries.
    pub config: Config,
    /// Its newest result.
    pub last: Option<TrialResult>,
    /// Its best result by the objective.
    pub best: Option<TrialResult>,
    /// The configuration of its best result. A scheduler that lets trials exploit others may have changed it since.
    pub best_config: Config,
    /// The number of attempts at it that have failed.
    pub failures: u32,
    /// Its newest failure.
    pub error: Option<String>,
    /// The folder of its files.
    pub folder: PathBuf,
    /// Its newest checkpoint on the disk.
    pub checkpoint: Option<PathBuf>,
    /// Its checkpoint on disk with the best result by the objective, and that result.
    pub(crate) best_checkpoint: Option<(PathBuf, TrialResult)>,
}

/// A search as tables and reports show it.
#[derive(Clone, Debug)]
pub(crate) struct SearchView {
    pub(crate) name: String,
    /// Its trials run the program of the specification, rather than functions or classes.
    pub(crate) runs_programs: bool,
    pub(crate) folder: PathBuf,
    pub(crate) objective: Objective,
    /// Paths of the parameters that are drawn, by path; constants are not among them.
    pub(crate) parameters: Vec<String>,
    pub(crate) scheduler: Vec<String>,
    pub(crate) rungs: Vec<Rung>,
    /// The trials, in the order of numbers.
    pub(crate) trials: Vec<Trial>,
    /// The number of trials that there will be, if it is known.
    pub(crate) expected: Option<usize>,
    /// A line such as `Resources requested: 2.0/2 CPUs, 0.0/0 GPUs`; `None` if nothing runs.
    pub(crate) resources: Option<String>,
}

/// The reason why a search has ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SearchEnd {
    /// Every trial has ended.
    Finished,
    /// It was interrupted. Running it again resumes it.
    Interrupted,
    /// Its time is over. Running it again resumes it.
    OutOfTime,
}

/// A point at which a scheduler compared trials.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rung {
    /// The time at which trials reach it.
    pub(crate) time: f64,
    /// Trials and their values, in the order of arrival.
    pub(crate) entries: Vec<(TrialId, f64)>,
    /// The value that trials have to reach.
    pub(crate) cutoff: Option<f64>,
}
