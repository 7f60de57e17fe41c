//! `accel-jobs stop`.

use std::process::ExitCode;

use clap::Args;

use super::{JobsLocation, details};
use crate::engine::local::may_run;
use crate::error::{Result, chain};
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
    let (records, mut record, engine) = location.job(name)?;
    let before = details(&records, &mut record, engine.as_ref());
    engine.stop(&record, &records.job_folder(name))?;
    if let Ok(mut last) = before {
        if last.status.is_final() {
            return Ok(format!(
                "had ended as {} before; nothing of it is left",
                last.status
            ));
        }
        last.stop(now());
        record.last = Some(last);
        records.write(&record)?;
    }
    Ok("stopped".to_owned())
}

/// Ends a job, and removes its record. What was never submitted whole is removed here alone.
fn forget(name: &JobName, location: &JobsLocation) -> Result<String> {
    let records = location.records()?;
    let folder = records.job_folder(name);
    match records.read(name) {
        // Another's job may have its name, so nothing is removed from the engine.
        Ok(record) if record.is_half_submitted() => {
            records.remove(name)?;
            Ok("forgotten".to_owned())
        }
        Ok(_) => {
            let (records, record, engine) = location.job(name)?;
            engine.stop(&record, &folder)?;
            records.remove(name)?;
            Ok("stopped".to_owned())
        }
        Err(error) if !folder.is_dir() || may_run(&folder) => Err(error),
        Err(_) => {
            records.remove(name)?;
            Ok("forgotten".to_owned())
        }
    }
}
