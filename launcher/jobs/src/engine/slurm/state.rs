//! The state of a job, from Slurm and from the files that the batch script leaves in the folder of the job, since Slurm
//! forgets a job some minutes after its end.

use std::fs;
use std::path::{Path, PathBuf};

use accelerator_host::cli::{Error, Result};
use serde::Deserialize;

use super::command::slurm;
use crate::job::{JobRecord, JobStatus, NodeUsage, read_json};

/// The status of a node that works.
pub(super) const READY: &str = "ready";

/// The states and flags of a node that works.
const WORKS: [&str; 7] = [
    "idle",
    "mixed",
    "allocated",
    "completing",
    "planned",
    "reserved",
    "cloud",
];

/// A job as Slurm knows it. Times are seconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SlurmJob {
    /// The state in Slurm's words: `PENDING`, `NODE_FAIL`.
    pub(super) state: String,
    /// The reason why it waits or has ended, in Slurm's words.
    pub(super) reason: Option<String>,
    pub(super) restarts: u32,
    /// The code and the signal of the batch script.
    pub(super) exit: (i32, i32),
    pub(super) started: Option<u64>,
    pub(super) ended: Option<u64>,
    pub(super) qos: Option<String>,
    /// The file of its output.
    pub(super) output: Option<String>,
}

impl SlurmJob {
    /// Queries Slurm for the job with that folder, and its accounting if Slurm has forgotten it. A controller that lost
    /// its state reuses numbers.
    ///
    /// # Errors
    /// When Slurm does not answer; [`Error::is_not_found`] when it has forgotten the job, or has reused its number.
    pub(super) fn of(job: &JobRecord, folder: &Path) -> Result<Self> {
        let id = &job.id;
        let found = match slurm("scontrol", &["show", "job", id]) {
            Ok(text) => Self::of_scontrol(&text),
            Err(error) if error.is_not_found() => {
                let fields = "--format=State,ExitCode,Start,End,QOS";
                let name = format!("--name={}", job.spec.name);
                let arguments = ["-X", "-n", "--parsable2", fields, &name, "-j", id];
                // Few sites go without accounting, and sacct fails at those.
                let accounted = slurm("sacct", &arguments).ok();
                return accounted.as_deref().and_then(Self::of_sacct).ok_or(error);
            }
            Err(error) => return Err(error),
        };
        // `scontrol` replaces the text after a `%`, even after another: such a folder cannot be told from others.
        let can_tell = !folder.to_string_lossy().contains('%');
        match &found.output {
            Some(output) if can_tell && !is_output_of(output, folder) => {
                Err(Error::not_found(format!(
                    "Slurm has given the number {id} to another job, and has forgotten this one"
                )))
            }
            _ => Ok(found),
        }
    }

    /// Reads the output of `scontrol show job`.
    fn of_scontrol(text: &str) -> Self {
        let field = |name| field(text, name);
        Self {
            state: field("JobState").unwrap_or_default().to_owned(),
            reason: field("Reason").map(|reason| reason.replace('_', " ")),
            restarts: number(field("Restarts")).unwrap_or(0),
            exit: field("ExitCode").map_or((0, 0), exit),
            started: number(field("StartTime")),
            ended: number(field("EndTime")),
            qos: field("QOS").map(str::to_owned),
            // It may have spaces, and has a line of its own.
            output: text
                .lines()
                .find_map(|line| line.trim_start().strip_prefix("StdOut="))
                .map(str::to_owned),
        }
    }

    /// Reads the last line that sacct prints.
    fn of_sacct(text: &str) -> Option<Self> {
        let fields: Vec<&str> = text.lines().last()?.split('|').collect();
        let [state, code, started, ended, qos] = fields[..] else {
            return None;
        };
        Some(Self {
            // `CANCELLED by 1000`.
            state: state.split(' ').next()?.to_owned(),
            reason: None,
            restarts: 0,
            exit: exit(code),
            started: number(Some(started)),
            ended: number(Some(ended)),
            qos: Some(qos).filter(|qos| !qos.is_empty()).map(str::to_owned),
            output: None,
        })
    }

