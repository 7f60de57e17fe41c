//! The report of failed attempts and survived losses, as text and as `failure.json`.

mod block;
pub(crate) mod operations;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::time::SystemTime;

use accelerator_host::fs::{Durability, Replace};
use accelerator_host::machine::host_name;
use accelerator_track::internal::mask_arguments;
use serde::Serialize;
use signal_hook::consts::signal;
use signal_hook::low_level::signal_name;

use self::operations::RankOperations;
use crate::error::START_AGAIN;
use crate::process::End;
use crate::supervisor::group_machine::Cause;
use crate::supervisor::run::{FinishedAttempt, LostRank};
use crate::supervisor::store::FailureReport;
use crate::text::{shell_line, utc};
use crate::variables;

/// The name of the report in the log folder.
pub(crate) const FILE: &str = "failure.json";

/// The version of the report's form.
const FORMAT_VERSION: u32 = 1;

/// One failed attempt; its fields are those of `failure.json`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct FailureRecord {
    first: FirstFailure,
    collateral: Vec<OtherRank>,
    exit_code: u8,
    restarts: u64,
    world_size: usize,
    job: String,
    command: Vec<String>,
    command_line: String,
    log_files: Vec<String>,
    time: String,
    /// The last operations of all ranks; the file has those of the last attempt.
    #[serde(skip)]
    operations: Vec<RankOperations>,
}

/// The rank that failed first.
#[derive(Clone, Debug, Serialize)]
struct FirstFailure {
    rank: usize,
    host: String,
    /// The place of its host among the hosts of the job.
    node: usize,
    pid: i32,
    /// The event that ended it; follows "rank 1: ".
    cause: String,
    /// Its exit code or signal; both are `null` if the launcher ended it or its host was lost.
    exit_code: Option<i32>,
    signal: Option<i32>,
    signal_name: Option<&'static str>,
    last_words: Vec<String>,
    log: Option<String>,
    /// The ranks that named it, itself not included.
    reported_by: BTreeSet<usize>,
    #[serde(skip)]
    shown: FirstText,
}

/// Parts of the text about the first failure that the file does not have.
#[derive(Clone, Debug)]
struct FirstText {
    end_text: String,
    report: Option<FailureReport>,
    /// Its host, if that is another one.
    host: Option<String>,
    /// The host that was lost with it, and how.
    loss: Option<String>,
}

/// A loss of ranks after which the others continued.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct SurvivedLoss {
    lost: Vec<LostRankRecord>,
    /// The number of ranks before the loss.
    world_size: usize,
    /// The number of ranks that continued.
    survivors: usize,
    /// The time at which the others continued.
    time: String,
}

/// A rank that was lost.
#[derive(Clone, Debug, Serialize)]
struct LostRankRecord {
    rank: usize,
    host: String,
    pid: i32,
    /// The event that ended it; follows "rank 1: ".
    cause: String,
    /// Its exit code or signal; both are `null` if the launcher ended it or its host was lost.
    exit_code: Option<i32>,
    signal: Option<i32>,
    signal_name: Option<&'static str>,
    last_words: Vec<String>,
}

/// Another rank of the job, and its end.
#[derive(Clone, Debug, Serialize)]
struct OtherRank {
    rank: usize,
    pid: i32,
    exit_code: Option<i32>,
    signal: Option<i32>,
    /// True if it was lost with its host.
    is_lost: bool,
    /// True if it ended before the launcher ended it.
    by_itself: bool,
    last_words: Vec<String>,
    /// True if its last lines name the first rank, which the text does already.
    #[serde(skip)]
    names_first: bool,
}

/// The outcome of the job after the failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum JobOutcome {
    /// It failed, and is not started again.
    Failed,
    /// It is being started again.
    Restarting,
    /// It succeeded. A report is written only if an attempt failed or ranks were lost before.
    #[serde(rename = "recovered")]
    Succeeded,
    /// It failed, and before it had succeeded a signal ended the launcher.
    Interrupted,
    /// All ranks have saved because they were told to leave, and the job continues when it is started again. There may
    /// be no failure before.
    Preempted,
}

