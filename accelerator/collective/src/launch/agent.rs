//! The place that engines give an agent, the launcher that is started once on each host of a job.

use std::{fmt, str::FromStr};

use accelerator_host::variable;

use super::{
    reader::{LaunchReader, LaunchSource},
    slurm::{self, SlurmStep},
};
use crate::{
    error::{Error, Result},
    rendezvous::without_brackets,
};

/// The place of an agent among the agents of its job, read from the variables of an engine. Fields that the engine does
/// not give are `None`; the agent's own settings or the first agent of the job provide them.
///
/// All fields come from the first engine in this table that gives any of them:
///
/// | engine | variables |
/// |---|---|
/// | an operator with torchrun's settings | `PET_NNODES` (`2`, `1:4`), `PET_NODE_RANK`, `PET_NPROC_PER_NODE`, `PET_RDZV_ENDPOINT`, `PET_MASTER_ADDR`, `PET_MASTER_PORT`, `PET_RDZV_ID`; for the head also `MASTER_ADDR` and `MASTER_PORT` |
/// | PyTorchJob, where `RANK` counts pods | `RANK`, `WORLD_SIZE`, `NPROC_PER_NODE`, `MASTER_ADDR`, `MASTER_PORT` |
/// | a step of Slurm with one task per host | `SLURM_NODEID`, `SLURM_STEP_NODELIST` and others of a step |
/// | SageMaker | `SM_HOSTS`, `SM_CURRENT_HOST`, `SM_NUM_GPUS` |
/// | an Indexed Job of Kubernetes | `JOB_COMPLETION_INDEX`, which comes without a count |
///
/// ```
/// use accelerator_collective::internal::{AgentLaunch, AgentProcesses};
///
/// # fn main() -> accelerator_collective::Result<()> {
/// let launch = AgentLaunch::from_vars(|name| {
///     let value = match name {
///         "PET_NNODES" => "2",
///         "PET_NODE_RANK" => "1",
///         "PET_NPROC_PER_NODE" => "auto",
///         "PET_MASTER_ADDR" => "job-node-0-0.job",
///         "PET_MASTER_PORT" => "29500",
///         _ => return None,
///     };
///     Some(value.to_owned())
/// })?
/// .unwrap();
/// assert_eq!(launch.node, Some(1));
/// assert_eq!(launch.processes, Some(AgentProcesses::Auto));
/// assert_eq!(launch.head.unwrap().to_string(), "job-node-0-0.job:29500");
/// assert_eq!(launch.source.variable, "PET_NNODES");
/// assert_eq!(launch.nodes.map(|nodes| nodes.most), Some(2));
/// assert!(launch.job.is_none() && launch.noticed.is_empty());
///
/// assert!(AgentLaunch::from_vars(|_| None)?.is_none());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AgentLaunch {
    /// The index of this agent's host, from 0; `None` if the first agent gives it.
    pub node: Option<usize>,
    /// The number of hosts of the job.
    pub nodes: Option<NodeCount>,
    /// The number of processes that this agent starts.
    pub processes: Option<AgentProcesses>,
    /// The meeting place of the agents: an address of the first agent's host.
    pub head: Option<AgentHead>,
    /// The name of the job, if the engine gives it one.
    pub job: Option<String>,
    /// The engine that gave this place.
    pub source: LaunchSource,
    /// Engines whose variables are set, but that did not give this place.
    pub noticed: Vec<LaunchSource>,
}

impl AgentLaunch {
    /// Reads the environment of this process.
    ///
    /// # Errors
    ///
    /// The same as for [`from_vars`](Self::from_vars).
    pub fn from_env() -> Result<Option<Self>> {
        Self::from_vars(|name| Some(variable(name)?.to_string_lossy().into_owned()))
    }

    /// Reads variables through `lookup`; an empty one counts as not set. Returns `None` if no engine gives a place, and
    /// in a rank of another launcher, which `LOCAL_RANK` shows.
    ///
    /// # Errors
    ///
    /// A topology error that names the variables if those of an engine are malformed or contradictory, or if a step of
    /// Slurm has several tasks on a host: an agent starts the processes of its host itself.
    pub fn from_vars(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let vars = LaunchReader(&lookup);
        if vars.is_set("LOCAL_RANK") {
            return Ok(None);
        }
        let mut found: Option<Self> = None;
        let mut noticed = Vec::new();
        for engine in &ENGINES {
            let shown = engine.shown_by.iter().find(|name| vars.is_set(name));
            let Some(variable) = shown else { continue };
            let source = LaunchSource {
                launcher: engine.name,
                variable,
            };
            let place = match found {
                Some(_) => None,
                None => (engine.read)(vars, source)?,
            };
            match place {
                Some(_) => found = place,
                None => noticed.push(source),
            }
        }
        let Some(found) = found else { return Ok(None) };
        found.check()?;
        Ok(Some(Self { noticed, ..found }))
    }

