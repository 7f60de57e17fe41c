use std::collections::{BTreeSet, VecDeque};

use super::event::{Branch, CheckpointKey, EndReason, Origin};
use crate::config::{Config, TrialId};
use crate::objective::Objective;
use crate::view::{TrialResult, TrialStatus};

#[derive(Debug)]
pub(crate) struct TrialState {
    pub(crate) id: TrialId,
    pub(crate) status: TrialStatus,
    /// Its branches, oldest first; never empty.
    pub(crate) branches: Vec<BranchState>,
    /// The virtual time of its next report, while it runs.
    pub(super) due: u64,
    /// The number of its iterations that are decided about.
    pub(crate) decided: u64,
    /// Its newest update, until that is decided about.
    pub(super) update: Option<TrialUpdate>,
    /// Set if a closure ends it with the report that is not decided about yet.
    pub(super) is_told_to_stop: bool,
    /// The newest results, as many as stop rules and forks need.
    pub(super) recent: VecDeque<TrialResult>,
    pub(crate) last: Option<TrialResult>,
    pub(crate) best: Option<TrialResult>,
    pub(crate) best_branch: Branch,
    /// The checkpoint on the disk with the best result.
    pub(crate) best_saved: Option<(CheckpointKey, TrialResult)>,
    pub(crate) failures: u32,
    pub(crate) error: Option<String>,
    pub(crate) end: Option<EndReason>,
}

#[derive(Debug)]
pub(crate) struct BranchState {
    pub(crate) config: Config,
    /// The branch and the iteration that it continues from; `None` if it begins anew.
    pub(crate) origin: Option<(Branch, Origin)>,
    /// The iterations after which a checkpoint was asked for.
    pub(crate) saves: BTreeSet<u64>,
}

/// An update of a running trial, which is to be decided about.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum TrialUpdate {
    Reported(TrialResult),
    Ended,
    Failed,
}

impl TrialState {
    pub(super) fn new(id: TrialId, config: Config) -> Self {
        Self {
            id,
            status: TrialStatus::Pending,
            branches: vec![BranchState::new(config, None)],
            due: 0,
            decided: 0,
            update: None,
            is_told_to_stop: false,
            recent: VecDeque::new(),
            last: None,
            best: None,
            best_branch: Branch {
                trial: id,
                generation: 0,
            },
            best_saved: None,
            failures: 0,
            error: None,
            end: None,
        }
    }

    pub(crate) fn branch(&self) -> Branch {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "fewer than 2^32 iterations"
        )]
        Branch {
            trial: self.id,
            generation: (self.branches.len() - 1) as u32,
        }
    }

    pub(crate) fn branch_state(&self) -> &BranchState {
        #[expect(
            clippy::expect_used,
            reason = "it is made with one branch, and loses none"
        )]
        self.branches.last().expect("a trial has a branch")
    }

    pub(super) fn branch_state_mut(&mut self) -> &mut BranchState {
        #[expect(
            clippy::expect_used,
            reason = "it is made with one branch, and loses none"
        )]
        self.branches.last_mut().expect("a trial has a branch")
    }

    pub(crate) fn config(&self) -> &Config {
        &self.branch_state().config
    }

    /// Returns the configuration that it tried, or tries, in a branch of its own.
    pub(crate) fn config_of(&self, branch: Branch) -> &Config {
        let state = self.branches.get(branch.generation as usize);
        &state.unwrap_or_else(|| self.branch_state()).config
    }

    /// Notes a checkpoint that is on the disk now. It is the best one if the result at which it was saved is the best of
    /// those with a checkpoint.
    pub(super) fn saved(&mut self, key: CheckpointKey, objective: &Objective) {
        let Some(result) = self.result_of(key).cloned() else {
            return;
        };
        let value = |result: &TrialResult| result.value(&objective.metric);
        let best = self.best_saved.as_ref().and_then(|(_, best)| value(best));
        if value(&result)
            .is_some_and(|value| best.is_none_or(|best| objective.mode.is_better(value, best)))
        {
            self.best_saved = Some((key, result));
        }
    }

    /// Returns the result at which a checkpoint was saved, if it is one of the newest.
    fn result_of(&self, key: CheckpointKey) -> Option<&TrialResult> {
        let origin = self.branch_state().origin.as_ref();
        if key.branch != self.branch()
            || origin.is_some_and(|(_, origin)| key.iteration <= origin.iteration)
        {
            return None;
        }
        let arrived = match &self.update {
            Some(TrialUpdate::Reported(result)) => Some(result),
            _ => None,
        };
        let results = arrived.into_iter().chain(&self.last).chain(&self.recent);
        results
            .into_iter()
            .find(|result| result.training_iteration == key.iteration)
    }

    /// Returns `true` if it runs and has no update to decide about.
    pub(crate) fn is_awaited(&self) -> bool {
        self.status == TrialStatus::Running && self.update.is_none()
    }
}

impl BranchState {
    pub(super) fn new(config: Config, origin: Option<(Branch, Origin)>) -> Self {
        Self {
            config,
            origin,
            saves: BTreeSet::new(),
        }
    }

    /// The iteration at which it begins.
    pub(crate) fn start(&self) -> u64 {
        self.origin
            .as_ref()
            .map_or(0, |(_, origin)| origin.iteration)
    }
}