impl FailureRecord {
    /// Describes the failure of an attempt; `None` if no rank failed.
    ///
    /// `command` is the launcher's own command line.
    pub(crate) fn of(finished: &FinishedAttempt, command: &[OsString]) -> Option<Self> {
        let Some(Cause::Failure(rank)) = finished.outcome.cause() else {
            return None;
        };
        let log = |rank| {
            finished
                .output
                .log(rank)
                .map(|path| path.display().to_string())
        };
        let first = FirstFailure::of(finished, rank, log(rank));
        let failure_reports = finished.rank_reports.failure_reports();
        let other = |rank| {
            let (exit_code, signal) = parts(finished.outcome.end(rank));
            let last_words = finished.output.stderr_tail(rank);
            let own_report = failure_reports.iter().find(|report| report.rank == rank);
            let named = own_report.filter(|report| report.blamed.contains(&first.rank));
            OtherRank {
                names_first: named.is_some_and(|report| {
                    last_words
                        .last()
                        .is_some_and(|line| line.contains(&report.text))
                }),
                rank,
                pid: finished.processes[rank].pid,
                exit_code,
                signal,
                is_lost: finished.outcome.end(rank) == Some(End::Lost),
                by_itself: finished.outcome.ended_by_itself(rank),
                last_words,
            }
        };
        let ranks = 0..finished.processes.len();
        let others = ranks.clone().filter(|&one| one != rank);
        Some(Self {
            collateral: others.map(other).collect(),
            first,
            exit_code: finished.outcome.exit_code(),
            restarts: finished.settings.restart,
            world_size: finished.processes.len(),
            job: finished.settings.job.clone(),
            command_line: command_line(&words(command)),
            command: words(command),
            log_files: ranks.filter_map(log).collect(),
            time: utc(SystemTime::now()),
            operations: operations_of(finished),
        })
    }

    /// Forgets the operations of the ranks, once another attempt has failed.
    pub(crate) fn forget_operations(&mut self) {
        self.operations = Vec::new();
    }

    /// The rank that failed first.
    pub(crate) fn rank(&self) -> usize {
        self.first.rank
    }

    /// Returns `true` if more than the order of ends shows that it was this rank. An error that all ranks share
    /// ends each of them with code 1, and one of them is first.
    pub(crate) fn is_certain(&self) -> bool {
        self.first.exit_code != Some(1)
            || !self.first.reported_by.is_empty()
            || self.first.shown.report.is_some()
    }

    /// The exit code of a job that ends with it.
    pub(crate) fn exit_code(&self) -> u8 {
        self.exit_code
    }
}

impl SurvivedLoss {
    /// Describes a loss after which `survivors` ranks continue.
    pub(crate) fn of(lost: &[LostRank], survivors: usize) -> Self {
        let lost = lost.iter().map(|rank| {
            let (exit_code, signal) = parts(rank.end);
            let loss = rank.process.loss.clone();
            LostRankRecord {
                rank: rank.rank,
                host: rank.process.host.clone().unwrap_or_else(host_name),
                pid: rank.process.pid,
                cause: loss.unwrap_or_else(|| match rank.end {
                    Some(end @ End::Code(_)) => format!("it ended with {end}"),
                    Some(end) => format!("it was {end}"),
                    None => "it stopped responding, and the launcher killed it".to_owned(),
                }),
                exit_code,
                signal,
                signal_name: signal.and_then(signal_name),
                last_words: rank.last_words.clone(),
            }
        });
        let lost: Vec<_> = lost.collect();
        Self {
            world_size: survivors + lost.len(),
            survivors,
            lost,
            time: utc(SystemTime::now()),
        }
    }
}

/// Writes the report in `folder`. The last of `attempts` is the failure of the job. Without attempts and losses, a report
/// is written only for a preemption.
///
/// `reason` tells why there was no further attempt, if there might have been one.
///
/// The file is replaced by a rename, so a reader never sees half of it.
pub(crate) fn write(
    folder: &Path,
    attempts: &[FailureRecord],
    losses: &[SurvivedLoss],
    ending: JobOutcome,
    reason: Option<&str>,
) -> std::io::Result<()> {
    if attempts.is_empty() && losses.is_empty() && ending != JobOutcome::Preempted {
        return Ok(());
    }
    let file = ReportFile::of(attempts, losses, ending, reason);
    let mut text = serde_json::to_vec_pretty(&file)?;
    text.push(b'\n');
    Replace::new(&folder.join(FILE), Durability::Cached)
        .draft(folder.join(format!("{FILE}.partial")))
        .write(|file| file.write_all(&text))
}

/// The contents of the report.
#[derive(Debug, Serialize)]
pub(crate) struct ReportFile<'a> {
    version: u32,
    #[serde(flatten)]
    last: Option<&'a FailureRecord>,
    ending: JobOutcome,
    reason: Option<&'a str>,
    attempts: &'a [FailureRecord],
    /// The losses after which the job continued without a restart.
    losses: &'a [SurvivedLoss],
    /// The last operations of each rank in the last attempt: 64 of each, fewer in a world of more than 128 ranks.
    operations: &'a [RankOperations],
}