    /// Returns the status in the words of all engines.
    pub(super) fn status(&self) -> JobStatus {
        match self.state.as_str() {
            "COMPLETED" => JobStatus::Succeeded,
            "CANCELLED" => JobStatus::Stopped,
            "FAILED" | "TIMEOUT" | "NODE_FAIL" | "OUT_OF_MEMORY" | "PREEMPTED" | "DEADLINE"
            | "BOOT_FAIL" | "LAUNCH_FAILED" | "RECONFIG_FAIL" => JobStatus::Failed,
            "REQUEUED" | "REQUEUE_FED" | "REQUEUE_HOLD" | "SPECIAL_EXIT" | "RESV_DEL_HOLD" => {
                JobStatus::Restarting
            }
            "PENDING" if self.restarts > 0 => JobStatus::Restarting,
            "PENDING" | "CONFIGURING" => JobStatus::Pending,
            "RUNNING" | "COMPLETING" | "SUSPENDED" | "STOPPED" | "RESIZING" | "SIGNALING"
            | "STAGE_OUT" => JobStatus::Running,
            _ => JobStatus::Unknown,
        }
    }

    /// Returns why it waits or has ended: Slurm's word, and its meaning if that is not plain.
    pub(super) fn why(&self) -> Option<String> {
        let meaning = match self.state.as_str() {
            "TIMEOUT" => "its time limit is over; give a longer --time",
            "OUT_OF_MEMORY" => "a process was killed for want of memory; give more --memory",
            "NODE_FAIL" => "a node was lost, and no restart was left; give --max-restarts",
            "PREEMPTED" => "a job of higher priority has taken its nodes",
            "DEADLINE" => "its deadline is over",
            "BOOT_FAIL" => "a node did not boot",
            // Slurm's signal for an output that cannot be opened.
            "FAILED" if self.exit == (0, 53) => {
                "Slurm could not start it; the folder of the jobs' records has to be seen by the nodes: give one by \
                 --jobs-dir"
            }
            "COMPLETED" | "CANCELLED" | "RUNNING" => return None,
            "FAILED" | "PENDING" => return self.reason.clone(),
            state => return Some(state.to_owned()),
        };
        let word = match (self.state.as_str(), &self.reason) {
            ("FAILED", Some(reason)) => reason,
            (_, _) => &self.state,
        };
        Some(format!("{word}: {meaning}"))
    }
}

/// Lists all nodes of Slurm.
///
/// # Errors
/// When Slurm does not answer.
pub(super) fn nodes() -> Result<Vec<NodeUsage>> {
    Ok(of_nodes(&slurm(
        "scontrol",
        &["show", "--detail", "--oneliner", "node"],
    )?))
}

fn of_nodes(text: &str) -> Vec<NodeUsage> {
    let node = |line: &str| {
        let name = field(line, "NodeName")?.to_owned();
        let state = field(line, "State").unwrap_or("UNKNOWN").to_lowercase();
        let works = state.split('+').all(|word| WORKS.contains(&word));
        let cpus = |name| number(field(line, name)).unwrap_or(0.0);
        Some(NodeUsage {
            address: field(line, "NodeAddr").unwrap_or(&name).to_owned(),
            role: "<none>".to_owned(),
            status: if works { READY.to_owned() } else { state },
            gpus: gpus(field(line, "Gres")),
            gpus_allocated: gpus(field(line, "GresUsed")),
            cpus: cpus("CPUTot"),
            cpus_allocated: cpus("CPUAlloc"),
            name,
        })
    };
    text.lines().filter_map(node).collect()
}

/// Returns `true` if the job that writes this file is the one with this folder.
pub(super) fn is_output_of(output: &str, folder: &Path) -> bool {
    // `squeue` shows the pattern that it was given.
    Path::new(&output.replace("%%", "%")).starts_with(folder)
}

/// Returns the value of the first field with this name in the output of scontrol. Users' text comes after these fields.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let value = text
        .split_whitespace()
        .find_map(|word| word.strip_prefix(name)?.strip_prefix('='))?;
    (!["", "(null)", "None", "N/A", "Unknown"].contains(&value)).then_some(value)
}

fn number<T: std::str::FromStr>(text: Option<&str>) -> Option<T> {
    text?.parse().ok()
}

