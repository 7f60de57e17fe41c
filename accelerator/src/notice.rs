//! What must not go unnoticed and is no error: where the program collects no logs, its standard error
//! is told.

use accelerator_collective::stderr_fallback;

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
