//! A sum over the ranks within a graph: its gradient is summed over the ranks, too.

use core::fmt;
use std::sync::Arc;

use burn::tensor::Tensor;

use crate::core::autodiff::{self, Node, NodeContext};

/// Gives the gradient of the values that this rank has put in for that of the values that came out.
pub(super) trait ExchangeBackward: fmt::Debug + Send + Sync {
    fn back(&self, gradient: Tensor<1>) -> Tensor<1>;
}

/// `values` in place of `from`, whose gradient is what `back` makes of theirs. Both are of one device
/// and shape, and `from` is tracked.
pub(super) fn replace(
    from: Tensor<1>,
    values: Tensor<1>,
    back: impl ExchangeBackward + 'static,
) -> Tensor<1> {
    let exchange = Arc::new(Exchange(back));
    let replaced = autodiff::above(from.into_dispatch(), values.into_dispatch(), exchange);
    Tensor::from_dispatch(replaced)
}

#[derive(Debug)]
struct Exchange<B>(B);

impl<B: ExchangeBackward> Node for Exchange<B> {
    fn backward(&self, here: &mut dyn NodeContext) {
        here.hand_on_as(&|gradient| {
            let gradient = Tensor::from_dispatch(gradient);
            self.0.back(gradient).into_dispatch()
        });
    }
}
