//! Nodes of our own in the graph that Burn's backward runs through.

#![allow(deprecated, reason = "ndarray is, and is served while it is there")]

use core::fmt;
use core::marker::PhantomData;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, Backend, BackendTensor, Dispatch, DispatchAutodiffContext, DispatchTensor,
    DispatchTensorKind, backend_extension,
};
use burn::tensor::Tensor;

/// The work of a node when backward reaches it, on the thread that runs backward.
///
/// The graph is locked meanwhile: the model's own tensors must not be computed with. Plain tensors, which
/// gradients are, may.
pub(crate) trait Node: fmt::Debug + Send + Sync {
    /// Runs when backward reaches the node. A gradient that it leaves alone goes no further.
    fn backward(&self, here: &mut dyn NodeContext);
}

/// A node's surroundings in the midst of backward.
pub(crate) trait NodeContext {
    /// The depth of the node's first parent in the graph; `None` if nothing asks for a gradient of it.
    fn depth(&self) -> Option<usize>;

    /// The gradient of a leaf so far.
    fn of_leaf(&self, leaf: &DispatchTensor) -> Option<DispatchTensor>;

    /// The node's gradient, which is not given to its parents.
    fn take(&mut self) -> DispatchTensor;

    /// Adds to the gradient of a node that backward has not reached yet, or of a leaf. It need not be a parent.
    fn give(&mut self, to: NodeId, gradient: DispatchTensor);

    /// Gives the node's gradient to its first parent.
    fn hand_on(&mut self);

    /// Gives what `new` makes of the node's gradient, which is of the same device and shape, to its first
    /// parent.
    fn hand_on_as(&mut self, new: &dyn Fn(DispatchTensor) -> DispatchTensor);
}

/// Gives its gradient to its first parent: a node that only makes the graph deeper.
#[derive(Debug)]
pub(crate) struct HandOn;

impl Node for HandOn {
    fn backward(&self, here: &mut dyn NodeContext) {
        here.hand_on();
    }
}

/// Returns `true` if nodes can be placed above this tensor: its device is a known one, and it is tracked.
pub(crate) fn serves(tensor: &Tensor<1>) -> bool {
    let DispatchTensorKind::Autodiff(kind) = tensor.clone().into_dispatch().kind else {
        return false;
    };
    match *kind {
        #[cfg(feature = "flex")]
        DispatchTensorKind::Flex(_) => true,
        #[cfg(feature = "ndarray")]
        DispatchTensorKind::NdArray(_) => true,
        #[cfg(feature = "cube")]
        DispatchTensorKind::Cube(_) => true,
        _ => false,
    }
}

pub(crate) fn is_same_leaf(left: &DispatchTensor, right: &DispatchTensor) -> bool {
    let left = leaf_number(left);
    left.is_some() && left == leaf_number(right)
}

/// The number of the node that a tracked tensor is, which no other one of this process has.
pub(crate) fn leaf_number(leaf: &DispatchTensor) -> Option<u64> {
    node_of(leaf).map(|node| node.id.value)
}

/// The node that a tensor is in the graph, if it is tracked: something asks for its gradient.
pub(crate) fn tracked_node(tensor: &DispatchTensor) -> Option<NodeId> {
    let node = node_of(tensor)?;
    node.is_tracked.then_some(node.id)
}

struct TensorNode {
    id: NodeId,
    is_tracked: bool,
}

fn node_of(tensor: &DispatchTensor) -> Option<TensorNode> {
    fn node<B: BackendParts>(tensor: &DispatchTensor) -> Option<TensorNode> {
        let tensor = B::leaf(tensor)?;
        Some(TensorNode {
            id: tensor.id(),
            is_tracked: tensor.is_tracked(),
        })
    }
    let found = None;
    #[cfg(feature = "flex")]
    let found = found.or_else(|| node::<burn::backend::Flex>(tensor));
    #[cfg(feature = "ndarray")]
    let found = found.or_else(|| node::<burn::backend::NdArray>(tensor));
    #[cfg(feature = "cube")]
    let found = found.or_else(|| node::<burn::backend::Cube>(tensor));
    found
}

/// The values of `values`, one deeper than `parent`: backward comes to `node` when everything that is
/// deeper has run. If nothing asks for a gradient of `parent`, it never does. All is of one device.
pub(crate) fn above(
    parent: DispatchTensor,
    values: DispatchTensor,
    node: Arc<dyn Node>,
) -> DispatchTensor {
    Dispatch::above(parent, values, node)
}

/// The same, above two parents: one deeper than the deeper of them. Gradients go to the first.
pub(crate) fn above_both(
    parents: [DispatchTensor; 2],
    values: DispatchTensor,
    node: Arc<dyn Node>,
) -> DispatchTensor {
    let [first, second] = parents;
    Dispatch::above_both(first, second, values, node)
}

/// The operations of a backend. `Cube` covers every CubeCL runtime, with and without fusion.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff
)]
trait OutputDevice: Backend {
    /// See [`above`].
    fn above(
        parent: FloatTensor<Self>,
        values: FloatTensor<Self>,
        node: Arc<dyn Node>,
    ) -> FloatTensor<Self>;

    /// See [`above_both`].
    fn above_both(
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        values: FloatTensor<Self>,
        node: Arc<dyn Node>,
    ) -> FloatTensor<Self>;
}

/// Access to the tensors of a backend under autodiff.
trait BackendParts: OutputDevice {
    /// The autodiff tensor in `leaf`, if it is one of this backend.
    fn leaf(leaf: &DispatchTensor) -> Option<&FloatTensor<Autodiff<Self>>>;

