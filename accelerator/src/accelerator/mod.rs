mod builder;
mod collectives;
mod environment;
mod process;

use core::fmt;
use core::num::{NonZeroU64, NonZeroUsize};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use accelerator_collective::{ProcessGroup, Topology};
use burn::module::Module;
use burn::tensor::{Device, Tensor};

pub use self::builder::AcceleratorBuilder;
use crate::checkpoint::Ongoing;
use crate::device::DeviceKind;
use crate::error::{Error, Result};
use crate::gradient::{Gradients, Weight};
use crate::model::Models;
use crate::prepare::Prepare;

/// This process's (or, under [`launch`](crate::launch), this thread's) place among the ranks of
/// a job, with everything a training loop needs of it.
///
/// It is a handle: clones are the same accelerator. There is no global state, so one process
/// may hold several.
///
/// ```
/// use accelerator::Accelerator;
///
/// let accelerator = Accelerator::new()?;
/// accelerator.print(format_args!("{} on {}", accelerator.topology(), accelerator.device_kind()));
/// accelerator.finish()
/// # .map(|()| assert!(accelerator.is_main_process()))
/// # ; Ok::<(), accelerator::Error>(())
/// ```
#[derive(Clone)]
pub struct Accelerator {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) checkpoints: Ongoing,
    pub(crate) device: Device,
    pub(crate) group: ProcessGroup,
    pub(crate) kind: DeviceKind,
    /// How many loaders were prepared: the next one's number.
    pub(crate) loaders: AtomicU64,
    pub(crate) models: Models,
    pub(crate) restarts: Restarts,
    pub(crate) settings: Settings,
}

/// What the builder was told, checked.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) accumulation_steps: NonZeroUsize,
    /// In bytes.
    pub(crate) bucket_size: usize,
    /// After how many optimizer steps the parameters of all ranks are compared.
    pub(crate) check_replicas: Option<NonZeroU64>,
    pub(crate) seed: u64,
}

/// What the launcher says about restarts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Restarts {
    done: u64,
    most: Option<u64>,
}

impl Accelerator {
    /// Takes its place from the environment that `accel-launch`, torchrun or a cluster made; a
    /// process that was started by hand is alone. Everything else has its default: see
    /// [`Accelerator::builder`].
    ///
    /// # Errors
    ///
    /// See [`AcceleratorBuilder::build`].
    pub fn new() -> Result<Self> {
        Self::builder().build()
    }

    /// Starts from the defaults, to be changed before [`AcceleratorBuilder::build`].
    pub fn builder() -> AcceleratorBuilder {
        AcceleratorBuilder::new()
    }

    /// Makes model, optimizer and data loaders ready for wherever this program was started, and
    /// gives them back in the order in which they came.
    ///
    /// | give | get |
    /// |---|---|
    /// | a Burn module | the same module, with rank 0's parameters, buffers and parameter ids |
    /// | a `ModuleOptimizer` | a [`PreparedOptimizer`](crate::optim::PreparedOptimizer) whose `step` takes the learning rate |
    /// | `(optimizer, scheduler)` | one whose `step` advances the scheduler itself |
    /// | a [`Loader`](crate::data::Loader) | this rank's share, as a [`PreparedLoader`](crate::data::PreparedLoader) |
    /// | [`InOrder`](crate::data::InOrder) around one of Burn's own loaders | the same, shared out batch by batch |
    /// | a tuple of these | a tuple of those |
    ///
    /// Every rank must prepare the same things in the same order.
    ///
    /// A bare number is a Burn module too, so `(optimizer, 1e-3)` could be two things, and the
    /// compiler answers "type annotations needed" (E0283). Give a constant rate to `step`, or as
    /// `(optimizer, ConstantLr::new(1e-3))`.
    ///
    /// # Errors
    ///
    /// [`Error::is_model`](crate::Error::is_model) when the model's layout differs between ranks,
    /// naming the rank and the first path that differs;
    /// [`Error::is_config`](crate::Error::is_config) for a loader whose batch size is 0 or cannot be
    /// shared by this many ranks, or that differs between ranks;
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost.
    pub fn prepare<K, P: Prepare<K>>(&self, parts: P) -> Result<P::Prepared> {
        parts.prepare(self)
    }

