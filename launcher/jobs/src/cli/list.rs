//! `accel-jobs list`.

use std::process::ExitCode;

use clap::Args;

use super::{JobsLocation, check_submitted, details};
use crate::engine::{Engine, connect};
use crate::error::{Error, Result, chain};
use crate::job::{JobDetails, JobRecord, JobStatus, Records};
use crate::output::{age, columns, json, now, print, warn};
use crate::spec::{EngineAddress, EngineKind};

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
    let mut engines = EngineConnections::new(location);
    let mut problems = Vec::new();
    let mut jobs = Vec::new();
    for mut record in found
        .into_iter()
        .filter(|record| only.is_none_or(|only| record.spec.engine == only))
    {
        let name = record.spec.name.clone();
        // Its engine is not even connected to.
        let found = match record.ended() {
            Some(ended) => Ok(ended.clone()),
            None => engines.ask(&records, &mut record),
        };
        match (found, record.last) {
            (Ok(details), _) => jobs.push(details),
            (Err(error), last) => {
                // Of an engine that does not answer it is said once.
                let mut problem = chain(&error);
                if error.is_unreachable() {
                    problem.push_str("; its jobs are shown as they were known last");
                }
                if !problems.contains(&problem) {
                    warn(&problem);
                    problems.push(problem);
                }
                jobs.extend(last.or_else(|| Some(unknown(name.as_str(), record.submitted))));
            }
        }
    }
    Ok(jobs)
}

/// The engines that were asked, each connected to once.
struct EngineConnections<'a> {
    location: &'a JobsLocation,
    known: Vec<(EngineKind, EngineAddress, EngineConnection)>,
}

enum EngineConnection {
    Connected(Box<dyn Engine>),
    /// It did not answer; it is not asked for the next job.
    Unreachable(String),
}

impl<'a> EngineConnections<'a> {
    fn new(location: &'a JobsLocation) -> Self {
        Self {
            location,
            known: Vec::new(),
        }
    }

    fn ask(&mut self, records: &Records, record: &mut JobRecord) -> Result<JobDetails> {
        check_submitted(record)?;
        let kind = record.spec.engine;
        let address = self.location.address.or(&record.spec.address);
        let is_same =
            |(known, at, _): &(EngineKind, EngineAddress, _)| *known == kind && *at == address;
        let at = match self.known.iter().position(is_same) {
            Some(at) => at,
            None => {
                let engine = match connect(kind, &address) {
                    Err(error) if error.is_unreachable() => {
                        EngineConnection::Unreachable(chain(&error))
                    }
                    engine => EngineConnection::Connected(engine?),
                };
                self.known.push((kind, address, engine));
                self.known.len() - 1
            }
        };
        let engine = &mut self.known[at].2;
        let found = match engine {
            EngineConnection::Connected(engine) => details(records, record, engine.as_ref()),
            EngineConnection::Unreachable(why) => Err(Error::unreachable(why.clone())),
        };
        if let Err(error) = &found
            && error.is_unreachable()
        {
            *engine = EngineConnection::Unreachable(chain(error));
        }
        found
    }
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
