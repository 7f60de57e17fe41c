//! Copies of parameters' elements, for the exchange of updated elements between ranks.

use std::collections::{HashMap, HashSet};

use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::{Bytes, DType, Device, Shape, Tensor, TensorData};

/// Takes the elements of parameters out of a model: moved, if nobody else holds its tensors.
pub(super) struct ParameterTaker<'a> {
    asked: HashSet<ParamId>,
    taken: &'a mut Elements,
}

/// Elements of parameters, to be written to and [put back](ModuleMapper) into their model.
#[derive(Default)]
pub(super) struct Elements(HashMap<ParamId, TakenParameter>);

struct TakenParameter {
    bytes: Bytes,
    shape: Shape,
    dtype: DType,
    /// The parameter's own device, which carries Burn's setting of gradient checkpointing.
    device: Device,
    requires_gradient: bool,
}

impl Elements {
    pub(super) fn taker(&mut self, asked: HashSet<ParamId>) -> ParameterTaker<'_> {
        ParameterTaker { asked, taken: self }
    }

    pub(super) fn write(&mut self, id: ParamId, start: usize, bytes: &[u8]) {
        if let Some(held) = self.0.get_mut(&id) {
            held.bytes[start..start + bytes.len()].copy_from_slice(bytes);
        }
    }
}

impl ModuleMapper for ParameterTaker<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.asked.remove(&param.id) {
            return param;
        }
        let (id, old, mapper) = param.consume();
        let (dtype, device) = (old.dtype(), old.device());
        let requires_gradient = old.is_require_grad();
        let (bytes, shape, _) = old.inner().into_data().into_parts();
        let held = TakenParameter {
            bytes,
            shape,
            dtype,
            device,
            requires_gradient,
        };
        let nothing = Tensor::<D>::zeros([1; D], &held.device);
        self.taken.0.insert(id, held);
        Param::from_mapped_value(id, nothing, mapper)
    }
}

impl ModuleMapper for Elements {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(held) = self.0.remove(&param.id) else {
            return param;
        };
        let (id, _, mapper) = param.consume();
        let data = TensorData::from_bytes(held.bytes, held.shape, held.dtype);
        let new = Tensor::<D>::from_data(data, (&held.device, held.dtype));
        Param::from_mapped_value(id, new.set_require_grad(held.requires_gradient), mapper)
    }
}
