//! Finds the branches and checkpoints that a trial goes back to.

use super::Core;
use super::event::{Branch, CheckpointKey};
use super::trial_state::{BranchState, TrialState};

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
