//! A job as an engine reports it, and the record of it on this machine: one folder per job, so that a name outlives an
//! engine that forgets.

use std::fmt;
use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use accelerator_host::cli::{Error, Result};
use accelerator_host::fs::{Durability, Replace};
use accelerator_host::lock::{FileLock, LockMode};
use rustix::io::Errno;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::spec::{EngineKind, JobName, JobSpec};

/// The status of a job, or of one of its instances.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum JobStatus {
    /// Waits for its nodes.
    Pending,
    Running,
    /// Was interrupted, and starts again.
    Restarting,
    /// Every rank succeeded.
    Succeeded,
    /// A rank failed, or the engine ended the job.
    Failed,
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

/// The resources of a node, and the amounts of them that are allocated.
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

/// Returns the number of times that the launcher had restarted its ranks when it wrote that report.
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

/// A job as this machine knows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct JobRecord {
    pub(crate) spec: JobSpec,
    /// The engine's name of the job: Slurm's number, Ray's submission id, `NAMESPACE/NAME` of Kubernetes.
    pub(crate) id: String,
    /// Seconds since 1970.
    pub(crate) submitted: u64,
    /// The engine's last answer about the job.
    pub(crate) last: Option<JobDetails>,
    /// True if the engine has nothing of the job any more.
    pub(crate) removed: bool,
}

impl JobRecord {
    /// Returns `true` if the submission ended before the engine answered. The local engine knows the job by its folder.
    pub(crate) fn is_half_submitted(&self) -> bool {
        self.id.is_empty() && self.spec.engine != EngineKind::Local
    }

    /// Returns the end of the job, if it is known. It is final, so no engine needs to be queried; an engine that
    /// forgets may even have given the id to another job.
    pub(crate) fn ended(&self) -> Option<&JobDetails> {
        self.last.as_ref().filter(|last| last.status.is_final())
    }

    /// Returns `true` if the job has ended, and `stop` has nothing to remove from the engine.
    pub(crate) fn is_over(&self) -> bool {
        let has_nothing = self.removed || !self.spec.engine.leaves_remains();
        !self.is_half_submitted() && self.ended().is_some() && has_nothing
    }

    /// Returns `true` if `other` is a record of the same job, and not of another one that got its name later.
    fn is_of(&self, other: &Self) -> bool {
        self.spec.nonce == other.spec.nonce
    }
}

/// The folder of records: `DIR/NAME/job.json`. It may hold secrets of the environment, so only its owner can read it.
#[derive(Clone, Debug)]
pub(crate) struct Records {
    folder: PathBuf,
}

const FILE: &str = "job.json";
/// The lock of a command that changes or removes a record. It is next to the folders of jobs, since on NFS an open file
/// would hinder the removal of its folder; no job can have its name.
const LOCK: &str = "_lock";
/// The number of attempts to remove a folder that others write into, and the pause between them.
const REMOVAL_TRIES: u32 = 10;
const PAUSE: Duration = Duration::from_millis(50);

impl Records {
    /// Opens the records in `folder`, else in the user's folder for such: `$XDG_STATE_HOME/accel-jobs`, or
    /// `~/.local/state/accel-jobs`.
    ///
    /// # Errors
    /// When neither is known.
    pub(crate) fn open(folder: Option<PathBuf>) -> Result<Self> {
        let variable = |name| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let state = || {
            let state = variable("XDG_STATE_HOME")
                .or_else(|| Some(variable("HOME")?.join(".local/state")))?;
            Some(state.join("accel-jobs"))
        };
        match folder.or_else(state) {
            Some(folder) => Ok(Self {
                folder: crate::spec::absolute(&folder)?,
            }),
            None => Err(Error::usage(
                "there is no folder for the records of jobs, since HOME is not set; give one by --jobs-dir",
            )),
        }
    }

    /// Returns the folder of one job, in which its engine may also keep files.
    pub(crate) fn job_folder(&self, name: &JobName) -> PathBuf {
        self.folder.join(name.as_str())
    }

