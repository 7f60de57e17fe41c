use core::fmt;
use std::sync::Weak;

use accelerator_collective::launcher::GroupExt;
use accelerator_collective::{ProcessGroup, ReduceOp};
use accelerator_host::sync::Mutex;

use crate::core::error::{self, Result};
use crate::core::preemption::{Preemption, PreemptionNotice};

/// The signals that ranks send each other with each window, beside the gradients: the flag, whether one of them
/// is preempted, whether rank 0 has written the last checkpoint that was begun, and whether it has a place in the
/// next group.
#[derive(Default)]
pub(crate) struct Trigger(Mutex<TriggerState>);

#[derive(Default)]
struct TriggerState {
    /// Set while the flag is raised on this rank and not told to the others yet.
    set: bool,
    /// The flag of all windows since the last check; `None` if there was no window.
    told: Option<bool>,
    /// The preemption notices that this rank watches.
    notice: PreemptionNotice,
    /// `true` once a window told of a preempted rank, which stays; `None` if there was no window since the last look.
    preempted: Option<bool>,
    /// The same of a next group.
    regroups: Option<bool>,
    /// Set once rank 0 has shown the user how the program reacts to a change of the number of ranks.
    told_user: bool,
    /// The last checkpoint that was begun beside training.
    saving: Option<Weak<dyn WatchedSave>>,
}

/// A checkpoint that is written beside training.
pub(crate) trait WatchedSave: Send + Sync {
    /// Returns `true` if this rank writes it, and has finished.
    fn has_ended(&self) -> bool;

    /// Notes what all ranks have heard.
    fn hear(&self, progress: SaveProgress);
}

/// The state of the writing, as told by windows of gradients since the program asked last.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum SaveProgress {
    /// No window was reduced.
    #[default]
    Unknown,
    Writing,
    Done,
}

impl Trigger {
    /// Raises the flag on this rank.
    pub(crate) fn set(&self) {
        self.0.lock().set = true;
    }

    /// Tells of a checkpoint that is being written, from the next window on.
    pub(crate) fn watch(&self, work: Weak<dyn WatchedSave>) {
        self.0.lock().saving = Some(work);
    }

    /// Watches what announces a preemption of this rank.
    pub(crate) fn watch_preemption(&self, preemption: Preemption) -> Result<()> {
        self.0.lock().notice.watch(preemption)
    }

    /// Gives what this rank watches to the accelerator of the next group.
    pub(crate) fn hand_over_to(&self, next: &Self) {
        let notice = std::mem::take(&mut self.0.lock().notice);
        next.0.lock().notice = notice;
    }

    /// Returns what a window tells of this rank, as a summand.
    pub(crate) fn send(&self, group: &ProcessGroup) -> f64 {
        let saving = self.0.lock().saving.as_ref().and_then(Weak::upgrade);
        let written = saving.is_some_and(|work| work.has_ended());
        self.take() + digit(written, WRITTEN) + self.0.lock().departures(group)
    }

    /// Takes what a window has told, as the sum over all ranks.
    pub(crate) fn receive(&self, sum: f64) {
        let mut state = self.0.lock();
        state.told = Some(state.told == Some(true) || sum % PREEMPTED > 0.0);
        state.hear_of_departures(sum);
        if let Some(work) = state.saving.as_ref().and_then(Weak::upgrade) {
            work.hear(match sum % REGROUPS >= WRITTEN {
                true => SaveProgress::Done,
                false => SaveProgress::Writing,
            });
        }
    }

    #[track_caller]
    pub(crate) fn check(&self, group: &ProcessGroup) -> Result<bool> {
        if let Some(told) = self.0.lock().told.take() {
            return Ok(told);
        }
        let mine = self.take();
        // Where it fails, nobody has heard of it.
        any(group, mine).inspect_err(|_| self.0.lock().set |= mine > 0.0)
    }

    /// Returns `true` if all ranks have learned that one is preempted.
    pub(crate) fn has_told_of_preemption(&self) -> bool {
        self.0.lock().preempted == Some(true)
    }

    /// Returns `true` if all ranks have learned that they are to leave for the next group.
    pub(crate) fn has_told_of_regroup(&self) -> bool {
        self.0.lock().regroups == Some(true)
    }

    /// Checks if some rank is preempted, or all are to leave for the next group. If no window told, ranks ask.
    #[track_caller]
    pub(crate) fn is_preempted(&self, group: &ProcessGroup) -> Result<bool> {
        let told = self.learn(group, |state| &mut state.preempted)?;
        let mut state = self.0.lock();
        let regroups = state.regroups == Some(true);
        if regroups {
            state.tell_user(group, "save and end, to be started again");
        }
        Ok(told || regroups)
    }

    /// Checks if all ranks are to leave for the next group. If no window told, ranks ask each other.
    #[track_caller]
    pub(crate) fn is_regroup_pending(&self, group: &ProcessGroup) -> Result<bool> {
        let told = self.learn(group, |state| &mut state.regroups)?;
        if told {
            self.0
                .lock()
                .tell_user(group, "go on live in the next group");
        }
        Ok(told)
    }

