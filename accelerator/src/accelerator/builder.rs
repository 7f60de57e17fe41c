use core::num::{NonZeroU64, NonZeroUsize};
use core::time::Duration;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use accelerator_collective::{GroupOptions, Launch, ProcessGroup, Topology, TransportKind};
use burn::tensor::{Device, FloatDType};

use super::{Accelerator, Restarts, Settings, Shared, WindowSize, environment};
use crate::agreement::{self, Term};
use crate::checkpoint::Ongoing;
use crate::device::{self, DeviceKind};
use crate::error::{Error, Kind, Result};
use crate::gradient::hook::{CommunicationHook, Maker};
use crate::gradient::{Compression, Overlap, Switch, Turn};
use crate::logging::Warned;
use crate::model::Models;
use crate::nn::Crossing;
use crate::optim::Census;
use crate::precision::{LossScale, Precision};
use crate::timeline::{self, Output, Place, Recording, Schedule, Timeline, check_cycles};

/// Settings for an [`Accelerator`]; begin with [`Accelerator::builder`].
///
/// ```
/// use accelerator::{Accelerator, DeviceKind};
///
/// let accelerator = Accelerator::builder()
///     .device(DeviceKind::Flex)
///     .seed(7)
///     .accumulation_steps(4)
///     .build()?;
/// assert_eq!(accelerator.accumulation_steps(), 4);
/// # Ok::<(), accelerator::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct AcceleratorBuilder {
    accumulation_steps: Option<usize>,
    bucket_size: usize,
    check_replicas: Option<NonZeroU64>,
    compression: Option<Compression>,
    device: Option<DeviceKind>,
    dtype: Option<FloatDType>,
    global_batch: Option<GlobalBatch>,
    hook: Option<Maker>,
    launch: Option<Launch>,
    loss_scale: LossScale,
    options: GroupOptions,
    overlap: Option<Overlap>,
    precision: Option<Precision>,
    recording: Recording,
    seed: u64,
    trace: Option<PathBuf>,
    trace_schedule: Option<Schedule>,
    transport: Option<TransportKind>,
}

/// A batch of all ranks, in samples, to be reached by accumulation.
#[derive(Clone, Copy, Debug)]
struct GlobalBatch {
    samples: usize,
    /// Of one rank in one micro-step.
    batch_size: usize,
}

impl AcceleratorBuilder {
    pub(super) fn new() -> Self {
        Self {
            accumulation_steps: None,
            bucket_size: 25 << 20,
            check_replicas: None,
            compression: None,
            device: None,
            dtype: None,
            global_batch: None,
            hook: None,
            launch: None,
            loss_scale: LossScale::new(),
            options: GroupOptions::new(),
            overlap: None,
            precision: None,
            recording: Recording::Nothing,
            seed: 0,
            trace: None,
            trace_schedule: None,
            transport: None,
        }
    }

    /// How many calls of [`Accelerator::backward`] make one optimizer step. The last window of
    /// an epoch may be shorter; its average is over the samples that it holds. Default:
    /// `ACCEL_ACCUMULATION_STEPS`, else 1.
    pub fn accumulation_steps(mut self, steps: usize) -> Self {
        self.accumulation_steps = Some(steps);
        self
    }

    /// The size, in bytes, of the flat buffers in which gradients are reduced. The first one is
    /// at most 1 MiB. With [`Overlap`], one that holds 1 MiB is also closed where the next gradient
    /// is ready later. Default: 25 MiB.
    pub fn bucket_size(mut self, bytes: usize) -> Self {
        self.bucket_size = bytes;
        self
    }

