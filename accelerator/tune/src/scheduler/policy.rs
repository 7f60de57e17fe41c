use std::fmt;

use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::error::Error;
use crate::stop::ITERATION;
use crate::trial_id::TrialId;
use crate::view::Rung;

/// Whether a scheduler decides as Ray Tune 2 does where that is a defect.
///
/// ```
/// use accelerator_tune::{Asha, Compatibility};
///
/// let as_ray = Asha { compatibility: Compatibility::Ray, ..Asha::default() };
/// ```
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Compatibility {
    /// As its description says.
    #[default]
    Exact,
    /// As Ray Tune, to the decision.
    Ray,
}

/// What happens to a trial that has reported.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Verdict {
    /// It goes on.
    Continue,
    /// It saves a checkpoint and goes on.
    Save,
    /// It saves a checkpoint and gives its worker back.
    Pause,
    /// It ends.
    Stop,
    /// It goes on from the donor's checkpoint of that iteration, with another configuration.
    Exploit {
        donor: TrialId,
        iteration: u64,
        config: Config,
    },
}

/// A report as schedulers see it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Observation {
    pub(crate) trial: TrialId,
    /// How often the trial has reported, this report counted.
    pub(crate) iteration: u64,
    /// The value of the scheduler's time attribute: mostly the iteration again, or seconds.
    pub(crate) time: f64,
    /// The metric, in the user's sign. `None` where it is missing.
    pub(crate) value: Option<f64>,
}

/// What else there is to run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Supply {
    /// Trials that have not begun.
    New,
    /// None but trials that run at present.
    Running,
    /// Nothing: unless a paused trial goes on, the search ends.
    Nothing,
}

/// The decisions of a scheduler.
pub(crate) trait Policy: fmt::Debug + Send {
    /// A trial begins.
    fn add(&mut self, trial: TrialId, config: &Config);

    /// A trial has reported. `waits` says whether a trial that is paused or has not begun waits for a worker.
    fn report(&mut self, observation: Observation, waits: bool) -> Verdict;

    /// A trial has ended: by itself, by a stop rule, or by a verdict of this scheduler. The observation is its last.
    fn complete(&mut self, last: Observation);

    /// A trial has failed for good.
    fn fail(&mut self, trial: TrialId);

    /// The paused trial to continue now; `None` for a new one, or none. `paused` is in the order of numbers.
    fn resume(&mut self, paused: &[TrialId], supply: Supply) -> Option<TrialId>;

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

/// New trials first, then the paused one with the lowest number.
pub(super) fn oldest(paused: &[TrialId], supply: Supply) -> Option<TrialId> {
    match supply {
        Supply::New => None,
        Supply::Running | Supply::Nothing => paused.first().copied(),
    }
}
