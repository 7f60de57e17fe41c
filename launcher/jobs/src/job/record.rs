//! The records of jobs on this machine: one folder a job, so that a name outlives an engine that forgets.

use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::JobDetails;
use crate::error::{Error, Result};
use crate::spec::{EngineKind, JobName, JobSpec};

/// What is known of a job here.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct JobRecord {
    pub(crate) spec: JobSpec,
    /// What the engine calls the job: Slurm's number, Ray's submission id, `NAMESPACE/NAME` of Kubernetes.
    pub(crate) id: String,
    /// Seconds since 1970.
    pub(crate) submitted: u64,
    /// What the engine said when it was asked last.
    pub(crate) last: Option<JobDetails>,
}

impl JobRecord {
    /// Whether the submission ended before the engine had answered. The local engine knows the job by its folder.
    pub(crate) fn is_half_submitted(&self) -> bool {
        self.id.is_empty() && self.spec.engine != EngineKind::Local
    }

    /// How the job has ended, where that is known. It does not change any more, so no engine needs to be asked; and one that
    /// forgets may have given the id to another job.
    pub(crate) fn ended(&self) -> Option<&JobDetails> {
        self.last.as_ref().filter(|last| last.status.is_final())
    }
}

/// The folder of records: `DIR/NAME/job.json`. It may hold secrets of the environment, so only its owner can read it.
#[derive(Clone, Debug)]
pub(crate) struct Records {
    folder: PathBuf,
}

const FILE: &str = "job.json";
/// How often the removal of a folder is tried that others write into, and how long between.
const REMOVAL_TRIES: u32 = 10;
const PAUSE: Duration = Duration::from_millis(50);

impl Records {
    /// The records in `folder`, else in the user's folder for such: `$XDG_STATE_HOME/accel-jobs`, or
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

    /// The folder of one job, where its engine may keep files as well.
    pub(crate) fn job_folder(&self, name: &JobName) -> PathBuf {
        self.folder.join(name.as_str())
    }

    /// A folder for what an engine keeps beside its jobs; it has no name that a job can have.
    #[cfg(feature = "ray")]
    pub(crate) fn engine_folder(&self, engine: &str) -> PathBuf {
        self.folder.join(format!("_{engine}"))
    }

    /// Makes the folder of a new job.
    ///
    /// # Errors
    /// When there is a job of that name already, or the folder cannot be made.
    pub(crate) fn create(&self, name: &JobName) -> Result<PathBuf> {
        let folder = self.job_folder(name);
        let mut builder = DirBuilder::new();
        builder.mode(0o700);
        let made = DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.folder);
        match made.and_then(|()| builder.create(&folder)) {
            Ok(()) => Ok(folder),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(Error::refused(format!(
                "there is a job {name} already; `accel-launch jobs get {name}` shows it, and `accel-launch jobs stop {name} --forget` \
                 frees its name"
            ))),
            Err(error) => Err(cannot("made", &folder, error)),
        }
    }

    /// Writes a record whole, in place of the one before.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn write(&self, record: &JobRecord) -> Result<()> {
        let folder = self.job_folder(&record.spec.name);
        let write = || -> io::Result<()> {
            let mut file = tempfile::NamedTempFile::new_in(&folder)?;
            file.as_file()
                .set_permissions(Permissions::from_mode(0o600))?;
            serde_json::to_writer_pretty(&mut file, record)?;
            file.write_all(b"\n")?;
            file.as_file().sync_all()?;
            file.persist(folder.join(FILE))
                .map_err(|error| error.error)?;
            Ok(())
        };
        write().map_err(|error| cannot("written", &folder, error))
    }

    /// The record of the job of this name.
    ///
    /// # Errors
    /// When there is none ([`Error::is_not_found`]), or it cannot be read.
    pub(crate) fn read(&self, name: &JobName) -> Result<JobRecord> {
        Self::record_in(&self.job_folder(name))
    }

    /// The record in the folder of a job.
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

    /// All records, the newest first, and the errors of those that cannot be read.
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

    /// Removes the folder of a job, and all in it.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub(crate) fn remove(&self, name: &JobName) -> Result<()> {
        let folder = self.job_folder(name);
        let mut tries = 1;
        loop {
            match fs::remove_dir_all(&folder) {
                // Somebody has written into it meanwhile.
                Err(error)
                    if error.kind() == ErrorKind::DirectoryNotEmpty && tries < REMOVAL_TRIES =>
                {
                    tries += 1;
                    thread::sleep(PAUSE);
                }
                // Another command has removed it.
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
                removed => return removed.map_err(|error| cannot("removed", &folder, error)),
            }
        }
    }
}

fn cannot(done: &str, path: &Path, error: io::Error) -> Error {
    Error::system(format!("{} cannot be {done}", path.display())).with_source(error)
}
