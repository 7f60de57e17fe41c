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
use crate::core::module::ModulePath;
use crate::core::partition::{Partition, Partitioner, Pieces, partition_of};

/// The most bytes that rank 0 sends at once. Other ranks hold no more of a parameter beside their pieces.
const CHUNK: usize = 16 << 20;

/// Cuts the parameters of units.
pub(in crate::unit) struct Cutter {
    context: Weak<Context>,
    rank: usize,
    cuts: Cuts,
    buffers: Buffers,
    /// The parameters of units.
    cut: HashSet<ParamId>,
    /// Set if a parameter is in two units.
    is_tied: bool,
}

/// The places where parameters are cut.
pub(super) enum Cuts {
    /// Even parts of the parameters that rank 0 trains.
    Even(Distribution),
    /// The places where they were cut before.
    Given(VecDeque<UnitPartitions>),
}

impl Cuts {
    pub(super) fn even(group: &ProcessGroup) -> Self {
        Self::Even(Distribution {
            group: group.clone(),
            partitioner: Partitioner::new(group.world_size()),
            failure: None,
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
            cut: HashSet::new(),
            is_tied: false,
        }
    }

    pub(super) fn cut(&mut self, block: BoxedModule) -> (BoxedModule, Sharding) {
        let (block, partitions) = match &mut self.cuts {
            Cuts::Even(distribution) => {
                let mut mapper = DistributionMapper {
                    distribution,
                    partitions: HashMap::new(),
                };
                (block.map(&mut mapper), mapper.partitions)
            }
            Cuts::Given(units) => {
                let mut mapper = CutMapper {
                    rank: self.rank,
                    places: units.pop_front().unwrap_or_default(),
                    partitions: HashMap::new(),
                };
                (block.map(&mut mapper), mapper.partitions)
            }
        };
        for id in partitions.keys() {
            self.is_tied |= !self.cut.insert(*id);
        }
        let pieces = Pieces {
            rank: self.rank,
            partitions,
        };
        let sharding = Sharding::new(self.context.clone(), pieces, self.buffers.clone());
        (block, sharding)
    }

    /// Fails if the model could not be distributed, or has a parameter in a unit and elsewhere, too.
    pub(super) fn finish(self, model: &dyn DynModule) -> Result<()> {
        if let Cuts::Even(Distribution {
            failure: Some(error),
            ..
        }) = self.cuts
        {
            return Err(error);
        }
        let mut search = OutsideSearch {
            cut: &self.cut,
            path: ModulePath::default(),
            found: None,
        };
        model.visit(&mut search);
        let parameter = match search.found {
            Some(path) => format!("`{path}`"),
            None if self.is_tied => "a parameter".to_owned(),
            None => return Ok(()),
        };
        Err(Error::model(format!(
            "{parameter} is tied to a parameter of a unit, and units are to be sharded: all places of a tied parameter \
             must be in one unit, or outside of units"
        )))
    }
}

/// Searches for a place outside of units of a parameter that is cut.
struct OutsideSearch<'a> {
    cut: &'a HashSet<ParamId>,
    path: ModulePath,
    found: Option<String>,
}

impl ModuleVisitor for OutsideSearch<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.cut.contains(&param.id) && partition_of(param.id).is_none() {
            self.found
                .get_or_insert_with(|| self.path.as_str().to_owned());
        }
    }
}

/// Gives each rank its pieces of rank 0's parameters, one parameter after the other.
pub(super) struct Distribution {
    group: ProcessGroup,
    partitioner: Partitioner,
    /// The first error; later parameters stay as they are.
    failure: Option<Error>,
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

/// Returns the places in a chunk of the bytes that it has in common with a piece.
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
    places: UnitPartitions,
    partitions: HashMap<ParamId, Partition>,
}

impl ModuleMapper for CutMapper {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(partition) = self.places.pop_front().flatten() else {
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

/// A tensor of its own: a slice of another one may keep all of its memory.
fn piece_of<const D: usize>(
    bytes: Vec<u8>,
    shape: Vec<usize>,
    dtype: DType,
    device: &Device,
) -> Tensor<D> {
    let data = TensorData::from_bytes_vec(bytes, shape, dtype);
    Tensor::from_data(data, (device, dtype))
}
