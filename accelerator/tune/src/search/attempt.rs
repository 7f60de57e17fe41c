//! An attempt that is running, and the waits of trials that fail again and again.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::config::TrialId;
use crate::core::{AttemptPlan, Branch, CheckpointKey, Core, TrialState};
use crate::runner::{Answer, Location, Offer};
use crate::view::TrialStatus;

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

/// The waits of trials that fail again and again before they start anew: each twice as long as the one before, while
/// the trial gets no further. They change no decision.
#[derive(Debug, Default)]
pub(super) struct Backoff(BTreeMap<TrialId, Failures>);

#[derive(Debug)]
struct Failures {
    /// The number of iterations that were done at the last failure.
    done: u64,
    repeated: u32,
    /// The time from which it may start; `None` if it may start, and once [`Backoff::take_due`] has
    /// returned the trial.
    until: Option<Instant>,
}

impl Backoff {
    /// Counts a failure of a trial, of which so many iterations are done.
    pub(super) fn failed(&mut self, trial: TrialId, done: u64, now: Instant) {
        let before = self.0.get(&trial).filter(|before| before.done == done);
        let repeated = before.map_or(0, |before| before.repeated.saturating_add(1));
        let factor = 1_u32
            .checked_shl(repeated.saturating_sub(1))
            .unwrap_or(u32::MAX);
        let wait = match repeated {
            0 => Duration::ZERO,
            _ => FIRST.saturating_mul(factor).min(LONGEST),
        };
        let failures = Failures {
            done,
            repeated,
            until: (!wait.is_zero()).then(|| now + wait),
        };
        self.0.insert(trial, failures);
    }

    pub(super) fn is_waiting(&self, trial: TrialId, now: Instant) -> bool {
        let until = self.0.get(&trial).and_then(|failures| failures.until);
        until.is_some_and(|until| now < until)
    }

    /// The trials that may start from now on, each once.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<TrialId> {
        let due = |failures: &mut Failures| failures.until.take_if(|until| now >= *until);
        let waiting = self.0.iter_mut();
        let due = waiting.filter_map(|(trial, failures)| due(failures).map(|_| *trial));
        due.collect()
    }
}

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_that_comes_no_further_waits_twice_as_long_each_time() {
        let (mut backoff, trial, start) = (Backoff::default(), TrialId::new(3), Instant::now());
        let mut wait = |done| {
            backoff.failed(trial, done, start);
            let ends = [0, 50, 150, 250, 450, 9_900, 10_000]
                .into_iter()
                .find(|end| !backoff.is_waiting(trial, start + Duration::from_millis(*end)));
            ends.unwrap()
        };
        assert_eq!([wait(2), wait(2), wait(2), wait(2)], [0, 150, 250, 450]);
        assert_eq!(wait(3), 0);
        assert_eq!((0..40).map(|_| wait(3)).last(), Some(10_000));
        backoff.failed(trial, 3, start);
        assert!(backoff.is_waiting(trial, start) && backoff.take_due(start).is_empty());
        assert_eq!(backoff.take_due(start + LONGEST), [trial]);
        assert!(backoff.take_due(start + LONGEST).is_empty());
    }
}
