//! Models whose parameters are cut.

use core::ops::Range;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Weak};

use accelerator_collective::ProcessGroup;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use super::exchange::{Buffers, Sharding};
use super::join::UnitPartitions;

use crate::context::Context;
use crate::core::dyn_module::{BoxedModule, DynModule};
use crate::core::error::{Error, Result};
use crate::core::partition::{Partition, Partitioner, Pieces};
use crate::unit::visited::visited_unit;

/// The maximum number of bytes that rank 0 sends at once. Apart from its own pieces, no other rank holds more than this of
/// a parameter.
const CHUNK: usize = 16 << 20;

/// Cuts the parameters of units.
pub(in crate::unit) struct Cutter {
    context: Weak<Context>,
    rank: usize,
    cuts: Cuts,
    buffers: Buffers,
}

/// The places where parameters are cut.
pub(super) enum Cuts {
    /// Cuts the parameters that are trainable on rank 0 into even parts.
    Even(Distribution),
    /// Cuts parameters where they were cut before.
    Given(VecDeque<UnitPartitions>),
}

impl Cuts {
    pub(super) fn even(group: &ProcessGroup, model: &dyn DynModule) -> Self {
        let mut search = TieSearch::default();
        model.visit(&mut search);
        Self::Even(Distribution {
            group: group.clone(),
            tied: search.tied,
            partitioner: Partitioner::new(group.world_size()),
            failure: None,
            difference: None,
        })
    }
}

impl Cutter {
    pub(super) fn new(context: &Arc<Context>, cuts: Cuts) -> Self {
        Self {
            context: Arc::downgrade(context),
            rank: context.rank(),
            cuts,
            buffers: Buffers::default(),
        }
    }

    /// Cuts the parameters of the unit with this number. It is not sharded if it was not before.
    pub(super) fn cut(
        &mut self,
        number: usize,
        block: BoxedModule,
    ) -> (BoxedModule, Option<Sharding>) {
        let (block, partitions) = match &mut self.cuts {
            Cuts::Even(distribution) => {
                let mut mapper = DistributionMapper {
                    distribution,
                    partitions: HashMap::new(),
                };
                (block.map(&mut mapper), mapper.partitions)
            }
            Cuts::Given(units) => {
                let former = units.pop_front().unwrap_or_default();
                if former.is_empty() {
                    return (block, None);
                }
                let mut mapper = CutMapper {
                    rank: self.rank,
                    former,
                    partitions: HashMap::new(),
                };
                (block.map(&mut mapper), mapper.partitions)
            }
        };
        let pieces = Pieces {
            rank: self.rank,
            partitions,
        };
        let (context, buffers) = (self.context.clone(), self.buffers.clone());
        let sharding = Sharding::new(context, number, pieces, buffers);
        (block, Some(sharding))
    }

    /// Fails if the model could not be distributed.
    pub(super) fn finish(self) -> Result<()> {
        let Cuts::Even(distribution) = self.cuts else {
            return Ok(());
        };
        let error = distribution.failure.or(distribution.difference);
        error.map_or(Ok(()), Err)
    }
}

/// Searches for parameters with uses in several units, or in a unit and outside, which stay whole.
#[derive(Default)]
struct TieSearch {
    /// The unit of the first use of each parameter.
    first: HashMap<ParamId, Option<usize>>,
    tied: HashSet<ParamId>,
}

impl ModuleVisitor for TieSearch {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let unit = visited_unit();
        if *self.first.entry(param.id).or_insert(unit) != unit {
            self.tied.insert(param.id);
        }
    }
}

/// Gives each rank its pieces of rank 0's parameters, one parameter after the other.
pub(super) struct Distribution {
    group: ProcessGroup,
    /// The parameters that stay whole, by their ids on this rank.
    tied: HashSet<ParamId>,
    partitioner: Partitioner,
    /// The first error of a collective; later parameters stay as they are.
    failure: Option<Error>,
    /// The first difference from rank 0's model.
    difference: Option<Error>,
}

/// A parameter of rank 0.
#[derive(Deserialize, Serialize)]
struct ParameterHeader {
    id: u64,
    is_trained: bool,
    dtype: DType,
    shape: Vec<usize>,
}

/// The bytes of this rank's piece of a parameter.
struct OwnPiece {
    partition: Partition,
    bytes: Vec<u8>,
}

