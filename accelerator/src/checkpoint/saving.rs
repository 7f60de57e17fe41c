use core::fmt;
use std::sync::Arc;

use super::background::BackgroundSave;
use super::checkpoint_context::CheckpointContext;
use super::saved::Saved;
use crate::core::error::Result;
use crate::reduce::{SaveProgress, WatchedSave};

/// A checkpoint that is being written beside training; from
/// [`Accelerator::save_state_async`](crate::Accelerator::save_state_async).
///
/// Dropping it changes nothing: the checkpoint is completed all the same. How it went is told by
/// [`wait`](Self::wait), by the next save, or by [`finish`](crate::Accelerator::finish), whichever
/// comes first; a program that ends without any of them still waits, on rank 0, for the writing.
///
/// ```
/// use accelerator::checkpoint::Saving;
/// use accelerator::prelude::*;
/// # let folder = tempfile::tempdir().unwrap();
/// # let folder = folder.path();
///
/// let numbers = launch(2, |accelerator| {
///     let saving: Saving = accelerator.save_state_async(folder, Object(&"state"))?;
///     while !saving.is_done()? {
///         // Train on: a step here.
///         std::thread::yield_now();
///     }
///     Ok(saving.wait()?.number())
/// })?;
/// assert_eq!(numbers, [1, 1]);
/// # Ok::<(), Error>(())
/// ```
#[must_use = "`wait` tells how it went; so do the next save and `finish`"]
pub struct Saving {
    context: Arc<CheckpointContext>,
    work: Arc<BackgroundSave>,
}

impl Saving {
    pub(super) fn new(context: Arc<CheckpointContext>, work: Arc<BackgroundSave>) -> Self {
        Self { context, work }
    }

    /// Waits until the checkpoint is complete. Every rank must call it.
    ///
    /// # Errors
    ///
    /// The errors of [`save_state`](crate::Accelerator::save_state), on every rank.
    #[track_caller]
    pub fn wait(self) -> Result<Saved> {
        let outcome = self.work.settle(&self.context);
        self.context.ongoing.forget(&self.work);
        outcome
    }

    /// Checks if rank 0 has written the checkpoint, or failed to, so that [`wait`](Self::wait) does not take
    /// long: the same answer on every rank. Every rank must call it, in the same places, so that all leave a
    /// loop at the same step.
    ///
    /// It costs nothing where gradients travel anyhow:
    ///
    /// - If a window of gradients was reduced since the last call, the answer is what came with it: whether
    ///   rank 0 was done at the end of its backward pass.
    /// - Otherwise rank 0 tells the others, which is a broadcast of one byte; so it does where the call comes
    ///   right after another one.
    /// - After the answer was "yes" it stays so, and nothing is asked.
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when rank 0 has to be asked and a rank is lost.
    #[track_caller]
    pub fn is_done(&self) -> Result<bool> {
        let (group, work) = (self.context.group(), &self.work);
        if group.world_size() == 1 {
            return Ok(work.has_ended());
        }
        match work.progress() {
            SaveProgress::Done => Ok(true),
            SaveProgress::Writing => {
                work.hear(SaveProgress::Unknown);
                Ok(false)
            }
            SaveProgress::Unknown => {
                let mut done = [u8::from(work.has_ended())];
                let asking = group.for_purpose("whether the checkpoint is written");
                asking.broadcast(&mut done, 0)?;
                if done == [1] {
                    work.hear(SaveProgress::Done);
                }
                Ok(done == [1])
            }
        }
    }
}

impl fmt::Debug for Saving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Saving").finish_non_exhaustive()
    }
}