    /// Returns what windows have told since the last look, and resets it unless it is "yes". If there was no window,
    /// ranks ask each other.
    #[track_caller]
    fn learn(
        &self,
        group: &ProcessGroup,
        told: impl Fn(&mut TriggerState) -> &mut Option<bool>,
    ) -> Result<bool> {
        if told(&mut self.0.lock()).is_none() {
            let mut sum = [self.0.lock().departures(group)];
            let asking = group.for_purpose("whether ranks are to leave");
            asking.all_reduce(&mut sum, ReduceOp::Sum)?;
            self.0.lock().hear_of_departures(sum[0]);
        }
        let mut state = self.0.lock();
        let told = told(&mut state);
        let is_told = *told == Some(true);
        *told = is_told.then_some(true);
        Ok(is_told)
    }

    /// The flag as a summand; it is down afterwards.
    fn take(&self) -> f64 {
        digit(std::mem::take(&mut self.0.lock().set), 1.0)
    }
}

impl TriggerState {
    /// Returns as a summand if this rank is preempted, and if it is rank 0 and has a place in a next group.
    fn departures(&mut self, group: &ProcessGroup) -> f64 {
        let preempted = self.notice.is_given(group.rank());
        let regroups = group.rank() == 0 && group.has_next_place();
        digit(preempted, PREEMPTED) + digit(regroups, REGROUPS)
    }

    /// Notes the same of all ranks.
    fn hear_of_departures(&mut self, sum: f64) {
        let preempted = sum % WRITTEN >= PREEMPTED;
        self.preempted = Some(self.preempted == Some(true) || preempted);
        self.regroups = Some(self.regroups == Some(true) || sum >= REGROUPS);
        if preempted {
            self.notice.give();
        }
    }

    /// Tells the user once, on rank 0, what the program does.
    fn tell_user(&mut self, group: &ProcessGroup, what: &str) {
        if group.rank() == 0 && !std::mem::replace(&mut self.told_user, true) {
            let ranks = group.world_size();
            error::tell(&format!(
                "the launcher changes the number of ranks: the {ranks} ranks of now {what}"
            ));
        }
    }
}

/// The summand of a preempted rank: more than there are ranks to raise the flag.
const PREEMPTED: f64 = (1_u64 << 20) as f64;

/// The summand of a written checkpoint, which only one rank sends: more than all preempted ranks, and the sum
/// is exact.
const WRITTEN: f64 = (1_u64 << 40) as f64;

/// The summand of a next group, which only rank 0 sends.
const REGROUPS: f64 = (1_u64 << 41) as f64;

fn digit(is_set: bool, place: f64) -> f64 {
    if is_set { place } else { 0.0 }
}

/// Returns `true` if it is more than 0 on some rank.
#[track_caller]
fn any(group: &ProcessGroup, mine: f64) -> Result<bool> {
    let mut flag = [mine];
    group.all_reduce(&mut flag, ReduceOp::Sum)?;
    Ok(flag[0] > 0.0)
}

impl fmt::Debug for Trigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trigger").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::SystemTime;

    use super::*;

    #[derive(Debug, Default)]
    struct WrittenSave(Mutex<SaveProgress>);

    impl WatchedSave for WrittenSave {
        fn has_ended(&self) -> bool {
            true
        }

        fn hear(&self, progress: SaveProgress) {
            *self.0.lock() = progress;
        }
    }

    /// Returns what a window has told: of the flag, of a preemption, of the save, of a next group.
    fn told(sum: f64) -> (Option<bool>, Option<bool>, SaveProgress, Option<bool>) {
        let (trigger, save) = (Trigger::default(), Arc::new(WrittenSave::default()));
        let watched: Weak<WrittenSave> = Arc::downgrade(&save);
        trigger.watch(watched);
        trigger.receive(sum);
        let state = trigger.0.lock();
        let progress = *save.0.lock();
        (state.told, state.preempted, progress, state.regroups)
    }

    #[test]
    fn what_a_sum_tells_does_not_mix() {
        let ranks = accelerator_collective::Topology::LARGEST as f64;
        for flags in [0.0, 1.0, ranks] {
            for preempted in [0.0, 1.0, ranks] {
                let sum = flags + preempted * PREEMPTED;
                let [flag, preempted] = [flags, preempted].map(|ranks| Some(ranks > 0.0));
                for (save, progress) in
                    [(0.0, SaveProgress::Writing), (WRITTEN, SaveProgress::Done)]
                {
                    for (next, regroups) in [(0.0, false), (REGROUPS, true)] {
                        let expected = (flag, preempted, progress, Some(regroups));
                        assert_eq!(told(sum + save + next), expected);
                    }
                }
            }
        }
    }

    #[test]
    fn the_flag_is_told_once_and_a_preemption_for_good() {
        let trigger = Trigger::default();
        let passed = Preemption::new().with_signals([]);
        let passed = passed.with_deadline(SystemTime::now());
        trigger.watch_preemption(passed).unwrap();
        trigger.set();
        let alone = ProcessGroup::single();
        let sent = [trigger.send(&alone), trigger.send(&alone)];
        assert_eq!(sent, [1.0 + PREEMPTED, PREEMPTED]);
        trigger.receive(PREEMPTED);
        trigger.receive(0.0);
        assert_eq!(trigger.0.lock().preempted, Some(true));
    }
}
