//! `accel-launch inspect`: what the ranks of a running job are doing.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use accelerator_collective::Launch;
use accelerator_collective::internal::{
    FlightRecords, OpRecord, RankStatus, Rendezvous, flight_records,
};
use accelerator_host::machine::unix_time;
use accelerator_host::{JOB, STORE, TOKEN_FILE};
use clap::Args;
use serde::Serialize;

use crate::error::{Error, Result, chain};
use crate::process::descendants::processes;
use crate::report::operations::RankOperations;
use crate::text::{columns, duration, json, list, plain, print};

/// The time that the store and all ranks may take to answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Shows the operation that each rank of a running job is in, and the rank that the others wait for.
///
/// Run this on a host of the job, as the user who started it. It does not stop or disturb the job. It locates the job
/// through the environment variables that its ranks were started with, so it does not work if the number of ranks has
/// changed since then (`--num-processes 2:4`), or if an MPI launcher connects the ranks.
#[derive(Args, Clone, Debug)]
pub(crate) struct InspectArgs {
    /// The PID of a rank, or of a process that started ranks. Required if several jobs are running on this host.
    #[arg(value_name = "PID")]
    pid: Option<i32>,

    /// Also print the last N operations of each rank (at most 64).
    #[arg(long, value_name = "N", default_value_t = 0)]
    last: usize,

    /// Print one JSON object with the last 64 operations of each rank.
    #[arg(long, conflicts_with = "last")]
    json: bool,
}

/// Prints the operations of the ranks.
///
/// # Errors
/// If no job is found, or several; if the store of the job does not answer.
pub(crate) fn run(arguments: &InspectArgs) -> Result<ExitCode> {
    let job = Job::find(arguments.pid)?;
    let ranks = flight_records(&job.rendezvous, ANSWER_WITHIN)
        .map_err(|error| Error::unreachable(chain(&error)))?;
    if arguments.json {
        return print(&json(&Inspection {
            job: &job.name,
            store: job.rendezvous.to_string(),
            world_size: job.world_size,
            ranks: ranks.into_iter().map(RankOperations::from).collect(),
        })?);
    }
    print(&text(&job, &ranks, arguments.last))
}

/// The object of `--json`.
#[derive(Serialize)]
struct Inspection<'a> {
    job: &'a str,
    store: String,
    world_size: usize,
    ranks: Vec<RankOperations>,
}

/// A job with ranks on this host.
struct Job {
    rendezvous: Rendezvous,
    name: String,
    world_size: usize,
    /// One of its processes on this host.
    pid: i32,
    /// Set if the launcher has started it.
    is_ours: bool,
}

impl Job {
    /// Finds the job of `pid`, or the only one.
    fn find(pid: Option<i32>) -> Result<Self> {
        let processes = processes(pid).ok_or_else(|| {
            Error::usage("this system does not list its processes (it has no /proc)")
        })?;
        let mut jobs: BTreeMap<(String, String), Self> = BTreeMap::new();
        for process in processes {
            let variables = process.variables().unwrap_or_default();
            let launch = Launch::from_vars(|name| {
                let value = variables.get(name)?;
                match name == TOKEN_FILE.name && !Path::new(value).is_absolute() {
                    true => Some(format!("/proc/{}/cwd/{value}", process.pid)),
                    false => Some(value.clone()),
                }
            });
            // Other processes are no ranks, or those of other programs.
            let Ok(launch) = launch else {
                continue;
            };
            let Some(rendezvous) = launch
                .rendezvous
                .filter(|_| launch.topology.world_size() > 1)
            else {
                continue;
            };
            let name = variables.get(JOB.name).cloned().unwrap_or_default();
            let key = (rendezvous.to_string(), name.clone());
            jobs.entry(key).or_insert(Self {
                rendezvous,
                name,
                world_size: launch.topology.world_size(),
                pid: process.pid,
                is_ours: variables.contains_key(STORE.name),
            });
        }
        // RANK and MASTER_PORT may be those of another library.
        let has_ours = jobs.values().any(|job| job.is_ours);
        let mut jobs: Vec<_> = jobs.into_values().collect();
        jobs.retain(|job| job.is_ours || !has_ours);
        match (jobs.pop(), jobs.is_empty(), pid) {
            (Some(job), true, _) => Ok(job),
            (Some(job), false, _) => {
                jobs.push(job);
                let each = jobs
                    .iter()
                    .map(|job| format!("{} (process {})", job, job.pid));
                let each: Vec<_> = each.collect();
                Err(Error::usage(format!(
                    "several jobs are running here; pass the PID of a process of the one you mean: {}",
                    each.join(", ")
                )))
            }
            (None, _, Some(pid)) => Err(Error::not_found(format!(
                "process {pid} is not a rank of a multi-rank job, and this user can see no such rank among the processes that it started"
            ))),
            (None, _, None) => Err(Error::not_found(
                "no multi-rank job of this user is running on this host",
            )),
        }
    }
}

