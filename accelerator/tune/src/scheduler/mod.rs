//! Which trials go on, pause or stop.
//!
//! Schedulers are pure: the same calls in the same order give the same verdicts. See the README of this folder.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::objective::{Mode, Objective};
use crate::stop::ITERATION;
use crate::trial::TrialId;

pub use asha::Asha;
pub use asha_promotion::AshaPromotion;
pub use median_stopping::MedianStopping;
pub use pbt::Pbt;

mod asha;
mod asha_promotion;
mod fifo;
mod median_stopping;
mod pbt;
#[cfg(test)]
mod ray_tests;
mod rungs;
#[cfg(test)]
mod tests;

/// Who decides which trials go on.
///
/// ```
/// use accelerator_tune::{Asha, Scheduler};
///
/// let of_file: Scheduler = serde_json::from_str(r#"{"type": "asha", "max_t": 16}"#)?;
/// let of_code = Scheduler::from(Asha { max_t: 16, ..Asha::default() });
/// assert_eq!(of_file, of_code);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Scheduler {
    /// Nobody: every trial runs to its end.
    #[default]
    Fifo,
    /// ASHA in the stopping form, as Ray Tune has it.
    #[serde(alias = "async_hyperband")]
    Asha(Asha),
    /// ASHA in the form of its paper: trials pause, and the best are promoted.
    AshaPromotion(AshaPromotion),
    /// Trials that are worse than the median of the others stop.
    MedianStopping(MedianStopping),
    /// Population based training.
    #[serde(alias = "population_based_training")]
    Pbt(Pbt),
}

impl Scheduler {
    /// What it decides by.
    pub(crate) fn policy(&self, objective: &Objective, seed: u64) -> Result<Box<dyn Policy>> {
        let mode = self.own().1.unwrap_or(objective.mode);
        Ok(match self {
            Self::Fifo => Box::new(fifo::Fifo),
            Self::Asha(asha) => asha.policy(mode, seed)?,
            Self::AshaPromotion(asha) => asha.policy(mode)?,
            Self::MedianStopping(median) => median.policy(mode)?,
            Self::Pbt(pbt) => pbt.policy(mode, seed)?,
        })
    }

    /// The metric that it looks at.
    pub(crate) fn metric<'a>(&'a self, objective: &'a Objective) -> &'a str {
        self.own().0.unwrap_or(&objective.metric)
    }

    /// What it takes for time.
    pub(crate) fn time_attr(&self) -> &str {
        match self {
            Self::Fifo | Self::AshaPromotion(_) => ITERATION,
            Self::Asha(asha) => &asha.time_attr,
            Self::MedianStopping(median) => &median.time_attr,
            Self::Pbt(pbt) => &pbt.time_attr,
        }
    }

    /// A metric and mode other than the search's.
    fn own(&self) -> (Option<&str>, Option<Mode>) {
        match self {
            Self::Fifo => (None, None),
            Self::Asha(asha) => (asha.metric.as_deref(), asha.mode),
            Self::AshaPromotion(asha) => (asha.metric.as_deref(), asha.mode),
            Self::MedianStopping(median) => (median.metric.as_deref(), median.mode),
            Self::Pbt(pbt) => (pbt.metric.as_deref(), pbt.mode),
        }
    }
}

impl From<Asha> for Scheduler {
    fn from(asha: Asha) -> Self {
        Self::Asha(asha)
    }
}

impl From<AshaPromotion> for Scheduler {
    fn from(asha: AshaPromotion) -> Self {
        Self::AshaPromotion(asha)
    }
}

impl From<MedianStopping> for Scheduler {
    fn from(median: MedianStopping) -> Self {
        Self::MedianStopping(median)
    }
}

impl From<Pbt> for Scheduler {
    fn from(pbt: Pbt) -> Self {
        Self::Pbt(pbt)
    }
}

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

fn misuse(scheduler: &str, what: &str) -> Error {
    Error::misuse(format!("the scheduler `{scheduler}`: {what}"))
}

fn iteration_attr() -> String {
    ITERATION.to_owned()
}

/// New trials first, then the paused one with the lowest number.
fn oldest(paused: &[TrialId], supply: Supply) -> Option<TrialId> {
    match supply {
        Supply::New => None,
        Supply::Running | Supply::Nothing => paused.first().copied(),
    }
}
