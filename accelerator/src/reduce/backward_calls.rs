//! Calls of `backward`: one at a time, and those that failed on this rank before the other ranks heard of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use accelerator_collective::ProcessGroup;
use accelerator_host::sync::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

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

/// Calls of `backward` that failed on this rank before its first collective, since a model was last prepared. Other
/// ranks would pair the next call with the failed one. Every window carries the number, so that ranks notice where
/// theirs differ.
#[derive(Debug, Default)]
pub(crate) struct FailedCalls(Mutex<Failed>);

#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub(super) struct Failed {
    pub(super) calls: u64,
    /// The error of the last of them.
    pub(super) last: String,
}

#[derive(Clone, Debug)]
pub(super) struct BackwardCall {
    calls: Arc<FailedCalls>,
    /// Set once the ranks have communicated in it.
    synchronized: Arc<AtomicBool>,
}

/// Counts the call as one that failed, unless it [ends](Self::end) well or the ranks have met in it.
#[derive(Debug)]
pub(super) struct OpenCall(BackwardCall);

impl FailedCalls {
    pub(super) fn begin(self: &Arc<Self>) -> OpenCall {
        OpenCall(BackwardCall {
            calls: self.clone(),
            synchronized: Arc::default(),
        })
    }

    /// Forgets all failed calls. All ranks come here, and so are at one place again.
    pub(crate) fn reset(&self) {
        *self.0.lock() = Failed::default();
    }
}

impl BackwardCall {
    /// Notes that the ranks have met in this call: each of them knows how it goes.
    pub(super) fn mark_synchronized(&self) {
        self.synchronized.store(true, Ordering::Relaxed);
    }

    /// Returns the number of calls that failed before this one.
    pub(super) fn count(&self) -> u64 {
        self.calls.0.lock().calls
    }

    pub(super) fn failed(&self) -> Failed {
        self.calls.0.lock().clone()
    }
}

impl OpenCall {
    pub(super) fn call(&self) -> &BackwardCall {
        &self.0
    }

    pub(super) fn end(self, error: Option<&Error>) {
        if let Some(error) = error {
            self.note(|| error.to_string());
        }
        // Nothing is left to count when it is dropped.
        self.0.mark_synchronized();
    }

    fn note(&self, reason: impl FnOnce() -> String) {
        if !self.0.synchronized.load(Ordering::Relaxed) {
            let mut failed = self.0.calls.0.lock();
            failed.calls += 1;
            failed.last = reason();
        }
    }
}

impl Drop for OpenCall {
    /// Notes that the call panicked, if it is dropped without `end`.
    fn drop(&mut self) {
        self.note(|| "it panicked".to_owned());
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn a_call_that_others_wait_for_is_counted_where_it_fails_or_panics() {
        let calls = Arc::new(FailedCalls::default());
        let error = Error::misuse("the loss is no mean");
        let caught = catch_unwind(AssertUnwindSafe(|| {
            let _call = calls.begin();
            panic!("a panic that the test wants");
        }));
        assert!(caught.is_err());
        let panicked = Failed {
            calls: 1,
            last: "it panicked".to_owned(),
        };
        let look = calls.begin();
        assert_eq!(look.call().failed(), panicked);
        look.end(None);
        // Of two that are under way at once, the ranks have met in the first.
        let (synchronized, other) = (calls.begin(), calls.begin());
        synchronized.call().mark_synchronized();
        synchronized.end(Some(&error));
        let look = calls.begin();
        assert_eq!(look.call().failed(), panicked);
        look.end(None);
        other.end(Some(&error));
        let look = calls.begin();
        assert_eq!(look.call().failed().last, error.to_string());
        assert_eq!(look.call().count(), 2);
        look.end(None);
        calls.reset();
        let look = calls.begin();
        assert_eq!(look.call().failed(), Failed::default());
        look.end(None);
    }
}
