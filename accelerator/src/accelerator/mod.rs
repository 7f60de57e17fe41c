mod builder;
mod collectives;
mod environment;
mod padding;
mod passed;
mod process;
mod share;
mod trigger;

use core::cell::Cell;
use core::fmt;
use core::num::{NonZeroU64, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use accelerator_collective::{ProcessGroup, Topology};
use burn::module::Module;
use burn::tensor::{Device, Tensor};

pub use self::builder::AcceleratorBuilder;
pub use self::padding::PadSide;
pub use self::share::PaddedShare;
pub(crate) use self::trigger::Trigger;
use crate::checkpoint::Ongoing;
use crate::data::UncountedPadding;
use crate::device::DeviceKind;
use crate::error::{Error, Result};
use crate::gradient::hook;
use crate::gradient::{
    Compression, FailedCalls, GradientReduction, Gradients, OnNonFiniteLoss, Overlap,
    OverlapReport, Reach, Road, SeenUpdates, Switch, Turn, Weight,
};
use crate::logging::Warned;
use crate::model::Models;
use crate::nn::Crossing;
use crate::notice;
use crate::optim::Census;
use crate::precision::{LossScale, Precision, Scaler, WorkingUse};
use crate::prepare::{self, Prepare};
use crate::timeline::{Recording, Schedule, StepSummary, Timeline};

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
    pub(crate) crossing: Crossing,
    pub(crate) device: Device,
    pub(crate) failed_calls: Arc<FailedCalls>,
    pub(crate) group: ProcessGroup,
    pub(crate) kind: DeviceKind,
    /// How many loaders were prepared: the next one's number.
    pub(crate) loaders: AtomicU64,
    pub(crate) models: Models,
    /// That were prepared, and live.
    pub(crate) optimizers: Census,
    pub(crate) overlap: Switch,
    pub(crate) restarts: Restarts,
    /// Between its device and the other ranks.
    pub(crate) road: Arc<Road>,
    pub(crate) settings: Settings,
    pub(crate) timeline: Timeline,
    pub(crate) trigger: Arc<Trigger>,
    /// Of the threads that reduce gradients.
    pub(crate) turn: Turn,
    pub(crate) uncounted: UncountedPadding,
    pub(crate) warned: Warned,
    pub(crate) working: WorkingUse,
}

impl Drop for Shared {
    /// The program ends without `finish`, which would have written the trace: a `?` has left the loop,
    /// or a panic.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.road.rest();
        } else if self.working.lacks_copy() && self.group.rank() == 0 {
            notice::warn(
                "inputs were cast by `to_working`, and no model was: where the panic is about types, write \
                 `accelerator.forward(&model, |model| …)` around the forward pass",
            );
        }
        let world_size = self.group.world_size();
        self.timeline.write_own_cycles(world_size);
        if let Some(path) = self.settings.whole_trace()
            && let Err(error) = self.timeline.write_own(world_size, path)
        {
            let rank = self.group.rank();
            notice::warn(&format!("the trace of rank {rank} is lost: {error}"));
        }
    }
}

/// What the builder was told, checked.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) accumulation_steps: NonZeroUsize,
    /// In bytes.
    pub(crate) bucket_size: usize,
    /// After how many optimizer steps the parameters of all ranks are compared.
    pub(crate) check_replicas: Option<NonZeroU64>,
    pub(crate) compression: Compression,
    pub(crate) hook: Option<hook::Maker>,
    pub(crate) loss_scale: LossScale,
    pub(crate) on_non_finite_loss: OnNonFiniteLoss,
    pub(crate) overlap: Overlap,
    pub(crate) precision: Precision,
    pub(crate) recording: Recording,
    pub(crate) reduction: GradientReduction,
    pub(crate) same_batches: SameBatches,
    pub(crate) seed: u64,
    /// The file of the trace; with a schedule, the one beside which those of its cycles are.
    pub(crate) trace: Option<PathBuf>,
    pub(crate) trace_schedule: Option<Schedule>,
    pub(crate) window: WindowSize,
}

impl Settings {
    /// The file of the trace, where it is one of the whole program.
    pub(crate) fn whole_trace(&self) -> Option<&Path> {
        match self.trace_schedule {
            Some(_) => None,
            None => self.trace.as_deref(),
        }
    }
}

