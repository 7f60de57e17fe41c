//! What must not go unnoticed and is no error.

use std::io::Write;

/// Says it to the program's log, or to standard error where the program collects none.
pub(crate) fn warn(text: &str) {
    tracing::warn!("{text}");
    if !tracing::dispatcher::has_been_set() {
        // A closed standard error is no reason to end.
        let _ = writeln!(std::io::stderr(), "accelerator: {text}");
    }
}
