//! ASHA, in its stopping and its promotion form.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::trial_scheduler::{
    Compatibility, Observation, OtherTrials, SchedulerDecision, TrialScheduler, iteration_attr,
    misuse,
};
use crate::config::{Config, TrialId};
use crate::error::Result;
use crate::objective::Mode;
use crate::space::Random;
use crate::view::Rung;

/// Asynchronous successive halving in the stopping form: Ray Tune's `ASHAScheduler`.
///
/// A trial that reaches a rung is compared with those that were there before, and ends where it is worse than the best
/// `1/reduction_factor` of them. It needs no checkpoints. See [`AshaPromotion`](crate::AshaPromotion) for the form that
/// gives trials a second chance.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Asha {
    /// The metric that it compares; `None` is the search's.
    pub metric: Option<String>,
    /// The direction of the metric; `None` is the search's.
    pub mode: Option<Mode>,
    /// The metric that counts as time.
    pub time_attr: String,
    /// The time at which a trial ends.
    pub max_t: u64,
    /// No trial ends before that time.
    pub grace_period: u64,
    /// The reduction at each rung: one in so many trials continues.
    pub reduction_factor: u64,
    /// The number of brackets. Each next one begins a rung later; trials are drawn into one.
    pub brackets: u32,
    /// Lets trials end at `max_t`.
    pub stop_last_trials: bool,
    /// The choice to decide as Ray Tune.
    pub compatibility: Compatibility,
}

impl Default for Asha {
    fn default() -> Self {
        Self {
            metric: None,
            mode: None,
            time_attr: iteration_attr(),
            max_t: 100,
            grace_period: 1,
            reduction_factor: 4,
            brackets: 1,
            stop_last_trials: true,
            compatibility: Compatibility::Exact,
        }
    }
}

impl Asha {
    pub(super) fn build(&self, mode: Mode, seed: u64) -> Result<Box<dyn TrialScheduler>> {
        Ok(Box::new(self.halving(mode, seed)?))
    }

    pub(super) fn halving(&self, mode: Mode, seed: u64) -> Result<Halving> {
        let (grace, eta, max_t) = (self.grace_period, self.reduction_factor, self.max_t);
        let times = rung_times("asha", grace, eta, max_t)?;
        if self.brackets == 0 || self.brackets as usize > times.len() {
            let what = format!(
                "`brackets` is {}; with {} rungs it is from 1 to {}",
                self.brackets,
                times.len(),
                times.len()
            );
            return Err(misuse("asha", &what));
        }
        let bracket = |number: u32| match self.compatibility {
            Compatibility::Exact => times[number as usize..].to_vec(),
            Compatibility::Ray => rung_times_of_ray(grace, eta, max_t, number),
        };
        let brackets = (0..self.brackets).map(|number| {
            let rungs = bracket(number).into_iter().map(|time| StopRung {
                time,
                entries: Vec::new(),
            });
            rungs.collect()
        });
        Ok(Halving {
            settings: self.clone(),
            mode,
            seed,
            brackets: brackets.collect(),
            bracket_of: BTreeMap::new(),
            stopped: 0,
        })
    }
}

#[derive(Debug)]
pub(super) struct Halving {
    settings: Asha,
    mode: Mode,
    seed: u64,
    /// The rungs of each bracket, from the bottom.
    brackets: Vec<Vec<StopRung>>,
    bracket_of: BTreeMap<TrialId, usize>,
    stopped: usize,
}

/// Scores are larger where they are better.
#[derive(Debug)]
struct StopRung {
    time: u64,
    entries: Vec<(TrialId, f64)>,
}

impl StopRung {
    fn has(&self, trial: TrialId) -> bool {
        self.entries.iter().any(|(entered, _)| *entered == trial)
    }
}

impl Halving {
    /// The cutoffs, from the bottom rung of the first bracket; scores, of which larger is better.
    #[cfg(test)]
    pub(super) fn cutoffs(&self) -> Vec<Option<f64>> {
        let rungs = self.brackets.iter().flatten();
        rungs.map(|rung| self.cutoff(rung)).collect()
    }

    #[cfg(test)]
    pub(super) fn set_bracket(&mut self, trial: TrialId, bracket: usize) {
        self.bracket_of.insert(trial, bracket);
    }

    fn cutoff(&self, rung: &StopRung) -> Option<f64> {
        let scores: Vec<_> = rung.entries.iter().map(|(_, score)| *score).collect();
        let fraction = 1.0 - 1.0 / float(self.settings.reduction_factor);
        percentile(&scores, fraction, self.settings.compatibility)
    }

    fn score(&self, value: Option<f64>) -> Option<f64> {
        let score = value.map(|value| signed(self.mode, value));
        match self.settings.compatibility {
            Compatibility::Ray => score,
            Compatibility::Exact => Some(
                score
                    .filter(|score| !score.is_nan())
                    .unwrap_or(f64::NEG_INFINITY),
            ),
        }
    }

