//! `accel-jobs logs`, `wait` and `stop`: a job until its end.

use std::io;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;

use super::{JobsLocation, details};
use crate::engine::local::may_run;
use crate::engine::{LogsMode, LogsRequest};
use crate::error::{Error, Result, chain};
use crate::job::{JobDetails, JobRecord, JobStatus, Role};
use crate::output::{now, print, warn};
use crate::spec::{JobName, time_limit};

#[derive(Args, Debug)]
pub(super) struct LogsArgs {
    /// The job.
    name: JobName,
    /// The instance, as `get` shows it [default: that of rank 0].
    #[arg(short, long, value_name = "INSTANCE")]
    instance: Option<String>,
    /// Continue until the job has ended, through its restarts.
    #[arg(short, long)]
    follow: bool,
    /// Only the last N lines.
    #[arg(short, long, value_name = "N", allow_negative_numbers = true)]
    tail: Option<usize>,
}

/// Prints the output of a job.
pub(super) fn logs(arguments: &LogsArgs, location: &JobsLocation) -> Result<ExitCode> {
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

/// Returns the node whose instance has this name; node 0 if none is named.
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

#[derive(Args, Debug)]
pub(super) struct WaitArgs {
    /// The job.
    name: JobName,
    /// Give up after so long: `90m`, `2h`.
    #[arg(long, value_name = "TIME", value_parser = time_limit)]
    timeout: Option<Duration>,
}

/// The time for which an engine may fail to answer if there is no --timeout.
const LONGEST_SILENCE: Duration = Duration::from_secs(300);

/// Waits until a job has ended.
pub(super) fn wait(arguments: &WaitArgs, location: &JobsLocation) -> Result<ExitCode> {
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
                    warn(&format!("{}; retrying", chain(&error)));
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

#[derive(Args, Debug)]
pub(super) struct StopArgs {
    /// The jobs.
    #[arg(required = true)]
    names: Vec<JobName>,
    /// Remove their records as well, so that their names are free.
    #[arg(long)]
    forget: bool,
}

/// Ends jobs, and removes them from their engines.
pub(super) fn stop(arguments: &StopArgs, location: &JobsLocation) -> Result<ExitCode> {
    let mut done = Ok(ExitCode::SUCCESS);
    for name in &arguments.names {
        let stopped = match arguments.forget {
            true => forget(name, location),
            false => stop_job(name, location),
        };
        match stopped {
            Ok(what) => {
                print(&format!("job {name} {what}\n"))?;
            }
            // The others are stopped nevertheless; the command returns the last error.
            Err(error) => {
                if let Err(before) = std::mem::replace(&mut done, Err(error)) {
                    warn(&chain(&before));
                }
            }
        }
    }
    done
}

/// Ends a job, and records that.
fn stop_job(name: &JobName, location: &JobsLocation) -> Result<String> {
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

/// Ends a job, and removes its record. A job whose submission was interrupted is ended only if the engine keeps its nonce:
/// otherwise another user's job may have its name.
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
