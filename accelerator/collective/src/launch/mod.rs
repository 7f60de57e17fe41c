//! A launch, as the environment describes it.

mod agent;
mod builder;
mod exchange;
mod inherited;
mod place;
mod pmi1;
mod pmix;
mod reader;
mod slurm;
mod sources;
#[cfg(test)]
mod tests;

use std::time::Duration;

use accelerator_host::variable;

pub use agent::{AgentHead, AgentLaunch, AgentProcesses, NodeCount};
#[cfg(target_os = "linux")]
pub use inherited::{inherited, spawn_with_inherited};
pub use reader::{LaunchSource, Origin, Setting};
pub use slurm::expand_hosts;
pub use sources::place_variables;

use exchange::Exchange;
use reader::LaunchReader;

use crate::{
    error::{Error, Result},
    processor::keep_mark,
    rendezvous::{MAX_WAIT, Meeting, Rendezvous, WeakStoreClient, resolve_local_rank},
    topology::{Topology, TransportKind},
    wire::message::Registration,
};

/// The launch of this process: its place in the job and where the ranks meet.
///
/// [`from_env`](Self::from_env) asks these launchers in turn. The first that tells a place tells all of it;
/// [`source`](Self::source) is that one:
///
/// | launcher | place | where the ranks meet, without `MASTER_ADDR` |
/// |---|---|---|
/// | `accel-launch`, torchrun, or whoever sets `RANK` | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | nothing tells |
/// | Open MPI | `OMPI_COMM_WORLD_RANK`, `…_SIZE`, `…_LOCAL_RANK`, `…_LOCAL_SIZE` | on one host, on the loopback interface; else rank 0 tells the others through PMIx (`libpmix.so.2`) |
/// | PMI: MPICH, Intel MPI, `srun --mpi=pmi2` | `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` | rank 0 tells the others through `PMI_FD` or `PMI_PORT` |
/// | a step of Slurm | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID`, `SLURM_NODEID`, `SLURM_STEP_TASKS_PER_NODE` | the first host of `SLURM_STEP_NODELIST`, at port 21000 + (job + 257 · step) mod 8000; the job is `slurm-JOB.STEP` |
///
/// Through a launcher, rank 0 sends the others the addresses of its host, a port and a new token, once per process,
/// when the ranks connect. Slurm's variables come without a token, so ranks on several
/// hosts need `ACCEL_TOKEN_FILE`, or `srun --mpi=pmi2`.
///
/// `LOCAL_RANK` may be told without `LOCAL_WORLD_SIZE`: the ranks find out the rest, and whether it agrees.
///
/// Further variables:
///
/// | variable | meaning |
/// |---|---|
/// | `MASTER_ADDR` | the host of the store where the ranks meet, with any launcher; if it is a name (not `localhost`) that leads to a loopback address on rank 0's host, rank 0 listens at all addresses of its host |
/// | `ACCEL_PORT`, else `MASTER_PORT` | the port of the store |
/// | `TORCHELASTIC_USE_AGENT_STORE` | torchrun's agent listens on `MASTER_PORT`: the store is one above |
/// | `TORCHELASTIC_RUN_ID`, `ACCEL_JOB` | the name of the job; ranks of another job are refused |
/// | `ACCEL_STORE` | `launcher` where the launcher hosts the store, `rank0` (default) where rank 0 does |
/// | `ACCEL_TOKEN_FILE` | the file that holds the job token |
/// | `ACCEL_INSECURE` | `1` lets several hosts meet without a token |
/// | `ACCEL_NETWORK_INTERFACE` | the network interface at whose address this rank listens for the others |
/// | `ACCEL_TRANSPORT` | `auto` (default), `hierarchical`, `shm`, `tcp` or `threads` |
/// | `ACCEL_LIVENESS_TIMEOUT` | after how many seconds of silence a rank counts as lost |
/// | `ACCEL_RESTART`, `ACCEL_MAX_RESTARTS` | how often the job was restarted, and may be; set by the launcher |
/// | `ACCEL_ELASTIC` | `running` if the launcher may give ranks a place in a next group, `joining` if the others are already running |
/// | `ACCEL_ON_LOSS` | `continue` if the launcher may give the survivors of a lost rank places in a next group, `survivor` if it has given this rank one |
/// | `ACCEL_SET_BY_LAUNCHER` | which variables the launcher has set itself, separated by commas: a program that does not know one of them is older than the launcher and ignores it |
///
/// `ACCEL_FAULTS`, faults to inject for tests, is read by `burn-accelerate-fault`.
///
/// If no launcher tells a place, the process is a world of its own. Anything incomplete, malformed or contradictory
/// is an error: a process never becomes rank 0 by accident. So it is an error, too, if a job has several processes,
/// but this one has no place among them: the body of a batch script or a shell of `salloc` in a job of several tasks, a
/// program that an operator of Kubernetes has set up for an agent (`PET_NNODES`, `PET_NPROC_PER_NODE`; start it with
/// `accel-launch`), PMI or PMIx without a rank and a size; and where `RANK` is set by none of the launchers above and
/// contradicts MPI's.
///
/// For example, from the variables of a launcher:
///
/// ```
/// use accelerator_collective::{Launch, TransportKind};
///
/// # fn main() -> accelerator_collective::Result<()> {
/// let launched = Launch::from_vars(|name| {
///     let value = match name {
///         "RANK" | "LOCAL_RANK" => "1",
///         "WORLD_SIZE" | "LOCAL_WORLD_SIZE" => "2",
///         "MASTER_ADDR" => "127.0.0.1",
///         "ACCEL_PORT" => "29500",
///         "ACCEL_TRANSPORT" => "shm",
///         "ACCEL_RESTART" => "1",
///         "ACCEL_MAX_RESTARTS" => "3",
///         _ => return None,
///     };
///     Some(value.to_owned())
/// })?;
/// assert_eq!((launched.restart(), launched.max_restarts()), (1, Some(3)));
/// assert_eq!(launched.transport, TransportKind::Shm);
/// assert_eq!(launched.rendezvous.as_ref().map(|store| store.port()), Some(29_500));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Launch {
    /// The place of this rank. Without `LOCAL_RANK` its place on its host is known where `MASTER_ADDR` is on the
    /// loopback interface, as all ranks share the host then; otherwise [`Topology::is_local_known`] is false here,
    /// and the [group](crate::ProcessGroup::topology) knows it.
    pub topology: Topology,
    /// The place where the ranks meet; `None` in a world of one, or if rank 0 tells the others through their launcher.
    pub rendezvous: Option<Rendezvous>,
    /// The transport that the environment asks for.
    pub transport: TransportKind,
    /// The time without a heartbeat after which a rank counts as lost, if the environment sets it.
    pub(crate) liveness_timeout: Option<Duration>,
    restart: u64,
    max_restarts: Option<u64>,
    settings: Vec<Setting>,
    source: Option<LaunchSource>,
    noticed: Vec<LaunchSource>,
    exchange: Option<Exchange>,
    elastic: Elastic,
    pub(crate) on_loss: OnLoss,
    /// The store of the group that this rank comes from, if any.
    pub(crate) former_store: WeakStoreClient,
    /// A local rank that was told without the local world size.
    local_rank: Option<usize>,
}

