//! Operations without an effect on values, placed in Burn's graph so that backward calls back: see this folder's
//! README.

mod backward;
mod ready_order;
mod scheduler;

use core::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;

use crate::core::anchors::Anchors;
use crate::core::autodiff::{self, Node, NodeContext};

pub(super) use self::backward::is_of;
pub(super) use self::ready_order::ReadyOrder;
pub use self::scheduler::Overlap;
pub(super) use self::scheduler::OverlapScheduler;
pub(crate) use self::scheduler::OverlapSwitch;
pub use self::scheduler::{OverlapReport, OverlapState};

/// A place in backward at which to look at gradients.
#[derive(Debug)]
struct ProbePoint {
    /// The depth of the point: everything deeper has run when it is reached.
    depth: usize,
    /// The parameters whose gradients are looked at; `None` is one that has none.
    leaves: Vec<Option<DispatchTensor>>,
}

/// The same loss, whose backward calls `observer` at each of `probes`, which are ordered from
/// the deepest to the shallowest. Values and gradients stay as they are.
fn watch(
    loss: Tensor<1>,
    anchors: &mut Anchors,
    probes: Vec<ProbePoint>,
    observer: &Arc<dyn Observer>,
) -> Tensor<1> {
    let chain = anchors.on(&loss.device());
    let depths: Vec<usize> = probes.iter().map(|probe| probe.depth).collect();
    let anchors = chain.at(&depths);
    // Each watch stands on the next shallower one, so that one node joins all of them. The first stands on a leaf,
    // which makes them tracked.
    let mut watched = chain.leaf.clone();
    for (point, (probe, anchor)) in probes.into_iter().zip(anchors).enumerate().rev() {
        let watch = ProbeWatch {
            leaves: probe.leaves,
            observer: Arc::clone(observer),
            point,
        };
        let values = watched.clone();
        watched = autodiff::above_both([watched, anchor], values, Arc::new(watch));
    }
    let loss = loss.into_dispatch();
    let joined = Arc::new(Join(Arc::clone(observer)));
    Tensor::from_dispatch(autodiff::above_both([loss.clone(), watched], loss, joined))
}

/// An observer that is called in the middle of a backward pass, as a [`Node`] is.
trait Observer: fmt::Debug + Send + Sync {
    /// Backward begins, at a loss that is so deep.
    fn begins(&self, depth: usize);

    /// A point was reached. `gradients` are those of its leaves so far, in their order; `None`
    /// where a leaf has none yet.
    fn reached(&self, point: usize, gradients: &mut dyn Iterator<Item = Option<DispatchTensor>>);
}

/// A node that reports to an observer when backward reaches it.
#[derive(Debug)]
struct ProbeWatch {
    /// `None` is one that has no gradient.
    leaves: Vec<Option<DispatchTensor>>,
    observer: Arc<dyn Observer>,
    point: usize,
}

impl Node for ProbeWatch {
    // It has no gradient, and passes none on.
    fn backward(&self, here: &mut dyn NodeContext) {
        let so_far = |leaf: &Option<DispatchTensor>| here.of_leaf(leaf.as_ref()?);
        let mut so_far = self.leaves.iter().map(so_far);
        self.observer.reached(self.point, &mut so_far);
    }
}

/// The node of the loss, from which backward comes to the watches as well.
#[derive(Debug)]
struct Join(Arc<dyn Observer>);

impl Node for Join {
    fn backward(&self, here: &mut dyn NodeContext) {
        if let Some(depth) = here.depth() {
            self.0.begins(depth);
        }
        here.hand_on();
    }
}

#[cfg(test)]
mod tests;
