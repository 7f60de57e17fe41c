//! The callback that reports progress of long file operations.

use std::fmt;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;

/// Called after each block of a file that was read, summed up, written or flushed.
#[derive(Clone, Default)]
pub(crate) struct Progress(Option<Arc<Callback>>);

type Callback = dyn Fn() + Send + Sync + UnwindSafe + RefUnwindSafe;

impl Progress {
    pub(crate) fn new(
        callback: impl Fn() + Send + Sync + UnwindSafe + RefUnwindSafe + 'static,
    ) -> Self {
        Self(Some(Arc::new(callback)))
    }

    pub(crate) fn tick(&self) {
        if let Some(callback) = &self.0 {
            callback();
        }
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress").finish_non_exhaustive()
    }
}
