//! `accel-jobs wait`.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;

use super::{JobsLocation, details};
use crate::error::{Error, Result, chain};
use crate::job::JobStatus;
use crate::output::warn;
use crate::spec::{JobName, time_limit};

#[derive(Args, Debug)]
pub(super) struct WaitArgs {
    /// The job.
    name: JobName,
    /// Give up after so long: `90m`, `2h`.
    #[arg(long, value_name = "TIME", value_parser = time_limit)]
    timeout: Option<Duration>,
}

/// How long an engine may not answer, where no --timeout says how long to wait.
const LONGEST_SILENCE: Duration = Duration::from_secs(300);

pub(super) fn run(arguments: &WaitArgs, location: &JobsLocation) -> Result<ExitCode> {
    let (records, mut record, engine) = location.job(&arguments.name)?;
    let deadline = arguments.timeout.map(|limit| Instant::now() + limit);
    let mut silent_since = None;
    loop {
        match details(&records, &mut record, engine.as_ref()) {
            Ok(details) if details.status == JobStatus::Succeeded => return Ok(ExitCode::SUCCESS),
            Ok(details) if details.status.is_final() => {
                return Err(Error::refused(format!(
                    "job {} has ended as {}; `accel-launch jobs get {0}` says why",
                    arguments.name, details.status
                )));
            }
            Ok(details) if details.status == JobStatus::Unknown => {
                let reason = details.reason.unwrap_or_default();
                return Err(Error::not_found(format!(
                    "the end of job {} is not known: {reason}",
                    arguments.name
                )));
            }
            Ok(_) => silent_since = None,
            // The engine may answer again.
            Err(error) if error.is_unreachable() => {
                let since = *silent_since.get_or_insert_with(|| {
                    warn(&format!("{}; it is asked again", chain(&error)));
                    Instant::now()
                });
                if deadline.is_none() && since.elapsed() > LONGEST_SILENCE {
                    return Err(error);
                }
            }
            Err(error) => return Err(error),
        }
        if deadline.is_some_and(|deadline| Instant::now() > deadline) {
            return Err(Error::unreachable(format!(
                "job {} has not ended in time",
                arguments.name
            )));
        }
        engine.pause(&record);
    }
}
