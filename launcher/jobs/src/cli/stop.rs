//! `accel-jobs stop`.

use std::process::ExitCode;

use clap::Args;

use super::{JobsLocation, details};
use crate::engine::local::may_run;
use crate::error::{Result, chain};
use crate::job::{JobDetails, JobStatus};
use crate::output::{now, print, warn};
use crate::spec::JobName;

#[derive(Args, Debug)]
pub(super) struct StopArgs {
    /// The jobs.
    #[arg(required = true)]
    names: Vec<JobName>,
    /// Remove their records as well, so that their names are free.
    #[arg(long)]
    forget: bool,
}

pub(super) fn run(arguments: &StopArgs, location: &JobsLocation) -> Result<ExitCode> {
    let mut done = Ok(ExitCode::SUCCESS);
    for name in &arguments.names {
        let stopped = match arguments.forget {
            true => forget(name, location),
            false => stop(name, location),
        };
        match stopped {
            Ok(what) => {
                print(&format!("job {name} {what}\n"))?;
            }
            // The others are stopped all the same; the last error is that of the command.
            Err(error) => {
                if let Err(before) = std::mem::replace(&mut done, Err(error)) {
                    warn(&chain(&before));
                }
            }
        }
    }
    done
}

/// Ends a job, and says so in its record.
fn stop(name: &JobName, location: &JobsLocation) -> Result<String> {
    let record = location.records()?.read(name)?;
    if let Some(ended) = record.ended().filter(|_| record.is_over()) {
        return Ok(had_ended(ended));
    }
    let (records, mut record, engine) = location.job(name)?;
    let before = details(&records, &mut record, engine.as_ref());
    engine.stop(&record, &records.job_folder(name))?;
    let stopped = records.update(&record, |record| {
        record.removed = true;
        if let Some(last) = &mut record.last {
            last.stop(now());
        }
    });
    match stopped {
        // Another command has forgotten it meanwhile.
        Err(error) if !error.is_not_found() => return Err(error),
        _ => {}
    }
    Ok(match before {
        Ok(before) if before.status.is_final() => had_ended(&before),
        Ok(before) if before.status == JobStatus::Unknown => {
            format!("is gone: {}", before.reason.unwrap_or_default())
        }
        Err(error) if error.is_not_found() => format!("is gone: {}", chain(&error)),
        _ => "stopped".to_owned(),
    })
}

fn had_ended(details: &JobDetails) -> String {
    format!(
        "had ended as {} before; nothing of it is left",
        details.status
    )
}

/// Ends a job, and removes its record. What was not submitted whole is ended where the engine keeps its nonce; elsewhere
/// another's job may have its name.
fn forget(name: &JobName, location: &JobsLocation) -> Result<String> {
    let records = location.records()?;
    let folder = records.job_folder(name);
    match records.read(name) {
        Ok(record) if record.is_half_submitted() && !record.spec.engine.keeps_nonce() => {
            records.remove(&record)?;
            Ok("forgotten".to_owned())
        }
        Ok(record) => {
            if !record.is_over() {
                location.engine_of(&record)?.stop(&record, &folder)?;
            }
            records.remove(&record)?;
            Ok("stopped".to_owned())
        }
        Err(error) if !folder.is_dir() || may_run(&folder) => Err(error),
        Err(_) => {
            records.remove_unread(name)?;
            Ok("forgotten".to_owned())
        }
    }
}