    /// Compares the parameters of each model between the ranks after every so many optimizer
    /// steps, in the [`backward`](Accelerator::backward) that ends the next accumulation window:
    /// see [`check_replicas`](Accelerator::check_replicas) for what is compared, and what it
    /// costs. It fails with [`Error::is_drift`] on every rank before the model is moved. The last
    /// steps of a program are checked where it asks for it. Default, and 0: never.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::optim::SgdConfig;
    /// # use burn::tensor::Tensor;
    ///
    /// let errors = Accelerator::builder().check_replicas_every(1).launch(2, |accelerator| {
    /// #     let device = accelerator.device();
    /// #     let model: Linear = accelerator.init(|device| LinearConfig::new(2, 1).init(device));
    /// #     let optimizer = SgdConfig::new().init();
    /// #     let (mut model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    /// #     let loss = |model: &Linear| model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
    ///     let gradients = accelerator.backward(loss(&model), &model, 4)?;
    ///     // Each rank steps with a rate of its own, by mistake.
    ///     let rate = [0.1, 0.2][accelerator.rank()];
    ///     model = optimizer.step(rate, model, gradients);
    ///     Ok(accelerator.backward(loss(&model), &model, 4).unwrap_err())
    /// })?;
    /// assert!(errors.iter().all(Error::is_drift));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn check_replicas_every(mut self, steps: u64) -> Self {
        self.check_replicas = NonZeroU64::new(steps);
        self
    }

    /// How long ranks wait for each other when they connect. Default: 60 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.options = self.options.with_connect_timeout(timeout);
        self
    }

    /// The device; `None` is the default: `ACCEL_DEVICE`, else the fastest kind that is
    /// compiled in.
    pub fn device(mut self, kind: impl Into<Option<DeviceKind>>) -> Self {
        self.device = kind.into();
        self
    }

    /// The floating-point type of parameters and batches. It must be set before the process
    /// makes its first tensor, since Burn fixes it then. Default: the device's own, which is
    /// `F32`.
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

    /// Accumulates as many micro-steps as make an optimizer step of `samples` over all ranks, where each
    /// rank's batches have `batch_size`: `samples / (world size · batch_size)`, so that a program does the
    /// same steps on any number of ranks.
    ///
    /// [`build`](Self::build) fails with [`Error::is_config`] where that is no whole number, and names the
    /// nearest sizes that are reached; another batch would be another training.
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

    /// Where this process stands among the others, instead of what the environment says.
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

    /// How long a rank may be silent before the others give it up, as one that is stopped or cut
    /// off from the network. A rank that dies is noticed at once. Default:
    /// `ACCEL_LIVENESS_TIMEOUT` (seconds), else 5 s.
    pub fn liveness_timeout(mut self, timeout: Duration) -> Self {
        self.options = self.options.with_liveness_timeout(timeout);
        self
    }

    /// How the loss is scaled with [`Precision::F16`]. Default: [`LossScale::new`].
    pub fn loss_scale(mut self, rule: LossScale) -> Self {
        self.loss_scale = rule;
        self
    }

    /// The type in which [`Accelerator::forward`] and backward compute; parameters stay in full
    /// precision: see [`precision`](crate::precision). Default: `ACCEL_PRECISION`, else
    /// [`Precision::No`].
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = Some(precision);
        self
    }

    /// How long a collective waits for a rank that lives but does not come. Default: 10 minutes.
    ///
    /// ```
    /// use accelerator::Accelerator;
    /// use core::time::Duration;
    ///
    /// // Hosts that boot one after the other, and checkpoints that take long.
    /// let accelerator = Accelerator::builder()
    ///     .connect_timeout(Duration::from_secs(600))
    ///     .liveness_timeout(Duration::from_secs(20))
    ///     .progress_timeout(Duration::from_secs(3600))
    ///     .build()?;
    /// # assert_eq!(accelerator.world_size(), 1);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn progress_timeout(mut self, timeout: Duration) -> Self {
        self.options = self.options.with_progress_timeout(timeout);
        self
    }

    /// The seed of initial weights, dropout and everything else that draws from the device. The
    /// order of samples has a seed of its own, that of the loader. Default: 0.
    ///
    /// ```
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use accelerator::Accelerator;
    /// let weights = |seed| -> accelerator::Result<_> {
    ///     let accelerator = Accelerator::builder().seed(seed).build()?;
    ///     let model: Linear = LinearConfig::new(2, 1).init(&accelerator.device());
    ///     Ok(model.weight.val().into_data())
    /// };
    /// assert_eq!(weights(7)?, weights(7)?);
    /// assert_ne!(weights(7)?, weights(8)?);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// How bytes travel between ranks. Default: `ACCEL_TRANSPORT`, else chosen for where the
    /// ranks are.
    pub fn transport(mut self, transport: TransportKind) -> Self {
        self.transport = Some(transport);
        self
    }

    /// The type in which gradients travel between ranks. Default: `ACCEL_COMPRESSION`, else
    /// [`Compression::None`].
    pub fn with_compression(mut self, compression: Compression) -> Self {
        self.compression = Some(compression);
        self
    }

    /// Reduces gradients in the program's own way: by a hook that `make` gives, once for each prepared
    /// model of each rank, and once more to learn its name. See
    /// [`CommunicationHook`], and [`PowerSgd`](crate::hook::PowerSgd) for one that is ready. Every rank
    /// uses a hook of the same name, or none. Default: an exact all-reduce.
    ///
    /// Nothing is sent while backward runs, and there is no [`Compression`] beside it:
    /// [`build`](Self::build) fails with [`Error::is_config`] where both are asked for.
    pub fn with_communication_hook<H: CommunicationHook + 'static>(
        mut self,
        make: impl Fn() -> H + Send + Sync + 'static,
    ) -> Self {
        self.hook = Some(Maker::new(make));
        self
    }

    /// Notes how long each step takes, and what it is made of: for
    /// [`Accelerator::step_summary`], and for logs at the level `debug`. It costs a few readings of the
    /// clock a step. Default: no clock is read.
    ///
    /// At the end of the program, the mean of all ranks on the main one:
    ///
    /// ```
    /// # let accelerator = accelerator::Accelerator::builder().with_step_summary().build()?;
    /// # // Nothing is trained here.
    /// if let Some(summary) = accelerator.mean_step_summary()? {
    ///     accelerator.print(summary);
    /// }
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn with_step_summary(mut self) -> Self {
        self.recording = Recording::Steps;
        self
    }

    /// Records a trace of every rank, which [`Accelerator::finish`] gathers and rank 0 writes to
    /// `path`: a JSON file that [Perfetto](https://ui.perfetto.dev) opens (Chrome's trace event
    /// format). Implies [`with_step_summary`](Self::with_step_summary). Default: `ACCEL_TRACE`, else
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
    /// Where other ranks are lost, each writes its own part instead, as `….rank3.json`. So does a rank
    /// that ends without `finish`, since an error has left its loop by `?`, for example: when the last
    /// handle of its accelerator is dropped. A process that is killed, or ends by
    /// [`std::process::exit`], writes nothing. Such parts of an earlier run are removed at the start, but
    /// not in a restart of the job by the launcher, and where a whole trace is written.
    ///
    /// Of a long training, record some steps: [`with_trace_schedule`](Self::with_trace_schedule).
    ///
    /// ```
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("trace.json");
    /// let accelerator = accelerator::Accelerator::builder().with_trace(&path).build()?;
    /// // Train here.
    /// accelerator.finish()?;
    /// assert!(path.is_file());
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn with_trace(mut self, path: impl Into<PathBuf>) -> Self {
        self.trace = Some(path.into());
        self
    }

    /// Of the steps from the first on, records those that the schedule keeps, in a trace for each of its
    /// cycles beside the file of [`with_trace`](Self::with_trace): `trace.cycle0.json` and so on. It is
    /// [`Accelerator::profile`] from the start to the end of the program. Default:
    /// `ACCEL_TRACE_SCHEDULE`, else one trace of everything.
    ///
    /// ```
    /// use accelerator::timeline::Schedule;
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("trace.json");
    /// // Five steps of every thousand.
    /// let schedule = Schedule::new(5).with_wait(994).with_warm_up(1);
    /// let accelerator = accelerator::Accelerator::builder()
    ///     .with_trace(&path)
    ///     .with_trace_schedule(schedule)
    ///     .build()?;
    /// # accelerator.finish()?;
    /// # assert!(!path.exists());
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn with_trace_schedule(mut self, schedule: Schedule) -> Self {
        self.trace_schedule = Some(schedule);
        self
    }

    /// Whether gradients are sent while backward still runs. Results do not depend on it.
    /// Default: `ACCEL_OVERLAP`, else [`Overlap::Auto`].
    pub fn with_overlap(mut self, overlap: Overlap) -> Self {
        self.overlap = Some(overlap);
        self
    }

    /// Finds this process's place, connects it with the others, and opens the device.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`] for a setting that is out of range, unknown or contradicts another, or
    /// a plan of faults in a program that is built without them;
    /// [`Error::is_device`] for a device that is not there; [`Error::is_collective`] when the
    /// other ranks do not come in time.
    #[track_caller]
    pub fn build(self) -> Result<Accelerator> {
        let mut settings = self.settings()?;
        if self.transport == Some(TransportKind::Threads) {
            return Err(Error::config(
                "the transport `threads` joins ranks inside one process; start them with \
                 `Accelerator::builder().launch(n, …)`, or choose another transport",
            ));
        }
        let launch = match &self.launch {
            Some(launch) => launch.clone(),
            None => Launch::from_env()?,
        };
        // Before the others are kept waiting for a rank that will not come.
        settings.accumulation_steps = self.steps(launch.topology.world_size())?;
        let (kind, device) = self.open_device(launch.topology.local_rank(), &settings)?;
        if launch.topology.is_main() {
            check_trace(&settings)?;
        }
        if launch.topology.is_local_main() && launch.restart() == 0 {
            clear_traces(&settings);
        }
        let group = ProcessGroup::connect(&launch, &self.group_options(&launch)?)?;
        let switch = switch(group.topology(), &settings);
        let mut terms = terms(&settings, switch, group.topology());
        terms.push(hook_term(&settings));
        agreement::check_all(&group, &terms)?;
        let restarts = Restarts {
            done: launch.restart(),
            most: launch.max_restarts(),
        };
        self.join(group, settings, switch, restarts, kind, device)
    }

    /// Runs `body` on `world_size` ranks, each a thread of this process, and returns what they
    /// return, in rank order; see [`launch`](crate::launch).
    ///
    /// ```
    /// use accelerator::Accelerator;
    ///
    /// let accumulation = Accelerator::builder()
    ///     .global_batch(256, 32)
    ///     .launch(4, |accelerator| Ok(accelerator.accumulation_steps()))?;
    /// assert_eq!(accumulation, [2; 4]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The error or panic of the rank that failed first.
    pub fn launch<T, F>(self, world_size: usize, body: F) -> Result<Vec<T>>
    where
        T: Send,
        F: Fn(Accelerator) -> Result<T> + Send + Sync,
    {
        let mut settings = self.settings()?;
        settings.accumulation_steps = self.steps(world_size)?;
        check_trace(&settings)?;
        clear_traces(&settings);
        let world_size = NonZeroUsize::new(world_size)
            .ok_or_else(|| Error::config("launch: 0 ranks were asked for; at least 1 is needed"))?;
        if !matches!(
            self.transport,
            None | Some(TransportKind::Auto | TransportKind::Threads)
        ) {
            return Err(Error::config(
                "`launch` joins ranks inside one process by the transport `threads`; leave the \
                 transport unset, or start processes with `accel-launch`",
            ));
        }
        if self.launch.is_some() {
            return Err(Error::config(
                "`launched_as` says which process this is, and `launch` makes ranks inside one; \
                 use one of them",
            ));
        }
        let groups = ProcessGroup::threads(world_size.get(), &self.options)?;
        crate::launch::run(groups, |group| {
            let (kind, device) = self.open_device(group.topology().local_rank(), &settings)?;
            // Threads are started by this program, which nothing restarts.
            let restarts = Restarts {
                done: 0,
                most: None,
            };
            let switch = switch(group.topology(), &settings);
            if settings.hook.is_some() {
                // The rest is one setting, and each thread makes hooks of its own.
                agreement::check_all(&group, &[hook_term(&settings)])?;
            }
            body(self.join(group, settings.clone(), switch, restarts, kind, device)?)
        })
    }

    #[track_caller]
    fn join(
        &self,
        group: ProcessGroup,
        settings: Settings,
        overlap: Switch,
        restarts: Restarts,
        kind: DeviceKind,
        device: Device,
    ) -> Result<Accelerator> {
        {
            // The same seed on every rank: models that are built alike are alike. Another rank of this
            // process may be building one.
            let _turn = super::drawing();
            device.seed(settings.seed);
        }
        tracing::debug!(topology = %group.topology(), device = %kind, "accelerator ready");
        let timeline = Timeline::new(&group, settings.recording)?;
        if let (Some(schedule), Some(path)) = (settings.trace_schedule, &settings.trace) {
            timeline.begin(&group, schedule, Output::Trace(path.clone()))?;
        }
        Ok(Accelerator {
            shared: Arc::new(Shared {
                checkpoints: Ongoing::default(),
                device,
                group,
                kind,
                loaders: AtomicU64::new(0),
                models: Models::default(),
                optimizers: Census::default(),
                overlap,
                restarts,
                settings,
                timeline,
                trigger: Arc::default(),
                crossing: Crossing::default(),
                turn: Turn::default(),
                warned: Warned::default(),
            }),
        })
    }

    fn open_device(&self, local_rank: usize, settings: &Settings) -> Result<(DeviceKind, Device)> {
        let kind = environment::device(self.device)?;
        let mut device = kind.open(local_rank)?;
        if let Some(dtype) = self.dtype {
            device::configure(&mut device, dtype)?;
        }
        let precision = settings.precision;
        if let Some(dtype) = precision.dtype()
            && !device.supports_dtype(dtype)
        {
            return Err(Error::new(
                Kind::Device,
                format!(
                    "the precision {precision} was asked for, and the device `{kind}` does not compute in \
                     it; choose another precision, or another device"
                ),
            ));
        }
        Ok((kind, device))
    }

    fn settings(&self) -> Result<Settings> {
        if super::is_drawing() {
            return Err(Error::misuse(
                "an accelerator cannot be built within the closure of `Accelerator::init`, whose model \
                 would be drawn from another place of the generator; build it before",
            ));
        }
        environment::check()?;
        accelerator_fault::check()
            .map_err(|error| Error::with_source(Kind::Config, error.to_string(), error))?;
        self.loss_scale.check()?;
        if self.bucket_size < 1024 {
            return Err(Error::config(format!(
                "bucket_size is {} bytes; expected at least 1024 (the default is 25 MiB)",
                self.bucket_size
            )));
        }
        let trace = environment::trace(self.trace.as_deref())?;
        let trace_schedule = environment::trace_schedule(self.trace_schedule)?;
        let recording = match (&trace, &trace_schedule) {
            (Some(_), None) => Recording::Events,
            (Some(_), Some(schedule)) => {
                schedule.check()?;
                self.recording
            }
            (None, None) => self.recording,
            (None, Some(schedule)) => {
                return Err(Error::config(format!(
                    "the schedule `{schedule}` was given, and no trace; name its file by `with_trace` or \
                     ACCEL_TRACE, or leave the schedule out"
                )));
            }
        };
        let compression = environment::compression(self.compression)?;
        if self.hook.is_some() && compression != Compression::None {
            return Err(Error::config(format!(
                "`with_communication_hook` was called, and the compression is {compression} (by \
                 ACCEL_COMPRESSION or `with_compression`): a hook decides itself in which type gradients \
                 travel; leave one of them out"
            )));
        }
        Ok(Settings {
            accumulation_steps: NonZeroUsize::MIN,
            bucket_size: self.bucket_size,
            check_replicas: self.check_replicas,
            compression,
            hook: self.hook.clone(),
            loss_scale: self.loss_scale,
            overlap: environment::overlap(self.overlap)?,
            precision: environment::precision(self.precision)?,
            recording,
            seed: self.seed,
            trace,
            trace_schedule,
            window: match self.global_batch {
                Some(_) => WindowSize::Samples,
                None => WindowSize::Steps,
            },
        })
    }

    /// How many micro-steps make a step on so many ranks, as the program and the environment say.
    fn steps(&self, world_size: usize) -> Result<NonZeroUsize> {
        let given = self.accumulation_steps.map(|steps| {
            NonZeroUsize::new(steps).ok_or_else(|| {
                Error::config("accumulation_steps is 0; expected at least 1 (no accumulation)")
            })
        });
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
        environment::accumulation_steps(asked)
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
        Err(Error::config(format!(
            "a global batch of {samples} samples is no multiple of {world_size} ranks times batches of \
             {batch_size}; choose {near}, or another batch size"
        )))
    }
}

