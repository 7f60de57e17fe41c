mod build;

use core::num::{NonZeroU64, NonZeroUsize};
use core::time::Duration;
use std::path::{Path, PathBuf};

use accelerator_collective::{GroupOptions, Launch, TransportKind};
use accelerator_host::{
    COMPRESSION, OFFLOAD_FOLDER, OPERATIONS, OVERLAP, PRECISION, REDUCTION, TRACE, TRACE_SCHEDULE,
    UNITS,
};
use burn::tensor::{Device, FloatDType};

use crate::accelerator::variables::{self, agreed};
use crate::context::WindowSize;
use crate::core::device::{BackendKind, Operations, Oversubscription};
use crate::core::draws::is_drawing;
use crate::core::error::{Error, Result, counted};
use crate::core::offload;
use crate::precision::{LossScale, Precision};
use crate::reduce::hook::{CommunicationHook, HookFactory};
use crate::reduce::{
    Compression, GradientReduction, OnNonFiniteLoss, Overlap, ReduceSettings, SameBatches,
};
use crate::timeline::{ProfilerSchedule, Recording};
use crate::tracking::{Tracker, TrackerSettings};
use crate::unit::Units;

/// Settings for an [`Accelerator`](crate::Accelerator); begin with
/// [`Accelerator::builder`](crate::Accelerator::builder).
///
/// ```
/// use accelerator::{Accelerator, BackendKind};
///
/// let accelerator = Accelerator::builder()
///     .device(BackendKind::Flex)
///     .seed(7)
///     .accumulation_steps(4)
///     .build()?;
/// assert_eq!(accelerator.accumulation_steps(), 4);
/// # Ok::<(), accelerator::Error>(())
/// ```
///
/// The device and the transport, for ranks on several hosts:
///
/// ```
/// use accelerator::collective::TransportKind;
/// use accelerator::precision::LossScale;
/// use accelerator::prelude::*;
///
/// let accelerator = Accelerator::builder()
///     .precision(Precision::F16)
///     .loss_scale(LossScale::new().with_initial(1024.0))
///     .transport(TransportKind::Tcp)
///     .compression(Compression::F16)
///     .overlap(Overlap::On)
///     .bucket_size(8 << 20)
///     .build()?;
/// assert_eq!(accelerator.precision(), Precision::F16);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct AcceleratorBuilder {
    accumulation_steps: Option<usize>,
    bucket_size: usize,
    check_replicas: Option<NonZeroU64>,
    compression: Option<Compression>,
    reduction: Option<GradientReduction>,
    device: Option<BackendKind>,
    dtype: Option<FloatDType>,
    global_batch: Option<GlobalBatch>,
    hook: Option<HookFactory>,
    launch: Option<Launch>,
    /// The device of this process in the group before.
    kept_device: Option<(BackendKind, Device)>,
    loss_scale: LossScale,
    offload_folder: Option<PathBuf>,
    operations: Option<Operations>,
    on_non_finite_loss: OnNonFiniteLoss,
    options: GroupOptions,
    overlap: Option<Overlap>,
    oversubscription: Option<Oversubscription>,
    precision: Option<Precision>,
    recording: Recording,
    same_batches: SameBatches,
    seed: u64,
    trackers: TrackerSettings,
    trace: Option<PathBuf>,
    trace_schedule: Option<ProfilerSchedule>,
    transport: Option<TransportKind>,
    units: Option<Units>,
}

/// A batch of all ranks, in samples, to be reached by accumulation.
#[derive(Clone, Copy, Debug)]
struct GlobalBatch {
    samples: usize,
    /// The batch size of one rank in one micro-step.
    batch_size: usize,
}

