//! A job as an engine reports it, and the record of it on this machine.

mod record;

use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use accelerator_host::fs::{Durability, Replace};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub(crate) use record::{JobRecord, Records};

/// The status of a job, or of one of its instances.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum JobStatus {
    /// Waits for its nodes.
    Pending,
    /// Runs.
    Running,
    /// Was interrupted, and starts again.
    Restarting,
    /// Every rank succeeded.
    Succeeded,
    /// A rank failed, or the engine ended the job.
    Failed,
    /// A user stopped it.
    Stopped,
    /// The engine does not report it.
    #[default]
    Unknown,
}

impl JobStatus {
    /// Returns `true` if nothing of it runs any more, or will.
    pub(crate) fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Stopped)
    }

    /// Returns `true` if nodes are allocated to it.
    pub(crate) fn is_active(self) -> bool {
        matches!(self, Self::Running | Self::Restarting)
    }
}

impl fmt::Display for JobStatus {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Pending => "PENDING",
            Self::Running => "RUNNING",
            Self::Restarting => "RESTARTING",
            Self::Succeeded => "SUCCEEDED",
            Self::Failed => "FAILED",
            Self::Stopped => "STOPPED",
            Self::Unknown => "UNKNOWN",
        })
    }
}

/// A job as its engine reports it. Times are seconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct JobDetails {
    pub(crate) name: String,
    /// The kind of job at the engine: `LOCAL`, `SLURM`, `JOB`, `PYTORCHJOB`, `TRAINJOB`, `RAY`.
    pub(crate) trainer: String,
    pub(crate) status: JobStatus,
    /// The reason why it waits or ended, in the engine's words.
    pub(crate) reason: Option<String>,
    pub(crate) namespace: Option<String>,
    pub(crate) priority: Option<String>,
    pub(crate) submitted: Option<u64>,
    pub(crate) started: Option<u64>,
    pub(crate) ended: Option<u64>,
    /// The number of times that it was started again.
    pub(crate) restarts: u32,
    pub(crate) gpus_requested: usize,
    pub(crate) gpus_allocated: usize,
    /// The instances, node by node.
    pub(crate) instances: Vec<Instance>,
    /// The address of its TensorBoard, or the command that makes it reachable.
    pub(crate) tensorboard: Option<String>,
    pub(crate) failure: Option<Failure>,
}

impl JobDetails {
    /// Marks the job as stopped by its user.
    pub(crate) fn stop(&mut self, now: u64) {
        self.status = JobStatus::Stopped;
        self.reason = Some("stopped by its user".to_owned());
        self.ended = Some(now);
        self.gpus_allocated = 0;
        self.tensorboard = None;
        for instance in &mut self.instances {
            if !instance.status.is_final() {
                instance.status = JobStatus::Stopped;
                instance.ended = Some(now);
            }
        }
    }
}

/// The part of a job on one node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Instance {
    /// `NAME-master-0` for node 0, `NAME-worker-K` for node K + 1, or the engine's name.
    pub(crate) name: String,
    pub(crate) role: Role,
    pub(crate) status: JobStatus,
    /// The node's name or address, once it has one.
    pub(crate) node: Option<String>,
    pub(crate) started: Option<u64>,
    pub(crate) ended: Option<u64>,
    pub(crate) restarts: u32,
    pub(crate) exit_code: Option<i32>,
    /// The reason in the engine's words, such as `OOMKilled`, `Evicted` or `Unschedulable`.
    pub(crate) reason: Option<String>,
}

impl Instance {
    /// Makes the instance of node `node` of a job, of which only the status is known.
    pub(crate) fn new(job: &str, node: usize, status: JobStatus) -> Self {
        Self {
            name: Role::instance_name(job, node),
            role: Role::of_node(node),
            status,
            node: None,
            started: None,
            ended: None,
            restarts: 0,
            exit_code: None,
            reason: None,
        }
    }
}

/// The role of an instance: node 0, or another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    /// Node 0, on which rank 0 runs.
    Master,
    /// Another node.
    Worker,
}

impl Role {
    /// Returns the role of node `node`.
    pub(crate) fn of_node(node: usize) -> Self {
        match node {
            0 => Self::Master,
            _ => Self::Worker,
        }
    }

    /// Returns the name of node `node` of a job: `NAME-master-0`, `NAME-worker-0`, `NAME-worker-1`.
    pub(crate) fn instance_name(job: &str, node: usize) -> String {
        match node.checked_sub(1) {
            None => format!("{job}-master-0"),
            Some(worker) => format!("{job}-worker-{worker}"),
        }
    }
}

/// The reason why a job failed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Failure {
    /// The instance that failed first, if that is known.
    pub(crate) instance: Option<String>,
    pub(crate) exit_code: Option<i32>,
    /// One sentence: `rank 2 was killed for want of memory (OOMKilled)`.
    pub(crate) reason: String,
    /// The last lines of the instance's output.
    pub(crate) last_lines: Vec<String>,
}

/// The resources of a node, and how much of them is allocated.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NodeUsage {
    pub(crate) name: String,
    pub(crate) address: String,
    /// `master` for a node of the engine's control plane, else `<none>`.
    pub(crate) role: String,
    /// `ready`, or the engine's word for another state.
    pub(crate) status: String,
    pub(crate) gpus: usize,
    pub(crate) gpus_allocated: usize,
    pub(crate) cpus: f64,
    pub(crate) cpus_allocated: f64,
}

/// The number of lines of output that a failure shows.
pub(crate) const LAST_LINES: usize = 20;

/// Returns the path of the output of a node's agent, in the folder of its job.
pub(crate) fn node_log(folder: &Path, node: usize) -> PathBuf {
    folder.join(format!("node-{node}.log"))
}

/// Reads the report of the job's last failure from the log folder of its launcher, if there is one.
pub(crate) fn read_failure(log_dir: &Path, job: &str) -> Option<Failure> {
    let first = Report::read(log_dir)?.first?;
    Some(Failure {
        instance: Some(Role::instance_name(job, first.node)),
        exit_code: first.exit_code,
        reason: format!("rank {}: {}", first.rank, first.cause),
        last_lines: first.last_words,
    })
}

/// Returns how often the launcher had restarted its ranks when it wrote that report.
pub(crate) fn launcher_restarts(log_dir: &Path) -> u32 {
    Report::read(log_dir).map_or(0, |report| report.restarts)
}

/// Reads a JSON file in the folder of a job; `None` if it does not exist or cannot be read.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Replaces a JSON file in the folder of a job. Only its owner can read it.
pub(crate) fn replace_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    Replace::new(path, Durability::Flushed)
        .private()
        .write(|file| {
            serde_json::to_writer_pretty(&mut *file, value)?;
            file.write_all(b"\n")
        })
}

/// The fields of `failure.json` that are shown.
#[derive(Deserialize)]
struct Report {
    #[serde(default)]
    restarts: u32,
    first: Option<FirstFailure>,
}

impl Report {
    fn read(log_dir: &Path) -> Option<Self> {
        read_json(&log_dir.join("latest/failure.json"))
    }
}

#[derive(Deserialize)]
struct FirstFailure {
    rank: usize,
    node: usize,
    cause: String,
    exit_code: Option<i32>,
    last_words: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_are_named_as_arena_names_them() {
        let names: Vec<_> = (0..3).map(|node| Role::instance_name("a", node)).collect();
        assert_eq!(names, ["a-master-0", "a-worker-0", "a-worker-1"]);
    }
}
