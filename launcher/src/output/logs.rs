//! The log files of a run, in a folder of its own, so that no run overwrites the logs of another.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::SystemTime;

use crate::error::{Error, Result};
use crate::text::utc;

/// Makes a folder in `logs` for one run with all its restarts, named by the time: their names are in the order
/// in which the runs began.
///
/// # Errors
/// When it cannot be made.
pub(crate) fn create_run_folder(logs: &Path) -> Result<PathBuf> {
    create_unique(logs).map_err(|error| {
        Error::usage(format!(
            "--log-dir {}: no folder for this run can be made; name a folder that can be written",
            logs.display()
        ))
        .with_source(error)
    })
}

/// Points the link `latest` at `run` in one step: readers find the run before or this one, never nothing.
///
/// # Errors
/// When something that is no link has its name, or the system has no links.
pub(crate) fn point_latest(run: &Path) -> io::Result<()> {
    let (Some(logs), Some(name)) = (run.parent(), run.file_name()) else {
        return Err(ErrorKind::InvalidInput.into());
    };
    let latest = logs.join(LATEST);
    if fs::symlink_metadata(&latest).is_ok_and(|found| !found.is_symlink()) {
        return Err(io::Error::new(ErrorKind::AlreadyExists, "it is no link"));
    }
    // The run's name is its own, so this one is free.
    let link = logs.join(format!(".{LATEST}-{}", name.to_string_lossy()));
    symlink(name, &link)?;
    fs::rename(&link, latest).inspect_err(|_| {
        let _ = fs::remove_file(&link);
    })
}

/// The log file of a rank.
#[derive(Debug)]
pub(crate) struct Log {
    pub(crate) path: PathBuf,
    pub(crate) file: Mutex<File>,
    /// Whether a write to it has failed.
    pub(crate) broken: AtomicBool,
}

/// Opens a log file in `dir`.
///
/// # Errors
/// When the folder or the file cannot be made.
pub(crate) fn open_log(dir: &Path, name: &str) -> Result<Log> {
    fs::create_dir_all(dir).map_err(|error| {
        Error::usage(format!(
            "--log-dir {}: the folder cannot be made; name one that can be written",
            dir.display()
        ))
        .with_source(error)
    })?;
    let path = dir.join(name);
    // Opening a pipe would wait for its other end.
    if fs::metadata(&path).is_ok_and(|found| !found.is_file()) {
        return Err(Error::usage(format!(
            "--log-dir: {} is there and no plain file; name another folder",
            path.display()
        )));
    }
    let file = File::create(&path).map_err(|error| {
        let message = format!(
            "--log-dir: {} cannot be written; name another folder",
            path.display()
        );
        Error::usage(message).with_source(error)
    })?;
    Ok(Log {
        path,
        file: Mutex::new(file),
        broken: AtomicBool::new(false),
    })
}

/// The link to the last run that began.
pub(crate) const LATEST: &str = "latest";

fn create_unique(logs: &Path) -> io::Result<PathBuf> {
    fs::create_dir_all(logs)?;
    // Tools that copy between hosts read a colon as the end of a host's name.
    let began = utc(SystemTime::now()).replace(':', "-");
    let mut run = logs.join(&began);
    let mut others = 1;
    loop {
        match fs::create_dir(&run) {
            Ok(()) => return Ok(run),
            // Another run began in the same second.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                others += 1;
                run = logs.join(format!("{began}-{others}"));
            }
            Err(error) => return Err(error),
        }
    }
}