/// Refuses a trace that cannot be written, before there is anything to lose.
fn check_trace(settings: &Settings) -> Result<()> {
    let Some(path) = &settings.trace else {
        return Ok(());
    };
    if settings.trace_schedule.is_some() {
        return check_cycles(path);
    }
    match Place::find(path) {
        Ok(_) => Ok(()),
        Err(error) => Err(Error::config(format!(
            "the trace cannot be written to `{}`: {error}; name a file in a folder that exists and \
             takes files",
            path.display()
        ))),
    }
}

/// Removes what an earlier run left beside the trace.
fn clear_traces(settings: &Settings) {
    if let Some(path) = &settings.trace {
        timeline::clear(path);
    }
}

/// What the setting comes to for ranks that stand so.
fn switch(topology: &Topology, settings: &Settings) -> Switch {
    let on = match settings.overlap {
        // Hooks run when backward has ended.
        _ if settings.hook.is_some() => false,
        Overlap::On => topology.world_size() > 1,
        Overlap::Off => false,
        // On one host, ranks compute on the cores that sending would need.
        Overlap::Auto => topology.local_world_size() < topology.world_size(),
    };
    if on { Switch::On } else { Switch::Off }
}

/// What all ranks must set alike.
fn terms(settings: &Settings, switch: Switch, topology: &Topology) -> Vec<Term> {
    let replicas = match settings.check_replicas {
        Some(steps) => format!("every {steps} steps"),
        None => "never".to_owned(),
    };
    let schedule = match settings.trace_schedule {
        Some(schedule) => schedule.to_string(),
        None => "none".to_owned(),
    };
    vec![
        Term::new(
            "the number of accumulation steps",
            settings.accumulation_steps,
        )
        .set_by("ACCEL_ACCUMULATION_STEPS, `accumulation_steps` or `global_batch`"),
        Term::new("the bucket size in bytes", settings.bucket_size).set_by("`bucket_size`"),
        Term::new("the compression", settings.compression)
            .set_by("ACCEL_COMPRESSION or `with_compression`"),
        // Ranks that ask for it in other words may come to the same.
        Term::new("overlap", switch.name())
            .shown_as(explained(switch, settings, topology))
            .set_by("ACCEL_OVERLAP or `with_overlap`"),
        Term::new("the precision", settings.precision).set_by("ACCEL_PRECISION or `precision`"),
        Term::new("the scale of the loss", settings.loss_scale).set_by("`loss_scale`"),
        Term::new("the seed", settings.seed).set_by("`seed`"),
        Term::new("what is recorded", settings.recording)
            .set_by("ACCEL_TRACE, `with_trace` or `with_step_summary`"),
        Term::new("the schedule of the trace", schedule)
            .set_by("ACCEL_TRACE_SCHEDULE or `with_trace_schedule`"),
        Term::new("when replicas are checked", replicas).set_by("`check_replicas_every`"),
    ]
}

/// The hook, which is made to learn its name.
fn hook_term(settings: &Settings) -> Term {
    let hook = settings.hook.as_ref().map(Maker::make);
    let name = hook.as_ref().map_or("none", |hook| hook.name());
    Term::new("the communication hook", name).set_by("`with_communication_hook`")
}

/// What the setting came to, and why.
fn explained(switch: Switch, settings: &Settings, topology: &Topology) -> String {
    match settings.overlap {
        _ if settings.hook.is_some() => format!("{} (by a communication hook)", switch.name()),
        Overlap::Auto => format!(
            "{} (`auto`, with {} of {} ranks on its host)",
            switch.name(),
            topology.local_world_size(),
            topology.world_size()
        ),
        Overlap::Off | Overlap::On => switch.name().to_owned(),
    }
}
