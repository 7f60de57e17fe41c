//! The interface of schedulers, their common parts, and the one that stops nobody.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::config::{Config, TrialId};
use crate::error::Error;
use crate::stop::ITERATION;
use crate::view::Rung;

/// The choice whether a scheduler decides as Ray Tune 2 does, even if that is a defect.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Compatibility {
    /// Decides as its description says.
    #[default]
    Exact,
    /// Decides exactly as Ray Tune does.
    Ray,
}

/// A scheduler's decision about a trial that has reported.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum SchedulerDecision {
    Continue,
    /// It saves a checkpoint and continues.
    Save,
    /// It saves a checkpoint and gives its worker back.
    Pause,
    Stop,
    /// It continues from the donor's checkpoint of that iteration, with another configuration.
    Exploit {
        donor: TrialId,
        iteration: u64,
        config: Config,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Observation {
    pub(crate) trial: TrialId,
    /// The number of times that the trial has reported, including this one.
    pub(crate) iteration: u64,
    /// The value of the scheduler's time attribute: mostly the iteration again, or seconds.
    pub(crate) time: f64,
    /// The metric, in the user's sign. `None` where it is missing.
    pub(crate) value: Option<f64>,
}

/// The trials that are not paused, where a worker is free.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum OtherTrials {
    /// Some have not begun, and can.
    Pending,
    /// Only trials that run.
    Running,
    /// None: unless a paused trial is resumed, the search ends.
    None,
}

/// Decides which trials continue: Ray Tune's `TrialScheduler`.
pub(crate) trait TrialScheduler: fmt::Debug + Send {
    fn on_trial_add(&mut self, _trial: TrialId, _config: &Config) {}

    /// A trial has reported. `others_wait` says whether a trial that is paused or has not begun waits for a worker.
    fn on_trial_result(&mut self, observation: Observation, others_wait: bool)
    -> SchedulerDecision;

    /// A trial has ended: by itself, by a stop rule, or by a decision of this scheduler. The observation is its last.
    fn on_trial_complete(&mut self, _last: Observation) {}

    fn on_trial_error(&mut self, _trial: TrialId) {}

    /// The paused trial to resume now; `None` for one that has not begun, or none. `paused` is in the order of numbers.
    /// By default, it is the first of these once every trial has begun.
    fn choose_trial_to_run(&mut self, paused: &[TrialId], others: OtherTrials) -> Option<TrialId> {
        match others {
            OtherTrials::Pending => None,
            OtherTrials::Running | OtherTrials::None => paused.first().copied(),
        }
    }

    /// Lines for the status table, such as `Using AsyncHyperBand: num_stopped=3`.
    fn status(&self) -> Vec<String>;

    /// The rungs for a plot, from the bottom.
    fn rungs(&self) -> Vec<Rung> {
        Vec::new()
    }
}

pub(super) fn misuse(scheduler: &str, what: &str) -> Error {
    Error::misuse(format!("the scheduler `{scheduler}`: {what}"))
}

pub(super) fn iteration_attr() -> String {
    ITERATION.to_owned()
}

/// Every trial runs to its end.
#[derive(Debug)]
pub(super) struct Fifo;

impl TrialScheduler for Fifo {
    fn on_trial_result(
        &mut self,
        _observation: Observation,
        _others_wait: bool,
    ) -> SchedulerDecision {
        SchedulerDecision::Continue
    }

    fn status(&self) -> Vec<String> {
        vec!["Using FIFO scheduling algorithm.".to_owned()]
    }
}
