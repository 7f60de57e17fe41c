//! The engines that start agents, in the order in which they are asked.

use std::str::FromStr;

use super::{AgentHead, AgentLaunch, AgentProcesses, NodeCount};
use crate::{
    error::{Error, Result},
    launch::{
        reader::{LaunchReader, invalid},
        setting::LaunchSource,
        slurm::{self, SlurmStep},
    },
    rendezvous::without_brackets,
};

/// An engine that starts agents.
pub(super) struct Engine {
    pub(super) name: &'static str,
    /// Any of these variables shows that it was there.
    pub(super) shown_by: &'static [&'static str],
    pub(super) read: fn(LaunchReader<'_>, LaunchSource) -> Result<Option<AgentLaunch>>,
}

pub(super) const ENGINES: [Engine; 5] = [
    Engine {
        name: "torchrun's settings",
        shown_by: &[
            "PET_NNODES",
            "PET_NODE_RANK",
            "PET_NPROC_PER_NODE",
            "PET_RDZV_ENDPOINT",
            "PET_MASTER_ADDR",
        ],
        read: torchrun,
    },
    Engine {
        name: "PyTorchJob",
        shown_by: &["RANK", "WORLD_SIZE"],
        read: pytorch_job,
    },
    Engine {
        name: slurm::STEP.launcher,
        shown_by: &["SLURM_PROCID", "SLURM_JOB_ID"],
        read: slurm_step,
    },
    Engine {
        name: "SageMaker",
        shown_by: &["SM_HOSTS"],
        read: sage_maker,
    },
    Engine {
        name: "an Indexed Job",
        shown_by: &["JOB_COMPLETION_INDEX"],
        read: indexed_job,
    },
];

fn torchrun(vars: LaunchReader<'_>, source: LaunchSource) -> Result<Option<AgentLaunch>> {
    let head = match parsed(vars, "PET_RDZV_ENDPOINT")? {
        Some(head) => Some(head),
        None => match head(vars, "PET_MASTER_ADDR", "PET_MASTER_PORT")? {
            Some(head) => Some(head),
            None => head(vars, "MASTER_ADDR", "MASTER_PORT")?,
        },
    };
    Ok(Some(AgentLaunch {
        node: vars.number("PET_NODE_RANK")?,
        nodes: parsed(vars, "PET_NNODES")?,
        processes: parsed(vars, "PET_NPROC_PER_NODE")?,
        head,
        job: vars.text("PET_RDZV_ID"),
        ..AgentLaunch::new(source)
    }))
}

fn pytorch_job(vars: LaunchReader<'_>, source: LaunchSource) -> Result<Option<AgentLaunch>> {
    let node = vars.required("RANK", &["WORLD_SIZE"])?;
    let nodes = vars.required("WORLD_SIZE", &["RANK"])?;
    if nodes == 0 {
        return Err(invalid(
            "WORLD_SIZE is \"0\"; expected the number of pods, at least 1",
        ));
    }
    Ok(Some(AgentLaunch {
        node: Some(node),
        nodes: Some(NodeCount::exactly(nodes)),
        processes: parsed(vars, "NPROC_PER_NODE")?,
        head: head(vars, "MASTER_ADDR", "MASTER_PORT")?,
        ..AgentLaunch::new(source)
    }))
}

fn slurm_step(vars: LaunchReader<'_>, source: LaunchSource) -> Result<Option<AgentLaunch>> {
    let Some(step) = SlurmStep::read(vars)? else {
        return Ok(None);
    };
    if step.tasks_per_node.iter().any(|tasks| *tasks > 1) {
        return Err(invalid(format!(
            "this step has several tasks on a host ({}), but a launcher starts the processes of its host itself: \
             start one on each host (`srun --ntasks-per-node=1`)",
            vars.shown(&[slurm::STEP.local_world_size])
        )));
    }
    Ok(Some(AgentLaunch {
        node: Some(step.node),
        nodes: Some(NodeCount::exactly(step.hosts.len())),
        head: Some(AgentHead {
            host: step.head().to_owned(),
            port: Some(step.port()),
        }),
        job: Some(step.name()),
        ..AgentLaunch::new(source)
    }))
}

fn sage_maker(vars: LaunchReader<'_>, source: LaunchSource) -> Result<Option<AgentLaunch>> {
    let text = vars.text("SM_HOSTS").unwrap_or_default();
    let hosts = strings(&text)
        .filter(|hosts| !hosts.is_empty())
        .ok_or_else(|| {
            invalid(format!(
                "SM_HOSTS is {text:?}; expected a list such as [\"algo-1\",\"algo-2\"]"
            ))
        })?;
    let Some(current) = vars.text("SM_CURRENT_HOST") else {
        return Err(invalid("SM_HOSTS is set, but SM_CURRENT_HOST is not"));
    };
    let node = hosts.iter().position(|host| *host == current);
    let node = node.ok_or_else(|| {
        invalid(format!(
            "SM_CURRENT_HOST is {current:?}, which is not in SM_HOSTS ({text})"
        ))
    })?;
    Ok(Some(AgentLaunch {
        node: Some(node),
        nodes: Some(NodeCount::exactly(hosts.len())),
        processes: vars.number("SM_NUM_GPUS")?.map(|gpus| match gpus {
            0 => AgentProcesses::Auto,
            gpus => AgentProcesses::Number(gpus),
        }),
        head: hosts.first().map(|host| AgentHead {
            host: (*host).to_owned(),
            port: None,
        }),
        ..AgentLaunch::new(source)
    }))
}

fn indexed_job(vars: LaunchReader<'_>, source: LaunchSource) -> Result<Option<AgentLaunch>> {
    Ok(Some(AgentLaunch {
        node: vars.number("JOB_COMPLETION_INDEX")?,
        ..AgentLaunch::new(source)
    }))
}

fn head(
    vars: LaunchReader<'_>,
    host: &'static str,
    port: &'static str,
) -> Result<Option<AgentHead>> {
    let Some(host) = vars.text(host) else {
        return Ok(None);
    };
    Ok(Some(AgentHead {
        host: without_brackets(host.trim()).to_owned(),
        port: vars.port(port)?,
    }))
}

fn parsed<T: FromStr<Err = Error>>(vars: LaunchReader<'_>, name: &str) -> Result<Option<T>> {
    let Some(text) = vars.text(name) else {
        return Ok(None);
    };
    match text.parse() {
        Ok(value) => Ok(Some(value)),
        Err(error) => Err(invalid(format!("{name}: {error}"))),
    }
}

/// The strings of a list in JSON, whose strings are names of hosts.
fn strings(text: &str) -> Option<Vec<&str>> {
    fn unquoted(text: &str) -> Option<&str> {
        let name = text.trim().strip_prefix('"')?.strip_suffix('"')?;
        (!name.is_empty() && !name.contains(['"', '\\'])).then_some(name)
    }
    let inner = text.trim().strip_prefix('[')?.strip_suffix(']')?;
    inner.split(',').map(unquoted).collect()
}
