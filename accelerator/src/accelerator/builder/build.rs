use core::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use accelerator_collective::{Launch, ProcessGroup, Topology, TransportKind};
use accelerator_host::sync::Mutex;
use accelerator_host::{DEVICE, OFFLOAD_FOLDER, allocator};
use burn::tensor::Device;

use super::AcceleratorBuilder;
use super::Settings;
use crate::accelerator::{Accelerator, Shared, rank_processes, variables};
use crate::checkpoint::CheckpointContext;
use crate::context::{Accumulation, Context, ForwardCollectives};
use crate::core::agreement::{self, Term};
use crate::core::device::{self, BackendKind};
use crate::core::draws::{self, drawing};
use crate::core::error::{self, Error, Result};
use crate::core::offload::Offload;
#[cfg(feature = "flex")]
use crate::core::thread_pool;
use crate::data::UncountedPadding;
use crate::optim::OptimizerCount;
use crate::reduce::hook::HookFactory;
use crate::reduce::{DeviceReducer, Overlap, OverlapSwitch, ReduceContext};
use crate::timeline::{Cycle, Timeline, TraceFile, check_cycles, clear_traces};
use crate::tracking::Tracking;

impl AcceleratorBuilder {
    /// Determines this process's rank, connects it with the other ranks, and opens the device.
    ///
    /// From then on, glibc's allocator keeps the memory that this process frees, as it does under `accel-launch`, which makes
    /// training steps 10 to 20 percent faster. To choose for yourself, set `MALLOC_TRIM_THRESHOLD_` to any number.
    ///
    /// With the Flex backend, this thread joins a rayon pool of its own if rayon has more than one thread. Operations then
    /// start here instead of waking another thread: steps of small models on two threads are up to 25 percent faster.
    /// Tasks that this thread gives to `rayon::spawn` may then run here, inside a tensor operation. Set
    /// `ACCEL_LOCAL_POOL=0` if they wait for this thread or take locks that it holds. Configure rayon's global pool before
    /// this call.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`] for a setting that is out of range, unknown or contradicts another, or
    /// a plan of faults in a program that is built without them;
    /// [`Error::is_device`] for a device that is not there, or NCCL where it was asked for and a rank has none;
    /// [`Error::is_collective`] when the
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
        let open = |place: &Topology| self.open_device(place, &settings);
        let place = Some(&launch.topology).filter(|place| place.is_local_known());
        let opened = match &self.kept_device {
            Some(kept) => Some(kept.clone()),
            None => place.map(open).transpose()?,
        };
        // Each rank writes the files of its cycles, and rank 0 that of a whole run.
        if launch.topology.is_main() || settings.trace.schedule.is_some() {
            check_trace(&settings)?;
        }
        if launch.topology.is_local_main() && launch.restart() == 0 {
            clear_traces_of(&settings);
        }
        #[cfg(feature = "flex")]
        let has_local_pool = variables::local_pool()?;
        let group = ProcessGroup::connect(&launch, &self.group_options(&launch)?)?;
        let (kind, device) = match opened {
            Some(opened) => opened,
            // Which device it is depends on the local rank, which the ranks have found only now.
            None => open(group.topology()).inspect_err(|error| group.abort(error.to_string()))?,
        };
        let switch = overlap_switch(group.topology(), &settings, kind);
        let device_reducer = device_reducer(&settings, kind, &device);
        let mut terms = terms(&settings, switch, group.topology(), &device_reducer);
        terms.push(hook_term(&settings));
        agreement::check_all(&group, &terms)?;
        #[cfg(feature = "flex")]
        if kind == BackendKind::Flex && has_local_pool {
            thread_pool::join_local_pool();
        }
        let restarts = launch.restart();
        self.join(group, settings, switch, restarts, device_reducer, device)
    }

    /// Runs `body` on `world_size` ranks, each a thread of this process, and returns what they
    /// return, in rank order; see [`launch`](crate::launch).
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
        clear_traces_of(&settings);
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
        rank_processes::run(groups, |group| {
            let (kind, device) = self.open_device(group.topology(), &settings)?;
            // Threads are started by this program, which nothing restarts.
            let restarts = 0;
            let switch = overlap_switch(group.topology(), &settings, kind);
            if settings.reduce.hook.is_some() {
                // The rest is one setting, and each thread makes hooks of its own.
                agreement::check_all(&group, &[hook_term(&settings)])?;
            }
            let device_reducer = device_reducer(&settings, kind, &device);
            let accelerator = self.join(
                group,
                settings.clone(),
                switch,
                restarts,
                device_reducer,
                device,
            )?;
            accelerator.run(&body)
        })
    }

    #[track_caller]
    fn join(
        &self,
        group: ProcessGroup,
        settings: Settings,
        overlap: OverlapSwitch,
        restarts: u64,
        device_reducer: DeviceReducer,
        device: Device,
    ) -> Result<Accelerator> {
        allocator::keep_freed_memory();
        {
            // The same seed on every rank: models that are built alike are alike. Another rank of this
            // process may be building one.
            let _turn = drawing();
            draws::seed(&device, settings.seed);
        }
        device_reducer.check(&group)?;
        tracing::debug!(topology = %group.topology(), device = %device_reducer.kind(), "accelerator ready");
        let timeline = Timeline::new(&group, settings.recording)?;
        if let (Some(schedule), Some(path)) = (settings.trace.schedule, &settings.trace.path) {
            let path = path.clone();
            let write = move |cycle: &Cycle| {
                if let Err(error) = cycle.write_trace(&path) {
                    error::warn(&format!("a trace is lost: {error:?}"));
                }
            };
            timeline.begin(&group, schedule, Box::new(write))?;
        }
        let context = Arc::new(Context {
            accumulation: Accumulation::new(settings.accumulation_steps, settings.window),
            device,
            backend_kind: device_reducer.kind(),
            forward_collectives: ForwardCollectives::default(),
            group,
            loaders: AtomicU64::new(0),
            offload: settings.offload.map(Offload::new),
            operations: settings.operations,
            seed: settings.seed,
            timeline,
        });
        let reduction =
            ReduceContext::new(context.clone(), device_reducer, overlap, settings.reduce);
        let reduction = Arc::new(reduction);
        let tracking = Arc::new(Tracking::new(&context.group));
        Ok(Accelerator {
            shared: Arc::new(Shared {
                accumulates: AtomicBool::new(false),
                builder: self.clone(),
                checkpoints: Arc::new(CheckpointContext::new(reduction.clone(), tracking.clone())),
                context,
                brought: Mutex::default(),
                groups: Mutex::default(),
                optimizers: OptimizerCount::default(),
                reduction,
                restarts,
                trace: settings.trace,
                tracker_settings: self.trackers.clone(),
                tracking,
                uncounted: UncountedPadding::default(),
            }),
        })
    }

    fn open_device(&self, place: &Topology, settings: &Settings) -> Result<(BackendKind, Device)> {
        let kind = variables::agreed("device", self.device, DEVICE)?;
        let kind = kind.unwrap_or_else(BackendKind::preferred);
        let oversubscription = variables::oversubscription(self.oversubscription)?;
        let mut device = kind.open(place, oversubscription)?;
        if let Some(dtype) = self.dtype {
            device::configure(&mut device, dtype)?;
        }
        let precision = settings.reduce.precision;
        if let Some(dtype) = precision.dtype()
            && !device.supports_dtype(dtype)
        {
            return Err(Error::device(format!(
                "the precision {precision} was asked for, and the device `{kind}` does not compute in \
                     it; choose another precision, or another device"
            )));
        }
        if settings.offload.is_some() && kind != BackendKind::Flex {
            return Err(Error::config(format!(
                "tensors cannot be offloaded from the device `{kind}`: only `flex` keeps them in memory-mapped files; choose \
                 `flex`, or unset `offload_folder` and {}",
                OFFLOAD_FOLDER.name
            )));
        }
        Ok((kind, device))
    }
}

