//! `accel-jobs list`, `get`, `top` and `data`: tables of jobs, nodes and volumes.

use std::fmt::Write;
use std::process::ExitCode;

use accelerator_host::cli::{Error, Result, chain};
use clap::{Args, Subcommand};

use super::{JobsLocation, check_submitted, details};
use crate::engine::{Engine, connect};
use crate::job::{Failure, JobDetails, JobRecord, JobStatus, NodeUsage, Records};
use crate::output::{age, columns, json, now, print, warn};
use crate::spec::{EngineAddress, EngineKind, JobName};

#[derive(Args, Debug)]
pub(super) struct ListArgs {
    /// List only jobs of this engine.
    #[arg(long, value_enum)]
    engine: Option<EngineKind>,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn list(arguments: &ListArgs, location: &JobsLocation) -> Result<ExitCode> {
    let jobs = jobs(location, arguments.engine)?;
    print(&match arguments.json {
        true => json(&jobs)?,
        false => jobs_table(&jobs),
    })
}

/// Returns the jobs of this machine's records. If an engine does not answer, the last known state is returned.
fn jobs(location: &JobsLocation, only: Option<EngineKind>) -> Result<Vec<JobDetails>> {
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
        // The engine of a job that has ended is not asked.
        let found = match record.ended() {
            Some(ended) => Ok(ended.clone()),
            None => engines.ask(&records, &mut record),
        };
        match (found, record.last) {
            (Ok(details), _) => jobs.push(details),
            (Err(error), last) => {
                // One warning per engine that does not answer.
                let mut problem = chain(&error);
                if error.is_unreachable() {
                    problem.push_str("; its jobs are shown in their last known state");
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

fn jobs_table(jobs: &[JobDetails]) -> String {
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
    /// Returns the time since it was submitted.
    fn age(&self) -> String {
        self.submitted.map_or_else(
            || "N/A".to_owned(),
            |submitted| age(now().saturating_sub(submitted)),
        )
    }

    /// Returns the node of rank 0 while it runs.
    fn node(&self) -> String {
        let node = self
            .instances
            .first()
            .and_then(|instance| instance.node.clone());
        node.filter(|_| self.status.is_active())
            .unwrap_or_else(|| "N/A".to_owned())
    }
}

#[derive(Args, Debug)]
pub(super) struct GetArgs {
    /// The job.
    name: JobName,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn get(arguments: &GetArgs, location: &JobsLocation) -> Result<ExitCode> {
    let (records, mut record, engine) = location.job(&arguments.name)?;
    let details = details(&records, &mut record, engine.as_ref())?;
    print(&match arguments.json {
        true => json(&details)?,
        false => details.text(),
    })
}

impl JobDetails {
    fn text(&self) -> String {
        let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "N/A".to_owned());
        let mut text = format!(
            "STATUS: {}\nNAMESPACE: {}\nPRIORITY: {}\nTRAINING DURATION: {}\n",
            self.status,
            or_none(&self.namespace),
            or_none(&self.priority),
            span(self.started, self.ended)
        );
        if self.restarts > 0 {
            // Writing to a string does not fail.
            let _ = writeln!(text, "RESTARTS: {}", self.restarts);
        }
        if let Some(reason) = &self.reason {
            let _ = writeln!(text, "REASON: {reason}");
        }
        let mut rows =
            vec![["NAME", "STATUS", "TRAINER", "AGE", "INSTANCE", "NODE"].map(str::to_owned)];
        rows.extend(self.instances.iter().map(|instance| {
            [
                self.name.clone(),
                instance.status.to_string(),
                self.trainer.clone(),
                span(instance.started.or(self.submitted), None),
                instance.name.clone(),
                or_none(&instance.node),
            ]
        }));
        let _ = write!(text, "\n{}", columns(&rows));
        for instance in &self.instances {
            if let Some(reason) = &instance.reason {
                let _ = writeln!(text, "{}: {reason}", instance.name);
            }
        }
        if let Some(failure) = &self.failure {
            text.push_str(&failure.text());
        }
        if let Some(address) = &self.tensorboard {
            let _ = write!(
                text,
                "\nYour tensorboard will be available on:\n{address}\n"
            );
        }
        text
    }
}

impl Failure {
    fn text(&self) -> String {
        let code = self
            .exit_code
            .map(|code| format!("exit code {code}"))
            .filter(|code| !self.reason.contains(code))
            .map(|code| format!(", {code}"))
            .unwrap_or_default();
        let instance = self
            .instance
            .as_ref()
            .map(|name| format!("{name}: "))
            .unwrap_or_default();
        let mut text = format!("\nFAILURE: {instance}{}{code}\n", self.reason);
        for line in &self.last_lines {
            // Writing to a string does not fail.
            let _ = writeln!(text, "  {line}");
        }
        text
    }
}

fn span(from: Option<u64>, to: Option<u64>) -> String {
    from.map_or_else(
        || "N/A".to_owned(),
        |from| age(to.unwrap_or_else(now).saturating_sub(from)),
    )
}

#[derive(Debug, Subcommand)]
pub(super) enum TopCommand {
    /// Show the nodes and their GPUs.
    #[command(visible_alias = "node")]
    Nodes(TopArgs),
    /// Show the jobs and their GPUs.
    #[command(visible_alias = "job")]
    Jobs(TopArgs),
}

#[derive(Args, Debug)]
pub(super) struct TopArgs {
    /// The engine to ask [default: the engine of the newest job].
    #[arg(long, value_enum)]
    engine: Option<EngineKind>,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Shows what nodes or jobs have of GPUs.
pub(super) fn top(command: &TopCommand, location: &JobsLocation) -> Result<ExitCode> {
    match command {
        TopCommand::Nodes(arguments) => {
            let nodes = arguments.engine(location)?.nodes()?;
            arguments.show(&nodes, || nodes_table(&nodes))
        }
        TopCommand::Jobs(arguments) => {
            let jobs = jobs(location, arguments.engine)?;
            arguments.show(&jobs, || gpus_table(&jobs))
        }
    }
}

impl TopArgs {
    fn engine(&self, location: &JobsLocation) -> Result<Box<dyn Engine>> {
        let newest = || -> Result<_> { Ok(location.records()?.all()?.0.into_iter().next()) };
        let (kind, address) = match self.engine {
            Some(kind) => (kind, location.address.clone()),
            None => match newest()? {
                Some(record) => (
                    record.spec.engine,
                    location.address.or(&record.spec.address),
                ),
                None => (EngineKind::Local, location.address.clone()),
            },
        };
        connect(kind, &address)
    }

    fn show<T: serde::Serialize>(
        &self,
        rows: &[T],
        text: impl FnOnce() -> String,
    ) -> Result<ExitCode> {
        print(&match self.json {
            true => json(&rows)?,
            false => text(),
        })
    }
}

fn nodes_table(nodes: &[NodeUsage]) -> String {
    let mut rows = vec![
        [
            "NAME",
            "IPADDRESS",
            "ROLE",
            "STATUS",
            "GPU(Total)",
            "GPU(Allocated)",
        ]
        .map(str::to_owned),
    ];
    rows.extend(nodes.iter().map(|node| {
        [
            node.name.clone(),
            node.address.clone(),
            node.role.clone(),
            node.status.clone(),
            node.gpus.to_string(),
            node.gpus_allocated.to_string(),
        ]
    }));
    let all: usize = nodes.iter().map(|node| node.gpus).sum();
    let allocated: usize = nodes.iter().map(|node| node.gpus_allocated).sum();
    let percent = (100 * allocated).checked_div(all).unwrap_or(0);
    format!(
        "{}{}\nAllocated/Total GPUs In Cluster:\n{allocated}/{all} ({percent}%)\n",
        columns(&rows),
        "-".repeat(89)
    )
}

fn gpus_table(jobs: &[JobDetails]) -> String {
    let mut rows = vec![
        [
            "NAME",
            "GPU(Requests)",
            "GPU(Allocated)",
            "STATUS",
            "TRAINER",
            "AGE",
            "NODE",
        ]
        .map(str::to_owned),
    ];
    rows.extend(jobs.iter().map(|job| {
        [
            job.name.clone(),
            job.gpus_requested.to_string(),
            job.gpus_allocated.to_string(),
            job.status.to_string(),
            job.trainer.to_lowercase(),
            job.age(),
            job.node(),
        ]
    }));
    let allocated: usize = jobs.iter().map(|job| job.gpus_allocated).sum();
    let requested: usize = jobs.iter().map(|job| job.gpus_requested).sum();
    format!(
        "{}\nTotal Allocated GPUs of Training Job:\n{allocated}\n\nTotal Requested GPUs of Training Job:\n{requested}\n",
        columns(&rows)
    )
}

#[derive(Debug, Subcommand)]
pub(super) enum DataCommand {
    /// List the volumes.
    List(TopArgs),
}

/// Lists the volumes that jobs can mount.
pub(super) fn data(command: &DataCommand, location: &JobsLocation) -> Result<ExitCode> {
    let DataCommand::List(arguments) = command;
    let volumes = arguments.engine(location)?.volumes()?;
    arguments.show(&volumes, || {
        let mut rows =
            vec![["NAME", "ACCESSMODE", "DESCRIPTION", "OWNER", "AGE"].map(str::to_owned)];
        rows.extend(volumes.iter().map(|volume| {
            let since = volume
                .created
                .map(|created| age(now().saturating_sub(created)));
            [
                volume.name.clone(),
                volume.access_mode.clone(),
                volume.description.clone(),
                volume.owner.clone(),
                since.unwrap_or_default(),
            ]
        }));
        columns(&rows)
    })
}
