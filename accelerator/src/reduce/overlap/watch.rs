//! Operations without an effect on values, placed in Burn's graph so that backward calls back. See this
//! folder's README for what they are good for.

use core::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;

use crate::core::autodiff::{self, Node, NodeContext};

/// An observer that is called in the middle of a backward pass, as a [`Node`] is.
pub(super) trait Observer: fmt::Debug + Send + Sync {
    /// Backward begins, at a loss that is so deep.
    fn begins(&self, depth: usize);

    /// A point was reached. `gradients` are those of its leaves so far, in their order; `None`
    /// where a leaf has none yet.
    fn reached(&self, point: usize, gradients: &mut dyn Iterator<Item = Option<DispatchTensor>>);
}

/// A node that reports to an observer when backward reaches it.
#[derive(Debug)]
pub(super) struct ProbeWatch {
    /// `None` is one that has no gradient.
    pub(super) leaves: Vec<Option<DispatchTensor>>,
    pub(super) observer: Arc<dyn Observer>,
    pub(super) point: usize,
}

/// The same values, one level deeper in the graph.
pub(super) fn deepen(tensor: DispatchTensor) -> DispatchTensor {
    autodiff::above(tensor.clone(), tensor, Arc::new(Deepen))
}

/// Returns a tensor to join to a loss, whose backward comes after that of everything that is deeper
/// than `anchor`. `below` makes it tracked: it is a leaf, or another watch.
pub(super) fn watch(
    below: DispatchTensor,
    anchor: DispatchTensor,
    watch: ProbeWatch,
) -> DispatchTensor {
    let values = below.clone();
    autodiff::above_both([below, anchor], values, Arc::new(watch))
}

/// The loss, whose backward comes to the watches as well.
pub(super) fn join(
    loss: DispatchTensor,
    watched: DispatchTensor,
    observer: Arc<dyn Observer>,
) -> DispatchTensor {
    let values = loss.clone();
    autodiff::above_both([loss, watched], values, Arc::new(Join(observer)))
}

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