/// Parses `CODE:SIGNAL`.
fn exit(text: &str) -> (i32, i32) {
    let (code, signal) = text.split_once(':').unwrap_or((text, "0"));
    (code.parse().unwrap_or(0), signal.parse().unwrap_or(0))
}

/// Counts GPUs: 6 for `gpu:a100:4(S:0-1),gpu:v100:2(IDX:0-1),license:1`.
fn gpus(gres: Option<&str>) -> usize {
    let mut depth = 0_usize;
    let outside = |c: &char| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => return depth == 0,
        }
        false
    };
    let plain: String = gres.unwrap_or_default().chars().filter(outside).collect();
    let kinds = plain.split(',').filter(|kind| kind.starts_with("gpu:"));
    kinds
        .filter_map(|kind| kind.rsplit(':').next()?.parse::<usize>().ok())
        .sum()
}

/// The file that is written at each start of the job.
pub(super) const RUN: &str = "run.json";
/// The file that is written at its end.
pub(super) const END: &str = "end.json";
/// The beginning of the name of a file with the exit code of an agent; the node's number follows.
pub(super) const AGENT_EXIT: &str = "exit-";
/// The beginning of the line in the batch script's log for each start; the number of the restart follows.
pub(super) const START_MARK: &str = "restart ";

/// The start of a job.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Run {
    pub(super) restarts: u32,
    /// Seconds since 1970.
    pub(super) started: u64,
    pub(super) nodes: Vec<String>,
}

/// The end of a job that Slurm did not kill.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct RunEnd {
    pub(super) code: i32,
    /// Seconds since 1970.
    pub(super) ended: u64,
    /// True if Slurm sent SIGTERM: the job was cancelled or preempted, or reached its time limit.
    pub(super) signalled: bool,
    /// True if the job reached its time limit.
    pub(super) timed_out: bool,
}

impl Run {
    /// Reads the job's last start; `None` before its first.
    pub(super) fn read(folder: &Path) -> Option<Self> {
        read_json(&folder.join(RUN))
    }
}

impl RunEnd {
    /// Reads the end; `None` for a job that runs, and for one that Slurm killed.
    pub(super) fn read(folder: &Path) -> Option<Self> {
        read_json(&folder.join(END))
    }
}

/// Returns the path of the output of srun and the batch script.
pub(super) fn batch_log(folder: &Path) -> PathBuf {
    folder.join("slurm.log")
}

/// Reads the exit code of a node's agent, once it has ended.
pub(super) fn agent_exit(folder: &Path, node: usize) -> Option<i32> {
    let text = fs::read_to_string(folder.join(format!("{AGENT_EXIT}{node}"))).ok()?;
    text.trim().parse().ok()
}