    /// Makes the folder of a new job with its first record.
    ///
    /// # Errors
    /// When there is a job with that name already, or the folder or the record cannot be written.
    pub(crate) fn create(&self, record: &JobRecord) -> Result<PathBuf> {
        let name = &record.spec.name;
        let folder = self.job_folder(name);
        let builder = |recursive| {
            let mut builder = DirBuilder::new();
            builder.mode(0o700).recursive(recursive);
            builder
        };
        builder(true)
            .create(&self.folder)
            .map_err(|error| cannot("made", &self.folder, error))?;
        let _lock = self.lock()?;
        match builder(false).create(&folder) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                return Err(Error::refused(format!(
                    "there is a job {name} already; `accel-launch jobs get {name}` shows it, and `accel-launch jobs stop {name} --forget` \
                     frees its name"
                )));
            }
            Err(error) => return Err(cannot("made", &folder, error)),
        }
        self.write(record).inspect_err(|_| {
            // The error of the record is the one to return.
            let _ = self.remove_folder(name);
        })?;
        Ok(folder)
    }

    /// Changes the current record of `job`, and returns the result. Several commands may do so at a time: each change
    /// sees the one before, and the first recorded end of a job is final.
    ///
    /// # Errors
    /// When there is no record of exactly this job any more ([`Error::is_not_found`]), or it cannot be read or written.
    pub(crate) fn update(
        &self,
        job: &JobRecord,
        change: impl FnOnce(&mut JobRecord),
    ) -> Result<JobRecord> {
        let _lock = self.lock()?;
        let before = self.same(job)?;
        let mut after = before.clone();
        change(&mut after);
        if before.ended().is_some() {
            after.last.clone_from(&before.last);
        }
        if after != before {
            self.write(&after)?;
        }
        Ok(after)
    }

    /// Returns the current record of `job`.
    fn same(&self, job: &JobRecord) -> Result<JobRecord> {
        let name = &job.spec.name;
        let found = self.read(name)?;
        match found.is_of(job) {
            true => Ok(found),
            false => Err(Error::not_found(format!(
                "job {name} was forgotten meanwhile, and another one has its name"
            ))),
        }
    }

    /// Waits for the lock; `None` on a file system without locks.
    fn lock(&self) -> Result<Option<FileLock>> {
        let path = self.folder.join(LOCK);
        FileLock::create(&path, LockMode::Exclusive, Duration::MAX).or_else(|error| {
            match Errno::from_io_error(&error) {
                // Without locks, concurrent commands may overwrite one another's changes.
                Some(Errno::NOSYS | Errno::NOTSUP | Errno::NOLCK) => Ok(None),
                _ => Err(cannot("locked", &path, error)),
            }
        })
    }

    fn write(&self, record: &JobRecord) -> Result<()> {
        let folder = self.job_folder(&record.spec.name);
        replace_json(&folder.join(FILE), record).map_err(|error| cannot("written", &folder, error))
    }

    /// Reads the record of the job with this name.
    ///
    /// # Errors
    /// When there is none ([`Error::is_not_found`]), or it cannot be read.
    pub(crate) fn read(&self, name: &JobName) -> Result<JobRecord> {
        Self::record_in(&self.job_folder(name))
    }

    /// Reads the record in the folder of a job.
    ///
    /// # Errors
    /// When there is none ([`Error::is_not_found`]), or it cannot be read.
    pub(crate) fn record_in(folder: &Path) -> Result<JobRecord> {
        let path = folder.join(FILE);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(Error::not_found(format!(
                    "there is no job {} in {}; `accel-launch jobs list` shows those that are there",
                    folder.file_name().unwrap_or_default().display(),
                    folder.parent().unwrap_or(folder).display()
                )));
            }
            Err(error) => return Err(cannot("read", &path, error)),
        };
        serde_json::from_slice(&text).map_err(|error| {
            Error::system(format!(
                "{} is no record of a job that this version reads",
                path.display()
            ))
            .with_source(error)
        })
    }

    /// Reads all records, the newest first, and returns the errors of those that it cannot read.
    ///
    /// # Errors
    /// When the folder cannot be read. One that is not there has no records.
    pub(crate) fn all(&self) -> Result<(Vec<JobRecord>, Vec<Error>)> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok((Vec::new(), Vec::new()));
            }
            Err(error) => return Err(cannot("read", &self.folder, error)),
        };
        let (mut records, mut unread) = (Vec::new(), Vec::new());
        for entry in entries {
            let entry = entry.map_err(|error| cannot("read", &self.folder, error))?;
            let Some(name) = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
            else {
                continue;
            };
            match self.read(&name) {
                Ok(record) => records.push(record),
                // A submission that has not ended.
                Err(error) if error.is_not_found() => {}
                Err(error) => unread.push(error),
            }
        }
        records.sort_by(|a: &JobRecord, b: &JobRecord| {
            b.submitted
                .cmp(&a.submitted)
                .then_with(|| a.spec.name.cmp(&b.spec.name))
        });
        Ok((records, unread))
    }

    /// Removes the folder of `job` with its contents, unless another job has its name by now.
    pub(crate) fn remove(&self, job: &JobRecord) -> Result<()> {
        let _lock = self.lock()?;
        match self.same(job) {
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) => Err(error),
            Ok(_) => self.remove_folder(&job.spec.name),
        }
    }

    /// Removes the folder of a job that has no record, or none that this version can read.
    pub(crate) fn remove_unread(&self, name: &JobName) -> Result<()> {
        let _lock = self.lock()?;
        match self.read(name) {
            // It was made meanwhile.
            Ok(_) => Err(Error::refused(format!(
                "job {name} has been submitted just now; try again"
            ))),
            Err(_) => self.remove_folder(name),
        }
    }

    fn remove_folder(&self, name: &JobName) -> Result<()> {
        let folder = self.job_folder(name);
        let mut tries = 1;
        loop {
            match fs::remove_dir_all(&folder) {
                // Another process has written into it meanwhile.
                Err(error)
                    if error.kind() == ErrorKind::DirectoryNotEmpty && tries < REMOVAL_TRIES =>
                {
                    tries += 1;
                    thread::sleep(PAUSE);
                }
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
                removed => return removed.map_err(|error| cannot("removed", &folder, error)),
            }
        }
    }
}

fn cannot(done: &str, path: &Path, error: io::Error) -> Error {
    Error::system(format!("{} cannot be {done}", path.display())).with_source(error)
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
