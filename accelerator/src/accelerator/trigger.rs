use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use accelerator_collective::{ProcessGroup, ReduceOp};

use super::Accelerator;
use crate::checkpoint::{BackgroundSave, SaveProgress};
use crate::core::error::Result;

/// A flag that any rank raises for all.
impl Accelerator {
    /// Raises a flag that [`check_trigger`](Self::check_trigger) shows to every rank: to stop early,
    /// or to save, for a reason that only this rank knows. Nothing is communicated here, so that it may
    /// be called on one rank only.
    pub fn set_trigger(&self) {
        self.shared.trigger.state().set = true;
    }

    /// Whether some rank has [raised the flag](Self::set_trigger): the same answer on every rank, and
    /// down again after it. Every rank must call it, in the same places.
    ///
    /// It costs nothing where gradients travel anyhow:
    ///
    /// - If a window of gradients was reduced since the last check, the answer is what came with it:
    ///   whether some rank had raised the flag by the end of its backward pass. A flag that is raised
    ///   later travels with the next window, or is told by the next check without one.
    /// - Otherwise ranks are asked, which is a reduction of one number; so is a check right after
    ///   another one.
    ///
    /// Which of the two it is depends on the calls of `backward` and `check_trigger` alone, and so is
    /// the same on every rank, and at every world size.
    ///
    /// ```
    /// let answers = accelerator::launch(2, |accelerator| {
    ///     let before = accelerator.check_trigger()?;
    ///     accelerator.on_last_process(|| accelerator.set_trigger());
    ///     Ok([before, accelerator.check_trigger()?, accelerator.check_trigger()?])
    /// })?;
    /// assert_eq!(answers, [[false, true, false]; 2]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when ranks have to be asked and one is
    /// lost.
    #[track_caller]
    pub fn check_trigger(&self) -> Result<bool> {
        self.shared.trigger.check(&self.shared.group)
    }
}

/// What ranks tell each other with each window, beside the gradients: the flag, and whether rank 0 has
/// written the checkpoint that was begun last.
#[derive(Debug, Default)]
pub(crate) struct Trigger(Mutex<TriggerState>);

#[derive(Debug, Default)]
struct TriggerState {
    /// Raised on this rank, and not told to the others yet.
    set: bool,
    /// What windows since the last check have told; `None` where there was none.
    told: Option<bool>,
    /// Of the last checkpoint that was begun beside training.
    saving: Weak<BackgroundSave>,
}

impl Trigger {
    /// Tells of a checkpoint that is being written, from the next window on.
    pub(crate) fn watch(&self, work: &Arc<BackgroundSave>) {
        self.state().saving = Arc::downgrade(work);
    }

    /// What a window tells of this rank, as a summand.
    pub(crate) fn send(&self) -> f64 {
        let saving = self.state().saving.upgrade();
        let written = saving.is_some_and(|work| work.has_ended());
        self.take() + if written { WRITTEN } else { 0.0 }
    }

    /// What a window has told, as the sum over all ranks.
    pub(crate) fn receive(&self, sum: f64) {
        let mut state = self.state();
        state.told = Some(state.told == Some(true) || sum % WRITTEN > 0.0);
        if let Some(work) = state.saving.upgrade() {
            work.hear(match sum >= WRITTEN {
                true => SaveProgress::Done,
                false => SaveProgress::Writing,
            });
        }
    }

    #[track_caller]
    fn check(&self, group: &ProcessGroup) -> Result<bool> {
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
