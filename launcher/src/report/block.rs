//! A failure as text.

use std::fmt::Write;
use std::path::Path;

use signal_hook::consts::signal;

use super::{FailureRecord, FirstFailure, FirstText, OtherRank};
use crate::output::headline;
use crate::process::End;
use crate::supervisor::run::last_words;
use crate::supervisor::store::FailureReport;
use crate::text::list;

/// The number of lines about other ranks in the text.
const MAX_OTHERS: usize = 16;

/// The length in bytes from which on a line that two texts share is no coincidence.
const MIN_SHARED_LINE: usize = 12;

impl FailureRecord {
    /// Says what happened, and if it is the same as in the failure `before`: "rank 1 was killed by SIGKILL, as
    /// before".
    pub(crate) fn headline(&self, before: Option<&Self>) -> String {
        let FirstFailure { rank, shown, .. } = &self.first;
        let again = match before {
            Some(before) if self.is_like(before) => ", as before",
            _ => "",
        };
        match &shown.loss {
            Some(loss) => format!("{loss}{again}"),
            None => format!("rank {rank}{} {}{again}", shown.on(), shown.end_text),
        }
    }

    /// Says which rank or host failed first, and how: "rank 1 (pid 7 on b) failed first: exit code 3".
    pub(crate) fn summary(&self) -> String {
        let FirstFailure {
            rank, pid, shown, ..
        } = &self.first;
        if let Some(loss) = &shown.loss {
            return loss.clone();
        }
        let first = if self.world_size > 1 { " first" } else { "" };
        let on = shown.on();
        let mut text = format!("rank {rank} (pid {pid}{on}) failed{first}: {}", self.how());
        text.push_str(match self.first.signal {
            Some(signal::SIGKILL) => ", as when the machine runs out of memory",
            Some(signal::SIGILL) => {
                ", as when it was compiled for a processor with more features than this one has"
            }
            _ => "",
        });
        text
    }

    /// Returns `true` if the same rank failed in the same way.
    fn is_like(&self, other: &Self) -> bool {
        let key = |one: &Self| (one.first.rank, one.first.exit_code, one.first.signal);
        key(self) == key(other) && self.first.last_words == other.first.last_words
    }

    /// Returns the rank's last lines, unless the failure `before` has shown them, and its log, indented.
    pub(crate) fn evidence(&self, before: Option<&Self>) -> String {
        let FirstFailure {
            last_words, log, ..
        } = &self.first;
        let mut text = String::new();
        let is_shown = before.is_some_and(|before| before.first.last_words == *last_words);
        if !last_words.is_empty() && !is_shown {
            text.push_str("\n  its last lines:");
            for line in last_words {
                let _ = write!(text, "\n    | {line}");
            }
        }
        if let Some(log) = log {
            let _ = write!(text, "\n  its log: {log}");
        }
        text
    }

    /// The whole text; `report` is the path of the same as JSON.
    pub(crate) fn block(&self, report: Option<&Path>) -> String {
        let FirstFailure {
            rank,
            reported_by,
            shown,
            ..
        } = &self.first;
        let mut text = self.summary();
        let reported = shown.report.as_ref();
        if let Some(reported) = reported.filter(|reported| !self.first.has_shown(reported)) {
            let who = if reported.rank == *rank {
                "it said".to_owned()
            } else {
                format!("rank {} said", reported.rank)
            };
            // That rank got the last lines from the store; they follow below.
            let words = last_words(&self.first.last_words);
            let said = reported.text.replace(&words, "").replace('\n', "\n    ");
            let _ = write!(text, "\n  {who}: {said}");
        }
        if !reported_by.is_empty() {
            let _ = write!(text, "\n  reported by {}", list(reported_by));
        }
        text.push_str(&self.evidence(None));
        if !self.collateral.is_empty() {
            text.push_str("\n  the others:");
        }
        let end_texts = self.end_texts();
        for (end_text, ranks) in end_texts.iter().take(MAX_OTHERS) {
            let _ = write!(text, "\n    {} {end_text}", list(ranks));
        }
        let hidden: usize = end_texts
            .iter()
            .skip(MAX_OTHERS)
            .map(|(_, ranks)| ranks.len())
            .sum();
        if hidden > 0 {
            let _ = write!(text, "\n    and {hidden} more");
        }
        if let Some([first, .., last]) = Some(self.log_files.as_slice()) {
            let _ = write!(text, "\n  all logs: {first} to {last}");
        }
        if let Some(report) = report {
            let _ = write!(text, "\n  this report: {}", report.display());
        }
        let _ = write!(text, "\n  to run it again: {}", self.command_line);
        text
    }

    /// Describes the ends of the other ranks, each with the ranks that ended so.
    fn end_texts(&self) -> Vec<(String, Vec<usize>)> {
        let mut end_texts: Vec<(String, Vec<usize>)> = Vec::new();
        for other in &self.collateral {
            let end_text = other.end_text(&self.first);
            match end_texts.iter_mut().find(|(known, _)| *known == end_text) {
                Some((_, ranks)) => ranks.push(other.rank),
                None => end_texts.push((end_text, vec![other.rank])),
            }
        }
        end_texts
    }

    fn how(&self) -> String {
        match (self.first.exit_code, self.first.signal) {
            (Some(code), _) if code != 0 => End::Code(code).to_string(),
            (None, Some(signal)) => End::Signal(signal).to_string(),
            _ => format!("it {}", self.first.shown.end_text),
        }
    }
}

impl FirstText {
    /// Says where it ran, if that is another host: " on b".
    fn on(&self) -> String {
        let host = self.host.as_ref();
        host.map_or_else(String::new, |host| format!(" on {host}"))
    }
}

impl FirstFailure {
    /// Returns `true` if its last lines show its own report, as those of a panic do.
    fn has_shown(&self, report: &FailureReport) -> bool {
        let is_shown =
            |line: &String| line.len() >= MIN_SHARED_LINE && report.text.contains(line.trim());
        report.rank == self.rank && self.last_words.iter().any(is_shown)
    }
}

impl OtherRank {
    /// Describes its end; follows "rank 1". It does not repeat the text about the first rank.
    fn end_text(&self, first: &FirstFailure) -> String {
        if self.is_lost {
            return format!("was {}", End::Lost);
        }
        let end = match (self.exit_code, self.signal) {
            (Some(code), _) => End::Code(code),
            (None, Some(signal)) => End::Signal(signal),
            (None, None) => return "could not be ended, even by SIGKILL".to_owned(),
        };
        match (end, self.by_itself) {
            (End::Code(0), true) => "had finished".to_owned(),
            (end, true) => format!("failed after it ({end}){}", self.said(end, first)),
            (end, false) => format!("had to be ended ({end})"),
        }
    }

    fn said(&self, end: End, first: &FirstFailure) -> String {
        let said = match end {
            // A panic, whose message begins with what went wrong and may continue with values.
            End::Code(101) | End::Signal(signal::SIGABRT) => headline(&self.last_words),
            _ => self.last_words.last(),
        };
        match said.filter(|_| !self.names_first) {
            None => String::new(),
            Some(line) if first.last_words.contains(line) => ", with the same error".to_owned(),
            Some(line) => format!(": {line}"),
        }
    }
}