    /// Enters a trial into the rung that it has reached; returns `true` if the trial continues.
    fn enter(&mut self, trial: TrialId, time: f64, score: f64) -> bool {
        let bracket = self.bracket_of.get(&trial).copied().unwrap_or(0);
        let reached = self.brackets[bracket].iter().rposition(|rung| {
            // To Ray, a rung that was passed over is entered later.
            let enters_later =
                self.settings.compatibility == Compatibility::Ray && self.settings.stop_last_trials;
            time >= float(rung.time) && !(enters_later && rung.has(trial))
        });
        let Some(index) = reached else {
            return true;
        };
        let rung = &self.brackets[bracket][index];
        if rung.has(trial) {
            return true;
        }
        let cutoff = self.cutoff(rung);
        self.brackets[bracket][index].entries.push((trial, score));
        // What is below a cutoff that is NaN continues, as Ray has it.
        !cutoff.is_some_and(|cutoff| score < cutoff)
    }

    fn draw_bracket(&self, trial: TrialId) -> usize {
        // The probabilities are a softmax of the numbers of rungs.
        #[expect(clippy::cast_precision_loss, reason = "a few rungs")]
        let weights: Vec<_> = self
            .brackets
            .iter()
            .map(|rungs| libm::exp(rungs.len() as f64 - self.brackets[0].len() as f64))
            .collect();
        let number = trial.number().to_le_bytes();
        let mut rest = Random::of(self.seed, &[b"bracket", &number]).unit();
        rest *= weights.iter().sum::<f64>();
        let below = weights.iter().position(|weight| {
            rest -= weight;
            rest < 0.0
        });
        below.unwrap_or(0)
    }
}

impl TrialScheduler for Halving {
    fn on_trial_add(&mut self, trial: TrialId, _config: &Config) {
        let bracket = self.draw_bracket(trial);
        self.bracket_of.insert(trial, bracket);
    }

    fn on_trial_result(
        &mut self,
        observation: Observation,
        _others_wait: bool,
    ) -> SchedulerDecision {
        let Some(score) = self.score(observation.value) else {
            return SchedulerDecision::Continue;
        };
        let is_last = observation.time >= float(self.settings.max_t);
        let continues = !(is_last && self.settings.stop_last_trials)
            && self.enter(observation.trial, observation.time, score);
        if continues {
            return SchedulerDecision::Continue;
        }
        self.stopped += 1;
        SchedulerDecision::Stop
    }

    fn on_trial_complete(&mut self, last: Observation) {
        if let Some(score) = self.score(last.value) {
            self.enter(last.trial, last.time, score);
        }
        self.bracket_of.remove(&last.trial);
    }

    fn on_trial_error(&mut self, trial: TrialId) {
        if self.settings.compatibility == Compatibility::Exact {
            // The worst of the next rung.
            let bracket = self.bracket_of.get(&trial).copied().unwrap_or(0);
            let rungs = &mut self.brackets[bracket];
            let last = rungs.iter().rposition(|rung| rung.has(trial));
            let next = last.map_or(0, |index| index + 1);
            if let Some(rung) = rungs.get_mut(next) {
                rung.entries.push((trial, f64::NEG_INFINITY));
            }
        }
        self.bracket_of.remove(&trial);
    }

    fn status(&self) -> Vec<String> {
        let mut lines = vec![format!(
            "Using AsyncHyperBand: num_stopped={}",
            self.stopped
        )];
        for bracket in &self.brackets {
            let rungs = bracket.iter().rev().map(|rung| {
                let cutoff = match self.cutoff(rung) {
                    None => "None".to_owned(),
                    Some(score) => shown(match self.settings.compatibility {
                        Compatibility::Exact => signed(self.mode, score),
                        Compatibility::Ray => score,
                    }),
                };
                format!("Iter {}.000: {cutoff}", rung.time)
            });
            let rungs: Vec<_> = rungs.collect();
            lines.push(format!("Bracket: {}", rungs.join(" | ")));
        }
        lines
    }

    fn rungs(&self) -> Vec<Rung> {
        let rungs = self.brackets.iter().flatten().map(|rung| {
            let entries = rung.entries.iter();
            let sign = |score| signed(self.mode, score);
            Rung {
                time: float(rung.time),
                entries: entries
                    .map(|(trial, score)| (*trial, sign(*score)))
                    .collect(),
                cutoff: self.cutoff(rung).map(sign),
            }
        });
        rungs.collect()
    }
}