impl<'a> ReportFile<'a> {
    pub(crate) fn of(
        attempts: &'a [FailureRecord],
        losses: &'a [SurvivedLoss],
        ending: JobOutcome,
        reason: Option<&'a str>,
    ) -> Self {
        Self {
            version: FORMAT_VERSION,
            last: attempts.last(),
            ending,
            reason,
            attempts,
            losses,
            operations: attempts.last().map_or(&[], |last| &last.operations),
        }
    }
}

impl FirstFailure {
    fn of(finished: &FinishedAttempt, rank: usize, log: Option<String>) -> Self {
        let outcome = &finished.outcome;
        let end = outcome.end(rank).filter(|_| outcome.ended_by_itself(rank));
        let failure_reports = finished.rank_reports.failure_reports();
        let own_report = failure_reports
            .iter()
            .find(|report| report.rank == rank)
            .filter(|report| report.blamed.contains(&rank));
        let other_report = failure_reports
            .iter()
            .find(|report| report.rank != rank && report.blamed.contains(&rank));
        let process = &finished.processes[rank];
        let end_text = match (end, own_report) {
            (Some(End::Signal(_) | End::Lost), _) => format!("was {}", shown(end)),
            (Some(End::Code(0)), _) => {
                "ended with exit code 0 while others waited for it".to_owned()
            }
            (Some(End::Code(_)), _) => format!("ended with {}", shown(end)),
            (None, Some(_)) => "reported a failure, and did not end".to_owned(),
            (None, None) => "stopped responding, and did not end".to_owned(),
        };
        let is_plain = matches!(end, Some(End::Signal(_) | End::Lost));
        let report = own_report.or(other_report.filter(|_| !is_plain));
        let cause = match (&process.loss, own_report) {
            (Some(loss), _) => loss.clone(),
            (None, Some(own_report)) => own_report.text.clone(),
            (None, None) => match (end, other_report) {
                (None, Some(other_report)) => format!("it {end_text}: {}", other_report.text),
                _ => format!("it {end_text}"),
            },
        };
        let (exit_code, signal) = parts(end);
        let known = process.host.clone();
        let host = known.or_else(|| finished.rank_reports.host(rank));
        Self {
            rank,
            host: host.unwrap_or_else(host_name),
            node: finished.settings.layout.host_of(rank),
            pid: process.pid,
            cause,
            exit_code,
            signal,
            signal_name: signal.and_then(signal_name),
            last_words: finished.output.stderr_tail(rank),
            log,
            reported_by: failure_reports
                .iter()
                .filter(|report| report.rank != rank && report.blamed.contains(&rank))
                .map(|report| report.rank)
                .collect(),
            shown: FirstText {
                end_text,
                report: report.cloned(),
                host: process.host.clone(),
                loss: process.loss.clone(),
            },
        }
    }
}

/// The last operations of the ranks: of few ranks all that are known, and of thousands a few each.
fn operations_of(finished: &FinishedAttempt) -> Vec<RankOperations> {
    const MOST: usize = 8192;
    let ranks = finished.operations.iter().cloned();
    let mut ranks: Vec<_> = ranks.map(RankOperations::from).collect();
    let each = (MOST / ranks.len().max(1)).max(4);
    ranks.iter_mut().for_each(|rank| rank.keep(each));
    ranks
}

/// Returns the command with its secrets masked, since the report is kept.
fn words(command: &[OsString]) -> Vec<String> {
    let words: Vec<_> = command.iter().map(|word| word.to_string_lossy()).collect();
    mask_arguments(&words)
}

/// Formats a command line for a shell, with the variables that are set.
fn command_line(words: &[String]) -> String {
    variables::assignments(&variables::set()) + &shell_line(words)
}

fn shown(end: Option<End>) -> String {
    end.map(|end| end.to_string()).unwrap_or_default()
}

/// `end` as exit code and signal, of which at most one is there.
fn parts(end: Option<End>) -> (Option<i32>, Option<i32>) {
    match end {
        Some(End::Code(code)) => (Some(code), None),
        Some(End::Signal(signal)) => (None, Some(signal)),
        Some(End::Lost) | None => (None, None),
    }
}

/// The knowledge of a host other than host 0 about a job whose host 0 was lost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LostHead<'a> {
    /// The name of host 0.
    pub(crate) host: &'a str,
    pub(crate) loss: &'a str,
    /// The number of ranks of the job; 0 where none had been started.
    pub(crate) world_size: usize,
    pub(crate) job: &'a str,
    pub(crate) restarts: u64,
    /// The ranks of this host.
    pub(crate) ranks: &'a [KnownRank],
}

