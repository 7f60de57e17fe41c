//! Memory of the size that windows take, for a trial of what else fits.

use core::fmt;
use std::sync::Arc;

use accelerator_collective::Buffer;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

use super::bucket_storage::BucketStorage;
use super::compression::Compression;
use super::model_state::ModelState;
use super::overlap::OverlapSwitch;
use super::reduce_context::ReduceContext;
use crate::core::error::Result;

/// The number of batches that a window holds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Windows {
    /// The number that the accelerator accumulates.
    AsConfigured,
    /// Several: the program keeps windows open.
    KeptOpen,
}

/// The buckets of a model, and what else of their size its windows hold. The memory is given back when this is
/// dropped.
pub(crate) struct Reserved {
    model_state: Arc<ModelState>,
    _buckets: Vec<BucketStorage>,
    _wires: Vec<Buffer>,
}

/// Lets all ranks agree on how gradients get to the others, which takes memory of devices. All ranks call it.
#[track_caller]
pub(crate) fn settle_device_reducer(context: &ReduceContext) -> Result<()> {
    let settings = &context.settings;
    // What a hook or f16 is for is done in memory, on all ranks.
    if settings.hook.is_none() && settings.compression != Compression::F16 {
        context.device_reducer.settle(context.group())?;
    }
    Ok(())
}

impl Reserved {
    pub(crate) fn of(
        context: &ReduceContext,
        model_state: Arc<ModelState>,
        windows: Windows,
    ) -> Self {
        let group = context.group();
        let several = group.world_size() > 1;
        let accumulates = windows == Windows::KeptOpen || context.accumulation.steps() > 1;
        // One rank alone hands the gradients of a lone batch on as they are.
        let sums = several || accumulates || model_state.loss_scale().is_some();
        // Sums that are sent early are kept as they were, in case that they are to be sent again.
        let undo = several && accumulates && context.overlap == OverlapSwitch::On;
        let compression = context.settings.compression;
        // What earlier windows have left is counted once.
        model_state.release_spare();
        let mut buckets = Vec::new();
        for _ in 0..usize::from(sums) + usize::from(undo) {
            buckets.extend(model_state.stores(group).map(BucketStorage::zeroed));
        }
        let wire = |store: &BucketStorage| match store {
            BucketStorage::Host(buffer) if several => {
                let mut wire = group.buffer(compression.wire(buffer.dtype())?, buffer.len());
                wire.bytes_mut().fill(0);
                Some(wire)
            }
            _ => None,
        };
        let first = buckets.len() / (1 + usize::from(undo));
        let wires = buckets[..first].iter().filter_map(wire).collect();
        Self {
            model_state,
            _buckets: buckets,
            _wires: wires,
        }
    }

    /// Forgets what was made for the forward of an attempt, which no `backward` uses up.
    pub(crate) fn attempt_ends(&self) {
        self.model_state.take_working();
    }
}

/// Lets Burn forget forward passes of a model that no backward pass follows. It keeps what they recorded until
/// another backward runs in the same graph, as every one does that comes to one of the same parameters.
pub(crate) fn forget_graphs<M: Module>(model: &M) {
    let mut sums = ParamSumBackwards(Vec::new());
    model.visit(&mut sums);
    // The first to be in the graph frees it, before there is a gradient of a large one.
    sums.0.sort_by_key(|(elements, _)| *elements);
    for (_, backward) in sums.0 {
        backward();
    }
}

/// The backward pass of the sum of each trainable parameter, with its number of elements.
struct ParamSumBackwards(Vec<(usize, Box<dyn FnOnce()>)>);

impl ModuleVisitor for ParamSumBackwards {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        if value.is_require_grad() {
            let elements = value.shape().num_elements();
            self.0
                .push((elements, Box::new(move || drop(value.sum().backward()))));
        }
    }
}

impl fmt::Debug for Reserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reserved").finish_non_exhaustive()
    }
}
