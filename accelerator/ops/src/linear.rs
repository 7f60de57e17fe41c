//! Burn's linear layer as one operation of the graph, which its dispatch composes of several.

#![allow(deprecated, reason = "ndarray is, and is served while it is there")]

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::ops::ModuleOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension};
use burn::tensor::Tensor;

/// The same as Burn's `linear`, with the weight and the bias next to the input in the graph.
pub(crate) fn linear<const D: usize>(
    input: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    let (input, weight) = (input.into_dispatch(), weight.into_dispatch());
    Tensor::from_dispatch(match bias {
        Some(bias) => Dispatch::linear_with_bias(input, weight, bias.into_dispatch()),
        None => Dispatch::linear_without_bias(input, weight),
    })
}

#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "cuda", feature = "wgpu")),
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
burns!(#[cfg(any(feature = "cuda", feature = "wgpu"))] [] burn::backend::Cube);
burns!([B: LinearNode, C: CheckpointStrategy] Autodiff<B, C>);
