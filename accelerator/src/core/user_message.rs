//! What must not go unnoticed and is no error: where the program collects no logs, its standard error
//! is told.

use std::sync::atomic::{AtomicBool, Ordering};

use accelerator_collective::stderr_fallback;

/// Lets something be said once.
#[derive(Debug, Default)]
pub(crate) struct Once(AtomicBool);

impl Once {
    /// Whether it was not said yet. It counts as said from here on.
    pub(crate) fn first(&self) -> bool {
        !self.0.swap(true, Ordering::Relaxed)
    }
}

/// Says what went wrong.
pub(crate) fn warn(text: &str) {
    tracing::warn!("{text}");
    stderr_fallback(text);
}

/// Says what the user asked for.
pub(crate) fn tell(text: &str) {
    tracing::info!("{text}");
    stderr_fallback(text);
}
