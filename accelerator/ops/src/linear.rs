//! Burn's linear layer as one operation of the graph, which its dispatch composes of several.

#![allow(deprecated, reason = "ndarray is, and is served while it is there")]

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::ops::ModuleOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, DispatchTensorKind, backend_extension};
use burn::tensor::{Tensor, module};

/// The same as Burn's `linear`, with the weight and the bias next to the input in the graph, on the backends of this
/// crate's features.
pub(crate) fn linear<const D: usize>(
    input: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    let input = input.into_dispatch();
    if !is_enabled(&input.kind) {
        return module::linear(Tensor::from_dispatch(input), weight, bias);
    }
    let weight = weight.into_dispatch();
    Tensor::from_dispatch(match bias {
        Some(bias) => Dispatch::linear_with_bias(input, weight, bias.into_dispatch()),
        None => Dispatch::linear_without_bias(input, weight),
    })
}

/// Returns `false` for tensors of a backend that the program enables in Burn alone.
fn is_enabled(kind: &DispatchTensorKind) -> bool {
    match kind {
        DispatchTensorKind::Autodiff(kind) => is_enabled(kind),
        #[cfg(feature = "flex")]
        DispatchTensorKind::Flex(_) => true,
        #[cfg(feature = "ndarray")]
        DispatchTensorKind::NdArray(_) => true,
        #[cfg(feature = "cube")]
        DispatchTensorKind::Cube(_) => true,
        #[allow(
            unreachable_patterns,
            reason = "Burn's features may be more than these"
        )]
        _ => false,
    }
}

#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff
)]
trait LinearNode: Backend {
    fn linear_with_bias(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    fn linear_without_bias(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

macro_rules! burns {
    ($(#[$cfg:meta])? [$($parameters:tt)*] $backend:ty) => {
        $(#[$cfg])?
        impl<$($parameters)*> LinearNode for $backend {
            fn linear_with_bias(
                input: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                bias: FloatTensor<Self>,
            ) -> FloatTensor<Self> {
                <Self as ModuleOps<Self>>::linear(input, weight, Some(bias))
            }

            fn linear_without_bias(
                input: FloatTensor<Self>,
                weight: FloatTensor<Self>,
            ) -> FloatTensor<Self> {
                <Self as ModuleOps<Self>>::linear(input, weight, None)
            }
        }
    };
}

burns!(#[cfg(feature = "flex")] [] burn::backend::Flex);
burns!(#[cfg(feature = "ndarray")] [] burn::backend::NdArray);
burns!(#[cfg(feature = "cube")] [] burn::backend::Cube);
burns!([B: LinearNode, C: CheckpointStrategy] Autodiff<B, C>);