fn device_reducer(settings: &Settings, kind: BackendKind, device: &Device) -> DeviceReducer {
    DeviceReducer::new(
        settings.reduce.reduction,
        kind,
        device,
        settings.reduce.compression,
    )
}

/// Refuses a trace that cannot be written, before there is anything to lose.
fn check_trace(settings: &Settings) -> Result<()> {
    let Some(path) = &settings.trace.path else {
        return Ok(());
    };
    if settings.trace.schedule.is_some() {
        return check_cycles(path);
    }
    match TraceFile::find(path) {
        Ok(_) => Ok(()),
        Err(error) => Err(Error::config(format!(
            "the trace cannot be written to `{}`: {error}; name a file in a folder that exists and \
             takes files",
            path.display()
        ))),
    }
}

fn clear_traces_of(settings: &Settings) {
    if let Some(path) = &settings.trace.path {
        clear_traces(path);
    }
}

pub(super) fn overlap_switch(
    topology: &Topology,
    settings: &Settings,
    kind: BackendKind,
) -> OverlapSwitch {
    let on = match settings.reduce.overlap {
        // Hooks run when backward has ended.
        _ if settings.reduce.hook.is_some() => false,
        Overlap::On => topology.world_size() > 1,
        Overlap::Off => false,
        // On one host, ranks compute on the cores that sending would need.
        Overlap::Auto => {
            let computes_elsewhere =
                matches!(kind, BackendKind::Cuda | BackendKind::Rocm) && topology.world_size() > 1;
            topology.local_world_size() < topology.world_size() || computes_elsewhere
        }
    };
    if on {
        OverlapSwitch::On
    } else {
        OverlapSwitch::Off
    }
}

