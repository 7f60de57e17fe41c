use std::sync::{Mutex, MutexGuard, TryLockError};

use accelerator_collective::ProcessGroup;

use crate::core::error::{Error, Result};

/// Whose turn it is among the threads of a rank.
///
/// Ranks pair what they send by its order. Two threads that are in `backward` at once leave the order
/// to chance, and gradients of one would be added to those of the other.
#[derive(Debug, Default)]
pub(crate) struct BackwardGuard(Mutex<()>);

impl BackwardGuard {
    /// Takes the turn, until the guard is dropped. Where another thread has it, the group fails: that
    /// thread's gradients may be paired with the wrong ones already. One rank alone has no order to
    /// keep.
    pub(super) fn take(&self, group: &ProcessGroup) -> Result<Option<MutexGuard<'_, ()>>> {
        if group.world_size() == 1 {
            return Ok(None);
        }
        match self.0.try_lock() {
            Ok(turn) => Ok(Some(turn)),
            Err(TryLockError::Poisoned(turn)) => Ok(Some(turn.into_inner())),
            Err(TryLockError::WouldBlock) => {
                let error = Error::misuse(
                    "`backward` was called while another thread of this rank was in it: ranks pair \
                     gradients by the order of calls, which threads leave to chance; call it from one \
                     thread at a time, in the same order on every rank",
                );
                group.abort(error.to_string());
                Err(error)
            }
        }
    }
}
