use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::trial_scheduler::{
    Compatibility, Observation, SchedulerDecision, TrialScheduler, iteration_attr, misuse,
};
use crate::config::TrialId;
use crate::error::Result;
use crate::objective::Mode;

/// Stops a trial whose best value is worse than the median of the other trials' means so far (Golovin et al. 2017, Google
/// Vizier): Ray Tune's `MedianStoppingRule`.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct MedianStopping {
    /// The metric that it compares; `None` is the search's.
    pub metric: Option<String>,
    /// The direction of the metric; `None` is the search's.
    pub mode: Option<Mode>,
    /// The metric that counts as time.
    pub time_attr: String,
    /// No trial ends before that time, and no earlier value counts for a mean.
    pub grace_period: f64,
    /// The number of other trials that have to come as far before one ends.
    pub min_samples_required: usize,
    /// The choice to decide as Ray Tune, to which the last value of a trial that has ended counts twice.
    pub compatibility: Compatibility,
}

impl Default for MedianStopping {
    fn default() -> Self {
        Self {
            metric: None,
            mode: None,
            time_attr: iteration_attr(),
            grace_period: 1.0,
            min_samples_required: 3,
            compatibility: Compatibility::Exact,
        }
    }
}

impl MedianStopping {
    pub(super) fn build(&self, mode: Mode) -> Result<Box<dyn TrialScheduler>> {
        if !self.grace_period.is_finite() {
            return Err(misuse(
                "median_stopping",
                "`grace_period` is no finite number",
            ));
        }
        Ok(Box::new(Median {
            settings: self.clone(),
            mode,
            results: BTreeMap::new(),
            stopped: 0,
        }))
    }
}

#[derive(Debug)]
struct Median {
    settings: MedianStopping,
    mode: Mode,
    /// Times and values of each trial, as they came.
    results: BTreeMap<TrialId, Vec<(f64, f64)>>,
    stopped: usize,
}

impl Median {
    fn mean(&self, results: &[(f64, f64)], until: f64) -> f64 {
        let keeps_all = self.settings.compatibility == Compatibility::Ray;
        let within = results
            .iter()
            .filter(|(time, value)| {
                (self.settings.grace_period..=until).contains(time)
                    && (keeps_all || value.is_finite())
            })
            .map(|(_, value)| *value);
        let (sum, count) =
            within.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
        sum / count
    }

    /// Compares; for Ray as Python's `max`: nothing is better than NaN, so a first value that is NaN stays the best.
    fn is_better(&self, value: f64, than: f64) -> bool {
        match self.settings.compatibility {
            Compatibility::Exact => self.mode.is_better(value, than),
            Compatibility::Ray => !than.is_nan() && self.mode.is_better(value, than),
        }
    }

    fn best(&self, trial: TrialId) -> f64 {
        let values = self.results[&trial].iter().map(|(_, value)| *value);
        let best = values.reduce(|best, value| match self.is_better(value, best) {
            true => value,
            false => best,
        });
        best.unwrap_or(f64::NAN)
    }
}

impl TrialScheduler for Median {
    fn on_trial_result(
        &mut self,
        observation: Observation,
        _others_wait: bool,
    ) -> SchedulerDecision {
        let Observation { trial, time, .. } = observation;
        let value = match (observation.value, self.settings.compatibility) {
            (Some(value), _) => value,
            (None, Compatibility::Exact) => f64::NAN,
            (None, Compatibility::Ray) => return SchedulerDecision::Continue,
        };
        self.results.entry(trial).or_default().push((time, value));
        if time < self.settings.grace_period {
            return SchedulerDecision::Continue;
        }
        let others = self.results.iter().filter(|(other, results)| {
            **other != trial && results.last().is_some_and(|(last, _)| *last >= time)
        });
        let mut means: Vec<_> = others
            .map(|(_, results)| self.mean(results, time))
            .collect();
        // A trial without a number has no mean.
        means.retain(|mean| mean.is_finite());
        let best = self.best(trial);
        // A best value that is NaN is worse than every median, to Ray too.
        let is_worse = median(&mut means).is_some_and(|median| self.mode.is_better(median, best));
        if means.len() < self.settings.min_samples_required || !is_worse {
            return SchedulerDecision::Continue;
        }
        self.stopped += 1;
        SchedulerDecision::Stop
    }

    fn on_trial_complete(&mut self, last: Observation) {
        if let (Compatibility::Ray, Some(value)) = (self.settings.compatibility, last.value) {
            let results = self.results.entry(last.trial).or_default();
            results.push((last.time, value));
        }
    }

    fn status(&self) -> Vec<String> {
        vec![format!(
            "Using MedianStoppingRule: num_stopped={}.",
            self.stopped
        )]
    }
}

fn median(values: &mut [f64]) -> Option<f64> {
    if values.is_empty() {
        return None;
    }
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    Some(match values.len() % 2 {
        1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    })
}