impl Launch {
    /// A world of one.
    pub fn single() -> Self {
        Self {
            topology: Topology::single(),
            rendezvous: None,
            transport: TransportKind::Auto,
            liveness_timeout: None,
            restart: 0,
            max_restarts: None,
            settings: Vec::new(),
            source: None,
            noticed: Vec::new(),
            exchange: None,
            elastic: Elastic::Fixed,
            on_loss: OnLoss::End,
            former_store: WeakStoreClient::default(),
            local_rank: None,
        }
    }

    /// Reads the environment of this process. If `PMI_PORT` and `PMI_ID` are set, but not `PMI_RANK`, it asks the
    /// launcher at that address for the rank; nothing else is sent before the ranks connect.
    ///
    /// # Errors
    ///
    /// A topology error that names the variable, what it holds and what was expected; a rendezvous or protocol error
    /// if the launcher at `PMI_PORT` does not answer.
    pub fn from_env() -> Result<Self> {
        // Whatever finds its place here can be checked by its launcher.
        keep_mark();
        // A value that is not Unicode cannot be any of the valid ones; the lossy text shows it.
        let read = |name: &str| Some(variable(name)?.to_string_lossy().into_owned());
        let Some((address, id)) = sources::pmi_to_ask(LaunchReader(&read))? else {
            return Self::from_vars(read);
        };
        let asked = pmi1::asked(&address, id)?;
        Self::from_vars(|name| match name {
            "PMI_RANK" => Some(asked.rank.to_string()),
            "PMI_SIZE" => Some(asked.world_size.to_string()),
            _ => read(name),
        })
    }

    /// Returns the number of times that the launcher has restarted this job (`ACCEL_RESTART`); 0 the first time.
    pub fn restart(&self) -> u64 {
        self.restart
    }

    /// Returns the most times that the launcher restarts this job (`ACCEL_MAX_RESTARTS`); `None` without
    /// a launcher that restarts.
    pub fn max_restarts(&self) -> Option<u64> {
        self.max_restarts
    }

    /// The launcher that told the place of this process; `None` if none did, and the process is alone or was given
    /// its place by the program.
    ///
    /// ```
    /// use accelerator_collective::Launch;
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// let launch = Launch::from_vars(|name| {
    ///     let value = match name {
    ///         "OMPI_COMM_WORLD_RANK" | "OMPI_COMM_WORLD_LOCAL_RANK" => "1",
    ///         "OMPI_COMM_WORLD_SIZE" | "OMPI_COMM_WORLD_LOCAL_SIZE" => "2",
    ///         "PMIX_NAMESPACE" => "prterun-node-0-4711@1",
    ///         _ => return None,
    ///     };
    ///     Some(value.to_owned())
    /// })?;
    /// assert_eq!(launch.topology.to_string(), "rank 1 of 2 (local 1 of 2)");
    /// assert_eq!(launch.source().unwrap().launcher, "Open MPI");
    /// # Ok(())
    /// # }
    /// ```
    pub fn source(&self) -> Option<LaunchSource> {
        self.source
    }