/// Asynchronous successive halving as its paper has it (Li et al. 2018, arXiv 1810.05934, algorithm 2): every trial pauses
/// at every rung, and the best `1/reduction_factor` of a rung are promoted to the next.
///
/// No report is final: a trial is promoted once there are enough worse ones, however late they come. Trials have to save
/// checkpoints. Time is the number of iterations.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct AshaPromotion {
    /// The metric that it compares; `None` is the search's.
    pub metric: Option<String>,
    /// The direction of the metric; `None` is the search's.
    pub mode: Option<Mode>,
    /// The iteration at which a trial ends.
    pub max_t: u64,
    /// The iterations of the first rung.
    pub grace_period: u64,
    /// The reduction at each rung: one in so many trials is promoted.
    pub reduction_factor: u64,
}

impl Default for AshaPromotion {
    fn default() -> Self {
        Self {
            metric: None,
            mode: None,
            max_t: 100,
            grace_period: 1,
            reduction_factor: 4,
        }
    }
}

impl AshaPromotion {
    pub(super) fn build(&self, mode: Mode) -> Result<Box<dyn TrialScheduler>> {
        let (grace, eta, max_t) = (self.grace_period, self.reduction_factor, self.max_t);
        let times = rung_times("asha_promotion", grace, eta, max_t)?;
        let rungs = times.into_iter().map(|time| PromotionRung {
            time,
            entries: Vec::new(),
            done: BTreeSet::new(),
        });
        Ok(Box::new(Promotion {
            eta: usize::try_from(eta).unwrap_or(usize::MAX),
            mode,
            rungs: rungs.collect(),
            next: BTreeMap::new(),
            promoted: 0,
        }))
    }
}

#[derive(Debug)]
struct Promotion {
    eta: usize,
    mode: Mode,
    /// The rungs, from the bottom.
    rungs: Vec<PromotionRung>,
    /// The rung that each trial runs to.
    next: BTreeMap<TrialId, usize>,
    promoted: usize,
}

#[derive(Debug)]
struct PromotionRung {
    time: u64,
    /// The entries in the order of arrival. NaN is a value that is missing, or of a trial that failed.
    entries: Vec<(TrialId, f64)>,
    /// The trials that were promoted, or have ended.
    done: BTreeSet<TrialId>,
}

impl Promotion {
    fn enter(&mut self, trial: TrialId, value: Option<f64>) {
        let Some(&next) = self.next.get(&trial) else {
            return;
        };
        if let Some(rung) = self.rungs.get_mut(next) {
            rung.entries.push((trial, value.unwrap_or(f64::NAN)));
            self.next.insert(trial, next + 1);
        }
    }

    /// The best so many of a rung; those that came earlier first, where they are equal.
    fn best(&self, rung: &PromotionRung, count: usize) -> Vec<TrialId> {
        let mut entries: Vec<_> = rung
            .entries
            .iter()
            .filter(|(_, value)| !value.is_nan())
            .collect();
        entries.sort_by(|(_, left), (_, right)| self.mode.compare(*right, *left));
        entries
            .into_iter()
            .take(count)
            .map(|(trial, _)| *trial)
            .collect()
    }

    /// The best trial of a rung that may be promoted.
    fn promotable(&self, index: usize, count: usize, paused: &[TrialId]) -> Option<TrialId> {
        let rung = &self.rungs[index];
        let mut best = self.best(rung, count).into_iter();
        best.find(|trial| !rung.done.contains(trial) && paused.contains(trial))
    }

    fn promote(&mut self, index: usize, trial: TrialId) -> TrialId {
        self.rungs[index].done.insert(trial);
        self.promoted += 1;
        trial
    }
}

impl TrialScheduler for Promotion {
    fn on_trial_add(&mut self, trial: TrialId, _config: &Config) {
        self.next.insert(trial, 0);
    }

    fn on_trial_result(
        &mut self,
        observation: Observation,
        _others_wait: bool,
    ) -> SchedulerDecision {
        let trial = observation.trial;
        let next = self.next.get(&trial).copied().unwrap_or(0);
        let Some(rung) = self.rungs.get(next) else {
            return SchedulerDecision::Stop;
        };
        if observation.iteration < rung.time {
            return SchedulerDecision::Continue;
        }
        self.enter(trial, observation.value);
        match next + 1 == self.rungs.len() {
            true => SchedulerDecision::Stop,
            false => SchedulerDecision::Pause,
        }
    }

    fn on_trial_complete(&mut self, last: Observation) {
        // One that pauses at a rung is in it; one that ended before the next rung enters that.
        let next = self.next.get(&last.trial).copied().unwrap_or(0);
        let reached = next
            .checked_sub(1)
            .map_or(0, |index| self.rungs[index].time);
        if last.iteration > reached {
            self.enter(last.trial, last.value);
        }
        for rung in &mut self.rungs {
            rung.done.insert(last.trial);
        }
        self.next.remove(&last.trial);
    }

