//! The records of jobs on this machine: one folder per job, so that a name outlives an engine that forgets.

use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use accelerator_host::lock::{FileLock, LockMode};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::{JobDetails, replace_json};
use crate::error::{Error, Result};
use crate::spec::{EngineKind, JobName, JobSpec};

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
    ///
    /// # Errors
    /// When it cannot be removed.
    pub(crate) fn remove(&self, job: &JobRecord) -> Result<()> {
        let _lock = self.lock()?;
        match self.same(job) {
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) => Err(error),
            Ok(_) => self.remove_folder(&job.spec.name),
        }
    }

    /// Removes the folder of a job that has no record, or none that this version can read.
    ///
    /// # Errors
    /// When it cannot be removed.
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
