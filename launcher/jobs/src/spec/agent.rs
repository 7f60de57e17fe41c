//! The command of the agent that an engine starts on each node: `accel-launch`.

use std::path::PathBuf;

use super::{JobSpec, on_path};
use crate::error::{Error, Result};

/// `accel-launch` with the options of a job. What is not given, the agent finds in the engine's variables.
#[derive(Clone, Debug)]
pub(crate) struct AgentCommand<'a> {
    spec: &'a JobSpec,
    launcher: String,
    node_rank: Option<String>,
    endpoint: Option<String>,
    program: Option<String>,
    log_dir: Option<String>,
    join_timeout: Option<u64>,
    grace: Option<u64>,
}

impl<'a> AgentCommand<'a> {
    /// The agent that the PATH of the node has.
    pub(super) fn new(spec: &'a JobSpec) -> Self {
        Self {
            spec,
            launcher: "accel-launch".to_owned(),
            node_rank: None,
            endpoint: None,
            program: None,
            log_dir: None,
            join_timeout: None,
            grace: None,
        }
    }

    /// Where the node has `accel-launch`.
    pub(crate) fn launcher(mut self, path: impl Into<String>) -> Self {
        self.launcher = path.into();
        self
    }

    /// Where the node has the program.
    pub(crate) fn program(mut self, path: impl Into<String>) -> Self {
        self.program = Some(path.into());
        self
    }

    /// Where the agent of node 0 writes the output of ranks, and what failed.
    pub(crate) fn log_dir(mut self, path: impl Into<String>) -> Self {
        self.log_dir = Some(path.into());
        self
    }

    /// How many seconds agents wait for one another, at first and after a loss.
    #[cfg(feature = "slurm")]
    pub(crate) fn join_timeout(mut self, seconds: u64) -> Self {
        self.join_timeout = Some(seconds);
        self
    }

    /// How many seconds ranks have to save after SIGTERM.
    #[cfg(feature = "slurm")]
    pub(crate) fn grace(mut self, seconds: u64) -> Self {
        self.grace = Some(seconds);
        self
    }

    /// Which node this is: a number, or what a shell makes one of.
    pub(crate) fn node_rank(mut self, rank: impl ToString) -> Self {
        self.node_rank = Some(rank.to_string());
        self
    }

    /// Where node 0 is reached: `HOST:PORT`.
    pub(crate) fn endpoint(mut self, endpoint: impl Into<String>) -> Self {
        self.endpoint = Some(endpoint.into());
        self
    }

    /// The words of the command.
    pub(crate) fn words(&self) -> Vec<String> {
        let spec = self.spec;
        let mut words = vec![self.launcher.clone()];
        let mut option = |name: &str, value: String| words.extend([format!("--{name}"), value]);
        option("nnodes", spec.nodes.to_string());
        if let Some(rank) = &self.node_rank {
            option("node-rank", rank.clone());
        }
        if let Some(endpoint) = &self.endpoint {
            option("rdzv-endpoint", endpoint.clone());
        }
        if let Some(seconds) = self.join_timeout {
            option("join-timeout", seconds.to_string());
        }
        if let Some(seconds) = self.grace {
            option("grace", seconds.to_string());
        }
        option("nproc-per-node", spec.nproc_per_node.clone());
        if spec.max_restarts > 0 {
            option("max-restarts", spec.max_restarts.to_string());
        }
        if let Some(folder) = &self.log_dir {
            words.extend(["--log-dir".to_owned(), folder.clone()]);
        }
        words.push("--".to_owned());
        let mut program = spec.program.iter().cloned();
        let first = program.next();
        words.extend(self.program.clone().or(first));
        words.extend(program);
        words
    }
}

/// The `accel-launch` of this machine: beside this program, else on the PATH.
///
/// # Errors
/// When there is none.
pub(crate) fn launcher_here() -> Result<PathBuf> {
    let beside = std::env::current_exe()
        .ok()
        .map(|program| program.with_file_name("accel-launch"));
    let found = beside
        .filter(|path| path.is_file())
        .or_else(|| on_path("accel-launch"));
    found.ok_or_else(|| {
        Error::usage("accel-launch is neither beside accel-jobs nor on the PATH; install it: cargo install --path launcher")
    })
}
