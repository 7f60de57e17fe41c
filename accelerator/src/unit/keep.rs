//! Units whose gradients are complete when backward leaves them.

use core::cell::RefCell;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;

use crate::core::anchors::Anchors;
use crate::core::autodiff::{self, HandOn};
use crate::core::dyn_module::BoxedModule;

/// More operations than a usual block is deep. The gradients of a deeper block are ready later, but equally correct.
const DEPTH: usize = 256;

/// Returns the same block, with parameters that enter the graph at the depth of unit `number`. A parameter's gradient
/// is then complete when backward leaves the unit. Without this, it would be complete only at the end of backward if
/// an operation takes a view of the parameter.
pub(super) fn lifted(block: BoxedModule, number: usize) -> BoxedModule {
    block.map(&mut Lift {
        depth: (number + 1) * DEPTH,
    })
}

struct Lift {
    depth: usize,
}

impl ModuleMapper for Lift {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, mapper) = param.consume();
        let tensor = value.clone().into_dispatch();
        if autodiff::tracked_node(&tensor).is_none() {
            return Param::from_mapped_value(id, value, mapper);
        }
        let anchor = anchor(&value, self.depth);
        let lifted = autodiff::above_both([tensor.clone(), anchor], tensor, Arc::new(HandOn));
        Param::from_mapped_value(id, Tensor::from_dispatch(lifted), mapper)
    }
}

fn anchor<const D: usize>(value: &Tensor<D>, depth: usize) -> DispatchTensor {
    thread_local! {
        static ANCHORS: RefCell<Anchors> = RefCell::default();
    }
    ANCHORS.with_borrow_mut(|anchors| anchors.on(&value.device()).make(depth))
}
