//! The block that says which rank failed first.

use std::fmt::Write;

use signal_hook::consts::signal;

use crate::job::{Cause, End};
use crate::output::Output;
use crate::supervise::Outcome;

/// Describes the failure of a job of `pids.len()` ranks; `None` where no rank failed.
pub(crate) fn report(outcome: &Outcome, pids: &[i32], output: &Output) -> Option<String> {
    let Some(Cause::Failure(culprit)) = outcome.cause() else {
        return None;
    };
    let end = outcome.end(culprit)?;
    let first = if pids.len() > 1 { " first" } else { "" };
    let mut text = format!(
        "rank {culprit} (pid {}) failed{first}: {end}",
        pids[culprit]
    );
    if end == End::Signal(signal::SIGKILL) {
        text.push_str(", as when the machine runs out of memory");
    }
    let last = output.last_words(culprit);
    if !last.is_empty() {
        text.push_str("\n  its last lines:");
        for line in last {
            let _ = write!(text, "\n    | {line}");
        }
    }
    if let Some(log) = output.log(culprit) {
        let _ = write!(text, "\n  its log: {}", log.display());
    }
    let others: Vec<String> = (0..pids.len())
        .filter(|&rank| rank != culprit)
        .map(|rank| fate(outcome, rank))
        .collect();
    if !others.is_empty() {
        let _ = write!(text, "\n  the others: {}", others.join("; "));
    }
    Some(text)
}

fn fate(outcome: &Outcome, rank: usize) -> String {
    match (outcome.end(rank), outcome.ended_by_itself(rank)) {
        (None, _) => format!("rank {rank} does not end, even on SIGKILL"),
        (Some(End::Code(0)), true) => format!("rank {rank} had finished"),
        (Some(end), true) => format!("rank {rank} failed after it ({end})"),
        (Some(end), false) => format!("rank {rank} was ended ({end})"),
    }
}
