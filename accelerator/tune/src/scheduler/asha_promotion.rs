use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::rungs;
use super::trial_scheduler::{Observation, OtherTrials, SchedulerDecision, TrialScheduler};
use crate::config::Config;
use crate::error::Result;
use crate::objective::Mode;
use crate::trial_id::TrialId;
use crate::view::Rung;

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
        rungs::check(name, self.grace_period, self.reduction_factor, self.max_t)?;
        let times = rungs::times(self.grace_period, self.reduction_factor, self.max_t);
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
            let value = value.map_or_else(|| "None".to_owned(), |(_, value)| rungs::shown(*value));
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
