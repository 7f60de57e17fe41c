//! `accel-jobs stop`.

use std::process::ExitCode;

use clap::Args;

use super::{JobsLocation, details};
use crate::error::Result;
use crate::job::JobStatus;
use crate::output::{now, print};
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
    for name in &arguments.names {
        let known = location.records()?;
        if arguments.forget && known.read(name)?.is_half_submitted() {
            // Another's job may have its name, so nothing is removed from the engine.
            known.remove(name)?;
            print(&format!("job {name} forgotten\n"))?;
            continue;
        }
        let (records, mut record, engine) = location.job(name)?;
        let before = details(&records, &mut record, engine.as_ref());
        engine.stop(&record, &records.job_folder(name))?;
        if arguments.forget {
            records.remove(name)?;
        } else if let Ok(mut last) = before
            && !last.status.is_final()
        {
            last.status = JobStatus::Stopped;
            last.ended = Some(now());
            record.last = Some(last);
            records.write(&record)?;
        }
        print(&format!("job {name} stopped\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}