impl AcceleratorBuilder {
    pub(super) fn new() -> Self {
        Self {
            accumulation_steps: None,
            bucket_size: 25 << 20,
            check_replicas: None,
            compression: None,
            reduction: None,
            device: None,
            dtype: None,
            global_batch: None,
            hook: None,
            launch: None,
            kept_device: None,
            loss_scale: LossScale::new(),
            offload_folder: None,
            operations: None,
            on_non_finite_loss: OnNonFiniteLoss::Warn,
            options: GroupOptions::new(),
            overlap: None,
            oversubscription: None,
            precision: None,
            recording: Recording::Nothing,
            same_batches: SameBatches::Unexpected,
            seed: 0,
            trackers: TrackerSettings::default(),
            trace: None,
            trace_schedule: None,
            transport: None,
            units: None,
        }
    }

    /// Sets how many calls of [`Accelerator::backward`](crate::Accelerator::backward) make one optimizer step. The
    /// last window of an epoch may be shorter; its average is over the samples that it holds. An epoch that is left by
    /// a `break` does not end its window. End it with [`trigger_sync`](crate::Weight::trigger_sync) in its last call;
    /// otherwise its micro-steps go into the next epoch's first step. Default: `ACCEL_ACCUMULATION_STEPS`, else 1.
    pub fn accumulation_steps(mut self, steps: usize) -> Self {
        self.accumulation_steps = Some(steps);
        self
    }

    /// Allows ranks to train on the same samples, for example in a benchmark or a test. Otherwise, rank 0 warns once
    /// per model whose loss has the same bits on all ranks in eight steps in a row, because its data is not sharded.
    ///
    /// A hash of the losses is sent with the gradients, so the check costs nothing. Losses that are 0 or not finite do
    /// not count, nor do losses on GPUs that NCCL joins, which are not read. Batches of prepared loaders that are
    /// passed to `backward` are never warned of, whatever their losses. Nor are the same samples under losses that
    /// differ, as with dropout, or a loader that was not prepared and is shuffled by another seed on each rank, since
    /// a program may shard its data itself.
    pub fn allow_same_batches(mut self) -> Self {
        self.same_batches = SameBatches::Allowed;
        self
    }

    /// Sets the size, in bytes, of the flat buffers in which gradients are reduced. The first one is at most 1 MiB.
    /// With [`Overlap`], a buffer that holds 1 MiB is also closed if the next gradient is ready later. Default: 25
    /// MiB.
    pub fn bucket_size(mut self, bytes: usize) -> Self {
        self.bucket_size = bytes;
        self
    }

    /// Sets how long a rank may spend in a closure that only some ranks run, such as that of
    /// [`main_process_first`](crate::Accelerator::main_process_first), while others wait for it. Each
    /// [`keep_alive`](crate::Accelerator::keep_alive) in the closure restarts this time. When it is over, the
    /// [progress timeout](Self::progress_timeout) begins. Default: an hour.
    pub fn busy_timeout(mut self, timeout: Duration) -> Self {
        self.options = self.options.with_busy_timeout(timeout);
        self
    }

    /// Compares the parameters of each model between the ranks after every `steps` optimizer steps, in the
    /// [`backward`](crate::Accelerator::backward) that ends the next accumulation window.
    /// [`check_replicas`](crate::Accelerator::check_replicas) describes what is compared, and what it costs. If they
    /// differ, `backward` fails with [`Error::is_drift`](crate::Error::is_drift) on every rank before the model is
    /// changed. The last steps of a program are checked only if it calls `check_replicas` itself. Default, and 0:
    /// never.
    pub fn check_replicas_every(mut self, steps: u64) -> Self {
        self.check_replicas = NonZeroU64::new(steps);
        self
    }