/// What the program says of ranks that compute the same.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum SameBatches {
    Allowed,
    /// They are taken for a mistake.
    Unexpected,
}

/// What the program says about how much an optimizer step takes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum WindowSize {
    /// So many samples over all ranks.
    Samples,
    /// So many micro-steps.
    Steps,
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
    #[track_caller]
    pub fn new() -> Result<Self> {
        Self::builder().build()
    }

    /// Starts from the defaults, to be changed before [`AcceleratorBuilder::build`].
    pub fn builder() -> AcceleratorBuilder {
        AcceleratorBuilder::new()
    }

    /// Prepares model, optimizer and data loaders for the ranks that there are, and returns them in
    /// the same order.
    ///
    /// | give | get |
    /// |---|---|
    /// | a Burn module | the same module, with rank 0's parameters, buffers and parameter ids |
    /// | a `ModuleOptimizer` | a [`PreparedOptimizer`](crate::optim::PreparedOptimizer) whose `step` takes the learning rate |
    /// | `(optimizer, scheduler)` | one whose `step` advances the scheduler itself |
    /// | [`Sharded(optimizer)`](crate::optim::Sharded) | the same, with its state shared out over the ranks |
    /// | a [`Loader`](crate::data::Loader) | this rank's share, as a [`PreparedLoader`](crate::data::PreparedLoader) |
    /// | [`InOrder`](crate::data::InOrder) around one of Burn's own loaders | the same, shared out batch by batch |
    /// | a tuple of these | a tuple of those |
    ///
    /// Every rank must prepare the same things in the same order.
    ///
    /// A model is known by its parameters' ids, which are rank 0's from here on: go on with what comes back.
    /// A clone that was made before is another model, which was not prepared, on one process too: clone afterwards.
    ///
    /// A model that was prepared before is prepared again when other parts of it are to be trained: see
    /// [freezing](crate::optim#freezing-and-unfreezing-on-the-way). Its training goes on: the count of its steps,
    /// and the scale of its losses. So a training from the start begins with a model that is built anew, and not
    /// with a clone.
    ///
    /// A model that has one `ParamId` in several places, such as a language model whose output layer is a clone of
    /// its token embedding, has one parameter there: it stays [tied](crate::model::retie_parameters).
    ///
    /// A model stays known as long as the accelerator lives, since nothing tells when a program has done with
    /// it: that is a few hundred bytes for each of its parameters. A program that trains one model after the
    /// other needs [memory for the gradients](Self::bucket_memory) of one.
    ///
    /// A bare number is a Burn module too, so `(optimizer, 1e-3)` could be two things, and the
    /// compiler answers "type annotations needed" (E0283). Give a constant rate to `step`, or as
    /// `(optimizer, ConstantLr::new(1e-3))`.
    ///
    /// ```
    /// # use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
    /// # struct Listed;
    /// # impl Batcher<u32, Vec<u32>> for Listed {
    /// #     fn batch(&self, items: Vec<u32>, _: &burn::tensor::Device) -> Vec<u32> { items }
    /// # }
    /// use accelerator::prelude::*;
    /// use burn::lr_scheduler::constant::ConstantLr;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::AdamConfig;
    ///
    /// let accelerator = Accelerator::new()?;
    /// let model: Linear = LinearConfig::new(2, 1).init(&accelerator.device());
    /// let optimizer = (AdamConfig::new().init(), ConstantLr::new(1e-3));
    /// # let dataset = InMemDataset::new((0..32).collect());
    /// let train = DataLoaderBuilder::new(Listed).batch_size(8).build(dataset);
    /// let (model, optimizer, train) = accelerator.prepare((model, optimizer, train))?;
    /// # assert_eq!((optimizer.steps(), train.steps()), (0, Some(4)));
    /// # let _: Linear = model;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_model`](crate::Error::is_model) when the model's layout differs between ranks,
    /// naming the rank and the first path that differs;
    /// [`Error::is_config`](crate::Error::is_config) for a loader whose batch size is 0 or cannot be
    /// shared by this many ranks, whose data set has no samples or makes no step, or that differs between ranks, in
    /// [some of its items](crate::data#the-same-data-set-on-every-rank) too;
    /// [`Error::is_data`](crate::Error::is_data) or [`is_panic`](crate::Error::is_panic) where no rank of several can
    /// read these items;
    /// [`Error::is_misuse`](crate::Error::is_misuse) when ranks prepare different things, or in another order,
    /// for a model of which a parameter lies on a device that records no gradients, as `Device::default()`,
    /// and for a model that is prepared again in the middle of an accumulation window or of
    /// [local training](crate::local), which go on as if it had not been;
    /// [`Error::is_checkpoint`](crate::Error::is_checkpoint) for an optimizer with state that was loaded in another
    /// float type than that of its parameter, of a model that was prepared before;
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost.
    #[track_caller]
    pub fn prepare<K, P: Prepare<K>>(&self, parts: P) -> Result<P::Prepared> {
        prepare::check_kinds::<K, P>(self)?;
        parts.prepare(self)
    }

    /// Runs the backward pass of `loss` and, at the end of an accumulation window, averages the
    /// gradients of `model` over every sample of every rank.
    ///
    /// `loss` is the mean over this rank's batch, as Burn's losses give it. `weight` says over
    /// how many samples (or tokens): pass the batch itself, [`Batch::with_weight`], or a count. A bare count
    /// is taken at its word, on an idle rank too: that has a batch of padding, whose `len()` is not 0. Pass
    /// `&batch`, or [`Batch::real`], which leaves padding out.
    /// The average is exact also where ranks or micro-steps hold different numbers of samples;
    /// an idle rank's gradient counts as zero.
    ///
    /// Nothing is communicated before the window ends. The result goes to
    /// [`PreparedOptimizer::step`], which leaves the model alone until then.
    ///
    /// Ranks pair gradients by the order of calls: where there are several, each calls it from one
    /// thread at a time. Burn 0.22.1 itself may lock up where one thread is in a backward pass while
    /// another computes with the same parameters.
    ///
    /// [`Batch::real`]: crate::data::Batch::real
    /// [`Batch::with_weight`]: crate::data::Batch::with_weight
    /// [`PreparedOptimizer::step`]: crate::optim::PreparedOptimizer::step
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::tensor::Tensor;
    ///
    /// let losses = launch(2, |accelerator| {
    /// #     let device = accelerator.device();
    /// #     let model: Linear = accelerator.init(|device| LinearConfig::new(2, 1).init(device));
    /// #     let model = accelerator.prepare(model)?;
    ///     // A loss of 0 over one sample on rank 0, and of 1 over three on rank 1.
    ///     let samples = 1 + 2 * accelerator.rank();
    /// #     let zero = model.forward(Tensor::<2>::ones([samples, 2], &device)).mean() * 0.0;
    /// #     let loss = zero + accelerator.rank() as f64;
    ///     let gradients = accelerator.backward(loss, &model, samples)?;
    ///     Ok(gradients.loss())
    /// })?;
    /// assert_eq!(losses, [Some(0.75), Some(0.75)]);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`](crate::Error::is_misuse) for a model that was not prepared, or whose replicas
    /// differ in the middle of [local steps](crate::local), a loss that does not depend
    /// on it on any rank (which all learn at the end of the window), a weight that is not a number of samples
    /// or out of the [bounds](crate::Weight) of sums, a
    /// batch of a loader with [`TailPolicy::Uneven`](crate::plan::TailPolicy::Uneven), a call where the ranks are
    /// not together, as in [`on_main_process`](Self::on_main_process), which leaves the window as it is, or after
    /// a [`SyncBatchNorm`](crate::nn::SyncBatchNorm) was used there, a call after one that failed on some ranks
    /// alone and that their programs went on from, which all ranks are told until the next
    /// [`prepare`](Self::prepare) or [`resume`](Self::resume) of a model, a window whose batches are of other
    /// loaders, epochs or steps than those of another rank, which all ranks are told, or a call while another
    /// thread reduces gradients of the same model, or of one whose window is being reduced, which ends
    /// the group;
    /// [`Error::is_not_finite`](crate::Error::is_not_finite) for a loss that is NaN or infinite, where the builder
    /// was asked to [stop there](AcceleratorBuilder::stop_at_non_finite_loss);
    /// [`Error::is_drift`](crate::Error::is_drift), on every rank, where one has stepped more often than another since
    /// the model was prepared, or with another learning rate or clip;
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost. The model
    /// is untouched in each case.
    #[track_caller]
    pub fn backward<M: Module>(
        &self,
        loss: Tensor<1>,
        model: &M,
        weight: impl Into<Weight>,
    ) -> Result<Gradients> {
        self.backward_of(loss, model, weight.into(), Reach::All)
    }

    /// The same over the samples of these ranks.
    #[track_caller]
    pub(crate) fn backward_of<M: Module>(
        &self,
        loss: Tensor<1>,
        model: &M,
        weight: Weight,
        reach: Reach,
    ) -> Result<Gradients> {
        let timeline = &self.shared.timeline;
        let gradients = crate::gradient::backward(self, loss, model, weight, reach);
        match gradients {
            Ok(_) => timeline.backward_ends(),
            Err(_) => timeline.step_failed(),
        }
        gradients
    }

    /// Where the time of this rank's steps went so far; `None` before the first one, and where the
    /// builder was not [asked](AcceleratorBuilder::with_step_summary) to note it.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::SgdConfig;
    /// use burn::tensor::Tensor;
    ///
    /// let accelerator = Accelerator::builder().with_step_summary().build()?;
    /// let device = accelerator.device();
    /// let model: Linear = LinearConfig::new(2, 1).init(&device);
    /// let (mut model, mut optimizer) = accelerator.prepare((model, SgdConfig::new().init()))?;
    /// for _ in 0..3 {
    ///     let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
    ///     let gradients = accelerator.backward(loss, &model, 4)?;
    ///     model = optimizer.step(0.1, model, gradients);
    /// }
    /// let summary = accelerator.step_summary().unwrap();
    /// assert_eq!(summary.steps, 3);
    /// assert!(summary.forward.mean + summary.backward.mean < summary.step.mean);
    /// println!("{summary}");
    /// // That of each rank:
    /// let all = accelerator.gather_object(&summary)?;
    /// # assert_eq!(all, [summary]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn step_summary(&self) -> Option<StepSummary> {
        self.shared.timeline.summary()
    }

    /// The [`step_summary`](Self::step_summary) of all ranks: each figure is the mean of the ranks'
    /// own. Every rank must call it.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::optim::SgdConfig;
    /// # use burn::tensor::Tensor;
    ///
    /// let means = Accelerator::builder().with_step_summary().launch(2, |accelerator| {
    /// #     let device = accelerator.device();
    /// #     let model: Linear = accelerator.init(|device| LinearConfig::new(2, 1).init(device));
    /// #     let (mut model, mut optimizer) = accelerator.prepare((model, SgdConfig::new().init()))?;
    ///     for _ in 0..3 {
    ///         // A step of training.
    /// #         let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
    /// #         let gradients = accelerator.backward(loss, &model, 4)?;
    /// #         model = optimizer.step(0.1, model, gradients);
    ///     }
    ///     accelerator.mean_step_summary()
    /// })?;
    /// assert_eq!(means[0].as_ref().map(|mean| mean.steps), Some(3));
    /// assert_eq!(means[0], means[1], "the same on every rank");
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost.
    #[track_caller]
    pub fn mean_step_summary(&self) -> Result<Option<StepSummary>> {
        let group = self.shared.group.for_purpose("mean_step_summary");
        let all = group.all_gather_object(&self.step_summary())?;
        let mut all = all.into_iter().flatten();
        let Some(mut mean) = all.next() else {
            return Ok(None);
        };
        let mut count = 1.0;
        for mut other in all {
            count += 1.0;
            mean.steps = mean.steps.min(other.steps);
            for (sum, other) in mean.figures_mut().into_iter().zip(other.figures_mut()) {
                sum.mean += other.mean;
                sum.median += other.median;
            }
        }
        for sum in mean.figures_mut() {
            sum.mean /= count;
            sum.median /= count;
        }
        Ok(Some(mean))
    }

    /// Leaves the group, once all ranks have called it. Call it at the end of the program: ranks
    /// that still communicate when another has left without it get an error that says so. Where there are several ranks, a model that was prepared and for which
    /// [`backward`](Self::backward) was never called is warned of, and so is one whose gradients no optimizer stepped
    /// with.
    /// Micro-steps in a window that is still open are lost, which rank 0 says.
    ///
    /// How often the ranks have updated each model, with which learning rates and clips, is compared: some 60 bytes a
    /// model travel. The values of parameters are not looked at, so another kind of optimizer on some rank goes
    /// unnoticed here; [`check_replicas`](Self::check_replicas) finds it.
    ///
    /// # Errors
    ///
    /// [`Error::is_drift`](crate::Error::is_drift) on every rank where one has updated a model otherwise than the
    /// others, which [`backward`](Self::backward) tells of all updates but the last; the group is left all the same;
    /// [`Error::is_collective`](crate::Error::is_collective) when a rank does not come;
    /// [`Error::is_misuse`](crate::Error::is_misuse), and nothing happens, where only some ranks are. The error
    /// of a checkpoint that was [saved beside training](Self::save_state_async), if nobody asked for it
    /// before, or of a [`SyncBatchNorm`](crate::nn::SyncBatchNorm) whose output nothing has refused; the group is
    /// left all the same. Where both go wrong, the error is that of the
    /// checkpoint, with the other one as its [source](Error::collective).
    #[track_caller]
    pub fn finish(&self) -> Result<()> {
        let (timeline, group) = (&self.shared.timeline, &self.shared.group);
        if self.world_size() > 1 {
            group.check_allowed("`finish`")?;
        }
        let alike = self.check_updates();
        self.warn_without_backward();
        if self.is_main_process() {
            self.shared.models.warn_open_windows();
        }
        let saved = self.shared.checkpoints.settle(self);
        let saved = saved.and_then(|()| self.shared.crossing.check());
        let saved = saved.and(alike);
        if let Some(path) = self.shared.settings.whole_trace()
            && let Err(error) = timeline.write(group, path)
        {
            notice::warn(&format!("the trace is lost: {error}"));
        }
        if let Err(error) = timeline.finish(group) {
            // The barrier returns it.
            tracing::debug!(%error, "ranks are missing: traces of cycles are each rank's own");
        }
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

    /// Whether all ranks have updated their models alike.
    #[track_caller]
    fn check_updates(&self) -> Result<()> {
        if self.world_size() == 1 {
            return Ok(());
        }
        let finishing = self.shared.group.for_purpose("finish");
        // Of a rank that is missing, the barrier tells.
        let Ok(ranks) = finishing.all_gather_object(&self.shared.models.updates()) else {
            return Ok(());
        };
        for model in 0..ranks[0].len() {
            let model: Vec<_> = ranks
                .iter()
                .filter_map(|models| models.get(model).copied())
                .collect();
            SeenUpdates::check(&model)?;
        }
        Ok(())
    }

    /// Warns of prepared models for which `backward` was never called.
    fn warn_without_backward(&self) {
        if !self.is_main_process() {
            return;
        }
        for path in self.shared.models.unstepped() {
            notice::warn(&format!(
                "`backward` was called for a model (its first parameter is `{path}`), and no optimizer stepped with \
                 what it gave, so it is as it was: where it was to be trained, give those to the optimizer, and go on with the \
                 model that `step` gives back"
            ));
        }
        if self.world_size() == 1 {
            return;
        }
        for path in self.shared.models.untrained() {
            notice::warn(&format!(
                "a model was prepared (its first parameter is `{path}`), and `backward` was never called for it: \
                 where it was trained, each of the {} ranks has trained a model of its own; write \
                 `accelerator.backward(loss, &model, &batch)` and step with what that gives; where it is only \
                 evaluated, do so with `accelerator.valid(&model)`, which compares it, or prepare it with `.no_grad()`",
                self.world_size()
            ));
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
    ///
    /// Within `build`, another model may be built by `init`, from the seed again; an accelerator cannot be,
    /// since that would set the generator under this model: [`Error::is_misuse`].
    pub fn init<M: Module>(&self, build: impl FnOnce(&Device) -> M) -> M {
        let _turn = drawing();
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
    ///
    /// ```
    /// let places = accelerator::launch(3, |accelerator| Ok((accelerator.rank(), accelerator.world_size())))?;
    /// assert_eq!(places, [(0, 3), (1, 3), (2, 3)]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn world_size(&self) -> usize {
        self.shared.group.world_size()
    }

    /// How many calls of [`backward`](Self::backward) make one optimizer step.
    pub fn accumulation_steps(&self) -> usize {
        self.shared.settings.accumulation_steps.get()
    }

    /// The type in which forward and backward compute; see [`precision`](crate::precision).
    pub fn precision(&self) -> Precision {
        self.shared.settings.precision
    }

    /// The seed that was given to the builder.
    ///
    /// ```
    /// let draws = accelerator::Accelerator::builder().seed(40).launch(3, |accelerator| {
    ///     // For a generator of the program's own, another one on each rank.
    ///     Ok(accelerator.seed() + accelerator.rank() as u64)
    /// })?;
    /// assert_eq!(draws, [40, 41, 42]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
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
    ///
    /// ```
    /// let accelerator = accelerator::Accelerator::new()?;
    /// // What fails in it is not tried again.
    /// let is_last_life = accelerator.max_restarts() == Some(accelerator.restarts());
    /// assert!(!is_last_life, "no launcher restarts this program");
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn max_restarts(&self) -> Option<u64> {
        self.shared.restarts.most
    }

    /// The bytes of the flat buffers in which this rank keeps gradients for communication, of all
    /// models together. One process that does not accumulate needs none.
    ///
    /// They hold the gradients once, half-precision ones as `f32`, with a few numbers for each
    /// parameter, in whole pages. [Compression](crate::Compression) adds what travels. Where gradients are
    /// accumulated and communication [overlaps](crate::Overlap), they are there twice, since a step
    /// may have to be undone.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::tensor::Tensor;
    ///
    /// let bytes = launch(2, |accelerator| {
    /// #     let device = accelerator.device();
    ///     let model: Linear = accelerator.init(|device| LinearConfig::new(64, 64).init(device));
    ///     let model = accelerator.prepare(model)?;
    ///     let loss = model.forward(Tensor::<2>::ones([4, 64], &device)).mean();
    ///     let gradients = accelerator.backward(loss, &model, 4)?;
    /// #     let _ = gradients;
    ///     Ok(accelerator.bucket_memory())
    /// })?;
    /// assert!(bytes[0] >= (64 * 64 + 64) * size_of::<f32>());
    /// # Ok::<(), Error>(())
    /// ```
    pub fn bucket_memory(&self) -> usize {
        self.shared.group.buffer_bytes()
    }

    /// How the gradients of a model were sent in its last step. It waits for nobody: while `backward` runs, as for a
    /// [communication hook](crate::hook::CommunicationHook) that asks, it tells of the step before.
    ///
    /// ```
    /// use accelerator::{Accelerator, OverlapState};
    /// use burn::nn::{Linear, LinearConfig};
    ///
    /// let accelerator = Accelerator::new()?;
    /// let model: Linear = accelerator.prepare(LinearConfig::new(2, 1).init(&accelerator.device()))?;
    /// // One process has nothing to send.
    /// assert_eq!(accelerator.overlap_report(&model)?.state, OverlapState::Off);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`](crate::Error::is_misuse) for a model that was not prepared.
    pub fn overlap_report<M: Module>(&self, model: &M) -> Result<OverlapReport> {
        Ok(self.shared.models.find(model)?.overlap_report())
    }

    /// The process group underneath, for communication that this type has no method for.
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
        &self.shared.group
    }

    /// For the gradients of a model, where the program reduces them itself.
    pub(crate) fn communication_hook(&self) -> Option<hook::Held> {
        let maker = self.shared.settings.hook.as_ref();
        maker.map(hook::Maker::make)
    }

    /// For the losses of a model, where they are scaled.
    pub(crate) fn scaler(&self) -> Option<Scaler> {
        let settings = &self.shared.settings;
        (settings.precision == Precision::F16).then(|| Scaler::new(settings.loss_scale))
    }

    pub(crate) fn next_loader(&self) -> u64 {
        self.shared.loaders.fetch_add(1, Ordering::Relaxed)
    }
}

/// One of the threads of this process at a time sets the device's generator and draws from it. A thread
/// whose turn it is goes on.
pub(crate) fn drawing() -> Drawing {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let turn = (!is_drawing()).then(|| {
        let turn = ONE_AT_A_TIME.lock();
        turn.unwrap_or_else(PoisonError::into_inner)
    });
    DRAWING.set(true);
    Drawing { turn }
}

/// Whether it is this thread's turn to draw.
fn is_drawing() -> bool {
    DRAWING.get()
}

thread_local! {
    static DRAWING: Cell<bool> = const { Cell::new(false) };
}

/// A turn to draw, or a part of one.
pub(crate) struct Drawing {
    /// `None` for a part.
    turn: Option<MutexGuard<'static, ()>>,
}

impl Drop for Drawing {
    fn drop(&mut self) {
        if self.turn.is_some() {
            DRAWING.set(false);
        }
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