    fn on_trial_error(&mut self, trial: TrialId) {
        self.enter(trial, None);
        for rung in &mut self.rungs {
            rung.done.insert(trial);
        }
        self.next.remove(&trial);
    }

    fn choose_trial_to_run(&mut self, paused: &[TrialId], others: OtherTrials) -> Option<TrialId> {
        for index in (0..self.rungs.len() - 1).rev() {
            let count = self.rungs[index].entries.len() / self.eta;
            if let Some(trial) = self.promotable(index, count, paused) {
                return Some(self.promote(index, trial));
            }
        }
        if others != OtherTrials::None {
            return None;
        }
        // Nothing can enter a rung any more, so the best continues until one has come to the end. Those that failed on the
        // way hold nobody up.
        let last = self.rungs.last()?;
        if last.entries.iter().any(|(_, value)| !value.is_nan()) {
            return None;
        }
        let (index, trial) = (0..self.rungs.len() - 1)
            .rev()
            .find_map(|index| Some((index, self.promotable(index, usize::MAX, paused)?)))?;
        Some(self.promote(index, trial))
    }

    fn status(&self) -> Vec<String> {
        let rungs = self.rungs.iter().rev().map(|rung| {
            let best = self.best(rung, 1).first().copied();
            let mut entries = rung.entries.iter();
            let value = entries.find(|(trial, _)| Some(*trial) == best);
            let value = value.map_or_else(|| "None".to_owned(), |(_, value)| shown(*value));
            format!(
                "Iter {}.000: {} trials, best {value}",
                rung.time,
                rung.entries.len()
            )
        });
        let rungs: Vec<_> = rungs.collect();
        vec![
            format!(
                "Using AsyncHyperBand with promotion: num_promoted={}",
                self.promoted
            ),
            format!("Bracket: {}", rungs.join(" | ")),
        ]
    }

    fn rungs(&self) -> Vec<Rung> {
        let rungs = self.rungs.iter().map(|rung| {
            let best = self.best(rung, rung.entries.len() / self.eta);
            let mut entries = rung.entries.iter();
            let last = entries.find(|(trial, _)| Some(trial) == best.last());
            Rung {
                time: float(rung.time),
                entries: rung.entries.clone(),
                cutoff: last.map(|(_, value)| *value),
            }
        });
        rungs.collect()
    }
}

/// The times of a bracket's rungs, ascending: `grace`, `grace·η`, … and at last `max_t`.
fn rung_times(scheduler: &str, grace: u64, eta: u64, max_t: u64) -> Result<Vec<u64>> {
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
    let steps = std::iter::successors(Some(grace), |time| time.checked_mul(eta));
    let mut times: Vec<_> = steps.take_while(|time| *time < max_t).collect();
    times.push(max_t);
    Ok(times)
}

/// Returns the times of Ray Tune, whose count is a truncated logarithm: the last is missing if that falls short, and
/// `max_t` is one only if it is a power.
fn rung_times_of_ray(grace: u64, eta: u64, max_t: u64, bracket: u32) -> Vec<u64> {
    let count = (float(max_t) / float(grace)).ln() / float(eta).ln() - f64::from(bracket) + 1.0;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "as Ray computes it"
    )]
    let count = count.trunc().max(0.0) as u32;
    (0..count)
        .map(|rung| grace * eta.pow(rung + bracket))
        .collect()
}

/// The percentile that a value has to reach: numpy's `nanpercentile` with linear interpolation. `None` of no values.
///
/// A difference of infinities is NaN to numpy, and then nobody is stopped any more; in the exact form the nearer of the two
/// values counts.
fn percentile(values: &[f64], fraction: f64, compatibility: Compatibility) -> Option<f64> {
    if values.is_empty() {
        return None;
    }
    let mut sorted = values.to_vec();
    sorted.retain(|value| !value.is_nan());
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
fn shown(value: f64) -> String {
    match value.is_nan() {
        true => "nan".to_owned(),
        false => format!("{value:?}"),
    }
}

/// Converts a value to a score, of which larger is better, or back.
fn signed(mode: Mode, value: f64) -> f64 {
    match mode {
        Mode::Max => value,
        Mode::Min => -value,
    }
}

#[expect(clippy::cast_precision_loss, reason = "times are far below 2^53")]
fn float(time: u64) -> f64 {
    time as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rungs_are_powers_and_the_last_is_the_longest_time() {
        let times = |grace, eta, max_t| rung_times("asha", grace, eta, max_t).unwrap();
        assert_eq!(times(1, 4, 100), [1, 4, 16, 64, 100]);
        assert_eq!(times(1, 10, 1000), [1, 10, 100, 1000]);
        assert_eq!(times(1, 3, 243), [1, 3, 9, 27, 81, 243]);
        assert_eq!(times(2, 3, 9), [2, 6, 9]);
        assert_eq!(times(5, 2, 5), [5]);
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
