use core::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

use accelerator_collective::{ProcessGroup, ReduceOp};

use crate::core::error::Result;
use crate::core::preemption::{Preemption, PreemptionNotice};

/// What ranks tell each other with each window, beside the gradients: the flag, whether one of them is preempted, and
/// whether rank 0 has written the checkpoint that was begun last.
#[derive(Default)]
pub(crate) struct Trigger(Mutex<TriggerState>);

#[derive(Default)]
struct TriggerState {
    /// Raised on this rank, and not told to the others yet.
    set: bool,
    /// What windows since the last check have told; `None` where there was none.
    told: Option<bool>,
    /// What this rank watches.
    notice: PreemptionNotice,
    /// Whether windows since the last look have told of a preempted rank, which stays; `None` where there was none.
    preempted: Option<bool>,
    /// Of the last checkpoint that was begun beside training.
    saving: Option<Weak<dyn WatchedSave>>,
}

/// A checkpoint that is written beside training.
pub(crate) trait WatchedSave: Send + Sync {
    /// Whether this rank has written, and has done so.
    fn has_ended(&self) -> bool;

    /// Notes what all ranks have heard.
    fn hear(&self, progress: SaveProgress);
}

/// What windows of gradients have told about the writing since the program asked last.
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
        self.state().set = true;
    }

    /// Tells of a checkpoint that is being written, from the next window on.
    pub(crate) fn watch(&self, work: Weak<dyn WatchedSave>) {
        self.state().saving = Some(work);
    }

    /// Watches what announces a preemption of this rank.
    pub(crate) fn watch_preemption(&self, preemption: Preemption) -> Result<()> {
        self.state().notice.watch(preemption)
    }

    /// What a window tells of this rank, as a summand.
    pub(crate) fn send(&self, rank: usize) -> f64 {
        let saving = self.state().saving.as_ref().and_then(Weak::upgrade);
        let written = saving.is_some_and(|work| work.has_ended());
        let preempted = self.state().notice.is_given(rank);
        let digit = |is_set: bool, place: f64| if is_set { place } else { 0.0 };
        self.take() + digit(preempted, PREEMPTED) + digit(written, WRITTEN)
    }

    /// What a window has told, as the sum over all ranks.
    pub(crate) fn receive(&self, sum: f64) {
        let mut state = self.state();
        let flags = sum % WRITTEN;
        state.told = Some(state.told == Some(true) || flags % PREEMPTED > 0.0);
        state.hear_of_preemption(flags >= PREEMPTED);
        if let Some(work) = state.saving.as_ref().and_then(Weak::upgrade) {
            work.hear(match sum >= WRITTEN {
                true => SaveProgress::Done,
                false => SaveProgress::Writing,
            });
        }
    }

    #[track_caller]
    pub(crate) fn check(&self, group: &ProcessGroup) -> Result<bool> {
        if let Some(told) = self.state().told.take() {
            return Ok(told);
        }
        let mine = self.take();
        // Where it fails, nobody has heard of it.
        any(group, mine).inspect_err(|_| self.state().set |= mine > 0.0)
    }

    /// Whether all ranks have learned that one is preempted.
    pub(crate) fn has_told_of_preemption(&self) -> bool {
        self.state().preempted == Some(true)
    }

    /// Whether some rank is preempted, as all ranks know, or ask each other now.
    #[track_caller]
    pub(crate) fn is_preempted(&self, group: &ProcessGroup) -> Result<bool> {
        let mine = {
            let mut state = self.state();
            if let Some(told) = state.preempted {
                state.preempted = told.then_some(true);
                return Ok(told);
            }
            state.notice.is_given(group.rank())
        };
        let asking = group.for_purpose("whether a rank is preempted");
        let told = any(&asking, f64::from(u8::from(mine)))?;
        if told {
            self.state().hear_of_preemption(true);
        }
        Ok(told)
    }

    /// The flag as a summand; it is down afterwards.
    fn take(&self) -> f64 {
        f64::from(u8::from(std::mem::take(&mut self.state().set)))
    }

    fn state(&self) -> MutexGuard<'_, TriggerState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TriggerState {
    fn hear_of_preemption(&mut self, of_some_rank: bool) {
        self.preempted = Some(self.preempted == Some(true) || of_some_rank);
        if of_some_rank {
            self.notice.give();
        }
    }
}

/// What stands for a preempted rank: more than there are ranks to raise the flag.
const PREEMPTED: f64 = (1_u64 << 20) as f64;

/// What stands for a checkpoint that is written, which is one rank's to say: more than all preempted ranks, and the sum
/// is exact.
const WRITTEN: f64 = (1_u64 << 40) as f64;

/// Whether it is more than 0 on some rank.
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
            *self.0.lock().unwrap() = progress;
        }
    }

    /// What a window has told: of the flag, of a preemption, of the save.
    fn told(sum: f64) -> (Option<bool>, Option<bool>, SaveProgress) {
        let (trigger, save) = (Trigger::default(), Arc::new(WrittenSave::default()));
        let watched: Weak<WrittenSave> = Arc::downgrade(&save);
        trigger.watch(watched);
        trigger.receive(sum);
        let state = trigger.state();
        (state.told, state.preempted, *save.0.lock().unwrap())
    }

    #[test]
    fn what_a_sum_tells_does_not_mix() {
        let ranks = accelerator_collective::Topology::LARGEST as f64;
        for flags in [0.0, 1.0, ranks] {
            for preempted in [0.0, 1.0, ranks] {
                let sum = flags + preempted * PREEMPTED;
                let [flag, preempted] = [flags, preempted].map(|ranks| Some(ranks > 0.0));
                assert_eq!(told(sum), (flag, preempted, SaveProgress::Writing));
                assert_eq!(told(sum + WRITTEN), (flag, preempted, SaveProgress::Done));
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
        assert_eq!(
            [trigger.send(0), trigger.send(0)],
            [1.0 + PREEMPTED, PREEMPTED]
        );
        trigger.receive(PREEMPTED);
        trigger.receive(0.0);
        assert_eq!(trigger.state().preempted, Some(true));
    }
}