    /// Sets how long ranks wait for each other when they connect. Default: 60 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.options = self.options.with_connect_timeout(timeout);
        self
    }

    /// Sets the device. `None` is the default: `ACCEL_DEVICE`, else the fastest kind that is compiled in.
    pub fn device(mut self, kind: impl Into<Option<BackendKind>>) -> Self {
        self.device = kind.into();
        self
    }

    /// Sets the floating-point type of parameters and batches. Set it before the process makes its first tensor,
    /// since Burn fixes the type then. Default: the device's own, which is `F32`.
    ///
    /// ```
    /// use accelerator::Accelerator;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::tensor::{DType, FloatDType};
    ///
    /// let accelerator = Accelerator::builder().dtype(FloatDType::F64).build()?;
    /// let model: Linear = LinearConfig::new(2, 1).init(&accelerator.device());
    /// assert_eq!(model.weight.val().dtype(), DType::F64);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn dtype(mut self, dtype: FloatDType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Accumulates as many micro-steps as an optimizer step of `samples` over all ranks needs, if each rank's batches
    /// have `batch_size`: `samples / (world size · batch_size)`. A program then does the same steps on any number of
    /// ranks.
    ///
    /// [`build`](Self::build) fails with [`Error::is_config`](crate::Error::is_config) if that is no whole
    /// number, and names the nearest sizes that are reached; another batch would be another training.
    ///
    /// ```
    /// let accelerator = accelerator::Accelerator::builder().global_batch(256, 32).build()?;
    /// assert_eq!(accelerator.accumulation_steps() * accelerator.world_size(), 8);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn global_batch(mut self, samples: usize, batch_size: usize) -> Self {
        self.global_batch = Some(GlobalBatch {
            samples,
            batch_size,
        });
        self
    }

    /// Sets the rank, world size and rendezvous of this process, instead of reading them from the environment.
    ///
    /// ```
    /// use accelerator::Accelerator;
    /// use accelerator::collective::Launch;
    ///
    /// // Alone, whatever launched the process: for an evaluation within a job, for example.
    /// let accelerator = Accelerator::builder().launched_as(Launch::single()).build()?;
    /// assert_eq!(accelerator.world_size(), 1);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn launched_as(mut self, launch: Launch) -> Self {
        self.launch = Some(launch);
        self
    }

    /// Keeps a device whose memory this process uses: its local rank may change.
    pub(crate) fn keep_device(mut self, kind: BackendKind, device: Device) -> Self {
        self.kept_device = Some((kind, device));
        self
    }

    /// Sets how long a rank may be silent before the others treat it as lost, because it is stopped or cut
    /// off from the network. A rank that dies is noticed at once. Default:
    /// `ACCEL_LIVENESS_TIMEOUT` (seconds), else 5 s.
    pub fn liveness_timeout(mut self, timeout: Duration) -> Self {
        self.options = self.options.with_liveness_timeout(timeout);
        self
    }

    /// Sets how the loss is scaled with [`Precision::F16`]. Default: [`LossScale::new`].
    pub fn loss_scale(mut self, rule: LossScale) -> Self {
        self.loss_scale = rule;
        self
    }

    /// Sets the type in which [`Accelerator::forward`](crate::Accelerator::forward) and backward compute; parameters
    /// stay in full precision: see [`precision`](crate::precision). Default: `ACCEL_PRECISION`, else
    /// [`Precision::No`].
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = Some(precision);
        self
    }

    /// Sets how long a collective waits for a rank that is alive but does not call it. The timeout restarts when that
    /// rank makes progress: when it saves or loads for all, or calls [`keep_alive`](crate::Accelerator::keep_alive).
    /// In a closure that only some ranks run, the [busy timeout](Self::busy_timeout) applies first. Default: 10
    /// minutes.
    pub fn progress_timeout(mut self, timeout: Duration) -> Self {
        self.options = self.options.with_progress_timeout(timeout);
        self
    }

    /// Sets the seed of initial weights, dropout and everything else that draws from the device. The order of samples
    /// has its own seed, that of the loader. Default: 0.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets how bytes travel between ranks. Default: `ACCEL_TRANSPORT`, else chosen by where the
    /// ranks are.
    pub fn transport(mut self, transport: TransportKind) -> Self {
        self.transport = Some(transport);
        self
    }

    /// Sets how single operations handle the values that they need in backward: for example, to recompute those of
    /// cheap operations instead of keeping them. For blocks of a model, see [`units`](Self::units); both can be
    /// combined. A model must be built on [`device`](crate::Accelerator::device), which carries this setting.
    /// Default: `ACCEL_OPERATIONS`, else [`Operations::Keep`].
    pub fn operations(mut self, operations: Operations) -> Self {
        self.operations = Some(operations);
        self
    }

    /// Sets the mode in which the [`Unit`](crate::nn::Unit)s of prepared models run: for example, to recompute
    /// activations in backward instead of keeping them. Default: `ACCEL_UNITS`, else [`Units::Plain`].
    pub fn units(mut self, units: Units) -> Self {
        self.units = Some(units);
        self
    }

    /// Keeps parameters, gradients and optimizer state of sharded units in memory-mapped files in this folder. The model can
    /// then be several times larger than memory: the kernel writes the excess to disk and reads it back when it is needed.
    /// Results are bit-identical to those without offloading. A single rank is enough.
    ///
    /// Needs [`Units::Shard`], the backend `flex`, and a fused optimizer, such as one from
    /// [`AdamWConfig::init_fused`](crate::optim::InitFused::init_fused). The folder, which is created if it does not
    /// exist, must be on a local disk, not on tmpfs. The files have no names, so a killed program leaves none behind,
    /// unless it is killed while it saves or resumes: then a temporary folder may remain.
    /// Default: `ACCEL_OFFLOAD_FOLDER`, else none.
    ///
    /// ```
    /// use accelerator::nn::{Unit, Units};
    /// use accelerator::prelude::*;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::AdamWConfig;
    /// use burn::tensor::Tensor;
    ///
    /// # // Tests may run in a temporary folder on tmpfs.
    /// # let folder = tempfile::tempdir_in(".")?;
    /// # let folder = folder.path();
    /// let accelerator = Accelerator::builder().units(Units::Shard).offload_folder(folder).build()?;
    /// let model: Unit<Linear> = accelerator.init(|device| Unit::new(LinearConfig::new(256, 256).init(device)));
    /// let (mut model, mut optimizer) = accelerator.prepare((model, AdamWConfig::new().init_fused()))?;
    /// let x = Tensor::<2>::ones([4, 256], &accelerator.device());
    /// let loss = model.run(x, |linear, x| linear.forward(x)).powi_scalar(2).mean();
    /// let gradients = accelerator.backward(loss, &model, 4)?;
    /// model = optimizer.step(1e-3, model, gradients);
    /// // The weight and two moments. The bias and its moments are small and stay in memory.
    /// assert_eq!(accelerator.offloaded_memory(), 3 * 256 * 256 * 4);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn offload_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.offload_folder = Some(folder.into());
        self
    }

    /// Sets the type in which gradients travel between ranks. Default: `ACCEL_COMPRESSION`, else
    /// [`Compression::None`].
    pub fn compression(mut self, compression: Compression) -> Self {
        self.compression = Some(compression);
        self
    }

    /// Sets how gradients of a GPU get to the other ranks. Default: `ACCEL_REDUCTION`, else
    /// [`GradientReduction::Auto`].
    ///
    /// Ranks that share a GPU use host memory by default, since NCCL refuses them; to set it:
    ///
    /// ```
    /// use accelerator::{Accelerator, Oversubscription, GradientReduction};
    ///
    /// let accelerator = Accelerator::builder()
    ///     .oversubscription(Oversubscription::Allow)
    ///     .gradient_reduction(GradientReduction::Staged)
    ///     .build()?;
    /// # let _ = accelerator;
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn gradient_reduction(mut self, reduction: GradientReduction) -> Self {
        self.reduction = Some(reduction);
        self
    }

    /// Reduces gradients with a hook of your own. `make` is called once for each prepared model of each rank, and
    /// once more for the hook's name. See [`CommunicationHook`], and [`PowerSgd`](crate::hook::PowerSgd) for a ready
    /// one. Every rank must use a hook of the same name, or none. Default: an exact all-reduce.
    ///
    /// Nothing is sent while backward runs, and there is no [`Compression`] beside it: [`build`](Self::build)
    /// fails with [`Error::is_config`](crate::Error::is_config) if both are asked for.
    pub fn communication_hook<H: CommunicationHook + 'static>(
        mut self,
        make: impl Fn() -> H + Send + Sync + 'static,
    ) -> Self {
        self.hook = Some(HookFactory::new(make));
        self
    }

    /// Records how long each step and its parts take, for
    /// [`Accelerator::step_summary`](crate::Accelerator::step_summary) and for logs at the level `debug`. It costs a
    /// few readings of the clock per step. Default: no clock is read.
    pub fn step_summary(mut self) -> Self {
        self.recording = Recording::Steps;
        self
    }

    /// Makes [`backward`](crate::Accelerator::backward) fail on every rank with
    /// [`Error::is_not_finite`](crate::Error::is_not_finite) if the loss of a window is NaN or infinite on any rank.
    /// The model is as it was before that step. Default: the rank with that loss warns once per model, with the step,
    /// and training continues.
    ///
    /// In [local training](crate::local), ranks do not communicate between averages, and this rank alone gets the
    /// error: end the program with it.
    ///
    /// On a CPU it costs nothing. On a GPU each call of `backward` waits until its loss is computed; without it, such
    /// a loss is told there when the program asks for [`AveragedGradients::loss`](crate::AveragedGradients::loss).
    ///
    /// Only the loss is checked. Gradients that are not finite under a finite loss show in the loss of the next step;
    /// after the last step they are saved without a warning: check
    /// [`AveragedGradients::norm`](crate::AveragedGradients::norm).
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::tensor::Tensor;
    ///
    /// let errors = Accelerator::builder().stop_at_non_finite_loss().launch(2, |accelerator| {
    ///     let device = accelerator.device();
    ///     let model: Linear = accelerator.init(|device| LinearConfig::new(2, 1).init(device));
    ///     let model = accelerator.prepare(model)?;
    ///     // Of what rank 1 has read, one value is missing.
    ///     let value = [1.0, f64::NAN][accelerator.rank()];
    ///     let loss = model.forward(Tensor::<2>::full([4, 2], value, &device)).mean();
    ///     Ok(accelerator.backward(loss, &model, 4).unwrap_err())
    /// })?;
    /// assert!(errors.iter().all(|error| error.is_not_finite()));
    /// assert!(errors[0].to_string().contains("the loss of step 0 is not finite: NaN on rank 1"));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn stop_at_non_finite_loss(mut self) -> Self {
        self.on_non_finite_loss = OnNonFiniteLoss::Fail;
        self
    }

    /// Records a trace of every rank, which [`Accelerator::finish`](crate::Accelerator::finish) gathers and
    /// rank 0 writes to `path`: a JSON file that [Perfetto](https://ui.perfetto.dev) opens (Chrome's trace
    /// event format). Implies [`step_summary`](Self::step_summary). Default: `ACCEL_TRACE`, else
    /// none.
    ///
    /// A process of it is a rank; its threads are the one that trains, the one that communicates, and
    /// the loader's workers. Times are those of rank 0's clock: how far clocks are apart is measured at
    /// the beginning and at the end, and the file says within which error. Each rank keeps its newest
    /// 65 536 events, in memory that is taken at the start; a step has about ten, and three to six for
    /// each bucket. Rank 0 says where the file is: at the level `info`, or on stderr where the program
    /// collects no logs.
    ///
    /// The file is complete or not there; what is no regular file is never replaced. A trace that cannot be
    /// written in the end is lost with a warning, and costs nothing else.
    ///
    /// If other ranks are lost, each writes its own part instead, as `….rank3.json`. So does a rank
    /// that ends without `finish`, since an error has left its loop by `?`, for example: when the last
    /// handle of its accelerator is dropped. A process that is killed, or ends by
    /// [`std::process::exit`], writes nothing. Such parts of an earlier run are removed at the start, but
    /// not in a restart of the job by the launcher, and where a whole trace is written.
    ///
    /// To record some steps of a long training, see [`trace_schedule`](Self::trace_schedule).
    ///
    /// ```
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("trace.json");
    /// let accelerator = accelerator::Accelerator::builder().trace(&path).build()?;
    /// // Train here.
    /// accelerator.finish()?;
    /// assert!(path.is_file());
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn trace(mut self, path: impl Into<PathBuf>) -> Self {
        self.trace = Some(path.into());
        self
    }

    /// Records the steps that the schedule keeps, counted from the first, and writes a trace for each of its cycles
    /// beside the file of [`trace`](Self::trace): `trace.cycle0.json`, or with several ranks one file per rank,
    /// `trace.cycle0.rank1.json`. It is [`Accelerator::profile`](crate::Accelerator::profile) with
    /// [`Cycle::write_trace`](crate::timeline::Cycle::write_trace), from the start to the end of the program.
    /// Default: `ACCEL_TRACE_SCHEDULE`, else one trace of everything.
    pub fn trace_schedule(mut self, schedule: ProfilerSchedule) -> Self {
        self.trace_schedule = Some(schedule);
        self
    }

    /// Adds trackers to which rank 0 writes in addition to the journals of runs; see [`Accelerator::init_trackers`].
    /// A second call adds to the first.
    ///
    /// A tracker that is slow or gone never stops the training: threads feed it from the journal.
    ///
    /// ```
    /// use accelerator::{Accelerator, Tracker};
    ///
    /// # let runs = tempfile::tempdir().unwrap();
    /// # let runs = runs.path();
    /// let accelerator = Accelerator::builder()
    ///     .log_with([Tracker::TensorBoard, Tracker::Csv])
    ///     .runs_folder(runs)
    ///     .build()?;
    /// accelerator.init_trackers("mnist", &serde_json::json!({ "lr": 1e-3 }))?;
    /// accelerator.log("train", [("loss", 0.5)], 1, None);
    /// accelerator.finish()?;
    /// assert!(runs.join("mnist/tensorboard").is_dir());
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// [`Accelerator::init_trackers`]: crate::Accelerator::init_trackers
    pub fn log_with(mut self, trackers: impl IntoIterator<Item = Tracker>) -> Self {
        self.trackers.trackers.extend(trackers);
        self
    }

    /// Sets the folder of all runs, on the host of rank 0. Default: `runs`.
    pub fn runs_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.trackers.runs_folder = Some(folder.into());
        self
    }

    /// Adds folders of data, or single files, whose digests a [run](crate::Accelerator::init_trackers) records.
    /// `accel-launch runs diff` then shows whether two runs had the same data, and `runs reproduce` whether the data
    /// has changed since. A second call adds to the first. A folder that cannot be read is a warning.
    ///
    /// Rank 0 reads every byte when the run begins, where the others wait: some seconds for ten gigabytes that the
    /// system has in memory.
    ///
    /// ```
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let (runs, data) = (folder.path().join("runs"), folder.path().join("data"));
    /// # std::fs::create_dir(&data)?;
    /// # std::fs::write(data.join("train.bin"), [1, 2, 3])?;
    /// let builder = accelerator::Accelerator::builder().runs_folder(&runs);
    /// let accelerator = builder.data_folders([&data]).build()?;
    /// accelerator.init_trackers("mnist", &())?;
    /// accelerator.finish()?;
    /// let run = accelerator::track::RunHistory::read(runs.join("mnist")).unwrap();
    /// let recorded = &run.attempts[0].provenance["data"];
    /// assert_eq!(recorded[data.to_str().unwrap()]["bytes"], 3);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn data_folders<P: Into<PathBuf>>(mut self, folders: impl IntoIterator<Item = P>) -> Self {
        let folders = folders.into_iter().map(Into::into);
        self.trackers.data_folders.extend(folders);
        self
    }

    /// Sets whether gradients are sent while backward still runs. Results do not depend on it. Default:
    /// `ACCEL_OVERLAP`, else [`Overlap::Auto`].
    pub fn overlap(mut self, overlap: Overlap) -> Self {
        self.overlap = Some(overlap);
        self
    }

    /// Sets whether ranks of a host may share its GPUs if there are more ranks than GPUs. If not, every rank
    /// of that host fails with [`Error::is_device`](crate::Error::is_device) before it joins the others.
    /// Default: `ACCEL_OVERSUBSCRIBE_GPUS` (`1` allows it), else [`Oversubscription::Refuse`].
    pub fn oversubscription(mut self, oversubscription: Oversubscription) -> Self {
        self.oversubscription = Some(oversubscription);
        self
    }
}

