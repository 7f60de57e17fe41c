//! Trials whose configurations are equal at first train that part once.
//!
//! A value `{"schedule": [[0, a], [10, b]]}` is `a` in the iterations before the tenth, and `b` from then on. Two
//! configurations are equal as far as all their values are. See Hippo (Shin et al. 2020, arXiv 2006.11972), which calls
//! this a stage tree.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::event::Origin;
use super::trial_state::TrialState;
use super::{CheckpointKey, Core, prefix};
use crate::config::{Config, TrialId};
use crate::view::TrialStatus;

/// Returns the origin of a trial that has not begun: `Some(None)` if it has none; `None` while the trial waits for
/// another to get there.
#[expect(
    clippy::option_option,
    reason = "whether it waits, and what it begins with"
)]
pub(super) fn origin(trials: &[TrialState], trial: TrialId) -> Option<Option<Origin>> {
    let config = trials[trial.index()].config();
    let mut best: Option<Origin> = None;
    let mut awaited = 0;
    for other in trials.iter().filter(|other| other.id != trial) {
        let has_begun = other.status != TrialStatus::Pending;
        if !has_begun || other.branches.len() > 1 {
            continue;
        }
        let shared = shared_iterations(config, other.config());
        if shared == 0 {
            continue;
        }
        let saved = other.branch_state().saves.range(..=shared).next_back();
        if let Some(&iteration) = saved
            && best.is_none_or(|best| iteration > best.iteration)
        {
            best = Some(Origin {
                trial: other.id,
                iteration,
            });
        }
        if other.status == TrialStatus::Running && other.decided < shared {
            awaited = awaited.max(shared);
        }
    }
    let reached = best.map_or(0, |best| best.iteration);
    (reached >= awaited).then_some(best)
}

/// Returns `true` if a pending trial's configuration is equal to this trial's up to exactly this iteration.
pub(super) fn is_fork(
    trials: &[TrialState],
    pending: &BTreeSet<TrialId>,
    trial: TrialId,
    iteration: u64,
) -> bool {
    let config = trials[trial.index()].config();
    pending
        .iter()
        .any(|other| shared_iterations(config, trials[other.index()].config()) == iteration)
}

/// Returns the number of first iterations in which two configurations are equal; 0 if they never differ, since there
/// is nothing to gain from a fork then.
pub(super) fn shared_iterations(left: &Config, right: &Config) -> u64 {
    match shared_tables(left.as_map(), right.as_map()) {
        u64::MAX => 0,
        shared => shared,
    }
}

fn shared_tables(left: &Map<String, Value>, right: &Map<String, Value>) -> u64 {
    let mut shared = u64::MAX;
    for name in left.keys().chain(right.keys()) {
        shared = match (left.get(name), right.get(name)) {
            (Some(left), Some(right)) => shared.min(shared_values(left, right)),
            _ => 0,
        };
        if shared == 0 {
            return 0;
        }
    }
    shared
}

fn shared_values(left: &Value, right: &Value) -> u64 {
    if left == right {
        return u64::MAX;
    }
    if let (Some(left), Some(right)) = (steps(left), steps(right)) {
        return shared_steps(&left, &right);
    }
    match (left, right) {
        (Value::Object(left), Value::Object(right)) => shared_tables(left, right),
        _ => 0,
    }
}

/// The first iteration, counted from 0, at which two schedules differ.
fn shared_steps(left: &[(u64, &Value)], right: &[(u64, &Value)]) -> u64 {
    let mut starts: Vec<u64> = left.iter().chain(right).map(|(start, _)| *start).collect();
    starts.sort_unstable();
    let differing = starts
        .into_iter()
        .find(|at| value_at(left, *at) != value_at(right, *at));
    differing.unwrap_or(u64::MAX)
}

fn value_at<'a>(steps: &[(u64, &'a Value)], at: u64) -> Option<&'a Value> {
    let before = steps.iter().rev().find(|(start, _)| *start <= at);
    before.map(|(_, value)| *value)
}

/// A schedule's values, each with the iteration from which it holds.
fn steps(value: &Value) -> Option<Vec<(u64, &Value)>> {
    let Value::Object(map) = value else {
        return None;
    };
    if map.len() != 1 {
        return None;
    }
    let Value::Array(steps) = map.get("schedule")? else {
        return None;
    };
    let steps = steps.iter().map(|step| match step.as_array()?.as_slice() {
        [start, value] => Some((start.as_u64()?, value)),
        _ => None,
    });
    let mut steps = steps.collect::<Option<Vec<_>>>()?;
    steps.sort_by_key(|(start, _)| *start);
    Some(steps)
}

