//! `accel-jobs list`.

use std::process::ExitCode;

use clap::Args;

use super::{JobsLocation, check_submitted, details};
use crate::engine::connect;
use crate::error::{Result, chain};
use crate::job::{JobDetails, JobStatus, Records};
use crate::output::{age, columns, json, now, print, warn};
use crate::spec::EngineKind;

#[derive(Args, Debug)]
pub(super) struct ListArgs {
    /// Only jobs of this engine.
    #[arg(long, value_enum)]
    engine: Option<EngineKind>,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &ListArgs, location: &JobsLocation) -> Result<ExitCode> {
    let jobs = jobs(location, arguments.engine)?;
    print(&match arguments.json {
        true => json(&jobs)?,
        false => text(&jobs),
    })
}

/// The jobs that are known here. One whose engine does not answer is shown as it was known last.
pub(super) fn jobs(location: &JobsLocation, only: Option<EngineKind>) -> Result<Vec<JobDetails>> {
    let records = location.records()?;
    let (found, unread) = records.all()?;
    for error in unread {
        warn(&chain(&error));
    }
    let mut jobs = Vec::new();
    for mut record in found
        .into_iter()
        .filter(|record| only.is_none_or(|only| record.spec.engine == only))
    {
        let name = record.spec.name.clone();
        let last = record.last.clone().filter(|last| last.status.is_final());
        let found = match last {
            // It does not change any more, so nobody needs to be asked.
            Some(last) => Ok(last),
            None => ask(location, &records, &mut record),
        };
        match (found, record.last) {
            (Ok(details), _) => jobs.push(details),
            (Err(error), last) => {
                warn(&chain(&error));
                jobs.extend(last.or_else(|| Some(unknown(name.as_str(), record.submitted))));
            }
        }
    }
    Ok(jobs)
}

fn ask(
    location: &JobsLocation,
    records: &Records,
    record: &mut crate::job::JobRecord,
) -> Result<JobDetails> {
    check_submitted(record)?;
    let engine = connect(
        record.spec.engine,
        &location.address.or(&record.spec.address),
    )?;
    details(records, record, engine.as_ref())
}

fn unknown(name: &str, submitted: u64) -> JobDetails {
    JobDetails {
        name: name.to_owned(),
        trainer: "N/A".to_owned(),
        status: JobStatus::Unknown,
        submitted: Some(submitted),
        ..JobDetails::default()
    }
}

fn text(jobs: &[JobDetails]) -> String {
    let mut rows = vec![["NAME", "STATUS", "TRAINER", "AGE", "NODE"].map(str::to_owned)];
    rows.extend(jobs.iter().map(|job| {
        [
            job.name.clone(),
            job.status.to_string(),
            job.trainer.clone(),
            job.age(),
            job.node(),
        ]
    }));
    columns(&rows)
}

impl JobDetails {
    /// Since it was submitted.
    pub(super) fn age(&self) -> String {
        self.submitted.map_or_else(
            || "N/A".to_owned(),
            |submitted| age(now().saturating_sub(submitted)),
        )
    }

    /// The node of rank 0 while it runs.
    pub(super) fn node(&self) -> String {
        let node = self
            .instances
            .first()
            .and_then(|instance| instance.node.clone());
        node.filter(|_| self.status.is_active())
            .unwrap_or_else(|| "N/A".to_owned())
    }
}
