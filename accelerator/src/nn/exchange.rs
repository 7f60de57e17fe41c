//! A sum over the ranks within a graph: its gradient is summed over the ranks, too.

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

/// Gives the gradient of the values that this rank has put in for that of the values that came out.
pub(super) trait Back: fmt::Debug + Send + Sync {
    fn back(&self, gradient: Tensor<1>) -> Tensor<1>;
}

/// `values` in place of `from`, whose gradient is what `back` makes of theirs. Both are of one device
/// and shape, and `from` is tracked.
pub(super) fn replace(from: Tensor<1>, values: Tensor<1>, back: Arc<dyn Back>) -> Tensor<1> {
    let replaced = Dispatch::replace(from.into_dispatch(), values.into_dispatch(), back);
    Tensor::from_dispatch(replaced)
}

#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "cuda", feature = "wgpu")),
    Autodiff
)]
trait Replace: Backend {
    /// See [`replace`].
    fn replace(
        from: FloatTensor<Self>,
        values: FloatTensor<Self>,
        back: Arc<dyn Back>,
    ) -> FloatTensor<Self>;
}

/// What a backend under autodiff must tell of its tensors.
trait Inner: Replace {
    /// A gradient, with its backend known at run time.
    fn erase(gradient: FloatTensor<Self>) -> DispatchTensor;

    /// The tensor in it, where it is one of this backend.
    fn restore(gradient: DispatchTensor) -> Option<FloatTensor<Self>>;
}

macro_rules! plain {
    ($($feature:meta => $backend:ident),+ $(,)?) => {$(
        #[cfg($feature)]
        impl Replace for burn::backend::$backend {
            fn replace(
                _from: FloatTensor<Self>,
                values: FloatTensor<Self>,
                _back: Arc<dyn Back>,
            ) -> FloatTensor<Self> {
                values
            }
        }

        #[cfg($feature)]
        impl Inner for burn::backend::$backend {
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
    any(feature = "cuda", feature = "wgpu") => Cube,
}

impl<B: Inner, C: CheckpointStrategy> Replace for Autodiff<B, C> {
    fn replace(
        from: FloatTensor<Self>,
        values: FloatTensor<Self>,
        back: Arc<dyn Back>,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Exchange;

        impl<B: Inner> Backward<B, 1> for Exchange {
            type State = Arc<dyn Back>;

            fn backward(
                self,
                ops: Ops<Self::State, 1>,
                gradients: &mut Gradients,
                _: &mut Checkpointer,
            ) {
                let gradient = gradients.consume::<B>(&ops.node);
                if let [Some(parent)] = &ops.parents {
                    let gradient = Tensor::from_dispatch(B::erase(gradient));
                    let gradient = ops.state.back(gradient).into_dispatch();
                    // It is of the backend that it came from.
                    if let Some(gradient) = B::restore(gradient) {
                        gradients.register::<B>(parent.id, gradient);
                    }
                }
            }
        }

        let (_, node) = from.into_parts();
        let (values, _) = values.into_parts();
        // What it is made of is never computed again: that would ask the other ranks again.
        match Backward::<B, 1>::prepare::<C>(Exchange, [node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prepared) => prepared.finish(back, values),
            OpsKind::UnTracked(prepared) => prepared.finish(values),
        }
    }
}
