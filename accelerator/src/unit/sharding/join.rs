//! Models whose parameters are made whole again, to be saved or changed.

use std::collections::VecDeque;

use accelerator_collective::ProcessGroup;
use accelerator_collective::internal::GroupExt;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData};

use crate::core::dyn_module::BoxedModule;
use crate::core::error::{Error, Result};
use crate::core::partition::{Partition, Pieces};

/// The partitions of a unit's floats, in the order in which Burn visits them; `None` for one that is not cut.
pub(super) type UnitPartitions = VecDeque<Option<Partition>>;

/// Makes the parameters of units whole.
pub(in crate::unit) struct Joiner {
    group: ProcessGroup,
    /// Set if this rank keeps whole parameters.
    is_kept: bool,
    /// The partitions of the units so far.
    units: VecDeque<UnitPartitions>,
    failure: Option<Error>,
}

impl Joiner {
    pub(super) fn new(group: ProcessGroup, is_kept: bool) -> Self {
        Self {
            group,
            is_kept,
            units: VecDeque::new(),
            failure: None,
        }
    }

    /// Makes the parameters of a unit whole that is sharded.
    pub(super) fn join(&mut self, block: BoxedModule, pieces: Option<&Pieces>) -> BoxedModule {
        let Some(pieces) = pieces else {
            self.units.push_back(VecDeque::new());
            return block;
        };
        let mut mapper = JoinMapper {
            joiner: self,
            pieces,
            partitions: VecDeque::new(),
        };
        let block = block.map(&mut mapper);
        let partitions = mapper.partitions;
        self.units.push_back(partitions);
        block
    }

    /// Returns the partitions of all units.
    pub(super) fn finish(self) -> Result<VecDeque<UnitPartitions>> {
        self.failure.map_or(Ok(self.units), Err)
    }
}

struct JoinMapper<'a> {
    joiner: &'a mut Joiner,
    pieces: &'a Pieces,
    partitions: UnitPartitions,
}

impl JoinMapper<'_> {
    /// Returns the bytes of the whole parameter, if this rank keeps it.
    fn join(&self, partition: &Partition, own: &[u8], width: usize) -> Result<Option<Vec<u8>>> {
        let joiner = &*self.joiner;
        let mut whole = vec![
            0;
            if joiner.is_kept {
                partition.elements() * width
            } else {
                0
            }
        ];
        let mut reached: Vec<_> = partition
            .bounds()
            .iter()
            .map(|bound| bound * width)
            .collect();
        let mut write = |rank: usize, bytes: &[u8]| {
            if joiner.is_kept {
                let start = reached[rank];
                whole[start..start + bytes.len()].copy_from_slice(bytes);
                reached[rank] += bytes.len();
            }
        };
        write(self.pieces.rank, own);
        joiner.group.all_gather_varied_with(own, &mut write)?;
        Ok(joiner.is_kept.then_some(whole))
    }
}

impl ModuleMapper for JoinMapper<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let partition = self.pieces.partitions.get(&param.id);
        self.partitions.push_back(partition.cloned());
        let Some(partition) = partition.filter(|_| self.joiner.failure.is_none()) else {
            return param;
        };
        let (id, piece, mapper) = param.consume();
        let (device, dtype) = (piece.device(), piece.dtype());
        let is_trained = piece.is_require_grad();
        let data = piece.clone().into_data();
        let value = match self.join(partition, data.bytes(), dtype.size()) {
            Ok(Some(bytes)) => {
                let shape = partition.whole_shape().to_vec();
                let data = TensorData::from_bytes_vec(bytes, shape, dtype);
                Tensor::<D>::from_data(data, (&device, dtype)).set_require_grad(is_trained)
            }
            Ok(None) => piece,
            Err(error) => {
                self.joiner.failure = Some(error);
                piece
            }
        };
        Param::from_mapped_value(id, value, mapper)
    }
}