    /// Returns `true` if this process has nobody to meet: it is the only one, and stays so.
    pub(crate) fn is_alone(&self) -> bool {
        self.topology.world_size() == 1 && self.elastic == Elastic::Fixed
    }

    /// Meets the other ranks.
    ///
    /// # Errors
    ///
    /// The same as for [`ProcessGroup::connect`](crate::ProcessGroup::connect).
    pub(crate) fn meet(
        &self,
        connect_timeout: Duration,
        liveness: Duration,
        transport: TransportKind,
    ) -> Result<Meeting> {
        let connect_timeout = match (self.elastic, self.on_loss) {
            // The others come when they have ended their step. The launcher ends the wait if they do not.
            (Elastic::Joining, _) | (_, OnLoss::Survivor) => MAX_WAIT,
            (Elastic::Fixed | Elastic::Running, OnLoss::End | OnLoss::Continue) => connect_timeout,
        };
        match (&self.rendezvous, &self.exchange) {
            (Some(rendezvous), _) => rendezvous.meet(
                &self.topology,
                connect_timeout,
                liveness,
                transport,
                &self.former_store,
            ),
            (None, Some(exchange)) => {
                exchange.meet(&self.topology, connect_timeout, liveness, transport)
            }
            (None, None) => Err(Error::topology(format!(
                "the launch of {} does not say where the ranks meet",
                self.topology
            ))),
        }
    }

    /// The topology of a rank that has met the others, whose places on their hosts are known now.
    ///
    /// # Errors
    ///
    /// A topology error if that is not found, or is not what the launcher told.
    pub(crate) fn met(&self, ranks: &[Registration]) -> Result<Topology> {
        let topology = resolve_local_rank(self.topology, ranks)?;
        match self.local_rank {
            Some(told) if told != topology.local_rank() => Err(Error::topology(format!(
                "this process was told that its local rank is {told}, without the local world size, but it is \
                 {topology} by the hosts of all ranks; set LOCAL_RANK and LOCAL_WORLD_SIZE for every process"
            ))),
            _ => Ok(topology),
        }
    }
}

#[doc(hidden)]
impl Launch {
    /// A launch that the program describes itself.
    pub fn new(topology: Topology, rendezvous: Rendezvous) -> Self {
        Self {
            topology,
            rendezvous: Some(rendezvous),
            ..Self::single()
        }
    }

    /// Every setting with its value and where it came from, in a fixed order.
    ///
    /// ```
    /// use accelerator_collective::Launch;
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// for setting in Launch::from_vars(|_| None)?.settings() {
    ///     println!("{} = {} ({})", setting.name, setting.value, setting.origin);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn settings(&self) -> &[Setting] {
        &self.settings
    }

    /// Launchers that have left variables, and whose place this process does not take.
    ///
    /// ```
    /// use accelerator_collective::Launch;
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// let launch = Launch::from_vars(|name| {
    ///     let value = match name {
    ///         "OMPI_COMM_WORLD_RANK" | "OMPI_COMM_WORLD_LOCAL_RANK" => "1",
    ///         "OMPI_COMM_WORLD_SIZE" | "OMPI_COMM_WORLD_LOCAL_SIZE" => "2",
    ///         "PMIX_NAMESPACE" => "prterun-node-0-4711@1",
    ///         // `mpirun` in a job of Slurm's starts its daemons as tasks of a step.
    ///         "SLURM_PROCID" => "0",
    ///         _ => return None,
    ///     };
    ///     Some(value.to_owned())
    /// })?;
    /// assert_eq!(launch.noticed()[0].variable, "SLURM_PROCID");
    /// # Ok(())
    /// # }
    /// ```
    pub fn noticed(&self) -> &[LaunchSource] {
        &self.noticed
    }
}

/// The fate of a group that has lost a rank.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum OnLoss {
    /// All its ranks end.
    End,
    /// The launcher may give the survivors places in a next group.
    Continue,
    /// The same as `Continue`, in a process that has survived such a loss.
    Survivor,
}

/// Tells if the number of ranks may change while they run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Elastic {
    Fixed,
    /// The number may change; this process waits for the others as long as any.
    Running,
    /// The number may change, and the other ranks run already.
    Joining,
}

/// Refuses to take this process for one that is alone if another launcher has started several alike, for a launcher,
/// which gives its ranks their places itself. It may run in the body of a batch script, where [`Launch::from_vars`]
/// refuses a program.
///
/// # Errors
///
/// A topology error that names the launcher, its variables and what to do.
pub fn check_alone(lookup: impl Fn(&str) -> Option<String>) -> Result<()> {
    sources::check_alone(LaunchReader(&lookup))
}
