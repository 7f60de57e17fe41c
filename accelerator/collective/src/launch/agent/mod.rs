//! The place that engines tell an agent: the launcher that is started once on each host of a job.

mod engines;
mod values;

use accelerator_host::variable;

pub use values::{AgentHead, AgentProcesses, NodeCount};

use super::{
    reader::{LaunchReader, invalid},
    setting::LaunchSource,
};
use crate::error::Result;
use engines::ENGINES;

/// The place of an agent among the agents of its job, as the variables of an engine tell it. What an engine does not
/// tell is `None`, for the agent's own settings or its first agent to say.
///
/// The first engine that tells anything tells all of it, in this order:
///
/// | engine | variables |
/// |---|---|
/// | an operator with torchrun's settings | `PET_NNODES` (`2`, `1:4`), `PET_NODE_RANK`, `PET_NPROC_PER_NODE`, `PET_RDZV_ENDPOINT`, `PET_MASTER_ADDR`, `PET_MASTER_PORT`, `PET_RDZV_ID`; for the head also `MASTER_ADDR` and `MASTER_PORT` |
/// | PyTorchJob, where `RANK` counts pods | `RANK`, `WORLD_SIZE`, `NPROC_PER_NODE`, `MASTER_ADDR`, `MASTER_PORT` |
/// | a step of Slurm with one task a host | `SLURM_NODEID`, `SLURM_STEP_NODELIST` and others of a step |
/// | SageMaker | `SM_HOSTS`, `SM_CURRENT_HOST`, `SM_NUM_GPUS` |
/// | an Indexed Job of Kubernetes | `JOB_COMPLETION_INDEX`, which comes without a count |
///
/// ```
/// use accelerator_collective::launcher::{AgentLaunch, AgentProcesses};
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
    /// The engine that told it.
    pub source: LaunchSource,
    /// Engines that have left variables, and did not tell it.
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

    /// Reads variables through `lookup`; one that is empty counts as not set. `None` if no engine tells anything,
    /// and in a rank of another launcher, which `LOCAL_RANK` shows.
    ///
    /// # Errors
    ///
    /// A topology error that names the variables if what an engine tells is malformed or contradictory, or if
    /// a step of Slurm has several tasks on a host: an agent starts the processes of its host itself.
    pub fn from_vars(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let vars = LaunchReader(&lookup);
        if vars.is_set("LOCAL_RANK") {
            return Ok(None);
        }
        let mut found: Option<Self> = None;
        for engine in &ENGINES {
            let shown = engine.shown_by.iter().find(|name| vars.is_set(name));
            let Some(variable) = shown else { continue };
            let source = LaunchSource {
                launcher: engine.name,
                variable,
            };
            match &mut found {
                Some(found) => found.noticed.push(source),
                None => found = (engine.read)(vars, source)?,
            }
        }
        if let Some(found) = &found {
            found.check()?;
        }
        Ok(found)
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
            false => Err(invalid(format!(
                "{} tells that this is host {node} of {nodes}; hosts are counted from 0",
                self.source.launcher
            ))),
        }
    }
}
