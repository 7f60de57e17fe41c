//! The folder of a run's log files, so that no run writes over the logs of another.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
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
