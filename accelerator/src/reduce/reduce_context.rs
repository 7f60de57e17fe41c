use core::num::NonZeroU64;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::backward_calls::{BackwardGuard, FailedCalls};
use super::compression::Compression;
use super::device_reduce::{DeviceReducer, GradientReduction};
use super::hook::{HookFactory, HookInstance};
use super::loss::OnNonFiniteLoss;
use super::models::Models;
use super::overlap::{Overlap, OverlapSwitch};
use super::pace::Pace;
use super::trigger::Trigger;
use crate::context::Context;
use crate::precision::{LossScale, Precision};
use crate::unit::Units;

/// A rank that reduces gradients: its [`Context`], with the models that were prepared.
#[derive(Debug)]
pub(crate) struct ReduceContext {
    pub(crate) context: Arc<Context>,
    /// The path of sums between its device and the other ranks.
    pub(crate) device_reducer: Arc<DeviceReducer>,
    pub(crate) failed_calls: Arc<FailedCalls>,
    /// The guard of the threads that reduce gradients.
    pub(crate) guard: BackwardGuard,
    pub(crate) models: Models,
    pub(crate) overlap: OverlapSwitch,
    pub(crate) pace: Arc<Pace>,
    pub(crate) settings: ReduceSettings,
    pub(crate) trigger: Arc<Trigger>,
    pub(crate) working: WorkingUse,
}

/// The settings of the program for the reduction of gradients.
#[derive(Clone, Debug)]
pub(crate) struct ReduceSettings {
    /// The size in bytes.
    pub(crate) bucket_size: usize,
    /// The number of optimizer steps between comparisons of all ranks' parameters.
    pub(crate) check_replicas: Option<NonZeroU64>,
    pub(crate) compression: Compression,
    pub(crate) hook: Option<HookFactory>,
    pub(crate) loss_scale: LossScale,
    pub(crate) on_non_finite_loss: OnNonFiniteLoss,
    pub(crate) overlap: Overlap,
    pub(crate) precision: Precision,
    pub(crate) reduction: GradientReduction,
    pub(crate) same_batches: SameBatches,
    pub(crate) units: Units,
}

/// The program's setting for ranks that compute the same.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum SameBatches {
    Allowed,
    /// They are taken for a mistake.
    Unexpected,
}

/// The samples that gradients are the average over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum ReduceScope {
    Global,
    /// The samples of this rank alone: nothing is communicated.
    Local,
}

/// The halves of a forward pass in half precision that the program has ever asked for.
#[derive(Debug, Default)]
pub(crate) struct WorkingUse {
    /// An input was cast.
    cast: AtomicBool,
    /// A working copy of a model was made.
    copied: AtomicBool,
}

impl WorkingUse {
    pub(super) fn note_copied(&self) {
        self.copied.store(true, Ordering::Relaxed);
    }

    pub(crate) fn note_cast(&self) {
        self.cast.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if inputs are in half precision, and no model is: most models panic then, with no clear message.
    pub(crate) fn lacks_copy(&self) -> bool {
        self.cast.load(Ordering::Relaxed) && !self.copied.load(Ordering::Relaxed)
    }
}

impl ReduceContext {
    pub(crate) fn new(
        context: Arc<Context>,
        device_reducer: DeviceReducer,
        overlap: OverlapSwitch,
        settings: ReduceSettings,
    ) -> Self {
        Self {
            context,
            device_reducer: Arc::new(device_reducer),
            failed_calls: Arc::default(),
            guard: BackwardGuard::default(),
            models: Models::default(),
            overlap,
            pace: Arc::default(),
            settings,
            trigger: Arc::default(),
            working: WorkingUse::default(),
        }
    }

    /// The hook of one more model.
    pub(crate) fn communication_hook(&self) -> Option<HookInstance> {
        self.settings.hook.as_ref().map(HookFactory::make)
    }
}

impl Deref for ReduceContext {
    type Target = Context;

    fn deref(&self) -> &Context {
        &self.context
    }
}
