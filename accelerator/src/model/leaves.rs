//! Tells a prepared model from its earlier clones, which have the same ids on some ranks.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;

use crate::core::autodiff;

/// The model with new leaves of the graph, and the old one of its first trainable parameter. A loss that was made
/// with a clone from before gives it no gradient, on any rank.
pub(crate) fn fresh_leaves<M: Module>(model: M) -> (M, Option<u64>) {
    let mut fresh = FreshLeaves { first: None };
    let model = model.map(&mut fresh);
    (model, fresh.first)
}

struct FreshLeaves {
    first: Option<u64>,
}

impl ModuleMapper for FreshLeaves {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_require_grad() {
            return param;
        }
        let (id, old, mapper) = param.consume();
        if self.first.is_none() {
            self.first = autodiff::leaf_number(&old.clone().into_dispatch());
        }
        Param::from_mapped_value(id, old.detach().require_grad(), mapper)
    }
}
