//! Selects the checkpoints to keep.
//!
//! None is indispensable: a trial is re-run from the newest one that is left. So pruning costs time at worst.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{CheckpointKey, Core, prefix};
use crate::config::TrialId;
use crate::view::TrialStatus;

/// The settings for when trials save, and which checkpoints stay on disk.
///
/// By default, the search takes each checkpoint that a function or a program reports, and each trial keeps its newest
/// one and the one with its best result. A [`Trainable`](crate::Trainable) saves when these settings specify it. In
/// addition, trials save when they are interrupted, or when a scheduler pauses or copies them.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointSettings {
    /// A trial saves after every so many iterations, be it a class, a function or a program; 0 for not at all.
    pub frequency: Option<u64>,
    /// A trial saves when a scheduler or a stop rule ends it.
    pub at_end: bool,
    /// The number of newest checkpoints that each trial keeps, at least 1. It also keeps the one with its best result.
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
        // Others may continue from what a scheduler asked for: what a trial reports by itself takes no place of those.
        let continues = core
            .trial(key.branch.trial)
            .is_some_and(|trial| trial.end.is_none());
        let is_asked = core
            .branch(key.branch)
            .is_some_and(|state| state.saves.contains(&key.iteration));
        let newer = newer
            .entry((key.branch.trial, continues && is_asked))
            .or_default();
        if *newer >= settings.keep_per_trial.max(1)
            && best_of(core, key.branch.trial) != Some(*key)
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
        let best_last = |trial: &TrialId| {
            let best = best_of(core, *trial);
            let others = of(*trial).filter(move |key| Some(*key) != best);
            others.chain(best)
        };
        for key in worst_first.flat_map(best_last) {
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

fn best_of(core: &Core, trial: TrialId) -> Option<CheckpointKey> {
    let (best, _) = core.trial(trial)?.best_saved.as_ref()?;
    Some(*best)
}

/// Checkpoints that running trials continue from, and those that have not begun.
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

/// The checkpoints that trials of a status would continue from, were they started now. It may be that of another trial.
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
