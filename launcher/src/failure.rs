//! A failed attempt: which rank failed first, as a block of text and as `failure.json`.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use signal_hook::consts::signal;
use signal_hook::low_level::signal_name;

use crate::attempt::Finished;
use crate::hearing::Statement;
use crate::job::{Cause, End};
use crate::output::headline;
use crate::text::{list, shell_line, utc};
use crate::variables;

/// The name of the report in the log folder.
pub(crate) const FILE: &str = "failure.json";

/// Of the report's form.
const VERSION: u32 = 1;

/// How many ends of other ranks the block shows, a line each.
const SHOWN: usize = 16;

/// One failed attempt; its fields are those of `failure.json`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Failure {
    first: First,
    collateral: Vec<Other>,
    exit_code: u8,
    restarts: u64,
    world_size: usize,
    job: String,
    command: Vec<String>,
    command_line: String,
    log_files: Vec<String>,
    time: String,
}

/// The rank that failed first.
#[derive(Clone, Debug, Serialize)]
struct First {
    rank: usize,
    host: String,
    pid: i32,
    /// What happened to it, in words that go on from "rank 1: ".
    cause: String,
    /// What it ended with; both `null` where only the launcher ended it.
    exit_code: Option<i32>,
    signal: Option<i32>,
    signal_name: Option<&'static str>,
    last_words: Vec<String>,
    log: Option<String>,
    /// The ranks that named it, itself not included.
    reported_by: BTreeSet<usize>,
    #[serde(skip)]
    shown: Shown,
}

/// How long a line is that two texts do not share by chance, in bytes.
const SAME: usize = 12;

/// What the block says of the first and the file does not.
#[derive(Clone, Debug)]
struct Shown {
    fate: String,
    said: Option<Statement>,
}

/// Another rank of the job, and how it ended.
#[derive(Clone, Debug, Serialize)]
struct Other {
    rank: usize,
    pid: i32,
    exit_code: Option<i32>,
    signal: Option<i32>,
    /// Whether it ended before the launcher ended it.
    by_itself: bool,
    last_words: Vec<String>,
    /// Whether its last words name the first rank, which the block does already.
    #[serde(skip)]
    names_first: bool,
}

/// What became of the job that failed so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Ending {
    /// It has ended.
    Failed,
    /// It is being started again.
    Restarting,
    /// It was started again, and then ended well.
    Recovered,
    /// It failed, and before it had ended well the launcher was told to end.
    Interrupted,
}

impl Failure {
    /// Describes the failure of an attempt; `None` where no rank failed.
    ///
    /// `command` is the launcher's own command line.
    pub(crate) fn of(finished: &Finished, command: &[OsString]) -> Option<Self> {
        let Some(Cause::Failure(rank)) = finished.outcome.cause() else {
            return None;
        };
        let log = |rank| {
            finished
                .output
                .log(rank)
                .map(|path| path.display().to_string())
        };
        let first = First::of(finished, rank, log(rank));
        let statements = finished.hearing.statements();
        let other = |rank| {
            let (exit_code, signal) = parts(finished.outcome.end(rank));
            let last_words = finished.output.last_words(rank);
            let statement = statements.iter().find(|said| said.rank == rank);
            let named = statement.filter(|said| said.accused.contains(&first.rank));
            Other {
                names_first: named.is_some_and(|said| {
                    last_words
                        .last()
                        .is_some_and(|line| line.contains(&said.text))
                }),
                rank,
                pid: finished.pids[rank],
                exit_code,
                signal,
                by_itself: finished.outcome.ended_by_itself(rank),
                last_words,
            }
        };
        let ranks = 0..finished.pids.len();
        let others = ranks.clone().filter(|&one| one != rank);
        Some(Self {
            collateral: others.map(other).collect(),
            first,
            exit_code: finished.outcome.exit_code(),
            restarts: finished.settings.restart,
            world_size: finished.pids.len(),
            job: finished.settings.job.clone(),
            command: command
                .iter()
                .map(|word| word.to_string_lossy().into_owned())
                .collect(),
            command_line: variables::assignments(&variables::set()) + &shell_line(command),
            log_files: ranks.filter_map(log).collect(),
            time: utc(SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()),
        })
    }

    /// The rank that failed first.
    pub(crate) fn rank(&self) -> usize {
        self.first.rank
    }

    /// Whether more than the order of ends tells that it was this rank. An error that all ranks share
    /// ends each of them with code 1, and one of them is first.
    pub(crate) fn is_certain(&self) -> bool {
        self.first.exit_code != Some(1)
            || !self.first.reported_by.is_empty()
            || self.first.shown.said.is_some()
    }

    /// The exit code of a job that ends with it.
    pub(crate) fn exit_code(&self) -> u8 {
        self.exit_code
    }

