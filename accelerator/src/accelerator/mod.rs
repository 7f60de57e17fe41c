mod batch_size;
mod builder;
mod checkpoints;
mod collectives;
mod finish;
#[cfg(feature = "burn-train")]
mod metric_logger;
mod precision;
mod preemption;
mod prepare;
mod process_control;
mod profile;
#[cfg(feature = "progress")]
mod progress;
mod rank_processes;
mod recover;
mod trackers;
mod training;
mod variables;

use core::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use accelerator_collective::{ProcessGroup, Topology};
use accelerator_host::sync::Mutex;
use burn::tensor::Device;

pub use self::builder::AcceleratorBuilder;
pub use self::collectives::PadSide;
#[cfg(feature = "burn-train")]
pub use self::metric_logger::RunLogger;
pub use self::prepare::Prepare;
pub(crate) use self::rank_processes::{
    GRACE, ProcessRole, RankProcesses, receive_from_parent, send, send_to_parent,
};
pub use self::rank_processes::{launch, launch_processes};
use crate::checkpoint::{CheckpointContext, SurvivorState};
use crate::context::Context;
use crate::core::device::BackendKind;
use crate::core::error::{self, Result};
use crate::data::UncountedPadding;
use crate::optim::OptimizerCount;
use crate::precision::Precision;
use crate::reduce::ReduceContext;
use crate::tracking::{RunEnding, TrackerSettings, Tracking};

/// The rank of this process (or, under [`launch`](crate::launch), of this thread) in a job, with everything that a
/// training loop needs.
///
/// It is a handle: clones are the same accelerator. There is no global state, so one process
/// may hold several.
///
/// ```
/// use accelerator::Accelerator;
///
/// let accelerator = Accelerator::new()?;
/// accelerator.print(format_args!("{} on {}", accelerator.topology(), accelerator.backend_kind()));
/// accelerator.finish()
/// # .map(|()| assert!(accelerator.is_main_process()))
/// # ; Ok::<(), accelerator::Error>(())
/// ```
#[derive(Clone)]
pub struct Accelerator {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    /// Set if the last `backward` left its window open.
    accumulates: AtomicBool,
    /// The state that this rank has brought from the failed group, until the program resumes from it.
    brought: Mutex<Option<SurvivorState>>,
    builder: AcceleratorBuilder,
    checkpoints: Arc<CheckpointContext>,
    pub(crate) context: Arc<Context>,
    /// The number of prepared optimizers that live.
    pub(crate) optimizers: OptimizerCount,
    pub(crate) reduction: Arc<ReduceContext>,
    /// The groups of this rank, once they are made.
    groups: Mutex<Option<Groups>>,
    restarts: u64,
    trace: builder::TraceSettings,
    pub(crate) tracker_settings: TrackerSettings,
    tracking: Arc<Tracking>,
    uncounted: UncountedPadding,
}

impl Drop for Shared {
    /// The program ends without `finish`, which would have written the trace: a `?` has left the loop,
    /// or a panic.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.reduction.device_reducer.rest();
        } else if self.reduction.working.lacks_copy() && self.context.is_main_process() {
            error::warn(
                "inputs were cast by `to_working`, and no model was: where the panic is about types, write \
                 `accelerator.forward(&model, |model| …)` around the forward pass",
            );
        }
        let failure = match std::thread::panicking() {
            true => Some(ProcessGroup::last_panic()),
            false => self.context.group.failure(),
        };
        let failure = failure.or_else(|| self.tracking.writes().then(|| LEFT.to_owned()));
        // The run learns of that checkpoint before it ends.
        self.checkpoints.complete();
        if let Some(failure) = failure {
            self.tracking.end(RunEnding::Finished, Some(&failure));
        }
        let rank = self.context.rank();
        let timeline = &self.context.timeline;
        timeline.end(None);
        if let Some(path) = self.trace.whole()
            && let Err(error) = timeline.write_own(path)
        {
            error::warn(&format!("the trace of rank {rank} is lost: {error}"));
        }
    }
}

impl Accelerator {
    /// Connects this process as the rank that the environment names, as `accel-launch`, torchrun or a cluster sets
    /// it. A process that was started by hand is the only rank. Everything else has its default: see
    /// [`Accelerator::builder`].
    ///
    /// # Errors
    ///
    /// See [`AcceleratorBuilder::build`].
    #[track_caller]
    pub fn new() -> Result<Self> {
        Self::builder().build()
    }

    /// Returns a builder with the defaults; change them before [`AcceleratorBuilder::build`].
    pub fn builder() -> AcceleratorBuilder {
        AcceleratorBuilder::new()
    }

    /// Returns the device to build models on. It records gradients. Batches arrive on its plain form, so evaluation
    /// on `model.valid()` records none.
    pub fn device(&self) -> Device {
        self.shared.context.autodiff_device()
    }

