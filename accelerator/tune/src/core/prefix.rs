//! Trials whose configurations are equal at first train that part once.
//!
//! A value `{"schedule": [[0, a], [10, b]]}` is `a` in the iterations before the tenth, and `b` from then on. Two
//! configurations are equal as far as all their values are. See Hippo (Shin et al. 2020, arXiv 2006.11972), which calls
//! this a stage tree.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::event::Origin;
use super::trial_state::TrialState;
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