    /// A gradient, with its backend known at run time.
    fn erase(gradient: FloatTensor<Self>) -> DispatchTensor;

    /// The tensor in it, if it is one of this backend.
    fn restore(gradient: DispatchTensor) -> Option<FloatTensor<Self>>;
}

// Without autodiff there is no backward to place anything in.
macro_rules! plain {
    ($($feature:meta => $backend:ident),+ $(,)?) => {$(
        #[cfg($feature)]
        impl OutputDevice for burn::backend::$backend {
            fn above(
                _parent: FloatTensor<Self>,
                values: FloatTensor<Self>,
                _node: Arc<dyn Node>,
            ) -> FloatTensor<Self> {
                values
            }

            fn above_both(
                _first: FloatTensor<Self>,
                _second: FloatTensor<Self>,
                values: FloatTensor<Self>,
                _node: Arc<dyn Node>,
            ) -> FloatTensor<Self> {
                values
            }
        }

        #[cfg($feature)]
        impl BackendParts for burn::backend::$backend {
            fn leaf(leaf: &DispatchTensor) -> Option<&FloatTensor<Autodiff<Self>>> {
                let DispatchTensorKind::Autodiff(kind) = &leaf.kind else {
                    return None;
                };
                match &**kind {
                    DispatchTensorKind::$backend(BackendTensor::Autodiff(leaf)) => Some(leaf),
                    _ => None,
                }
            }

            fn erase(gradient: FloatTensor<Self>) -> DispatchTensor {
                DispatchTensor {
                    kind: DispatchTensorKind::$backend(BackendTensor::Float(gradient)),
                    autodiff: DispatchAutodiffContext::Disabled,
                }
            }

            fn restore(gradient: DispatchTensor) -> Option<FloatTensor<Self>> {
                match gradient.kind {
                    DispatchTensorKind::$backend(BackendTensor::Float(gradient)) => Some(gradient),
                    _ => None,
                }
            }
        }
    )+};
}

plain! {
    feature = "flex" => Flex,
    feature = "ndarray" => NdArray,
    feature = "cube" => Cube,
}

impl<B: BackendParts, C: CheckpointStrategy> OutputDevice for Autodiff<B, C> {
    fn above(
        parent: FloatTensor<Self>,
        values: FloatTensor<Self>,
        node: Arc<dyn Node>,
    ) -> FloatTensor<Self> {
        place::<B, C, 1>([parent], values, node)
    }

    fn above_both(
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        values: FloatTensor<Self>,
        node: Arc<dyn Node>,
    ) -> FloatTensor<Self> {
        place::<B, C, 2>([first, second], values, node)
    }
}

fn place<B: BackendParts, C: CheckpointStrategy, const N: usize>(
    parents: [FloatTensor<Autodiff<B, C>>; N],
    values: FloatTensor<Autodiff<B, C>>,
    node: Arc<dyn Node>,
) -> FloatTensor<Autodiff<B, C>> {
    let parents = parents.map(|parent| parent.into_parts().1);
    let values = values.into_primitive();
    // Compute bound is what is never run again: what a node did, other ranks may have taken part in.
    match Backward::<B, N>::prepare::<C>(Call, parents)
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prepared) => prepared.finish(node, values),
        OpsKind::UnTracked(prepared) => prepared.finish(values),
    }
}

/// The operation that Burn knows.
#[derive(Debug)]
struct Call;

impl<B: BackendParts, const N: usize> Backward<B, N> for Call {
    type State = Arc<dyn Node>;

    fn backward(self, ops: Ops<Self::State, N>, gradients: &mut Gradients, _: &mut Checkpointer) {
        ops.state.backward(&mut NodeStep {
            ops: &ops,
            gradients,
            backend: PhantomData::<B>,
        });
    }
}

/// A node, with the gradients that there are when backward comes to it.
struct NodeStep<'a, B, const N: usize> {
    ops: &'a Ops<Arc<dyn Node>, N>,
    gradients: &'a mut Gradients,
    backend: PhantomData<B>,
}

impl<B: BackendParts, const N: usize> NodeStep<'_, B, N> {
    fn hand_on_with(&mut self, new: impl FnOnce(FloatTensor<B>) -> Option<FloatTensor<B>>) {
        let gradient = self.gradients.consume::<B>(&self.ops.node);
        if let Some(Some(parent)) = self.ops.parents.first()
            && let Some(gradient) = new(gradient)
        {
            self.gradients.register::<B>(parent.id, gradient);
        }
    }
}

impl<B: BackendParts, const N: usize> NodeContext for NodeStep<'_, B, N> {
    fn depth(&self) -> Option<usize> {
        let parent = self.ops.parents.first()?.as_ref();
        parent.map(|parent| parent.order)
    }

    fn of_leaf(&self, leaf: &DispatchTensor) -> Option<DispatchTensor> {
        self.gradients.get::<B>(B::leaf(leaf)?).map(B::erase)
    }

    fn take(&mut self) -> DispatchTensor {
        B::erase(self.gradients.consume::<B>(&self.ops.node))
    }

    fn give(&mut self, to: NodeId, gradient: DispatchTensor) {
        // Gradients in one graph are of one backend.
        if let Some(gradient) = B::restore(gradient) {
            self.gradients.register::<B>(to, gradient);
        }
    }

    fn hand_on(&mut self) {
        self.hand_on_with(Some);
    }

    fn hand_on_as(&mut self, new: &dyn Fn(DispatchTensor) -> DispatchTensor) {
        // It is of the backend that it came from.
        self.hand_on_with(|gradient| B::restore(new(B::erase(gradient))));
    }
}