/// Returns the node of the last run whose process ran out of memory, as srun reports it:
/// `srun: error: n2: task 1: Out Of Memory`.
pub(super) fn out_of_memory(folder: &Path) -> Option<usize> {
    let text = fs::read_to_string(batch_log(folder)).ok()?;
    let line = text
        .lines()
        .rev()
        .take_while(|line| !line.starts_with(START_MARK))
        .find(|line| line.ends_with("Out Of Memory"))?;
    let (_, tasks) = line.split_once(": task")?;
    let digits = |c: char| !c.is_ascii_digit();
    tasks
        .trim_start_matches(digits)
        .split(digits)
        .next()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Recorded from Slurm 22.05.
    const JOBS: &str = include_str!("fixtures/jobs.txt");
    const NODES: &str = include_str!("fixtures/nodes.txt");

    #[test]
    fn jobs_are_read() {
        let jobs: Vec<_> = JOBS
            .split("\n\n")
            .filter(|text| text.contains("JobId="))
            .map(SlurmJob::of_scontrol)
            .collect();
        let shown: Vec<_> = jobs
            .iter()
            .map(|job| (job.state.as_str(), job.status(), job.why()))
            .collect();
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(
            shown,
            [
                ("PENDING", JobStatus::Pending, some("Resources")),
                ("RUNNING", JobStatus::Running, None),
                ("PENDING", JobStatus::Restarting, some("BeginTime")),
                ("COMPLETED", JobStatus::Succeeded, None),
                ("CANCELLED", JobStatus::Stopped, None),
                (
                    "TIMEOUT",
                    JobStatus::Failed,
                    some("TIMEOUT: its time limit is over; give a longer --time")
                ),
                (
                    "NODE_FAIL",
                    JobStatus::Failed,
                    some(
                        "NODE_FAIL: a node was lost, and no restart was left; give --max-restarts"
                    )
                ),
                (
                    "FAILED",
                    JobStatus::Failed,
                    some(
                        "JobLaunchFailure: Slurm could not start it; the folder of the jobs' records has to be seen by \
                     the nodes: give one by --jobs-dir"
                    )
                ),
            ]
        );
        assert_eq!((jobs[0].started, jobs[0].restarts), (None, 0));
        assert_eq!(jobs[2].restarts, 1);
        let failed = &jobs[6];
        assert_eq!(failed.exit, (75, 0));
        assert!(failed.started < failed.ended);
    }

    #[test]
    fn every_reason_is_in_words() {
        let text = "JobState=PENDING Reason=ReqNodeNotAvail,_UnavailableNodes:n4 Dependency=(null)";
        assert_eq!(
            SlurmJob::of_scontrol(text).why().as_deref(),
            Some("ReqNodeNotAvail, UnavailableNodes:n4")
        );
        for state in ["OUT_OF_MEMORY", "PREEMPTED", "DEADLINE", "BOOT_FAIL"] {
            let job = SlurmJob::of_scontrol(&format!("JobState={state} Reason=None"));
            assert_eq!(job.status(), JobStatus::Failed, "{state}");
            assert!(job.why().unwrap().starts_with(state), "{state}");
        }
    }

    #[test]
    fn accounting_tells_what_is_forgotten() {
        let job = SlurmJob::of_sacct("TIMEOUT|0:15|1795648729|1795648817|normal\n").unwrap();
        assert_eq!(
            (job.state.as_str(), job.exit, job.started, job.ended),
            ("TIMEOUT", (0, 15), Some(1795648729), Some(1795648817))
        );
        let job = SlurmJob::of_sacct("CANCELLED by 1000|0:0|Unknown|Unknown|\n").unwrap();
        assert_eq!((job.status(), job.started), (JobStatus::Stopped, None));
        assert_eq!(SlurmJob::of_sacct(""), None);
    }

    #[test]
    fn nodes_are_read() {
        let nodes = of_nodes(NODES);
        let shown: Vec<_> = nodes
            .iter()
            .map(|node| {
                (
                    &*node.name,
                    &*node.address,
                    &*node.status,
                    node.gpus,
                    node.gpus_allocated,
                )
            })
            .collect();
        assert_eq!(
            shown,
            [
                ("n1", "10.77.0.1", READY, 2, 1),
                ("n2", "10.77.0.2", READY, 0, 0),
                ("n3", "10.77.0.1", "unknown+drain+invalid_reg", 2, 0),
                ("n4", "10.77.0.4", "down+not_responding", 0, 0),
            ]
        );
    }

    #[test]
    fn gpus_of_all_kinds_are_counted() {
        for (text, count) in [
            ("gpu:4", 4),
            ("gpu:a100:4(S:0-1),gpu:v100:2(S:0,1),license:1", 6),
            ("gpu:a100:1(IDX:0,2-3)", 1),
            ("gpu", 0),
            ("shard:gpu:3", 0),
        ] {
            assert_eq!(gpus(Some(text)), count, "{text}");
        }
        assert_eq!(gpus(None), 0);
    }

    #[test]
    fn the_node_without_memory_is_found() {
        let folder = tempfile::tempdir().unwrap();
        for (line, node) in [
            ("srun: error: n2: task 1: Out Of Memory", Some(1)),
            ("srun: error: n[3-4]: tasks 2-3: Out Of Memory", Some(2)),
            ("srun: error: n2: task 1: Exited with exit code 3", None),
            (
                "srun: error: n2: task 1: Out Of Memory\nrestart 1 of job 7, on n1 n2",
                None,
            ),
        ] {
            fs::write(batch_log(folder.path()), format!("first\n{line}\nlast\n")).unwrap();
            assert_eq!(out_of_memory(folder.path()), node, "{line}");
        }
    }
}
