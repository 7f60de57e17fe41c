//! Operations without an effect on values, placed in Burn's graph so that backward calls back: see this folder's
//! README.

mod backward;
mod ready_order;
mod scheduler;

use core::fmt;
use std::collections::BTreeMap;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{Device, Tensor};

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

/// Tensors of chosen depths, of which no gradient is asked: what is placed above one of them runs
/// at its depth in backward.
///
/// A node of Burn's graph is one deeper than its deepest parent, tracked or not, and backward
/// runs from the deepest to the shallowest. Untracked nodes are no part of any backward pass, so
/// a chain of them is made once and survives. There is one chain for each device and checkpointing
/// strategy, since Burn does not mix these.
#[derive(Debug, Default)]
struct Anchors {
    chains: Vec<Chain>,
}

#[derive(Debug)]
struct Chain {
    device: Device,
    /// Makes tracked what has it as a parent.
    leaf: DispatchTensor,
    /// The tensors by depth. The one of depth 0 is always there.
    made: BTreeMap<usize, DispatchTensor>,
}

impl Anchors {
    /// The chain for losses on `device`.
    fn on(&mut self, device: &Device) -> &mut Chain {
        let strategy = device.gradient_checkpointing_strategy();
        let known = self.chains.iter().position(|chain| {
            chain.device == *device && chain.device.gradient_checkpointing_strategy() == strategy
        });
        let known = known.unwrap_or_else(|| {
            self.chains.push(Chain::new(device.clone()));
            self.chains.len() - 1
        });
        &mut self.chains[known]
    }
}

impl Chain {
    fn new(device: Device) -> Self {
        let zero = || Tensor::<1>::zeros([1], &device);
        Self {
            leaf: zero().require_grad().into_dispatch(),
            made: BTreeMap::from([(0, zero().into_dispatch())]),
            device,
        }
    }

    /// Anchors of these depths; those of others are forgotten.
    fn at(&mut self, depths: &[usize]) -> Vec<DispatchTensor> {
        let anchors = depths.iter().map(|&depth| self.make(depth)).collect();
        self.made
            .retain(|depth, _| *depth == 0 || depths.contains(depth));
        anchors
    }

    fn make(&mut self, depth: usize) -> DispatchTensor {
        let nearest = self.made.range(..=depth).next_back();
        let Some((&from, anchor)) = nearest else {
            // Not reached: depth 0 is there.
            return self.leaf.clone();
        };
        let mut anchor = anchor.clone();
        for _ in from..depth {
            anchor = autodiff::above(anchor.clone(), anchor, Arc::new(Deepen));
        }
        self.made.insert(depth, anchor.clone());
        anchor
    }
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

/// Passes its gradient on: a node that only makes the graph deeper.
#[derive(Debug)]
struct Deepen;

impl Node for Deepen {
    fn backward(&self, here: &mut dyn NodeContext) {
        here.hand_on();
    }
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
