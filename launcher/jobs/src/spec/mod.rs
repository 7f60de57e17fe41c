//! The description of a job in the words that all engines share, and the command of its agents.

mod engine;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod values;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use accelerator_host::cli::{Error, Result};
use accelerator_host::process::{find_installed, is_executable, on_path};
use serde::{Deserialize, Serialize};

#[cfg(feature = "ray")]
pub(crate) use engine::RayPlacement;
pub(crate) use engine::{EngineAddress, EngineKind, EngineOptions};
#[cfg(feature = "kubernetes")]
pub(crate) use kubernetes::{DataMount, ObjectKind, SyncMode, Taint};
#[cfg(feature = "image")]
pub(crate) use values::include;
pub(crate) use values::{JobName, Memory, time_limit};

/// A job as it is submitted, and kept in its record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct JobSpec {
    pub(crate) name: JobName,
    /// Random digits that engines keep with the job and return with it. They distinguish it from another job with its
    /// name.
    pub(crate) nonce: String,
    pub(crate) engine: EngineKind,
    /// Nodes that run the job; one agent runs on each.
    pub(crate) nodes: NonZeroUsize,
    /// The ranks per node: a number, `auto`, `gpu` or `cpu`, as for `accel-launch --nproc-per-node`.
    pub(crate) nproc_per_node: String,
    pub(crate) resources: Resources,
    /// The time after which the job is ended.
    pub(crate) time_limit: Option<Duration>,
    /// Variables of the ranks.
    pub(crate) env: BTreeMap<String, String>,
    /// The folder in which the program starts.
    pub(crate) working_dir: Option<PathBuf>,
    /// The number of times that a job which failed or lost a node is started again.
    pub(crate) max_restarts: u32,
    /// A priority class of Kubernetes, a QOS of Slurm.
    pub(crate) priority: Option<String>,
    /// True if a TensorBoard shows `logdir` while the job runs.
    pub(crate) tensorboard: bool,
    /// The folder of event files, as the program sees it.
    pub(crate) logdir: PathBuf,
    pub(crate) program: Vec<String>,
    pub(crate) address: EngineAddress,
    /// The options that only one engine knows.
    pub(crate) options: EngineOptions,
}

/// The resources of each node of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Resources {
    /// Cores.
    pub(crate) cpus: Option<NonZeroUsize>,
    /// GPUs; 0 for none.
    pub(crate) gpus: usize,
    /// Memory in bytes.
    pub(crate) memory: Option<Memory>,
}

impl JobSpec {
    /// Returns the number of GPUs of all nodes.
    pub(crate) fn all_gpus(&self) -> usize {
        self.nodes.get() * self.resources.gpus
    }

    /// Returns the given options that the job's engine does not have: those without which the job would be another one,
    /// and those that it can do without.
    pub(crate) fn ignored_options(&self) -> (Vec<String>, Vec<String>) {
        /// They say what runs, on which nodes, and with which GPUs.
        const DECISIVE: [&str; 11] = [
            "--base-image",
            "--constraint",
            "--data",
            "--gpus",
            "--image",
            "--include",
            "--node-selector",
            "--placement",
            "--ray-include",
            "--sbatch-arg",
            "--sync-mode",
        ];
        let mut ignored = Vec::new();
        if self.engine == EngineKind::Local {
            let resources = self.resources;
            let limits = [
                ("--cpus", resources.cpus.is_some()),
                ("--gpus", resources.gpus > 0),
                ("--memory", resources.memory.is_some()),
                ("--priority", self.priority.is_some()),
            ];
            let given = limits.into_iter().filter(|(_, is_given)| *is_given);
            ignored.extend(given.map(|(name, _)| name.to_owned()));
        }
        ignored.extend(self.options.options_of_other_engines(self.engine));
        ignored.extend(self.address.options_of_other_engines(self.engine));
        let is_decisive = |name: &String| DECISIVE.contains(&name.as_str());
        ignored.into_iter().partition(is_decisive)
    }

    /// Returns the command of the agent on every node.
    pub(crate) fn agent(&self) -> AgentCommand<'_> {
        AgentCommand::new(self)
    }

    /// Returns the absolute path of the program on this machine.
    ///
    /// # Errors
    /// When there is no such file. A name without a slash is searched on the PATH.
    pub(crate) fn program_file(&self) -> Result<PathBuf> {
        let word = self.program.first().map_or("", String::as_str);
        let found = match word.contains('/') {
            true => Some(PathBuf::from(word)),
            false => on_path(word),
        };
        let found = found.filter(|path| is_executable(path));
        match found {
            Some(path) => absolute(&path),
            None => Err(Error::usage(format!(
                "{word:?} is not a program of this machine: {}",
                why_no_program(word)
            ))),
        }
    }
}

fn why_no_program(word: &str) -> String {
    let path = Path::new(word);
    if path.extension().is_some_and(|extension| extension == "rs") {
        "it is source; build it (`cargo build --release --example NAME`), and give target/release/examples/NAME".to_owned()
    } else if !path.exists() {
        "there is no such file; give the path of one, such as target/release/examples/mnist"
            .to_owned()
    } else if !word.contains('/') && is_executable(path) {
        format!("the PATH has none of that name; give ./{word} for the one in this folder")
    } else {
        "it is no executable file".to_owned()
    }
}

/// Makes `path` absolute.
pub(crate) fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|error| {
        Error::system(format!("the folder of {} is not known", path.display())).with_source(error)
    })
}

/// `accel-launch` with the options of a job. The agent reads missing options from the engine's variables.
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
    /// Makes the command for the agent on the PATH of the node.
    fn new(spec: &'a JobSpec) -> Self {
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

    /// Sets the path of `accel-launch` on the node.
    pub(crate) fn launcher(mut self, path: impl Into<String>) -> Self {
        self.launcher = path.into();
        self
    }

    /// Sets the path of the program on the node.
    pub(crate) fn program(mut self, path: impl Into<String>) -> Self {
        self.program = Some(path.into());
        self
    }

    /// Sets the folder in which the agent of node 0 writes the output of ranks and the report of a failure.
    pub(crate) fn log_dir(mut self, path: impl Into<String>) -> Self {
        self.log_dir = Some(path.into());
        self
    }

    /// Sets the number of seconds for which agents wait for each other, at the start and after a loss.
    #[cfg(feature = "slurm")]
    pub(crate) fn join_timeout(mut self, seconds: u64) -> Self {
        self.join_timeout = Some(seconds);
        self
    }

    /// Sets the number of seconds that ranks have to save after SIGTERM.
    #[cfg(feature = "slurm")]
    pub(crate) fn grace(mut self, seconds: u64) -> Self {
        self.grace = Some(seconds);
        self
    }

    /// Sets the rank of the node: a number, or a word that a shell expands to one.
    pub(crate) fn node_rank(mut self, rank: impl ToString) -> Self {
        self.node_rank = Some(rank.to_string());
        self
    }

    /// Sets the address of node 0: `HOST:PORT`.
    pub(crate) fn endpoint(mut self, endpoint: impl Into<String>) -> Self {
        self.endpoint = Some(endpoint.into());
        self
    }

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

/// Finds the `accel-launch` of this machine: installed with this program, else on the PATH.
pub(crate) fn launcher_here() -> Result<PathBuf> {
    find_installed("accel-launch").ok_or_else(|| {
        Error::usage(
            "accel-launch is neither beside accel-jobs nor on the PATH; in the clone that accel-jobs was built from, \
             run `cargo install --locked --path launcher`",
        )
    })
}
