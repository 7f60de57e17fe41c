use std::collections::{BTreeSet, VecDeque};

use super::Core;
use super::event::{Branch, CheckpointKey, EndReason, Origin};
use crate::config::{Config, TrialId};
use crate::view::{TrialResult, TrialStatus};

/// A trial as the core knows it.
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
    /// The branch of its best result.
    pub(crate) best_branch: Branch,
    pub(crate) failures: u32,
    pub(crate) error: Option<String>,
    pub(crate) end: Option<EndReason>,
}

/// One branch of a trial.
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
            failures: 0,
            error: None,
            end: None,
        }
    }

    /// Returns its present branch.
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

/// An attempt at a trial that is to be made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttemptPlan {
    /// The branch whose configuration it has: the trial's own, or one that this goes back to.
    pub(crate) branch: Branch,
    /// The checkpoint that it loads; `None` if it begins anew.
    pub(crate) checkpoint: Option<CheckpointKey>,
    /// The iteration at which it saves and ends: where the next branch begins.
    pub(crate) until: Option<u64>,
}

impl Core {
    /// The attempt that brings a trial to where it is: from the nearest checkpoint, on the branch that it is of or that begins
    /// there.
    pub(crate) fn plan_attempt(&self, trial: &TrialState) -> AttemptPlan {
        let checkpoint = self.nearest_checkpoint(trial.branch(), trial.decided);
        let reached = checkpoint.map_or(0, |key| key.iteration);
        let lineage = self.lineage(trial.branch());
        let is_of = |branch: &Branch| checkpoint.is_some_and(|key| key.branch == *branch);
        let mut at = lineage.iter().position(is_of).unwrap_or(0);
        let start = |branch: Branch| self.branch(branch).map_or(0, BranchState::start);
        while at + 1 < lineage.len() && start(lineage[at + 1]) <= reached {
            at += 1;
        }
        AttemptPlan {
            branch: lineage[at],
            checkpoint,
            until: lineage.get(at + 1).map(|next| start(*next)),
        }
    }

    /// The checkpoint from which iteration `iteration` of a branch is reached soonest: the newest of the branch or of
    /// what it goes back to. `None` where there is none, and it begins anew.
    pub(crate) fn nearest_checkpoint(
        &self,
        branch: Branch,
        iteration: u64,
    ) -> Option<CheckpointKey> {
        let (mut branch, mut iteration) = (branch, iteration);
        loop {
            let first = CheckpointKey {
                branch,
                iteration: 0,
            };
            let last = CheckpointKey { branch, iteration };
            if let Some((key, _)) = self.checkpoints.range(first..=last).next_back() {
                return Some(*key);
            }
            (branch, iteration) = match self.branch(branch)?.origin {
                Some((parent, origin)) => (parent, origin.iteration.min(iteration)),
                None => return None,
            };
        }
    }

    pub(crate) fn branch(&self, branch: Branch) -> Option<&BranchState> {
        let trial = self.trial(branch.trial)?;
        trial.branches.get(branch.generation as usize)
    }

    /// The branches that a branch goes back to, the oldest first, and itself.
    fn lineage(&self, branch: Branch) -> Vec<Branch> {
        let mut lineage = vec![branch];
        let mut at = branch;
        while let Some((parent, _)) = self.branch(at).and_then(|state| state.origin) {
            lineage.push(parent);
            at = parent;
        }
        lineage.reverse();
        lineage
    }
}
