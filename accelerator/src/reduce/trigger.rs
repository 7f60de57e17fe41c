use core::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

use accelerator_collective::{ProcessGroup, ReduceOp};

use crate::core::error::Result;

/// What ranks tell each other with each window, beside the gradients: the flag, and whether rank 0 has
/// written the checkpoint that was begun last.
#[derive(Default)]
pub(crate) struct Trigger(Mutex<TriggerState>);

#[derive(Default)]
struct TriggerState {
    /// Raised on this rank, and not told to the others yet.
    set: bool,
    /// What windows since the last check have told; `None` where there was none.
    told: Option<bool>,
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

    /// What a window tells of this rank, as a summand.
    pub(crate) fn send(&self) -> f64 {
        let saving = self.state().saving.as_ref().and_then(Weak::upgrade);
        let written = saving.is_some_and(|work| work.has_ended());
        self.take() + if written { WRITTEN } else { 0.0 }
    }

    /// What a window has told, as the sum over all ranks.
    pub(crate) fn receive(&self, sum: f64) {
        let mut state = self.state();
        state.told = Some(state.told == Some(true) || sum % WRITTEN > 0.0);
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
        let mut flag = [mine];
        if let Err(error) = group.all_reduce(&mut flag, ReduceOp::Sum) {
            // Nobody has heard of it.
            self.state().set |= mine > 0.0;
            return Err(error.into());
        }
        Ok(flag[0] > 0.0)
    }

    /// The flag as a summand; it is down afterwards.
    fn take(&self) -> f64 {
        f64::from(u8::from(std::mem::take(&mut self.state().set)))
    }

    fn state(&self) -> MutexGuard<'_, TriggerState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What stands for a checkpoint that is written, which is one rank's to say: more than there are ranks to
/// raise the flag, and both together are exact.
const WRITTEN: f64 = (1_u64 << 32) as f64;

impl fmt::Debug for Trigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trigger").finish_non_exhaustive()
    }
}