/// A rank of this host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KnownRank {
    /// Its number among all ranks.
    pub(crate) rank: usize,
    pub(crate) pid: i32,
    /// Its end, if it ended before host 0 was lost.
    pub(crate) end: Option<End>,
}

impl FailureRecord {
    /// Describes the loss of host 0, as the launcher of another host sees it.
    pub(crate) fn of_lost_head(lost: &LostHead<'_>, command: &[OsString]) -> Self {
        let others = lost.ranks.iter().map(|known| {
            let (exit_code, signal) = parts(known.end.or(Some(End::Signal(signal::SIGKILL))));
            OtherRank {
                rank: known.rank,
                pid: known.pid,
                exit_code,
                signal,
                is_lost: false,
                by_itself: known.end.is_some(),
                last_words: Vec::new(),
                names_first: false,
            }
        });
        Self {
            collateral: others.collect(),
            first: FirstFailure {
                rank: 0,
                host: lost.host.to_owned(),
                node: 0,
                pid: 0,
                cause: lost.loss.to_owned(),
                exit_code: None,
                signal: None,
                signal_name: None,
                last_words: Vec::new(),
                log: None,
                reported_by: BTreeSet::new(),
                shown: FirstText {
                    end_text: format!("was {}", End::Lost),
                    report: None,
                    host: Some(lost.host.to_owned()),
                    loss: Some(lost.loss.to_owned()),
                },
            },
            exit_code: START_AGAIN,
            restarts: lost.restarts,
            world_size: lost.world_size,
            job: lost.job.to_owned(),
            command_line: command_line(&words(command)),
            command: words(command),
            log_files: Vec::new(),
            time: utc(SystemTime::now()),
            operations: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use signal_hook::consts::signal;

    use super::*;

    fn other(rank: usize, code: i32, line: &str) -> OtherRank {
        OtherRank {
            rank,
            pid: 7,
            exit_code: Some(code),
            signal: None,
            is_lost: false,
            by_itself: true,
            last_words: vec![line.to_owned()],
            names_first: line.contains("is lost"),
        }
    }

    fn failure(line: &str, collateral: Vec<OtherRank>) -> FailureRecord {
        let first = FirstFailure {
            rank: 0,
            host: String::new(),
            node: 0,
            pid: 7,
            cause: String::new(),
            exit_code: Some(1),
            signal: None,
            signal_name: None,
            last_words: vec![line.to_owned()],
            log: None,
            reported_by: BTreeSet::new(),
            shown: FirstText {
                end_text: String::new(),
                report: None,
                host: None,
                loss: None,
            },
        };
        FailureRecord {
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
            operations: Vec::new(),
        }
    }

    #[test]
    fn a_panic_that_the_rank_reported_is_shown_once() {
        let mut failure = failure("no such digit: 10", Vec::new());
        let mut said = |rank: usize| {
            failure.first.shown.report = Some(FailureReport {
                rank,
                blamed: BTreeSet::from([0]),
                text: "it panicked: no such digit: 10 (at src/main.rs:3:5)".to_owned(),
            });
            failure.block(None)
        };
        assert_eq!(said(0).matches("no such digit").count(), 1);
        assert_eq!(said(1).matches("no such digit").count(), 2);
    }

    #[test]
    fn what_a_signal_may_mean_is_said() {
        let mut failure = failure("", Vec::new());
        failure.first.exit_code = None;
        for (signal, means) in [
            (signal::SIGKILL, "as when the machine runs out of memory"),
            (signal::SIGILL, "as when it was compiled for a processor"),
            (signal::SIGTERM, ""),
        ] {
            failure.first.signal = Some(signal);
            let summary = failure.summary();
            assert!(summary.contains(means), "{summary}");
            assert_eq!(summary.contains("as when"), !means.is_empty());
        }
    }

    #[test]
    fn last_lines_that_another_rank_was_told_are_shown_once() {
        let mut failure = failure("no labels here", Vec::new());
        failure.first.last_words.insert(0, "reading".to_owned());
        failure.first.shown.report = Some(FailureReport {
            rank: 1,
            blamed: BTreeSet::from([0]),
            text: "rank 0 is lost: it ended with exit code 1; its last words: no labels here; rank 1 was in a barrier"
                .to_owned(),
        });
        let block = failure.block(None);
        assert_eq!(block.matches("no labels").count(), 1, "{block}");
        let said =
            "rank 1 said: rank 0 is lost: it ended with exit code 1; rank 1 was in a barrier";
        assert!(block.contains(said), "{block}");
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