    fn new(source: LaunchSource) -> Self {
        Self {
            node: None,
            nodes: None,
            processes: None,
            head: None,
            job: None,
            source,
            noticed: Vec::new(),
        }
    }

    fn check(&self) -> Result<()> {
        let (Some(node), Some(nodes)) = (self.node, self.nodes) else {
            return Ok(());
        };
        match node < nodes.most {
            true => Ok(()),
            false => Err(Error::topology(format!(
                "{} says that this is host {node} of {nodes}; hosts are counted from 0",
                self.source.launcher
            ))),
        }
    }
}

/// The number of hosts of a job: one number, or a range such as `1:4`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct NodeCount {
    /// The least; at least 1.
    pub least: usize,
    /// The most.
    pub most: usize,
}

impl NodeCount {
    fn exactly(count: usize) -> Self {
        Self {
            least: count,
            most: count,
        }
    }
}

impl FromStr for NodeCount {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (least, most) = text.split_once(':').unwrap_or((text, text));
        let number = |text: &str| text.trim().parse::<usize>().ok().filter(|count| *count > 0);
        match (number(least), number(most)) {
            (Some(least), Some(most)) if least <= most => Ok(Self { least, most }),
            _ => Err(Error::topology(format!(
                "{text:?} is not a number of hosts; expected a number from 1 on, or a range such as 1:4"
            ))),
        }
    }
}

impl fmt::Display for NodeCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.least == self.most {
            true => write!(f, "{}", self.most),
            false => write!(f, "{}:{}", self.least, self.most),
        }
    }
}

/// The number of processes that an agent starts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum AgentProcesses {
    /// This number; at least 1.
    Number(usize),
    /// One per device of the host (`auto` or `gpu`).
    Auto,
}

impl FromStr for AgentProcesses {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.trim() {
            "auto" | "gpu" => Ok(Self::Auto),
            number => match number.parse() {
                Ok(count) if count > 0 => Ok(Self::Number(count)),
                _ => Err(Error::topology(format!(
                    "{text:?} is not a number of processes; expected a number from 1 on, auto or gpu"
                ))),
            },
        }
    }
}

impl fmt::Display for AgentProcesses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(count) => write!(f, "{count}"),
            Self::Auto => f.write_str("auto"),
        }
    }
}

/// The address at which agents meet.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct AgentHead {
    /// The host of the first agent.
    pub host: String,
    /// The port on which it listens; `None` if the endpoint names no port.
    pub port: Option<u16>,
}

impl FromStr for AgentHead {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            Error::topology(format!(
                "{text:?} is not an address of the first agent; expected a host, or a host and a port from 1 to \
                 65535 such as node-0:29400"
            ))
        };
        let (host, port) = match text.trim().strip_prefix('[') {
            Some(rest) => {
                let (host, rest) = rest.split_once(']').ok_or_else(wrong)?;
                (
                    host,
                    rest.strip_prefix(':').or((!rest.is_empty()).then_some("")),
                )
            }
            // An IPv6 address without brackets has several colons.
            None => match text.trim().split_once(':') {
                Some((host, port)) if !port.contains(':') => (host, Some(port)),
                _ => (text.trim(), None),
            },
        };
        let port = match port {
            Some(port) => Some(accelerator_host::port(port).ok_or_else(wrong)?),
            None => None,
        };
        match host.is_empty() {
            true => Err(wrong()),
            false => Ok(Self {
                host: host.to_owned(),
                port,
            }),
        }
    }
}

impl fmt::Display for AgentHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]", self.host)?,
            false => f.write_str(&self.host)?,
        }
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

struct Engine {
    name: &'static str,
    /// Any of these variables shows that the engine is present.
    shown_by: &'static [&'static str],
    read: fn(LaunchReader<'_>, LaunchSource) -> Result<Option<AgentLaunch>>,
}

const ENGINES: [Engine; 5] = [
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
        return Err(Error::topology(
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
        return Err(Error::topology(format!(
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
            Error::topology(format!(
                "SM_HOSTS is {text:?}; expected a list such as [\"algo-1\",\"algo-2\"]"
            ))
        })?;
    let Some(current) = vars.text("SM_CURRENT_HOST") else {
        return Err(Error::topology(
            "SM_HOSTS is set, but SM_CURRENT_HOST is not",
        ));
    };
    let node = hosts.iter().position(|host| *host == current);
    let node = node.ok_or_else(|| {
        Error::topology(format!(
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
        Err(error) => Err(Error::topology(format!("{name}: {error}"))),
    }
}

/// The strings of a JSON list of host names.
fn strings(text: &str) -> Option<Vec<&str>> {
    fn unquoted(text: &str) -> Option<&str> {
        let name = text.trim().strip_prefix('"')?.strip_suffix('"')?;
        (!name.is_empty() && !name.contains(['"', '\\'])).then_some(name)
    }
    let inner = text.trim().strip_prefix('[')?.strip_suffix(']')?;
    inner.split(',').map(unquoted).collect()
}
