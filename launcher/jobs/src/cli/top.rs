//! `accel-jobs top` and `accel-jobs data`.

use std::process::ExitCode;

use clap::{Args, Subcommand};

use super::{JobsLocation, list};
use crate::engine::{Engine, connect};
use crate::error::Result;
use crate::job::{JobDetails, NodeUsage};
use crate::output::{columns, json, print};
use crate::spec::EngineKind;

#[derive(Debug, Subcommand)]
pub(super) enum TopCommand {
    /// The nodes and their GPUs.
    #[command(visible_alias = "node")]
    Nodes(TopArgs),
    /// The jobs and their GPUs.
    #[command(visible_alias = "job")]
    Jobs(TopArgs),
}

#[derive(Args, Debug)]
pub(super) struct TopArgs {
    /// The engine [default: that of the newest job].
    #[arg(long, value_enum)]
    engine: Option<EngineKind>,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(command: &TopCommand, location: &JobsLocation) -> Result<ExitCode> {
    match command {
        TopCommand::Nodes(arguments) => {
            let nodes = arguments.engine(location)?.nodes()?;
            arguments.show(&nodes, || nodes_text(&nodes))
        }
        TopCommand::Jobs(arguments) => {
            let jobs = list::jobs(location, arguments.engine)?;
            arguments.show(&jobs, || jobs_text(&jobs))
        }
    }
}

impl TopArgs {
    pub(super) fn engine(&self, location: &JobsLocation) -> Result<Box<dyn Engine>> {
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

    pub(super) fn show<T: serde::Serialize>(
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

fn nodes_text(nodes: &[NodeUsage]) -> String {
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

fn jobs_text(jobs: &[JobDetails]) -> String {
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