#[derive(Clone, Debug)]
struct Settings {
    accumulation_steps: NonZeroUsize,
    /// The folder for memory-mapped files.
    offload: Option<PathBuf>,
    operations: Operations,
    recording: Recording,
    reduce: ReduceSettings,
    seed: u64,
    trace: TraceSettings,
    window: WindowSize,
}

#[derive(Clone, Debug)]
pub(super) struct TraceSettings {
    /// The file of the trace; with a schedule, the files of its cycles are beside it.
    pub(super) path: Option<PathBuf>,
    pub(super) schedule: Option<ProfilerSchedule>,
}

impl TraceSettings {
    /// Returns the file of the trace if it is one of the whole program.
    pub(super) fn whole(&self) -> Option<&Path> {
        match self.schedule {
            Some(_) => None,
            None => self.path.as_deref(),
        }
    }
}

impl AcceleratorBuilder {
    fn settings(&self) -> Result<Settings> {
        if is_drawing() {
            return Err(Error::misuse(
                "an accelerator cannot be built within the closure of `Accelerator::init`, whose model \
                 would be drawn from another place of the generator; build it before",
            ));
        }
        variables::check()?;
        accelerator_fault::check()
            .map_err(|error| Error::config(error.to_string()).with_source(error))?;
        self.loss_scale.check()?;
        if self.bucket_size < 1024 {
            return Err(Error::config(format!(
                "bucket_size is {} bytes; expected at least 1024 (the default is 25 MiB)",
                self.bucket_size
            )));
        }
        let trace = variables::path("the trace file", self.trace.as_deref(), TRACE)?;
        let trace_schedule = agreed("the schedule", self.trace_schedule, TRACE_SCHEDULE)?;
        let recording = match (&trace, &trace_schedule) {
            (Some(_), None) => Recording::Events,
            (Some(_), Some(schedule)) => {
                schedule.check()?;
                self.recording
            }
            (None, None) => self.recording,
            (None, Some(schedule)) => {
                return Err(Error::config(format!(
                    "the schedule `{schedule}` was given, and no trace; name its file by `trace` or \
                     ACCEL_TRACE, or leave the schedule out"
                )));
            }
        };
        let compression = agreed("compression", self.compression, COMPRESSION)?.unwrap_or_default();
        if self.hook.is_some() && compression != Compression::None {
            return Err(Error::config(format!(
                "`communication_hook` was called, and the compression is {compression} (by \
                 ACCEL_COMPRESSION or `compression`): a hook decides itself in which type gradients \
                 travel; leave one of them out"
            )));
        }
        let reduction = agreed("reduction", self.reduction, REDUCTION)?.unwrap_or_default();
        if reduction == GradientReduction::Nccl
            && (self.hook.is_some() || compression == Compression::F16)
        {
            let what = match self.hook {
                Some(_) => "a communication hook, which is given gradients in memory",
                None => "the compression f16, whose range is looked at in memory",
            };
            return Err(Error::config(format!(
                "the reduction `nccl` was asked for (by ACCEL_REDUCTION or `gradient_reduction`), and {what}: ask \
                 for `auto`, or leave the other out"
            )));
        }
        let units = agreed("units", self.units, UNITS)?.unwrap_or_default();
        let offload = self.offload_folder.as_deref();
        let offload = variables::path("the offload folder", offload, OFFLOAD_FOLDER)?;
        if let Some(folder) = &offload {
            if units != Units::Shard {
                return Err(Error::config(format!(
                    "offloading needs sharded units, but `units` is `{units}`; set `units` to `shard`, or unset `offload_folder` \
                     and {}",
                    OFFLOAD_FOLDER.name
                )));
            }
            offload::check_folder(folder)?;
        }
        Ok(Settings {
            accumulation_steps: NonZeroUsize::MIN,
            offload,
            operations: agreed("operations", self.operations, OPERATIONS)?.unwrap_or_default(),
            recording,
            reduce: ReduceSettings {
                bucket_size: self.bucket_size,
                check_replicas: self.check_replicas,
                compression,
                hook: self.hook.clone(),
                loss_scale: self.loss_scale,
                on_non_finite_loss: self.on_non_finite_loss,
                overlap: agreed("overlap", self.overlap, OVERLAP)?.unwrap_or_default(),
                precision: agreed("precision", self.precision, PRECISION)?.unwrap_or_default(),
                reduction,
                same_batches: self.same_batches,
                units,
            },
            seed: self.seed,
            trace: TraceSettings {
                path: trace,
                schedule: trace_schedule,
            },
            window: match self.global_batch {
                Some(_) => WindowSize::Samples,
                None => WindowSize::Steps,
            },
        })
    }

