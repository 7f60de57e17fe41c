//! `accel-jobs logs`.

use std::io;
use std::process::ExitCode;

use clap::Args;

use super::{JobsLocation, details};
use crate::engine::{LogsMode, LogsRequest};
use crate::error::{Error, Result};
use crate::job::{JobRecord, JobStatus, Role};
use crate::output::warn;
use crate::spec::JobName;

#[derive(Args, Debug)]
pub(super) struct LogsArgs {
    /// The job.
    name: JobName,
    /// The instance, as `get` shows it [default: that of rank 0].
    #[arg(short, long, value_name = "INSTANCE")]
    instance: Option<String>,
    /// Go on until the job has ended, through its restarts.
    #[arg(short, long)]
    follow: bool,
    /// Only the last N lines.
    #[arg(short, long, value_name = "N", allow_negative_numbers = true)]
    tail: Option<usize>,
}

pub(super) fn run(arguments: &LogsArgs, location: &JobsLocation) -> Result<ExitCode> {
    let (records, mut record, engine) = location.job(&arguments.name)?;
    let request = LogsRequest {
        node: node(&record, arguments.instance.as_deref())?,
        mode: if arguments.follow {
            LogsMode::Follow
        } else {
            LogsMode::Once
        },
        tail: arguments.tail,
    };
    if let Ok(details) = details(&records, &mut record, engine.as_ref())
        && details.status == JobStatus::Pending
    {
        let reason = details.reason.map(|reason| format!(" ({reason})"));
        warn(&format!(
            "job {} waits{}: it has no output yet",
            arguments.name,
            reason.unwrap_or_default()
        ));
    }
    let folder = records.job_folder(&arguments.name);
    match engine.logs(&record, &folder, &request, &mut io::stdout().lock()) {
        Err(error) if !error.is_broken_pipe() => Err(error),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// The node whose instance has this name; node 0 where none is named.
fn node(record: &JobRecord, instance: Option<&str>) -> Result<usize> {
    let Some(wanted) = instance else {
        return Ok(0);
    };
    let job = record.spec.name.as_str();
    let nodes = 0..record.spec.nodes.get();
    let names: Vec<_> = nodes.map(|node| Role::instance_name(job, node)).collect();
    names.iter().position(|name| name == wanted).ok_or_else(|| {
        Error::usage(format!(
            "job {job} has no instance {wanted:?}; it has {}",
            names.join(", ")
        ))
    })
}
