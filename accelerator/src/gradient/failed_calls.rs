//! Calls of `backward` that failed on this rank before the other ranks heard of them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// How often `backward` failed on this rank before the other ranks heard of it, since a model was prepared: the
/// other ranks wait in that call of theirs, and take the next one of this rank for it. All windows tell, so that
/// ranks that differ in it are found.
#[derive(Debug, Default)]
pub(crate) struct FailedCalls {
    /// Whether the other ranks wait for the call that runs.
    awaited: AtomicBool,
    failed: Mutex<Failed>,
}

#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub(super) struct Failed {
    pub(super) calls: u64,
    /// What the last of them failed with.
    pub(super) last: String,
}

/// A call of `backward` that all ranks make.
#[derive(Debug)]
pub(super) struct Call<'a>(&'a FailedCalls);

impl FailedCalls {
    pub(super) fn begin(&self) -> Call<'_> {
        self.awaited.store(true, Ordering::Relaxed);
        Call(self)
    }

    /// The other ranks do not wait for the call that runs: they have met this one in it, or do not make it.
    pub(super) fn release(&self) {
        self.awaited.store(false, Ordering::Relaxed);
    }

    /// All ranks come here, and so are at one place again.
    pub(crate) fn forget(&self) {
        *self.lock() = Failed::default();
    }

    pub(super) fn count(&self) -> u64 {
        self.lock().calls
    }

    pub(super) fn failed(&self) -> Failed {
        self.lock().clone()
    }

    fn note(&self, reason: impl FnOnce() -> String) {
        if self.awaited.load(Ordering::Relaxed) {
            let mut failed = self.lock();
            failed.calls += 1;
            failed.last = reason();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Failed> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Call<'_> {
    pub(super) fn end(self, error: Option<&Error>) {
        if let Some(error) = error {
            self.0.note(|| error.to_string());
        }
        core::mem::forget(self);
    }
}

impl Drop for Call<'_> {
    /// It panics, and the program may catch that.
    fn drop(&mut self) {
        self.0.note(|| "it panicked".to_owned());
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn a_call_that_others_wait_for_is_counted_where_it_fails_or_panics() {
        let calls = FailedCalls::default();
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
        assert_eq!(calls.failed(), panicked);
        calls.begin().end(None);
        let call = calls.begin();
        calls.release();
        call.end(Some(&error));
        assert_eq!(calls.failed(), panicked);
        calls.begin().end(Some(&error));
        assert_eq!(calls.failed().last, error.to_string());
        assert_eq!(calls.count(), 2);
        calls.forget();
        assert_eq!(calls.failed(), Failed::default());
    }
}
