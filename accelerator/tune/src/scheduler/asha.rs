//! ASHA, in its stopping and its promotion form.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::trial_scheduler::{
    self, Compatibility, Observation, OtherTrials, SchedulerDecision, TrialScheduler,
    iteration_attr, misuse, oldest,
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
        trial_scheduler::check("asha", self.grace_period, self.reduction_factor, self.max_t)?;
        let times =
            trial_scheduler::rung_times(self.grace_period, self.reduction_factor, self.max_t);
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
            Compatibility::Ray => trial_scheduler::rung_times_of_ray(
                self.grace_period,
                self.reduction_factor,
                self.max_t,
                number,
            ),
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

/// The state of [`Asha`].
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
        #[expect(clippy::cast_precision_loss, reason = "a small factor")]
        let fraction = 1.0 - 1.0 / self.settings.reduction_factor as f64;
        trial_scheduler::percentile(&scores, fraction, self.settings.compatibility)
    }

    fn score(&self, value: Option<f64>) -> Option<f64> {
        let score = value.map(|value| match self.mode {
            Mode::Max => value,
            Mode::Min => -value,
        });
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
            let is_in = rung.entries.iter().any(|(entered, _)| *entered == trial);
            #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
            let is_reached = time >= rung.time as f64;
            match (self.settings.compatibility, self.settings.stop_last_trials) {
                // A rung that was passed over is entered later.
                (Compatibility::Ray, true) => is_reached && !is_in,
                _ => is_reached,
            }
        });
        let Some(index) = reached else {
            return true;
        };
        let rung = &self.brackets[bracket][index];
        if rung.entries.iter().any(|(entered, _)| *entered == trial) {
            return true;
        }
        let cutoff = self.cutoff(rung);
        self.brackets[bracket][index].entries.push((trial, score));
        // What is below a cutoff that is NaN goes on, as Ray has it.
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
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let is_last = observation.time >= self.settings.max_t as f64;
        let goes_on = !(is_last && self.settings.stop_last_trials)
            && self.enter(observation.trial, observation.time, score);
        if goes_on {
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
            let is_in = |rung: &StopRung| rung.entries.iter().any(|(entered, _)| *entered == trial);
            let next = rungs.iter().rposition(is_in).map_or(0, |index| index + 1);
            if let Some(rung) = rungs.get_mut(next) {
                rung.entries.push((trial, f64::NEG_INFINITY));
            }
        }
        self.bracket_of.remove(&trial);
    }

    fn choose_trial_to_run(&mut self, paused: &[TrialId], others: OtherTrials) -> Option<TrialId> {
        oldest(paused, others)
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
                    Some(score) => trial_scheduler::shown(match self.settings.compatibility {
                        Compatibility::Exact => in_users_sign(self.mode, score),
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
            let sign = |score| in_users_sign(self.mode, score);
            #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
            Rung {
                time: rung.time as f64,
                entries: entries
                    .map(|(trial, score)| (*trial, sign(*score)))
                    .collect(),
                cutoff: self.cutoff(rung).map(sign),
            }
        });
        rungs.collect()
    }
}

fn in_users_sign(mode: Mode, score: f64) -> f64 {
    match mode {
        Mode::Max => score,
        Mode::Min => -score,
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
        let name = "asha_promotion";
        trial_scheduler::check(name, self.grace_period, self.reduction_factor, self.max_t)?;
        let times =
            trial_scheduler::rung_times(self.grace_period, self.reduction_factor, self.max_t);
        let rungs = times.into_iter().map(|time| PromotionRung {
            time,
            entries: Vec::new(),
            done: BTreeSet::new(),
        });
        Ok(Box::new(Promotion {
            eta: usize::try_from(self.reduction_factor).unwrap_or(usize::MAX),
            mode,
            rungs: rungs.collect(),
            next: BTreeMap::new(),
            promoted: 0,
        }))
    }
}

/// The state of [`AshaPromotion`].
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
        // Nothing can enter a rung any more, so the best goes on until one has come to the end. Those that failed on the
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
            let value = value.map_or_else(
                || "None".to_owned(),
                |(_, value)| trial_scheduler::shown(*value),
            );
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
            #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
            Rung {
                time: rung.time as f64,
                entries: rung.entries.clone(),
                cutoff: last.map(|(_, value)| *value),
            }
        });
        rungs.collect()
    }
}
