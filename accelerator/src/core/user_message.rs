//! Messages that must not go unnoticed but are no errors. If the program collects no logs, they go to standard error.

use std::sync::atomic::{AtomicBool, Ordering};

use accelerator_collective::launcher::stderr_fallback;

/// Lets something be said once.
#[derive(Debug, Default)]
pub(crate) struct Once(AtomicBool);

impl Once {
    /// Returns `true` on the first call only.
    pub(crate) fn first(&self) -> bool {
        !self.0.swap(true, Ordering::Relaxed)
    }
}

/// Warns that something is wrong.
pub(crate) fn warn(text: &str) {
    tracing::warn!("{text}");
    stderr_fallback(text);
}

/// Reports what the user asked for.
pub(crate) fn tell(text: &str) {
    tracing::info!("{text}");
    stderr_fallback(text);
}
