//! What people see of a search.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::metrics::Metrics;
use crate::objective::Objective;
use crate::runner::Location;
use crate::scheduler::Rung;
use crate::trial::TrialId;

/// How far a trial is, in Ray's words.
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

/// One result of a trial.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct TrialResult {
    /// How many iterations are done.
    pub training_iteration: u64,
    /// Seconds of this iteration.
    pub time_this_iter_s: f64,
    /// Seconds of all iterations.
    pub time_total_s: f64,
    /// Seconds since 1970 at which it was reported.
    pub timestamp: u64,
    /// What the trial reported.
    pub metrics: Metrics,
}

impl TrialResult {
    /// The value of a metric, of those that the search adds too.
    #[must_use]
    pub fn value(&self, metric: &str) -> Option<f64> {
        #[expect(
            clippy::cast_precision_loss,
            reason = "fewer than 2^53 iterations or seconds"
        )]
        match metric {
            "training_iteration" => Some(self.training_iteration as f64),
            "time_this_iter_s" => Some(self.time_this_iter_s),
            "time_total_s" => Some(self.time_total_s),
            "timestamp" => Some(self.timestamp as f64),
            _ => self.metrics.value(metric),
        }
    }
}

/// A trial as tables show it.
#[derive(Clone, Debug)]
pub(crate) struct TrialView {
    pub(crate) id: TrialId,
    /// Such as `MnistTrainable_358bb_00006`.
    pub(crate) name: String,
    pub(crate) status: TrialStatus,
    pub(crate) location: Option<Location>,
    pub(crate) config: Config,
    /// Its newest result.
    pub(crate) last: Option<TrialResult>,
    /// Its best result by the objective.
    pub(crate) best: Option<TrialResult>,
    /// How often an attempt at it has failed.
    pub(crate) failures: u32,
    /// Its newest failure.
    pub(crate) error: Option<String>,
    pub(crate) folder: PathBuf,
    /// Its newest checkpoint on the disk.
    pub(crate) checkpoint: Option<PathBuf>,
}

/// A search as tables and reports show it.
#[derive(Clone, Debug)]
pub(crate) struct SearchView {
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
    pub(crate) objective: Objective,
    /// Paths of the parameters that are drawn, by path; constants are not among them.
    pub(crate) parameters: Vec<String>,
    /// Lines of the scheduler.
    pub(crate) scheduler: Vec<String>,
    pub(crate) rungs: Vec<Rung>,
    /// In the order of numbers.
    pub(crate) trials: Vec<TrialView>,
    /// How many trials there will be, where that is known.
    pub(crate) expected: Option<usize>,
    /// Such as `Resources requested: 2.0/2 CPUs, 0.0/0 GPUs`; none where nothing runs.
    pub(crate) resources: Option<String>,
}
