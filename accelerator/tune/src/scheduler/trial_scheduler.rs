//! The interface of schedulers, their common parts, and the one that stops nobody.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::config::{Config, TrialId};
use crate::error::{Error, Result};
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

/// Decides which trials go on: Ray Tune's `TrialScheduler`.
pub(crate) trait TrialScheduler: fmt::Debug + Send {
    /// A trial begins.
    fn on_trial_add(&mut self, trial: TrialId, config: &Config);

    /// A trial has reported. `others_wait` says whether a trial that is paused or has not begun waits for a worker.
    fn on_trial_result(&mut self, observation: Observation, others_wait: bool)
    -> SchedulerDecision;

    /// A trial has ended: by itself, by a stop rule, or by a decision of this scheduler. The observation is its last.
    fn on_trial_complete(&mut self, last: Observation);

    /// A trial has failed for good.
    fn on_trial_error(&mut self, trial: TrialId);

    /// The paused trial to resume now; `None` for one that has not begun, or none. `paused` is in the order of numbers.
    fn choose_trial_to_run(&mut self, paused: &[TrialId], others: OtherTrials) -> Option<TrialId>;

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

/// Trials that have not begun first, then the paused one with the lowest number.
pub(super) fn oldest(paused: &[TrialId], others: OtherTrials) -> Option<TrialId> {
    match others {
        OtherTrials::Pending => None,
        OtherTrials::Running | OtherTrials::None => paused.first().copied(),
    }
}

/// Every trial runs to its end.
#[derive(Debug)]
pub(super) struct Fifo;

impl TrialScheduler for Fifo {
    fn on_trial_add(&mut self, _trial: TrialId, _config: &Config) {}

    fn on_trial_result(
        &mut self,
        _observation: Observation,
        _others_wait: bool,
    ) -> SchedulerDecision {
        SchedulerDecision::Continue
    }

    fn on_trial_complete(&mut self, _last: Observation) {}

    fn on_trial_error(&mut self, _trial: TrialId) {}

    fn choose_trial_to_run(&mut self, paused: &[TrialId], others: OtherTrials) -> Option<TrialId> {
        oldest(paused, others)
    }

    fn status(&self) -> Vec<String> {
        vec!["Using FIFO scheduling algorithm.".to_owned()]
    }
}

/// The times of a bracket's rungs, ascending: `grace`, `grace·η`, … and at last `max_t`.
pub(super) fn rung_times(grace: u64, eta: u64, max_t: u64) -> Vec<u64> {
    let steps = std::iter::successors(Some(grace), |time| time.checked_mul(eta));
    let mut times: Vec<_> = steps.take_while(|time| *time < max_t).collect();
    times.push(max_t);
    times
}

/// Returns the times of Ray Tune, whose count is a truncated logarithm: the last is missing if that falls short, and
/// `max_t` is one only if it is a power.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "as Ray computes them"
)]
pub(super) fn rung_times_of_ray(grace: u64, eta: u64, max_t: u64, bracket: u32) -> Vec<u64> {
    let (grace_f, eta_f, max_f) = (grace as f64, eta as f64, max_t as f64);
    let count = (max_f / grace_f).ln() / eta_f.ln() - f64::from(bracket) + 1.0;
    let count = count.trunc().max(0.0) as u32;
    (0..count)
        .map(|rung| grace * eta.pow(rung + bracket))
        .collect()
}

pub(super) fn check(scheduler: &str, grace: u64, eta: u64, max_t: u64) -> Result<()> {
    if max_t == 0 {
        return Err(misuse(scheduler, "`max_t` is 0; it is at least 1"));
    }
    if grace == 0 || grace > max_t {
        let what = format!("`grace_period` is {grace}; it is from 1 to `max_t`, {max_t}");
        return Err(misuse(scheduler, &what));
    }
    if eta < 2 {
        let what = format!("`reduction_factor` is {eta}; it is at least 2");
        return Err(misuse(scheduler, &what));
    }
    Ok(())
}

/// The percentile that a value has to reach: numpy's `nanpercentile` with linear interpolation. `None` of no values.
///
/// A difference of infinities is NaN to numpy, and then nobody is stopped any more; in the exact form the nearer of the two
/// values counts.
pub(super) fn percentile(
    values: &[f64],
    fraction: f64,
    compatibility: Compatibility,
) -> Option<f64> {
    if values.is_empty() {
        return None;
    }
    let mut sorted: Vec<_> = values
        .iter()
        .copied()
        .filter(|value| !value.is_nan())
        .collect();
    if sorted.is_empty() {
        return Some(f64::NAN);
    }
    sorted.sort_by(f64::total_cmp);
    #[expect(clippy::cast_precision_loss, reason = "a count of trials")]
    let place = (sorted.len() - 1) as f64 * fraction;
    let gap = place.fract();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 0 and the count"
    )]
    let index = place.floor() as usize;
    let low = sorted[index];
    let high = sorted[(index + 1).min(sorted.len() - 1)];
    if compatibility == Compatibility::Exact && !(low.is_finite() && high.is_finite()) {
        return Some(if gap < 0.5 { low } else { high });
    }
    // As numpy's `_lerp`, to the bit.
    Some(match gap < 0.5 {
        true => low + (high - low) * gap,
        false => high - (high - low) * (1.0 - gap),
    })
}

/// Formats a value of a rung with all digits. NaN is `nan`, as in Ray.
pub(super) fn shown(value: f64) -> String {
    match value.is_nan() {
        true => "nan".to_owned(),
        false => format!("{value:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rungs_are_powers_and_the_last_is_the_longest_time() {
        assert_eq!(rung_times(1, 4, 100), [1, 4, 16, 64, 100]);
        assert_eq!(rung_times(1, 10, 1000), [1, 10, 100, 1000]);
        assert_eq!(rung_times(1, 3, 243), [1, 3, 9, 27, 81, 243]);
        assert_eq!(rung_times(2, 3, 9), [2, 6, 9]);
        assert_eq!(rung_times(5, 2, 5), [5]);
        // Ray loses the last one where a logarithm falls short of an integer.
        assert_eq!(rung_times_of_ray(1, 10, 1000, 0), [1, 10, 100]);
        assert_eq!(rung_times_of_ray(1, 3, 243, 0), [1, 3, 9, 27, 81]);
        assert_eq!(rung_times_of_ray(1, 4, 100, 1), [4, 16, 64]);
    }

    #[test]
    fn infinities_leave_a_cutoff_in_the_exact_form() {
        let values = [f64::INFINITY, f64::INFINITY, 0.5];
        let cut = |compatibility| percentile(&values, 0.75, compatibility).unwrap();
        assert!(cut(Compatibility::Ray).is_nan());
        assert_eq!(cut(Compatibility::Exact), f64::INFINITY);
    }
}
