use accelerator_collective::ProcessGroup;
use accelerator_host::sync::{Mutex, MutexGuard};

use crate::core::error::{Error, Result};

/// Lets one thread of a rank at a time into `backward`.
///
/// Ranks match collectives by their order. With two threads in `backward` at once that order is random, and gradients
/// of one would be added to those of the other.
#[derive(Debug, Default)]
pub(crate) struct BackwardGuard(Mutex<()>);

impl BackwardGuard {
    /// Takes the turn, until the guard is dropped. If another thread has it, the group fails: that
    /// thread's gradients may be paired with the wrong ones already. One rank alone has no order to
    /// keep.
    pub(super) fn take(&self, group: &ProcessGroup) -> Result<Option<MutexGuard<'_, ()>>> {
        if group.world_size() == 1 {
            return Ok(None);
        }
        if let Some(turn) = self.0.try_lock() {
            return Ok(Some(turn));
        }
        let error = Error::misuse(
            "`backward` was called while another thread of this rank was in it: ranks pair \
             gradients by the order of calls, which threads leave to chance; call it from one \
             thread at a time, in the same order on every rank",
        );
        group.abort(error.to_string());
        Err(error)
    }
}