    /// What happened, in a line that goes on, and whether it is the same as in the failure
    /// `before`: "rank 1 was killed by SIGKILL, as before".
    pub(crate) fn headline(&self, before: Option<&Self>) -> String {
        let First { rank, shown, .. } = &self.first;
        let again = match before {
            Some(before) if self.is_like(before) => ", as before",
            _ => "",
        };
        format!("rank {rank} {}{again}", shown.fate)
    }

    /// Whether the same rank failed in the same way.
    fn is_like(&self, other: &Self) -> bool {
        let key = |one: &Self| (one.first.rank, one.first.exit_code, one.first.signal);
        key(self) == key(other) && self.first.last_words == other.first.last_words
    }

    /// The rank's last lines, and its log, indented.
    pub(crate) fn evidence(&self) -> String {
        let First {
            last_words, log, ..
        } = &self.first;
        let mut text = String::new();
        if !last_words.is_empty() {
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

    /// The whole block; `report` is where the same stands as JSON.
    pub(crate) fn block(&self, report: Option<&Path>) -> String {
        let First {
            rank,
            pid,
            reported_by,
            shown,
            ..
        } = &self.first;
        let first = if self.world_size > 1 { " first" } else { "" };
        let mut text = format!("rank {rank} (pid {pid}) failed{first}: {}", self.how());
        if self.first.signal == Some(signal::SIGKILL) {
            text.push_str(", as when the machine runs out of memory");
        }
        let said = shown.said.as_ref();
        if let Some(statement) = said.filter(|said| !self.first.has_shown(said)) {
            let who = if statement.rank == *rank {
                "it said".to_owned()
            } else {
                format!("rank {} said", statement.rank)
            };
            let _ = write!(
                text,
                "\n  {who}: {}",
                statement.text.replace('\n', "\n    ")
            );
        }
        if !reported_by.is_empty() {
            let _ = write!(text, "\n  reported by {}", list(reported_by));
        }
        text.push_str(&self.evidence());
        if !self.collateral.is_empty() {
            text.push_str("\n  the others:");
        }
        let fates = self.fates();
        for (fate, ranks) in fates.iter().take(SHOWN) {
            let _ = write!(text, "\n    {} {fate}", list(ranks));
        }
        let hidden: usize = fates.iter().skip(SHOWN).map(|(_, ranks)| ranks.len()).sum();
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

    /// How the other ranks ended, and which of them ended so.
    fn fates(&self) -> Vec<(String, Vec<usize>)> {
        let mut fates: Vec<(String, Vec<usize>)> = Vec::new();
        for other in &self.collateral {
            let fate = other.fate(&self.first);
            match fates.iter_mut().find(|(known, _)| *known == fate) {
                Some((_, ranks)) => ranks.push(other.rank),
                None => fates.push((fate, vec![other.rank])),
            }
        }
        fates
    }

    fn how(&self) -> String {
        match (self.first.exit_code, self.first.signal) {
            (Some(code), _) if code != 0 => End::Code(code).to_string(),
            (None, Some(signal)) => End::Signal(signal).to_string(),
            _ => format!("it {}", self.first.shown.fate),
        }
    }
}

/// Writes `attempts`, of which the last speaks for the job, to the report in `folder`.
///
/// `reason` is why there was no further attempt, where there might have been one.
///
/// It is written beside and then renamed, so a reader never sees half of it.
///
/// # Errors
/// When the folder cannot be written.
pub(crate) fn write(
    folder: &Path,
    attempts: &[Failure],
    ending: Ending,
    reason: Option<&str>,
) -> std::io::Result<()> {
    #[derive(Serialize)]
    struct File<'a> {
        version: u32,
        #[serde(flatten)]
        last: &'a Failure,
        ending: Ending,
        reason: Option<&'a str>,
        attempts: &'a [Failure],
    }
    let Some(last) = attempts.last() else {
        return Ok(());
    };
    let file = File {
        version: VERSION,
        last,
        ending,
        reason,
        attempts,
    };
    let mut text = serde_json::to_vec_pretty(&file)?;
    text.push(b'\n');
    let draft = folder.join(format!("{FILE}.partial"));
    std::fs::write(&draft, text)?;
    std::fs::rename(&draft, folder.join(FILE))
}

impl First {
    fn of(finished: &Finished, rank: usize, log: Option<String>) -> Self {
        let outcome = &finished.outcome;
        let end = outcome.end(rank).filter(|_| outcome.ended_by_itself(rank));
        let statements = finished.hearing.statements();
        let confession = statements
            .iter()
            .find(|said| said.rank == rank)
            .filter(|said| said.accused.contains(&rank));
        let accusation = statements
            .iter()
            .find(|said| said.rank != rank && said.accused.contains(&rank));
        let fate = match (end, confession) {
            (Some(End::Signal(_)), _) => format!("was {}", shown(end)),
            (Some(End::Code(0)), _) => "left with exit code 0 while others needed it".to_owned(),
            (Some(End::Code(_)), _) => format!("ended with {}", shown(end)),
            (None, Some(_)) => "said that it failed, and did not end".to_owned(),
            (None, None) => "fell silent, and did not end".to_owned(),
        };
        let said = confession.or(accusation.filter(|_| !matches!(end, Some(End::Signal(_)))));
        let cause = match confession {
            Some(confession) => confession.text.clone(),
            None => match (end, accusation) {
                (None, Some(accusation)) => format!("it {fate}: {}", accusation.text),
                _ => format!("it {fate}"),
            },
        };
        let (exit_code, signal) = parts(end);
        let host = finished.hearing.host(rank).unwrap_or_else(|| {
            let system = rustix::system::uname();
            system.nodename().to_string_lossy().into_owned()
        });
        Self {
            rank,
            host,
            pid: finished.pids[rank],
            cause,
            exit_code,
            signal,
            signal_name: signal.and_then(signal_name),
            last_words: finished.output.last_words(rank),
            log,
            reported_by: statements
                .iter()
                .filter(|said| said.rank != rank && said.accused.contains(&rank))
                .map(|said| said.rank)
                .collect(),
            shown: Shown {
                fate,
                said: said.cloned(),
            },
        }
    }

    /// Whether its last lines show what it said itself, as those of a panic do.
    fn has_shown(&self, statement: &Statement) -> bool {
        let says = |line: &String| line.len() >= SAME && statement.text.contains(line.trim());
        statement.rank == self.rank && self.last_words.iter().any(says)
    }
}

impl Other {
    /// How it ended, in words that go on from "rank 1". What the block says of the first rank is not
    /// said again.
    fn fate(&self, first: &First) -> String {
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

    fn said(&self, end: End, first: &First) -> String {
        let said = match end {
            // A panic, whose message begins with what went wrong and may go on with values.
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

fn shown(end: Option<End>) -> String {
    end.map(|end| end.to_string()).unwrap_or_default()
}

/// `end` as exit code and signal, of which at most one is there.
fn parts(end: Option<End>) -> (Option<i32>, Option<i32>) {
    match end {
        Some(End::Code(code)) => (Some(code), None),
        Some(End::Signal(signal)) => (None, Some(signal)),
        None => (None, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn other(rank: usize, code: i32, line: &str) -> Other {
        Other {
            rank,
            pid: 7,
            exit_code: Some(code),
            signal: None,
            by_itself: true,
            last_words: vec![line.to_owned()],
            names_first: line.contains("is lost"),
        }
    }

    fn failure(line: &str, collateral: Vec<Other>) -> Failure {
        let first = First {
            rank: 0,
            host: String::new(),
            pid: 7,
            cause: String::new(),
            exit_code: Some(1),
            signal: None,
            signal_name: None,
            last_words: vec![line.to_owned()],
            log: None,
            reported_by: BTreeSet::new(),
            shown: Shown {
                fate: String::new(),
                said: None,
            },
        };
        Failure {
            world_size: collateral.len() + 1,
            first,
            collateral,
            exit_code: 1,
            restarts: 0,
            job: String::new(),
            command: Vec::new(),
            command_line: String::new(),
            log_files: Vec::new(),
            time: String::new(),
        }
    }

    #[test]
    fn a_panic_that_the_rank_told_of_is_shown_once() {
        let mut failure = failure("no such digit: 10", Vec::new());
        let mut said = |rank: usize| {
            failure.first.shown.said = Some(Statement {
                rank,
                accused: BTreeSet::from([0]),
                text: "it panicked: no such digit: 10 (at src/main.rs:3:5)".to_owned(),
            });
            failure.block(None)
        };
        assert_eq!(said(0).matches("no such digit").count(), 1);
        assert_eq!(said(1).matches("no such digit").count(), 2);
    }

    #[test]
    fn an_error_that_several_ranks_share_is_shown_once() {
        let others = vec![
            other(1, 1, "the models differ"),
            other(2, 1, "rank 0 is lost: exit code 1"),
            other(3, 1, "the disk is full"),
            other(4, 1, "the models differ"),
            other(5, 1, "rank 0 is lost: exit code 1; rank 5 was in a barrier"),
            other(6, 0, "done"),
        ];
        let block = failure("the models differ", others).block(None);
        let lines: Vec<&str> = block.lines().map(str::trim).collect();
        assert_eq!(
            lines[1..8],
            [
                "its last lines:",
                "| the models differ",
                "the others:",
                "ranks 1, 4 failed after it (exit code 1), with the same error",
                "ranks 2, 5 failed after it (exit code 1)",
                "rank 3 failed after it (exit code 1): the disk is full",
                "rank 6 had finished",
            ]
        );
    }
}
