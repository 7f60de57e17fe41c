use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::core::{AttemptPlan, Branch, CheckpointKey, Core, TrialState};
use crate::runner::{Answer, Location, Offer};
use crate::view::TrialStatus;

/// An attempt at a trial that is running.
#[derive(Debug)]
pub(crate) struct Attempt {
    /// The branch whose configuration it has: the trial's own, or one that it goes back to.
    pub(super) branch: Branch,
    /// The iteration at which it is to save and end: where the next branch begins.
    pub(super) until: Option<u64>,
    pub(super) state: AttemptState,
    /// The time at which it began to compute.
    pub(super) since: Instant,
    pub(super) location: Option<Location>,
    /// The checkpoint that it loads, until it has reported.
    pub(super) restores: Option<CheckpointKey>,
    /// Tells if its newest report came with a checkpoint that the search takes.
    offer: Offer,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum AttemptState {
    Computing,
    /// It has reported this iteration, and waits.
    Waiting(u64),
    /// It saves what it has after its last iteration, or ends.
    Stopping,
}

impl Attempt {
    pub(super) fn new(plan: AttemptPlan) -> Self {
        Self {
            branch: plan.branch,
            until: plan.until,
            state: AttemptState::Computing,
            since: Instant::now(),
            location: None,
            restores: plan.checkpoint,
            offer: Offer::Nothing,
        }
    }

    pub(super) fn reported(&mut self, iteration: u64, offer: Offer) {
        self.offer = offer;
        self.state = AttemptState::Waiting(iteration);
        self.restores = None;
    }

    /// Returns the answer to the trial after an iteration; `None` while that is not decided. A search that closes has
    /// attempts save and end.
    pub(super) fn answer(
        &self,
        core: &Core,
        state: &TrialState,
        iteration: u64,
        is_closing: bool,
        folder: &dyn Fn(CheckpointKey) -> PathBuf,
    ) -> Option<Answer> {
        let key = CheckpointKey {
            branch: self.branch,
            iteration,
        };
        let is_saved = core.checkpoints().contains_key(&key);
        let pause = || match is_saved {
            true => Answer::Stop,
            false => Answer::Pause(folder(key)),
        };
        if let Some(until) = self.until {
            return Some(match iteration < until {
                true => Answer::Continue,
                false => pause(),
            });
        }
        if self.branch != state.branch() {
            return Some(Answer::Stop);
        }
        if iteration > state.decided {
            return is_closing.then(pause);
        }
        let is_wanted =
            self.offer == Offer::Checkpoint || state.branch_state().saves.contains(&iteration);
        let go_on = match is_wanted && !is_saved {
            true => Answer::Save(folder(key)),
            false => Answer::Continue,
        };
        if iteration < state.decided {
            return Some(go_on);
        }
        Some(match state.status {
            TrialStatus::Running if is_closing => pause(),
            TrialStatus::Running | TrialStatus::Pending => go_on,
            TrialStatus::Paused => pause(),
            TrialStatus::Terminated | TrialStatus::Error if is_wanted => pause(),
            TrialStatus::Terminated | TrialStatus::Error => Answer::Stop,
        })
    }

    pub(super) fn answered(&mut self, answer: &Answer) {
        self.since = Instant::now();
        self.state = match answer {
            Answer::Continue | Answer::Save(_) => AttemptState::Computing,
            Answer::Pause(_) | Answer::Stop => AttemptState::Stopping,
        };
    }

    /// Returns `true` if it will save the checkpoint of that iteration of a branch.
    pub(super) fn will_save(&self, core: &Core, branch: Branch, iteration: u64) -> bool {
        let reached = match self.state {
            AttemptState::Waiting(reached) => reached,
            AttemptState::Computing | AttemptState::Stopping => 0,
        };
        let saves = match self.until {
            Some(until) => until == iteration,
            None => core
                .branch(branch)
                .is_some_and(|state| state.saves.contains(&iteration)),
        };
        self.branch == branch && saves && reached <= iteration
    }

    /// Returns `true` if it has computed or saved for longer than a trial may.
    pub(super) fn is_late(&self, most: Duration) -> bool {
        !matches!(self.state, AttemptState::Waiting(_)) && self.since.elapsed() > most
    }
}