    fn steps(&self, world_size: usize) -> Result<NonZeroUsize> {
        let given = self.accumulation_steps.map(micro_steps);
        let reached = self.global_batch.map(|batch| batch.steps(world_size));
        let asked = match (given.transpose()?, reached.transpose()?) {
            (Some(given), Some(reached)) if given != reached => {
                return Err(Error::config(format!(
                    "accumulation_steps is {given}, and `global_batch` comes to {reached} on \
                     {world_size} ranks; set one of them"
                )));
            }
            (given, reached) => reached.or(given),
        };
        variables::accumulation_steps(asked)
    }

    fn group_options(&self, launch: &Launch) -> Result<GroupOptions> {
        match (self.transport, launch.transport) {
            (Some(asked), named)
                if named != TransportKind::Auto
                    && asked != TransportKind::Auto
                    && asked != named =>
            {
                Err(Error::config(format!(
                    "the program asks for the transport `{asked}`, and ACCEL_TRANSPORT for \
                     `{named}`; unset the variable, or leave the choice to it"
                )))
            }
            (Some(asked), _) => Ok(self.options.clone().with_transport(asked)),
            (None, _) => Ok(self.options.clone()),
        }
    }
}

/// Checks a number of micro-steps that the program asks for.
pub(super) fn micro_steps(steps: usize) -> Result<NonZeroUsize> {
    NonZeroUsize::new(steps).ok_or_else(|| {
        Error::config("accumulation_steps is 0; expected at least 1 (no accumulation)")
    })
}

impl GlobalBatch {
    fn steps(self, world_size: usize) -> Result<NonZeroUsize> {
        let Self {
            samples,
            batch_size,
        } = self;
        if batch_size == 0 {
            return Err(Error::config(
                "global_batch was given batches of 0 samples; expected at least 1",
            ));
        }
        let step = world_size.saturating_mul(batch_size);
        if step > 0
            && samples % step == 0
            && let Some(steps) = NonZeroUsize::new(samples / step)
        {
            return Ok(steps);
        }
        let below = samples.checked_div(step).unwrap_or(0) * step;
        let near = match below {
            0 => format!("{step}"),
            _ => format!("{below} or {}", below + step),
        };
        let ranks = counted(world_size, "rank");
        Err(Error::config(format!(
            "a global batch of {samples} samples is no multiple of {ranks} times {batch_size} samples a batch; choose \
             {near}, or another batch size"
        )))
    }
}
