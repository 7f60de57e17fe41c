use burn::module::{ModuleMapper, Param};
use burn::tensor::{Bytes, Tensor, TensorData};

use super::messages::Messages;

/// Writes all ranks' pieces into a model: in place, where nobody else holds its tensors.
pub(super) struct Writer {
    messages: Messages,
    /// By message, and then by rank.
    arrived: Vec<Vec<Bytes>>,
}

impl Writer {
    pub(super) fn new(messages: Messages, arrived: Vec<Vec<Bytes>>) -> Self {
        Self { messages, arrived }
    }
}

impl ModuleMapper for Writer {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(place) = self.messages.take_place(param.id) else {
            return param;
        };
        let (id, old, mapper) = param.consume();
        let (device, dtype) = (old.device(), old.dtype());
        let requires_gradient = old.is_require_grad();
        let (mut bytes, shape, _) = old.inner().into_data().into_parts();
        let mut at = 0;
        for ((start, length), part) in place.spots.into_iter().zip(&self.arrived[place.message]) {
            bytes[at..at + length].copy_from_slice(&part[start..start + length]);
            at += length;
        }
        let data = TensorData::from_bytes(bytes, shape, dtype);
        // On its own device, which knows how gradients are to be checkpointed.
        let new = Tensor::<D>::from_data(data, (&device, dtype));
        Param::from_mapped_value(id, new.set_require_grad(requires_gradient), mapper)
    }
}