impl Distribution {
    /// Returns rank 0's header of a parameter, and this rank's piece of it, if it is cut. Rank 0 passes its own.
    fn piece(
        &mut self,
        own: Option<(&ParameterHeader, &TensorData)>,
    ) -> Result<(ParameterHeader, Option<OwnPiece>)> {
        let (header, data) = own.unzip();
        let header = self.group.broadcast_object(header, 0)?;
        let id = ParamId::from(header.id);
        // Frozen parameters and statistics stay whole.
        if !header.is_trained {
            return Ok((header, None));
        }
        let width = header.dtype.size();
        let partition = match self.partitioner.known().get(&id) {
            Some(partition) => partition,
            None => self.partitioner.settle(id, &header.shape, width, || true),
        };
        let partition = partition.clone();
        let piece = partition.range(self.group.rank());
        let piece = piece.start * width..piece.end * width;
        let mut bytes = Vec::with_capacity(piece.len());
        let mut chunk = Vec::new();
        for start in (0..partition.elements() * width).step_by(CHUNK) {
            let end = (start + CHUNK).min(partition.elements() * width);
            chunk.clear();
            match data {
                Some(data) => chunk.extend_from_slice(&data.bytes()[start..end]),
                None => chunk.resize(end - start, 0),
            }
            self.group.broadcast(&mut chunk, 0)?;
            bytes.extend_from_slice(&chunk[common(&piece, start..end)]);
        }
        Ok((header, Some(OwnPiece { partition, bytes })))
    }
}

impl Distribution {
    /// Records an error if the parameter's data type, or whether it is trained, differs from rank 0. An uninitialized
    /// parameter takes both from rank 0.
    fn compare<const D: usize>(&mut self, header: &ParameterHeader, param: &Param<Tensor<D>>) {
        if !param.is_initialized() {
            return;
        }
        let value = param.base();
        let own = (value.dtype(), value.is_require_grad());
        if own != (header.dtype, header.is_trained) {
            let shown = |(dtype, is_trained): (DType, bool)| {
                format!(
                    "{dtype:?}, {}",
                    if is_trained { "trained" } else { "frozen" }
                )
            };
            self.difference.get_or_insert_with(|| {
                Error::model(format!(
                    "the model differs between ranks: a parameter of shape {:?} in a unit is {} on rank 0, and {} on \
                     rank {}; build the same model on every rank",
                    header.shape,
                    shown((header.dtype, header.is_trained)),
                    shown(own),
                    self.group.rank()
                ))
            });
        }
    }
}

/// Returns the range within `chunk` that overlaps `piece`.
fn common(piece: &Range<usize>, chunk: Range<usize>) -> Range<usize> {
    let at = |place: usize| place.clamp(chunk.start, chunk.end) - chunk.start;
    at(piece.start)..at(piece.end)
}

struct DistributionMapper<'a> {
    distribution: &'a mut Distribution,
    partitions: HashMap<ParamId, Partition>,
}

impl ModuleMapper for DistributionMapper<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.distribution.failure.is_some() {
            return param;
        }
        let device = param.lazy_device();
        let is_main = self.distribution.group.rank() == 0;
        if self.distribution.tied.contains(&param.id) {
            // Rank 0 draws it in its turn.
            drop(is_main.then(|| param.base()));
            return param;
        }
        let own = is_main.then(|| {
            let value = param.base();
            let header = ParameterHeader {
                id: param.id.val(),
                is_trained: value.is_require_grad(),
                dtype: value.dtype(),
                shape: value.dims().to_vec(),
            };
            // What stays whole is not read.
            let data = match header.is_trained {
                true => value.into_data(),
                false => TensorData::new(Vec::<f32>::new(), [0]),
            };
            (header, data)
        });
        let own = own.as_ref().map(|(header, data)| (header, data));
        let (header, piece) = match self.distribution.piece(own) {
            Ok(piece) => piece,
            Err(error) => {
                self.distribution.failure = Some(error);
                return param;
            }
        };
        self.distribution.compare(&header, &param);
        let Some(OwnPiece { partition, bytes }) = piece else {
            return param;
        };
        let id = ParamId::from(header.id);
        let shape = partition.shape(self.distribution.group.rank());
        let piece = piece_of::<D>(bytes, shape, header.dtype, &device);
        self.partitions.insert(id, partition);
        // A parameter that was not drawn is not drawn for this.
        let anything = Tensor::<D>::zeros([1; D], (&device, header.dtype));
        let param = param.transform_for_load(anything, id);
        param.map(|_| piece.require_grad())
    }
}

/// Cuts parameters that all ranks hold.
struct CutMapper {
    rank: usize,
    former: UnitPartitions,
    partitions: HashMap<ParamId, Partition>,
}

impl ModuleMapper for CutMapper {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(partition) = self.former.pop_front().flatten() else {
            return param;
        };
        let (id, value, mapper) = param.consume();
        let (device, dtype) = (value.device(), value.dtype());
        let is_trained = value.is_require_grad();
        let (range, width) = (partition.range(self.rank), dtype.size());
        let data = value.into_data();
        let bytes = data.bytes()[range.start * width..range.end * width].to_vec();
        let piece = piece_of::<D>(bytes, partition.shape(self.rank), dtype, &device);
        self.partitions.insert(id, partition);
        Param::from_mapped_value(id, piece.set_require_grad(is_trained), mapper)
    }
}

/// Makes a new tensor of a piece: a slice could keep the memory of the whole tensor alive.
fn piece_of<const D: usize>(
    bytes: Vec<u8>,
    shape: Vec<usize>,
    dtype: DType,
    device: &Device,
) -> Tensor<D> {
    let data = TensorData::from_bytes_vec(bytes, shape, dtype);
    Tensor::from_data(data, (device, dtype))
}