    /// Runs the backward pass of `loss` and, at the end of an accumulation window, averages the
    /// gradients of `model` over every sample of every rank.
    ///
    /// `loss` is the mean over this rank's batch, as Burn's losses give it. `weight` says over
    /// how many samples (or tokens): pass the batch itself, [`Batch::with_weight`], or a count.
    /// The average is exact also where ranks or micro-steps hold different numbers of samples;
    /// an idle rank's gradient counts as zero.
    ///
    /// Nothing is communicated before the window ends. The result goes to
    /// [`PreparedOptimizer::step`], which leaves the model alone until then.
    ///
    /// [`Batch::with_weight`]: crate::data::Batch::with_weight
    /// [`PreparedOptimizer::step`]: crate::optim::PreparedOptimizer::step
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`](crate::Error::is_misuse) for a model that was not prepared, a loss
    /// that does not depend on one, a weight that is not a number of samples, or a batch of a
    /// loader with [`TailPolicy::Uneven`](crate::plan::TailPolicy::Uneven);
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost. The model
    /// is untouched in each case.
    #[track_caller]
    pub fn backward<M: Module>(
        &self,
        loss: Tensor<1>,
        model: &M,
        weight: impl Into<Weight>,
    ) -> Result<Gradients> {
        crate::gradient::backward(self, loss, model, weight.into())
    }

    /// Says goodbye to the other ranks, once all have come here. Call it at the end of the
    /// program: ranks that still communicate when another has left without it get an error that
    /// says so.
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when a rank does not come. The error of
    /// a checkpoint that was [saved beside training](Self::save_state_async), if nobody asked for it
    /// before; the group is left all the same. Where both go wrong, the error is that of the
    /// checkpoint, with the other one as its [source](Error::collective).
    #[track_caller]
    pub fn finish(&self) -> Result<()> {
        let saved = self.shared.checkpoints.settle(self);
        let met = self.shared.group.barrier();
        self.shared.group.close()?;
        match (saved, met) {
            (saved, Ok(())) => saved,
            (Ok(()), Err(lost)) => Err(lost.into()),
            (Err(error), Err(_)) if error.is_collective() => Err(error),
            (Err(error), Err(lost)) => {
                let message = format!("{error:?}; and the ranks did not finish together: {lost}");
                Err(Error::with_source(error.kind(), message, lost))
            }
        }
    }

    /// Builds a model whose initial weights follow the seed alone, on the device of
    /// [`device`](Self::device).
    ///
    /// A rank that is a process gets that from plain `Model::new(&accelerator.device())` as well.
    /// Ranks that are threads share Burn's CPU generator, and draw from it all at once: there this
    /// method lets one build at a time, from the seed.
    ///
    /// ```
    /// use burn::nn::{Linear, LinearConfig};
    ///
    /// let train = |accelerator: accelerator::Accelerator| {
    ///     let model: Linear = accelerator.init(|device| LinearConfig::new(3, 3).init(device));
    ///     let model = accelerator.prepare(model)?;
    ///     Ok(model.weight.val().into_data())
    /// };
    /// let alone = accelerator::launch(1, train)?;
    /// let together = accelerator::launch(4, train)?;
    /// assert!(together.iter().all(|weight| *weight == alone[0]));
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn init<M: Module>(&self, build: impl FnOnce(&Device) -> M) -> M {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let device = self.device();
        device.seed(self.seed());
        let model = build(&device);
        crate::model::draw_all(&model);
        model
    }

    /// The device to build models on. It records gradients; batches arrive on its plain form, so
    /// that evaluation on `model.valid()` does not.
    pub fn device(&self) -> Device {
        self.shared.device.clone().autodiff()
    }

    /// The kind of [`device`](Self::device).
    pub fn device_kind(&self) -> DeviceKind {
        self.shared.kind
    }

    /// Where this rank stands.
    pub fn topology(&self) -> &Topology {
        self.shared.group.topology()
    }

    /// The number of this process among all, from 0.
    pub fn rank(&self) -> usize {
        self.shared.group.rank()
    }

    /// How many ranks the job has.
    pub fn world_size(&self) -> usize {
        self.shared.group.world_size()
    }

    /// How many calls of [`backward`](Self::backward) make one optimizer step.
    pub fn accumulation_steps(&self) -> usize {
        self.shared.settings.accumulation_steps.get()
    }

    /// The seed that was given to the builder.
    pub fn seed(&self) -> u64 {
        self.shared.settings.seed
    }

    /// How often the launcher has restarted this job: 0 in its first life, and without a launcher.
    ///
    /// ```
    /// let accelerator = accelerator::Accelerator::new()?;
    /// if accelerator.restarts() > 0 {
    ///     accelerator.print(format_args!("life {}", accelerator.restarts() + 1));
    /// }
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn restarts(&self) -> u64 {
        self.shared.restarts.done
    }

    /// How often the launcher restarts this job at most; `None` without a launcher that does.
    pub fn max_restarts(&self) -> Option<u64> {
        self.shared.restarts.most
    }

    /// The process group underneath, for communication that this type has no method for.
    pub fn group(&self) -> &ProcessGroup {
        &self.shared.group
    }

    pub(crate) fn next_loader(&self) -> u64 {
        self.shared.loaders.fetch_add(1, Ordering::Relaxed)
    }
}

impl fmt::Debug for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accelerator")
            .field("topology", self.topology())
            .field("device", &self.shared.device)
            .field("settings", &self.shared.settings)
            .finish_non_exhaustive()
    }
}
