//! Operations without an effect on values, placed in Burn's graph so that backward calls back.

#![allow(deprecated, reason = "ndarray is, and is served while it is there")]

use core::fmt;
use std::sync::Arc;

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

/// Who is called in the middle of a backward pass, on the thread that runs it.
///
/// The graph is locked meanwhile: the model's own tensors must not be computed with. Plain
/// tensors, which gradients are, may.
pub(super) trait Observer: fmt::Debug + Send + Sync {
    /// Backward begins, at a loss that is so deep.
    fn begins(&self, depth: usize);

    /// A point was reached. `gradients` are those of its leaves so far, in their order; `None`
    /// where a leaf has none yet.
    fn reached(&self, point: usize, gradients: &mut dyn Iterator<Item = Option<DispatchTensor>>);
}

/// What a watch does when backward comes to it.
#[derive(Clone, Debug)]
pub(super) struct Watch {
    /// `None` is one that has no gradient.
    pub(super) leaves: Vec<Option<DispatchTensor>>,
    pub(super) observer: Arc<dyn Observer>,
    pub(super) point: usize,
}

/// Whether these operations are there for the device of this tensor.
pub(super) fn serves(tensor: &Tensor<1>) -> bool {
    let DispatchTensorKind::Autodiff(kind) = tensor.clone().into_dispatch().kind else {
        return false;
    };
    match *kind {
        #[cfg(feature = "flex")]
        DispatchTensorKind::Flex(_) => true,
        #[cfg(feature = "ndarray")]
        DispatchTensorKind::NdArray(_) => true,
        #[cfg(any(feature = "cuda", feature = "wgpu"))]
        DispatchTensorKind::Cube(_) => true,
        _ => false,
    }
}

/// `deepen` for tensors whose backend is known at run time.
pub(super) fn deepen(tensor: DispatchTensor) -> DispatchTensor {
    Dispatch::deepen(tensor)
}

/// `watch` for tensors whose backend is known at run time.
pub(super) fn watch(below: DispatchTensor, anchor: DispatchTensor, watch: Watch) -> DispatchTensor {
    Dispatch::watch(below, anchor, watch)
}

/// `join` for tensors whose backend is known at run time.
pub(super) fn join(
    loss: DispatchTensor,
    watched: DispatchTensor,
    observer: Arc<dyn Observer>,
) -> DispatchTensor {
    Dispatch::join(loss, watched, observer)
}

/// The operations; see this folder's README for what they are good for. `Cube` covers every
/// CubeCL runtime, with and without fusion.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "cuda", feature = "wgpu")),
    Autodiff
)]
trait Hook: Backend {
    /// The same values, one level deeper in the graph.
    fn deepen(tensor: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Something to join to a loss, whose backward comes after that of everything that is deeper
    /// than `anchor`. `below` makes it tracked: it is a leaf, or another watch.
    fn watch(
        below: FloatTensor<Self>,
        anchor: FloatTensor<Self>,
        watch: Watch,
    ) -> FloatTensor<Self>;

    /// The loss, whose backward comes to the watches as well.
    fn join(
        loss: FloatTensor<Self>,
        watched: FloatTensor<Self>,
        observer: Arc<dyn Observer>,
    ) -> FloatTensor<Self>;
}

/// What a backend under autodiff must tell of its tensors.
trait Inner: Hook {
    /// The autodiff tensor in `leaf`, where it is one of this backend.
    fn leaf(leaf: &DispatchTensor) -> Option<FloatTensor<Autodiff<Self>>>;

