//! Models whose parameters are made whole again.

use accelerator_collective::ProcessGroup;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData};

use crate::core::agreement;
use crate::core::dyn_module::BoxedModule;
use crate::core::error::{Error, Result};
use crate::core::partition::{KeptBy, Piece, is_sharded, piece_of};

/// Returns the model with whole parameters, which its units take for pieces until they are prepared again. If the units
/// are sharded, all ranks call it.
#[track_caller]
pub(crate) fn whole(group: &ProcessGroup, model: BoxedModule) -> Result<BoxedModule> {
    const ACTION: &str = "gather a sharded model";
    if !is_sharded(&model) {
        return Ok(model);
    }
    let mut joiner = Joiner {
        group: group.for_purpose(ACTION),
        failure: None,
    };
    let model = model.map(&mut joiner);
    agreement::together(group, joiner.failure.map_or(Ok(model), Err), ACTION)
}

struct Joiner {
    group: ProcessGroup,
    /// The first failure. After one of the group, nothing more is gathered.
    failure: Option<Error>,
}

impl Joiner {
    fn join<const D: usize>(&self, piece: &Piece, own: &Tensor<D>) -> Result<Tensor<D>> {
        let (device, dtype) = (own.device(), own.dtype());
        let data = own.clone().into_data();
        let bytes = piece.gather(&self.group, dtype.size(), data.bytes(), KeptBy::All)?;
        let shape = piece.partition.whole_shape().to_vec();
        let data = TensorData::from_bytes_vec(bytes, shape, dtype);
        Ok(Tensor::from_data(data, (&device, dtype)).set_require_grad(own.is_require_grad()))
    }
}

impl ModuleMapper for Joiner {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let is_lost = self.failure.as_ref().is_some_and(Error::is_collective);
        let Some(piece) = piece_of(param.id).filter(|_| !is_lost) else {
            return param;
        };
        let (id, own, mapper) = param.consume();
        let value = self.join(&piece, &own).unwrap_or_else(|error| {
            self.failure.get_or_insert(error);
            own
        });
        Param::from_mapped_value(id, value, mapper)
    }
}
