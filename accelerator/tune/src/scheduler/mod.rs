//! Schedulers decide which trials continue, pause or stop.
//!
//! Schedulers are pure: the same calls in the same order give the same decisions. See the README of this folder.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::fields::{self, NoFields};
use crate::objective::{Mode, Objective};
use crate::space::Keys;
use crate::stop::ITERATION;

pub use asha::{Asha, AshaPromotion};
pub use median_stopping::MedianStopping;
pub use pbt::Pbt;
pub use trial_scheduler::Compatibility;
pub(crate) use trial_scheduler::{Observation, OtherTrials, SchedulerDecision, TrialScheduler};

mod asha;
mod median_stopping;
mod pbt;
#[cfg(test)]
mod tests;
mod trial_scheduler;

/// The scheduler that decides about trials, and its settings.
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
#[serde(
    tag = "type",
    rename_all = "snake_case",
    try_from = "Map<String, Value>"
)]
pub enum Scheduler {
    /// Nobody: every trial runs to its end.
    #[default]
    Fifo,
    /// ASHA in the stopping form, as Ray Tune has it.
    Asha(Asha),
    /// ASHA in the form of its paper: trials pause, and the best are promoted.
    AshaPromotion(AshaPromotion),
    /// Trials that are worse than the median of the others stop.
    MedianStopping(MedianStopping),
    /// Population based training.
    Pbt(Pbt),
}

impl Scheduler {
    pub(crate) fn build(
        &self,
        objective: &Objective,
        seed: u64,
    ) -> Result<Box<dyn TrialScheduler>> {
        let mode = self.own().1.unwrap_or(objective.mode);
        Ok(match self {
            Self::Fifo => Box::new(trial_scheduler::Fifo),
            Self::Asha(asha) => asha.build(mode, seed)?,
            Self::AshaPromotion(asha) => asha.build(mode)?,
            Self::MedianStopping(median) => median.build(mode)?,
            Self::Pbt(pbt) => pbt.build(mode, seed)?,
        })
    }

    /// Fails if it names a parameter that no configuration has.
    pub(crate) fn check_parameters(&self, keys: &Keys) -> Result<()> {
        match self {
            Self::Pbt(pbt) => pbt.check_parameters(keys),
            Self::Fifo | Self::Asha(_) | Self::AshaPromotion(_) | Self::MedianStopping(_) => Ok(()),
        }
    }

    pub(crate) fn metric<'a>(&'a self, objective: &'a Objective) -> &'a str {
        self.own().0.unwrap_or(&objective.metric)
    }

    /// Returns the metric that it takes for time.
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

/// Serde's own would not say which field is wrong.
impl TryFrom<Map<String, Value>> for Scheduler {
    type Error = Error;

    fn try_from(table: Map<String, Value>) -> Result<Self> {
        let types = [
            "fifo",
            "asha",
            "async_hyperband",
            "asha_promotion",
            "median_stopping",
            "pbt",
            "population_based_training",
        ];
        let (name, rest) = fields::of_type(table, &types)?;
        match &*name {
            "asha" | "async_hyperband" => fields::parse(rest).map(Self::Asha),
            "asha_promotion" => fields::parse(rest).map(Self::AshaPromotion),
            "median_stopping" => fields::parse(rest).map(Self::MedianStopping),
            "pbt" | "population_based_training" => fields::parse(rest).map(Self::Pbt),
            "fifo" => fields::parse::<NoFields>(rest).map(|_| Self::Fifo),
            name => Err(Error::misuse(format!("no scheduler has the type {name:?}"))),
        }
    }
}

macro_rules! from_settings {
    ($($settings:ident)*) => {$(
        impl From<$settings> for Scheduler {
            fn from(settings: $settings) -> Self {
                Self::$settings(settings)
            }
        }
    )*};
}

from_settings! { Asha AshaPromotion MedianStopping Pbt }