    /// A gradient, with its backend known at run time.
    fn erase(gradient: FloatTensor<Self>) -> DispatchTensor;
}

// Without autodiff there is no backward to place anything in.
macro_rules! plain {
    ($($feature:meta => $backend:ident),+ $(,)?) => {$(
        #[cfg($feature)]
        impl Hook for burn::backend::$backend {
            fn deepen(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
                tensor
            }

            fn watch(
                below: FloatTensor<Self>,
                _anchor: FloatTensor<Self>,
                _watch: Watch,
            ) -> FloatTensor<Self> {
                below
            }

            fn join(
                loss: FloatTensor<Self>,
                _watched: FloatTensor<Self>,
                _observer: Arc<dyn Observer>,
            ) -> FloatTensor<Self> {
                loss
            }
        }

        #[cfg($feature)]
        impl Inner for burn::backend::$backend {
            fn leaf(leaf: &DispatchTensor) -> Option<FloatTensor<Autodiff<Self>>> {
                let DispatchTensorKind::Autodiff(kind) = &leaf.kind else {
                    return None;
                };
                match &**kind {
                    DispatchTensorKind::$backend(BackendTensor::Autodiff(leaf)) => {
                        Some(leaf.clone())
                    }
                    _ => None,
                }
            }

            fn erase(gradient: FloatTensor<Self>) -> DispatchTensor {
                DispatchTensor {
                    kind: DispatchTensorKind::$backend(BackendTensor::Float(gradient)),
                    autodiff: DispatchAutodiffContext::Disabled,
                }
            }
        }
    )+};
}

plain! {
    feature = "flex" => Flex,
    feature = "ndarray" => NdArray,
    any(feature = "cuda", feature = "wgpu") => Cube,
}

impl<B: Inner, C: CheckpointStrategy> Hook for Autodiff<B, C> {
    fn deepen(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Deepen;

        impl<B: Backend> Backward<B, 1> for Deepen {
            type State = ();

            fn backward(self, ops: Ops<(), 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
                let gradient = gradients.consume::<B>(&ops.node);
                if let [Some(parent)] = &ops.parents {
                    gradients.register::<B>(parent.id, gradient);
                }
            }
        }

        let (values, node) = tensor.into_parts();
        match Backward::<B, 1>::prepare::<C>(Deepen, [node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prepared) => prepared.finish((), values),
            OpsKind::UnTracked(prepared) => prepared.finish(values),
        }
    }

    fn watch(
        below: FloatTensor<Self>,
        anchor: FloatTensor<Self>,
        watch: Watch,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Look;

        impl<B: Inner> Backward<B, 2> for Look {
            type State = (Watch, Vec<Option<FloatTensor<Autodiff<B>>>>);

            // It has no gradient, and passes none on.
            fn backward(
                self,
                ops: Ops<Self::State, 2>,
                gradients: &mut Gradients,
                _: &mut Checkpointer,
            ) {
                let (watch, leaves) = &ops.state;
                let gradient =
                    |leaf: &FloatTensor<Autodiff<B>>| gradients.get::<B>(leaf).map(B::erase);
                let mut so_far = leaves.iter().map(|leaf| leaf.as_ref().and_then(gradient));
                watch.observer.reached(watch.point, &mut so_far);
            }
        }

        let known = |leaf: &Option<DispatchTensor>| leaf.as_ref().and_then(B::leaf);
        let leaves = watch.leaves.iter().map(known).collect();
        // The leaves are kept as the backend knows them.
        let watch = Watch {
            leaves: Vec::new(),
            ..watch
        };
        let (values, below) = below.into_parts();
        let (_, anchor) = anchor.into_parts();
        match Backward::<B, 2>::prepare::<C>(Look, [below, anchor])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prepared) => prepared.finish((watch, leaves), values),
            OpsKind::UnTracked(prepared) => prepared.finish(values),
        }
    }

    fn join(
        loss: FloatTensor<Self>,
        watched: FloatTensor<Self>,
        observer: Arc<dyn Observer>,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Join;

        impl<B: Backend> Backward<B, 2> for Join {
            type State = Arc<dyn Observer>;

            fn backward(
                self,
                ops: Ops<Self::State, 2>,
                gradients: &mut Gradients,
                _: &mut Checkpointer,
            ) {
                let gradient = gradients.consume::<B>(&ops.node);
                if let [Some(loss), _] = &ops.parents {
                    ops.state.begins(loss.order);
                    gradients.register::<B>(loss.id, gradient);
                }
            }
        }

        let (values, loss) = loss.into_parts();
        let (_, watched) = watched.into_parts();
        match Backward::<B, 2>::prepare::<C>(Join, [loss, watched])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prepared) => prepared.finish(observer, values),
            OpsKind::UnTracked(prepared) => prepared.finish(values),
        }
    }
}
