use core::mem::{replace, take};
use std::sync::Weak;

use accelerator_collective::{ProcessGroup, ReduceOp};
use accelerator_host::sync::Mutex;

use crate::core::error::{self, Result};
use crate::core::preemption::{Preemption, PreemptionNotice};

/// The signals that ranks send each other with each window, beside the gradients: the flag, whether one of them
/// is preempted, whether rank 0 has written the last checkpoint that was begun, and whether it has a place in the
/// next group.
#[derive(Debug, Default)]
pub(crate) struct Trigger(Mutex<TriggerState>);

#[derive(Debug, Default)]
struct TriggerState {
    /// Set while the flag is raised on this rank and not told to the others yet.
    set: bool,
    /// The flag of all windows since the last check; `None` if there was no window.
    told: Option<bool>,
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
    pub(crate) fn set(&self) {
        self.0.lock().set = true;
    }

    /// Watches a checkpoint that is being written, from the next window on.
    pub(crate) fn watch(&self, work: Weak<dyn WatchedSave>) {
        self.0.lock().saving = Some(work);
    }

    /// Watches what announces a preemption of this rank.
    pub(crate) fn watch_preemption(&self, preemption: Preemption) -> Result<()> {
        self.0.lock().notice.watch(preemption)
    }

    /// Gives what this rank watches to the accelerator of the next group.
    pub(crate) fn hand_over_to(&self, next: &Self) {
        let notice = take(&mut self.0.lock().notice);
        next.0.lock().notice = notice;
    }

    /// Returns what a window tells of this rank, as a summand.
    pub(crate) fn send(&self, group: &ProcessGroup) -> f64 {
        let saving = self.0.lock().saving.as_ref().and_then(Weak::upgrade);
        let written = saving.is_some_and(|work| work.has_ended());
        let mut state = self.0.lock();
        let signals = Signals {
            flag: take(&mut state.set),
            written,
            ..state.departures(group)
        };
        signals.summand()
    }

    /// Takes what a window has told, as the sum over all ranks.
    pub(crate) fn receive(&self, sum: f64) {
        let signals = Signals::of_sum(sum);
        let mut state = self.0.lock();
        state.told = Some(state.told == Some(true) || signals.flag);
        state.hear_of_departures(signals);
        if let Some(work) = state.saving.as_ref().and_then(Weak::upgrade) {
            work.hear(match signals.written {
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
        let mine = take(&mut self.0.lock().set);
        let mut ranks = [f64::from(u8::from(mine))];
        let summed = group.all_reduce(&mut ranks, ReduceOp::Sum);
        // Where it fails, nobody has heard of it.
        summed.inspect_err(|_| self.0.lock().set |= mine)?;
        Ok(ranks[0] > 0.0)
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
                .tell_user(group, "continue live in the next group");
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
            let mut sum = [self.0.lock().departures(group).summand()];
            let asking = group.for_purpose("whether ranks are to leave");
            asking.all_reduce(&mut sum, ReduceOp::Sum)?;
            self.0.lock().hear_of_departures(Signals::of_sum(sum[0]));
        }
        let mut state = self.0.lock();
        let told = told(&mut state);
        let is_told = *told == Some(true);
        *told = is_told.then_some(true);
        Ok(is_told)
    }
}

impl TriggerState {
    /// Returns whether this rank is preempted, and whether it is rank 0 and has a place in a next group.
    fn departures(&mut self, group: &ProcessGroup) -> Signals {
        Signals {
            preempted: self.notice.is_given(group.rank()),
            regroups: group.rank() == 0 && group.has_next_place(),
            ..Signals::default()
        }
    }

    /// Notes the same of all ranks.
    fn hear_of_departures(&mut self, signals: Signals) {
        self.preempted = Some(self.preempted == Some(true) || signals.preempted);
        self.regroups = Some(self.regroups == Some(true) || signals.regroups);
        if signals.preempted {
            self.notice.give();
        }
    }

    /// Tells the user once, on rank 0, what the program does.
    fn tell_user(&mut self, group: &ProcessGroup, what: &str) {
        if group.rank() == 0 && !replace(&mut self.told_user, true) {
            let ranks = group.world_size();
            error::tell(&format!(
                "the launcher changes the number of ranks: the {ranks} ranks of now {what}"
            ));
        }
    }
}

/// The signals of a rank, or of all of them.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Signals {
    flag: bool,
    preempted: bool,
    written: bool,
    regroups: bool,
}

impl Signals {
    /// Returns one number, in whose sum over all ranks none of them mixes with another.
    fn summand(self) -> f64 {
        let digit = |is_set, place| if is_set { place } else { 0.0 };
        digit(self.flag, 1.0)
            + digit(self.preempted, PREEMPTED)
            + digit(self.written, WRITTEN)
            + digit(self.regroups, REGROUPS)
    }

    fn of_sum(sum: f64) -> Self {
        Self {
            flag: sum % PREEMPTED > 0.0,
            preempted: sum % WRITTEN >= PREEMPTED,
            written: sum % REGROUPS >= WRITTEN,
            regroups: sum >= REGROUPS,
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

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn what_a_sum_tells_does_not_mix() {
        let ranks = accelerator_collective::Topology::LARGEST as f64;
        let signals = |[flag, preempted, written, regroups]: [bool; 4]| Signals {
            flag,
            preempted,
            written,
            regroups,
        };
        for flags in [0.0, 1.0, ranks] {
            for preempted in [0.0, 1.0, ranks] {
                for (written, regroups) in
                    [(false, false), (true, false), (false, true), (true, true)]
                {
                    let of_one = signals([false, false, written, regroups]).summand();
                    let sum = flags + preempted * PREEMPTED + of_one;
                    let expected = [flags > 0.0, preempted > 0.0, written, regroups];
                    assert_eq!(Signals::of_sum(sum), signals(expected));
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
