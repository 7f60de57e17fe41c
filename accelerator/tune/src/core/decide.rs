//! Decides about trials that have reported or ended, applies the decisions, and plans the next attempt at a trial.

use super::event::{Action, Branch, CheckpointKey, Decision, EndReason, Origin};
use super::trial_state::{BranchState, TrialState, TrialUpdate};
use super::{Core, prefix};
use crate::config::{Config, TrialId};
use crate::scheduler::{Observation, SchedulerDecision};
use crate::searcher::TrialEnd;
use crate::view::{TrialResult, TrialStatus};

impl Core {
    pub(super) fn decide(&mut self, trial: TrialId) {
        match self.trial_mut(trial).update.take() {
            Some(TrialUpdate::Reported(result)) => self.decide_report(trial, result),
            Some(TrialUpdate::Ended) => self.end(trial, EndReason::Completed),
            Some(TrialUpdate::Failed) => self.end(trial, EndReason::Failed),
            None => {}
        }
    }

    fn decide_report(&mut self, trial: TrialId, result: TrialResult) {
        let iteration = result.training_iteration;
        let observation = self.observation(trial, &result);
        self.record_result(trial, result);
        let state = &mut self.trials[trial.index()];
        let is_told = std::mem::take(&mut state.is_told_to_stop);
        let recent = state.recent.make_contiguous();
        if is_told || self.rules.stop.is_due(&self.rules.objective, recent) {
            self.end(trial, EndReason::StopRule);
            return;
        }
        let others_wait = !self.pending.is_empty() || !self.paused.is_empty() || !self.is_exhausted;
        let is_due = self.is_checkpoint_due(trial, iteration);
        match self.scheduler.on_trial_result(observation, others_wait) {
            SchedulerDecision::Continue if !is_due => {
                self.go_on(trial);
                self.log(Decision::Continue { trial, iteration });
            }
            SchedulerDecision::Continue | SchedulerDecision::Save => {
                self.trial_mut(trial)
                    .branch_state_mut()
                    .saves
                    .insert(iteration);
                self.go_on(trial);
                self.log(Decision::Save { trial, iteration });
            }
            SchedulerDecision::Pause => {
                let state = self.trial_mut(trial);
                state.branch_state_mut().saves.insert(iteration);
                state.status = TrialStatus::Paused;
                self.running.remove(&trial);
                self.paused.insert(trial);
                self.actions.push(Action::Reconcile(trial));
                self.log(Decision::Pause { trial, iteration });
            }
            SchedulerDecision::Stop => self.end(trial, EndReason::Scheduler),
            SchedulerDecision::Exploit {
                donor,
                iteration: at,
                config,
            } => self.exploit(trial, iteration, donor, at, config),
        }
    }

    fn exploit(&mut self, trial: TrialId, iteration: u64, donor: TrialId, at: u64, config: Config) {
        let from = Origin {
            trial: donor,
            iteration: at,
        };
        let parent = self.trials[donor.index()].branch();
        let state = self.trial_mut(trial);
        let branch = BranchState::new(config.clone(), Some((parent, from)));
        state.branches.push(branch);
        state.decided = at;
        state.recent.clear();
        self.run(trial);
        self.log(Decision::Exploit {
            trial,
            iteration,
            from,
            config,
        });
    }

    fn record_result(&mut self, trial: TrialId, result: TrialResult) {
        let objective = &self.rules.objective;
        let keep = match self.rules.shares_prefixes {
            true => usize::MAX,
            false => self.rules.stop.window().max(1),
        };
        let state = &mut self.trials[trial.index()];
        state.decided = result.training_iteration;
        let value = result.value(&objective.metric);
        let best = state
            .best
            .as_ref()
            .and_then(|best| best.value(&objective.metric));
        if value.is_some_and(|value| best.is_none_or(|best| objective.mode.is_better(value, best)))
        {
            state.best = Some(result.clone());
            state.best_branch = state.branch();
        }
        state.last = Some(result.clone());
        state.recent.push_back(result.clone());
        if state.recent.len() > keep {
            state.recent.pop_front();
        }
        let branch = state.branch();
        self.actions.push(Action::Record { branch, result });
    }

    fn is_checkpoint_due(&self, trial: TrialId, iteration: u64) -> bool {
        let every = self.rules.checkpoint_frequency;
        let is_due = every.is_some_and(|every| iteration.is_multiple_of(every));
        is_due
            || self.rules.shares_prefixes
                && prefix::is_fork(&self.trials, &self.pending, trial, iteration)
    }

    /// Ends a trial that runs or is paused.
    pub(super) fn end(&mut self, trial: TrialId, why: EndReason) {
        self.running.remove(&trial);
        self.paused.remove(&trial);
        let at_end = self.rules.checkpoint_at_end;
        let last = self.trials[trial.index()].last.clone();
        match &last {
            Some(_) if why == EndReason::Failed => self.scheduler.on_trial_error(trial),
            Some(last) => {
                let observation = self.observation(trial, last);
                self.scheduler.on_trial_complete(observation);
            }
            None => self.scheduler.on_trial_error(trial),
        }
        let value = self.value_of(trial);
        let state = self.trial_mut(trial);
        state.status = match why {
            EndReason::Failed => TrialStatus::Error,
            _ => TrialStatus::Terminated,
        };
        state.end = Some(why);
        state.update = None;
        let iteration = state.decided;
        if at_end && matches!(why, EndReason::StopRule | EndReason::Scheduler) {
            state.branch_state_mut().saves.insert(iteration);
        }
        let told = match (why, value) {
            (EndReason::Failed, _) | (_, None) => TrialEnd::Failed,
            (_, Some(value)) if value.is_nan() => TrialEnd::Failed,
            (EndReason::Scheduler, Some(value)) => TrialEnd::Stopped(value),
            (_, Some(value)) => TrialEnd::Completed(value),
        };
        self.actions.push(Action::Tell(trial, told));
        self.actions.push(Action::Reconcile(trial));
        self.log(Decision::End {
            trial,
            iteration,
            why,
        });
    }

    /// The newest value of the objective.
    fn value_of(&self, trial: TrialId) -> Option<f64> {
        let last = self.trials[trial.index()].last.as_ref()?;
        last.value(&self.rules.objective.metric)
    }

    fn observation(&self, trial: TrialId, result: &TrialResult) -> Observation {
        #[expect(clippy::cast_precision_loss, reason = "fewer than 2^53 iterations")]
        let iteration = result.training_iteration as f64;
        Observation {
            trial,
            iteration: result.training_iteration,
            time: result
                .value(&self.rules.scheduler_time)
                .unwrap_or(iteration),
            value: result.value(&self.rules.scheduler_metric),
        }
    }
}

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