impl std::fmt::Display for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if !self.name.is_empty() {
            write!(f, "job {} ", plain(&self.name))?;
        }
        write!(f, "at {}", self.rendezvous)
    }
}

fn text(job: &Job, ranks: &[FlightRecords], last: usize) -> String {
    let now = u64::try_from(unix_time().as_micros()).unwrap_or(u64::MAX);
    let mut text = format!(
        "{job}: {} of {} ranks have joined\n",
        ranks.len(),
        job.world_size
    );
    let row = |rank: &FlightRecords| {
        [
            rank.rank.to_string(),
            rank.host.clone(),
            rank.pid.to_string(),
            state(rank, now),
        ]
    };
    let head = ["rank", "host", "pid", "state"].map(str::to_owned);
    let rows: Vec<_> = [head].into_iter().chain(ranks.iter().map(row)).collect();
    text.push_str(&columns(&rows));
    if let Some(verdict) = verdict(ranks) {
        let _ = writeln!(text, "\n{verdict}");
    }
    for rank in ranks.iter().filter(|_| last > 0) {
        let operations = rank.operations.as_deref().unwrap_or_default();
        let _ = writeln!(text, "\nrank {}", rank.rank);
        let shown = &operations[operations.len().saturating_sub(last)..];
        let rows = shown.iter().map(|operation| {
            let took = match operation.ended {
                Some(ended) if operation.failed => {
                    format!("failed after {}", span(ended, operation.started))
                }
                Some(ended) => format!("took {}", span(ended, operation.started)),
                None => "in progress".to_owned(),
            };
            let ago = format!("began {} ago", span(now, operation.started));
            [
                "".to_owned(),
                number(operation),
                named(operation),
                ago,
                took,
            ]
        });
        text.push_str(&columns(&rows.collect::<Vec<_>>()));
    }
    text
}

/// Says what a rank is doing.
fn state(rank: &FlightRecords, now: u64) -> String {
    let operations = rank.operations.as_deref().unwrap_or_default();
    let known = known_state(operations, now);
    match rank.state {
        RankStatus::Answered => known,
        RankStatus::Meeting => "still connecting to the other ranks".to_owned(),
        RankStatus::Gone => "has left the job, or exited".to_owned(),
        _ if operations.is_empty() => "does not answer".to_owned(),
        _ => format!("does not answer; its last report, with times up to now: {known}"),
    }
}

fn known_state(operations: &[OpRecord], now: u64) -> String {
    let mut under_way = operations
        .iter()
        .filter(|operation| operation.ended.is_none());
    if let Some(first) = under_way.next() {
        let more = match under_way.count() {
            0 => String::new(),
            more => format!(", and {more} more"),
        };
        let time = span(now, first.started);
        return format!("in {} {} for {time}{more}", number(first), named(first));
    }
    match operations.last() {
        None => "no operation yet".to_owned(),
        Some(last) => format!(
            "not in an operation for {}; the last was {} {}",
            span(now, last.ended.unwrap_or(last.started)),
            number(last),
            named(last)
        ),
    }
}

/// The progress of a rank in the operations of all ranks, by which ranks that are behind are found.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Progress {
    /// The number of the operation that it is in, or will call next.
    next: u64,
    is_waiting: bool,
}

impl Progress {
    fn of(operations: &[OpRecord]) -> Option<Self> {
        let mut of_world = operations.iter().filter(|operation| operation.group == 0);
        if let Some(first) = of_world.clone().find(|operation| operation.ended.is_none()) {
            return Some(Self {
                next: first.sequence,
                is_waiting: true,
            });
        }
        of_world.next_back().map(|last| Self {
            next: last.sequence + 1,
            is_waiting: false,
        })
    }
}

