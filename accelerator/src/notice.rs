//! What must not go unnoticed and is no error: where the program collects no logs, its standard error
//! is told.

use std::io::Write;

/// Says what went wrong.
pub(crate) fn warn(text: &str) {
    if tracing::dispatcher::has_been_set() {
        tracing::warn!("{text}");
    } else {
        say(text);
    }
}

/// Says what the user asked for.
pub(crate) fn tell(text: &str) {
    if tracing::dispatcher::has_been_set() {
        tracing::info!("{text}");
    } else {
        say(text);
    }
}

fn say(text: &str) {
    // A closed standard error is no reason to end.
    let _ = writeln!(std::io::stderr(), "accelerator: {text}");
}
