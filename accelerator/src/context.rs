//! The state of a rank that every part of the library needs.

use core::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use accelerator_collective::ProcessGroup;
use accelerator_host::sync::Mutex;
use burn::tensor::Device;

use crate::core::agreement;
use crate::core::device::{BackendKind, Operations};
use crate::core::error::{self, Error, Result};
use crate::core::offload::Offload;
use crate::timeline::Timeline;

/// A rank: its group, its device, its place in the training. The layers below the facade take it in the place of an
/// [`Accelerator`](crate::Accelerator).
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) accumulation: Accumulation,
    /// The device without gradients.
    pub(crate) device: Device,
    pub(crate) backend_kind: BackendKind,
    pub(crate) forward_collectives: ForwardCollectives,
    pub(crate) group: ProcessGroup,
    /// The number of loaders prepared so far, and so the number of the next one.
    pub(crate) loaders: AtomicU64,
    /// The offload folder for the tensors of sharded units, if offloading is on.
    pub(crate) offload: Option<Offload>,
    pub(crate) operations: Operations,
    pub(crate) seed: u64,
    pub(crate) timeline: Timeline,
}

/// The size of an accumulation window: as much as an optimizer step takes.
#[derive(Debug)]
pub(crate) struct Accumulation {
    steps: AtomicUsize,
    pub(crate) window: WindowSize,
}

/// The unit in which the program sets the size of a window.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum WindowSize {
    Samples,
    Steps,
}

impl Context {
    pub(crate) fn autodiff_device(&self) -> Device {
        self.operations.on(self.device.clone())
    }

    pub(crate) fn group(&self) -> &ProcessGroup {
        &self.group
    }

    pub(crate) fn rank(&self) -> usize {
        self.group.rank()
    }

    pub(crate) fn world_size(&self) -> usize {
        self.group.world_size()
    }

    pub(crate) fn is_main_process(&self) -> bool {
        self.group.topology().is_main()
    }

    /// Does what this rank alone does: collectives within it are refused.
    pub(crate) fn alone<T>(&self, work: impl FnOnce() -> T) -> T {
        let _guard = (self.world_size() > 1).then(|| {
            self.group.forbid(
                "it was called inside a closure that runs on one rank only, where the others \
                 would never join it; move it out of the closure",
            )
        });
        work()
    }

    /// Does `work` on rank 0 alone, and tells every rank if it failed; returns its result on rank 0. Long work shows
    /// that it is alive.
    #[track_caller]
    pub(crate) fn on_main<T>(
        &self,
        action: &str,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<Option<T>> {
        match self.is_main_process() {
            true => agreement::send(&self.group, self.alone(work)).map(Some),
            false => agreement::receive(&self.group, action).map(|()| None),
        }
    }

    /// Warns that the job restarts after a loss, though it was started to continue, since that state is not on every rank.
    pub(crate) fn warn_of_restart(&self, state: &str) {
        if self.is_main_process() && self.group.continues_on_loss() {
            error::warn(&format!(
                "the job was started with `--on-loss continue`, but {state} cannot continue without a lost rank: after a \
                 loss, the job restarts from its newest checkpoint"
            ));
        }
    }

    /// Fails where a layer's collective failed in the forward pass, in a call that all ranks make.
    pub(crate) fn check_forward(&self) -> Result<()> {
        self.forward_collectives.check_in(&self.group)
    }

    /// Names the loader that is being prepared, for an error.
    pub(crate) fn next_loader_name(&self) -> String {
        loader_name(self.loaders.load(Ordering::Relaxed))
    }

    pub(crate) fn next_loader(&self) -> u64 {
        self.loaders.fetch_add(1, Ordering::Relaxed)
    }
}

/// The name of a loader in messages, by its number among those of the program.
pub(crate) fn loader_name(number: u64) -> String {
    format!("loader {number} (the first that was prepared is 0)")
}

impl Accumulation {
    pub(crate) fn new(steps: NonZeroUsize, window: WindowSize) -> Self {
        let steps = AtomicUsize::new(steps.get());
        Self { steps, window }
    }

    pub(crate) fn set_steps(&self, steps: NonZeroUsize) {
        self.steps.store(steps.get(), Ordering::Relaxed);
    }

    pub(crate) fn steps(&self) -> usize {
        self.steps.load(Ordering::Relaxed)
    }
}

/// A note that there are layers that communicate. Their collectives run in the order of the graph during backward, so
/// no bucket of gradients may be sent then.
#[derive(Debug, Default)]
pub(crate) struct ForwardCollectives {
    /// The error of such a layer, which cannot return one and gave useless values instead.
    failure: Mutex<Option<Error>>,
    noted: AtomicBool,
}

impl ForwardCollectives {
    pub(crate) fn note(&self) {
        self.noted.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_noted(&self) -> bool {
        self.noted.load(Ordering::Relaxed)
    }

    /// Keeps why the ranks could not compute a layer together.
    pub(crate) fn failed(&self, error: Error) {
        self.failure.lock().get_or_insert(error);
    }

    /// Fails where a layer did, before what came of it is used: once for one that was called where it must
    /// not be, which leaves the group as it was, and always for a group that has failed.
    pub(crate) fn check(&self) -> Result<()> {
        if !self.is_noted() {
            return Ok(());
        }
        let mut failure = self.failure.lock();
        let lasts = failure.as_ref().is_some_and(|error| !error.is_misuse());
        let error = match lasts {
            true => failure.clone(),
            false => failure.take(),
        };
        error.map_or(Ok(()), Err)
    }

    /// The same in a call that the other ranks make, too: they do not know of a misuse on this one, and would wait for
    /// it, so the group ends with it.
    pub(crate) fn check_in(&self, group: &ProcessGroup) -> Result<()> {
        self.check().inspect_err(|error| {
            if group.check_allowed("this call").is_ok() {
                group.abort(error.to_string());
            }
        })
    }
}