pub(super) fn terms(
    settings: &Settings,
    switch: OverlapSwitch,
    topology: &Topology,
    device_reducer: &DeviceReducer,
) -> Vec<Term> {
    let replicas = match settings.reduce.check_replicas {
        Some(steps) => format!("every {steps} steps"),
        None => "never".to_owned(),
    };
    let schedule = match settings.trace.schedule {
        Some(schedule) => schedule.to_string(),
        None => "none".to_owned(),
    };
    vec![
        Term::new(
            "the number of accumulation steps",
            settings.accumulation_steps,
        )
        .set_by("ACCEL_ACCUMULATION_STEPS, `accumulation_steps` or `global_batch`"),
        Term::new("the bucket size in bytes", settings.reduce.bucket_size).set_by("`bucket_size`"),
        Term::new("the compression", settings.reduce.compression)
            .set_by("ACCEL_COMPRESSION or `compression`"),
        // Ranks that ask for it in other words may come to the same.
        Term::new("overlap", switch.name())
            .shown_as(explained(switch, settings, topology, device_reducer.kind()))
            .set_by("ACCEL_OVERLAP or `overlap`"),
        Term::new("the precision", settings.reduce.precision).set_by("ACCEL_PRECISION or `precision`"),
        Term::new("the reduction", settings.reduce.reduction)
            .set_by("ACCEL_REDUCTION or `gradient_reduction`"),
        // What all ranks scale by is found in one way on devices, and in another in memory.
        Term::new("where gradients are summed", device_reducer.placement())
            .shown_as(format!("{} (of `{}`)", device_reducer.placement(), device_reducer.kind()))
            .set_by(
                "the kind of device, ACCEL_REDUCTION and ACCEL_COMPRESSION; ACCEL_REDUCTION=staged on every rank \
                 lets all kinds of devices train together",
            ),
        Term::new("the scale of the loss", settings.reduce.loss_scale).set_by("`loss_scale`"),
        Term::new("a loss that is not finite", settings.reduce.on_non_finite_loss.name())
            .set_by("`stop_at_non_finite_loss`"),
        Term::new("the seed", settings.seed).set_by("`seed`"),
        Term::new("what is recorded", settings.recording)
            .set_by("ACCEL_TRACE, `trace` or `step_summary`"),
        Term::new("the schedule of the trace", schedule)
            .set_by("ACCEL_TRACE_SCHEDULE or `trace_schedule`"),
        Term::new("when replicas are checked", replicas).set_by("`check_replicas_every`"),
    ]
}

/// The hook, which is made to learn its name.
pub(super) fn hook_term(settings: &Settings) -> Term {
    let hook = settings.reduce.hook.as_ref().map(HookFactory::make);
    let name = hook.as_ref().map_or("none", |hook| hook.name());
    Term::new("the communication hook", name).set_by("`communication_hook`")
}

fn explained(
    switch: OverlapSwitch,
    settings: &Settings,
    topology: &Topology,
    kind: BackendKind,
) -> String {
    match settings.reduce.overlap {
        _ if settings.reduce.hook.is_some() => {
            format!("{} (by a communication hook)", switch.name())
        }
        Overlap::Auto => format!(
            "{} (`auto`, on the device `{kind}`, with {} of {} ranks on its host)",
            switch.name(),
            topology.local_world_size(),
            topology.world_size()
        ),
        Overlap::Off | Overlap::On => switch.name().to_owned(),
    }
}
