//! Which trials go on, pause or stop.
//!
//! Schedulers are pure: the same calls in the same order give the same verdicts.

use std::fmt;

use crate::config::Config;
use crate::trial::TrialId;

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

/// What trials were compared at.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rung {
    /// The time at which trials reach it.
    pub(crate) time: f64,
    /// Trials and their values, in the order of arrival.
    pub(crate) entries: Vec<(TrialId, f64)>,
    /// The value that trials have to reach, in the user's sign.
    pub(crate) cutoff: Option<f64>,
}