/// Says which ranks the others wait for in the operations of all ranks: those that do not answer, and those that have
/// begun the fewest operations and are in none.
fn verdict(ranks: &[FlightRecords]) -> Option<String> {
    let is_silent = |rank: &&FlightRecords| rank.state == RankStatus::Silent;
    let silent: Vec<_> = ranks
        .iter()
        .filter(is_silent)
        .map(|rank| rank.rank)
        .collect();
    let answered = ranks
        .iter()
        .filter(|rank| rank.state == RankStatus::Answered);
    let known = answered.map(|rank| {
        let operations = rank.operations.as_deref().unwrap_or_default();
        let none = Progress {
            next: 0,
            is_waiting: false,
        };
        // A rank whose newest operations are all those of groups may be anywhere.
        let has_any = !operations.is_empty();
        (
            rank.rank,
            Progress::of(operations).or_else(|| (!has_any).then_some(none)),
        )
    });
    let known: Vec<_> = known
        .filter_map(|(rank, progress)| Some((rank, progress?)))
        .collect();
    let waiting = known.iter().filter(|(_, progress)| progress.is_waiting);
    let first = waiting.clone().map(|(_, progress)| progress.next).min()?;
    let waiting: Vec<_> = waiting
        .filter(|(_, progress)| progress.next == first)
        .map(|(rank, _)| *rank)
        .collect();
    let behind = known
        .iter()
        .filter(|(_, progress)| !progress.is_waiting && progress.next <= first);
    let behind: Vec<_> = behind.map(|(rank, _)| *rank).collect();
    let wait = if waiting.len() == 1 { "waits" } else { "wait" };
    let head = format!("{} {wait} in #{first}", list(&waiting));
    match (behind.as_slice(), silent.as_slice()) {
        ([], []) => None,
        ([_], []) => Some(format!(
            "{head} for {}, which has not started it",
            list(&behind)
        )),
        (_, []) => Some(format!(
            "{head} for {}, which have not started it",
            list(&behind)
        )),
        (_, [_]) => Some(format!("{head}; {} does not answer", list(&silent))),
        _ => Some(format!("{head}; {} do not answer", list(&silent))),
    }
}

fn number(operation: &OpRecord) -> String {
    match operation.group {
        0 => format!("#{}", operation.sequence),
        group => format!("#{} of group {group}", operation.sequence),
    }
}

fn named(operation: &OpRecord) -> String {
    format!("{} at {}", operation.call, operation.site)
}

/// Formats the time between two times in microseconds; clocks of hosts may differ.
fn span(later: u64, earlier: u64) -> String {
    match later.saturating_sub(earlier) {
        micros @ 0..1000 => format!("{micros} µs"),
        micros @ 1000..1_000_000 => format!("{:.1} ms", micros as f64 / 1e3),
        micros @ 1_000_000..60_000_000 => format!("{:.1} s", micros as f64 / 1e6),
        micros => duration(micros / 1_000_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records of operations of groups: their numbers, and whether they have ended.
    fn operations(all: &[(u16, u64, bool)]) -> Vec<OpRecord> {
        let record = |&(group, sequence, has_ended): &(u16, u64, bool)| {
            let ended = has_ended.then_some(7);
            let json = serde_json::json!({
                "kind": 6, "call": "barrier", "site": "train.rs:1", "bytes": 0, "group": group,
                "sequence": sequence, "started": 5, "ended": ended, "failed": false,
            });
            serde_json::from_value(json).unwrap()
        };
        all.iter().map(record).collect()
    }

    fn progress(all: &[(u16, u64, bool)]) -> Option<(u64, bool)> {
        let progress = Progress::of(&operations(all))?;
        Some((progress.next, progress.is_waiting))
    }

    #[test]
    fn the_oldest_operation_under_way_counts() {
        let flight = [(0, 41, true), (0, 42, false), (0, 43, false), (1, 9, false)];
        assert_eq!(progress(&flight), Some((42, true)));
        assert_eq!(progress(&[(0, 41, true), (2, 3, true)]), Some((42, false)));
        assert_eq!(progress(&[(2, 3, true)]), None);
    }

    #[test]
    fn a_rank_says_what_it_is_in() {
        let flight = operations(&[(0, 41, true), (0, 42, false), (0, 43, false)]);
        let text = known_state(&flight, 2_000_005);
        assert_eq!(text, "in #42 barrier at train.rs:1 for 2.0 s, and 1 more");
        let idle = known_state(&operations(&[(3, 8, true)]), 1507);
        assert_eq!(
            idle,
            "not in an operation for 1.5 ms; the last was #8 of group 3 barrier at train.rs:1"
        );
    }
}
