//! The output of warnings that must not go unnoticed.

use std::io::Write;

/// Tells standard error what was logged, where the program collects no logs.
pub fn stderr_fallback(text: &str) {
    if !tracing::dispatcher::has_been_set() {
        // A closed standard error is no reason to end.
        let _ = writeln!(std::io::stderr(), "accelerator: {text}");
    }
}