    /// Returns the kind of [`device`](Self::device).
    pub fn backend_kind(&self) -> BackendKind {
        self.shared.context.backend_kind
    }

    /// Returns the rank, world size, local rank and local world size.
    pub fn topology(&self) -> &Topology {
        self.group().topology()
    }

    /// Returns the number of this rank among all, from 0.
    pub fn rank(&self) -> usize {
        self.shared.context.rank()
    }

    /// Returns the number of ranks of the job.
    pub fn world_size(&self) -> usize {
        self.shared.context.world_size()
    }

    /// Returns the number of calls of [`backward`](Self::backward) per optimizer step.
    pub fn accumulation_steps(&self) -> usize {
        self.shared.context.accumulation.steps()
    }

    /// Sets the number of micro-steps of an accumulation window, beginning with the one that is open. All ranks must
    /// call it at the same point.
    ///
    /// ```
    /// use accelerator::prelude::*;
    ///
    /// let accelerator = Accelerator::builder().accumulation_steps(2).build()?;
    /// accelerator.set_accumulation_steps(4)?;
    /// assert_eq!(accelerator.accumulation_steps(), 4);
    /// assert!(accelerator.set_accumulation_steps(0).unwrap_err().is_config());
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config) for 0 steps. Where ranks say different numbers, the window that
    /// they end differently fails on all of them.
    pub fn set_accumulation_steps(&self, steps: usize) -> Result<()> {
        let steps = builder::micro_steps(steps)?;
        self.shared.context.accumulation.set_steps(steps);
        Ok(())
    }

    /// Returns the type in which forward and backward compute; see [`precision`](crate::precision).
    pub fn precision(&self) -> Precision {
        self.shared.reduction.settings.precision
    }

    /// Returns how often the launcher has restarted this job: 0 in the first attempt, and without a launcher.
    pub fn restarts(&self) -> u64 {
        self.shared.restarts
    }

    /// Returns the underlying process group, for communication that has no method here.
    ///
    /// ```
    /// use accelerator::prelude::*;
    ///
    /// let latest = launch(2, |accelerator| {
    ///     let mut seconds = [0.5 * accelerator.rank() as f64];
    ///     accelerator.group().all_reduce(&mut seconds, ReduceOp::Max)?;
    ///     Ok(seconds[0])
    /// })?;
    /// assert_eq!(latest, [0.5, 0.5]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn group(&self) -> &ProcessGroup {
        &self.shared.context.group
    }

    /// Returns two groups of this rank: the ranks of its host, and the ranks that have its local rank on all hosts, itself
    /// included. For other groups, call [`split`](ProcessGroup::split) on [`group`](Self::group).
    ///
    /// The first call creates the groups, which is a collective operation: all ranks must make it at the same point among
    /// their collectives. Later calls only return them.
    ///
    /// ```
    /// use accelerator::prelude::*;
    ///
    /// let sums = launch(2, |accelerator| {
    ///     let groups = accelerator.groups()?;
    ///     // Threads are on one host.
    ///     assert_eq!((groups.host().world_size(), groups.replicas().world_size()), (2, 1));
    ///     let mut values = [1.0_f32];
    ///     groups.host().all_reduce(&mut values, ReduceOp::Sum)?;
    ///     Ok(values[0])
    /// })?;
    /// assert_eq!(sums, [2.0, 2.0]);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) if the groups cannot be made.
    #[track_caller]
    pub fn groups(&self) -> Result<Groups> {
        let mut groups = self.shared.groups.lock();
        if let Some(groups) = &*groups {
            return Ok(groups.clone());
        }
        let [host, replicas] = self.group().split_by_hosts()?;
        Ok(groups.insert(Groups { host, replicas }).clone())
    }
}

/// A rank's group on its host, and its group across hosts; from [`Accelerator::groups`].
///
/// For hybrid sharding, the ranks of a host hold the shards of one replica of the model: gather parameters in
/// [`host`](Self::host), and average gradients in [`replicas`](Self::replicas).
#[derive(Clone, Debug)]
pub struct Groups {
    host: ProcessGroup,
    replicas: ProcessGroup,
}

impl Groups {
    /// Returns the group of the ranks of this host, in the order of their local ranks.
    pub fn host(&self) -> &ProcessGroup {
        &self.host
    }

    /// Returns the group of the ranks with the same local rank as this one, at most one per host, in the order of the
    /// hosts.
    pub fn replicas(&self) -> &ProcessGroup {
        &self.replicas
    }
}

impl fmt::Debug for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accelerator")
            .field("topology", self.topology())
            .field("device", &self.shared.context.device)
            .field("settings", &self.shared.reduction.settings)
            .finish_non_exhaustive()
    }
}

/// The reason for which a run failed that the program did not end.
const LEFT: &str =
    "the program left without `finish`: it returned an error, or lacks `accelerator.finish()`";