/// The settings for when trials save, and what is kept on the disk.
///
/// Without more, each checkpoint that a function or a program reports is taken, and each trial keeps its newest. A
/// [`Trainable`](crate::Trainable) saves as these settings say. Schedulers that pause trials, or copy them, ask for
/// checkpoints besides, and so does an interruption.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointSettings {
    /// A trial saves after every so many iterations, be it a class, a function or a program; 0 for not at all.
    pub frequency: Option<u64>,
    /// A trial saves when a scheduler or a stop rule ends it.
    pub at_end: bool,
    /// The number of newest checkpoints that each trial keeps, at least 1.
    pub keep_per_trial: usize,
    /// The number of ended trials that keep their checkpoints: those with the best values of the objective. `None` is
    /// all of them.
    pub keep_best: Option<usize>,
    /// The most bytes that the checkpoints of a search may have. Ended trials lose theirs first, beginning with the
    /// worst, and then paused ones. Running trials and the best ended one keep theirs.
    pub budget: Option<u64>,
}

impl Default for CheckpointSettings {
    fn default() -> Self {
        Self {
            frequency: None,
            at_end: false,
            keep_per_trial: 1,
            keep_best: None,
            budget: None,
        }
    }
}

/// The checkpoints to delete now.
pub(crate) fn prunable(core: &Core, settings: &CheckpointSettings) -> Vec<CheckpointKey> {
    let pinned = pinned(core);
    let resumed = needed(core, TrialStatus::Paused);
    let mut gone = BTreeSet::new();
    let mut newer: BTreeMap<(TrialId, bool), usize> = BTreeMap::new();
    for key in core.checkpoints().keys().rev() {
        // Others may go on from what a scheduler asked for: what a trial reports by itself takes no place of those.
        let goes_on = core
            .trial(key.branch.trial)
            .is_some_and(|trial| trial.end.is_none());
        let is_asked = core
            .branch(key.branch)
            .is_some_and(|state| state.saves.contains(&key.iteration));
        let newer = newer
            .entry((key.branch.trial, goes_on && is_asked))
            .or_default();
        if *newer >= settings.keep_per_trial.max(1)
            && !pinned.contains(key)
            && !resumed.contains(key)
        {
            gone.insert(*key);
        }
        *newer += 1;
    }
    let ended = ranked(core, |status| {
        matches!(status, TrialStatus::Terminated | TrialStatus::Error)
    });
    let of = |trial: TrialId| {
        let keys = core.checkpoints().keys();
        keys.filter(move |key| key.branch.trial == trial).copied()
    };
    if let Some(best) = settings.keep_best {
        let worse = ended.iter().skip(best);
        gone.extend(
            worse
                .flat_map(|trial| of(*trial))
                .filter(|key| !pinned.contains(key)),
        );
    }
    if let Some(budget) = settings.budget {
        let mut bytes: u64 = core
            .checkpoints()
            .iter()
            .filter(|(key, _)| !gone.contains(key))
            .map(|(_, bytes)| bytes)
            .sum();
        let paused = ranked(core, |status| status == TrialStatus::Paused);
        let worst_first = ended.iter().skip(1).rev().chain(paused.iter().rev());
        for key in worst_first.flat_map(|trial| of(*trial)) {
            if bytes <= budget {
                break;
            }
            if !pinned.contains(&key) && gone.insert(key) {
                bytes -= core.checkpoints()[&key];
            }
        }
    }
    gone.into_iter().collect()
}

/// Checkpoints that running trials go on from, and those that have not begun.
fn pinned(core: &Core) -> BTreeSet<CheckpointKey> {
    let mut pinned = needed(core, TrialStatus::Running);
    if core.rules.shares_prefixes {
        let keys = core.checkpoints().keys().filter(|key| {
            prefix::is_fork(&core.trials, &core.pending, key.branch.trial, key.iteration)
        });
        pinned.extend(keys);
    }
    pinned
}

/// The checkpoints that trials of a status would go on from, were they started now. It may be that of another trial.
fn needed(core: &Core, status: TrialStatus) -> BTreeSet<CheckpointKey> {
    let trials = core.trials.iter().filter(|trial| trial.status == status);
    let nearest = trials.filter_map(|trial| core.nearest_checkpoint(trial.branch(), trial.decided));
    nearest.collect()
}

/// Trials of a status, those with the best values first.
fn ranked(core: &Core, is: impl Fn(TrialStatus) -> bool) -> Vec<TrialId> {
    let objective = &core.rules.objective;
    let mut trials: Vec<_> = core
        .trials
        .iter()
        .filter(|trial| is(trial.status))
        .collect();
    let value = |best: &Option<crate::view::TrialResult>| {
        let value = best.as_ref().and_then(|best| best.value(&objective.metric));
        value.unwrap_or(f64::NAN)
    };
    trials.sort_by(|left, right| {
        objective
            .mode
            .compare(value(&right.best), value(&left.best))
    });
    trials.into_iter().map(|trial| trial.id).collect()
}
