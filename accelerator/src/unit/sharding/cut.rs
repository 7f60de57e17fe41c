//! Models whose parameters are cut.

use core::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use accelerator_collective::ProcessGroup;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use super::exchange::{Buffers, Sharding};
use crate::context::Context;
use crate::core::dyn_module::{BoxedModule, DynModule};
use crate::core::error::{Error, Result};
use crate::core::offload::Offload;
use crate::core::partition::{Partition, Partitioner, Piece, Pieces};
use crate::model::{Float, running_states};
use crate::unit::visited::visited_unit;

/// Cuts the parameters of units into even parts, as they are on rank 0, and gives each rank its pieces of rank 0's
/// values, one parameter after the other.
pub(in crate::unit) struct Cutter {
    context: Weak<Context>,
    offload: Option<Offload>,
    group: ProcessGroup,
    /// The parameters that stay whole, by their ids on this rank.
    tied: HashSet<ParamId>,
    partitioner: Partitioner,
    buffers: Buffers,
    /// The first error of a collective; later parameters stay as they are.
    failure: Option<Error>,
    /// The first difference from rank 0's model.
    difference: Option<Error>,
}

impl Cutter {
    pub(super) fn new(context: &Arc<Context>, group: ProcessGroup, model: &dyn DynModule) -> Self {
        let mut search = TieSearch::default();
        model.visit(&mut search);
        Self {
            context: Arc::downgrade(context),
            offload: context.offload.clone(),
            tied: search.tied,
            partitioner: Partitioner::new(group.world_size()),
            group,
            buffers: Buffers::default(),
            failure: None,
            difference: None,
        }
    }

    /// Takes the cutter that this thread applies to a model. There is none until it is [put back](Self::put_back).
    pub(in crate::unit) fn take() -> Option<Self> {
        CUTTER.take()
    }

    pub(in crate::unit) fn put_back(self) {
        CUTTER.set(Some(self));
    }

    /// Cuts the units of a model, and applies `rest` to all other parameters. Returns the cutter, or `None` if a unit took
    /// it and did not put it back.
    pub(super) fn applied_to<M: ModuleMapper>(
        self,
        model: BoxedModule,
        rest: &mut M,
    ) -> (BoxedModule, Option<Self>) {
        // A parameter may panic while it is initialized.
        struct Cleared;
        impl Drop for Cleared {
            fn drop(&mut self) {
                drop(Cutter::take());
            }
        }
        let _cleared = Cleared;
        self.put_back();
        (model.map(rest), Self::take())
    }

    /// Cuts the parameters of the unit with this number.
    pub(in crate::unit) fn cut(
        &mut self,
        number: usize,
        block: BoxedModule,
    ) -> (BoxedModule, Sharding) {
        // Rank 0 draws the parameters of the unit now, in the order in which they are cut.
        let is_main = self.group.rank() == 0;
        let statistics = if is_main {
            running_states(&block)
        } else {
            HashSet::new()
        };
        let mut mapper = CutMapper {
            cutter: self,
            statistics,
            place: 0,
            partitions: HashMap::new(),
        };
        let block = block.map(&mut mapper);
        let pieces = Pieces {
            partitions: mapper.partitions,
            rank: self.group.rank(),
            offload: self.offload.clone(),
        };
        let (context, buffers) = (self.context.clone(), self.buffers.clone());
        (block, Sharding::new(context, number, pieces, buffers))
    }

    /// Fails if the model could not be distributed.
    pub(super) fn finish(self) -> Result<()> {
        self.failure.or(self.difference).map_or(Ok(()), Err)
    }

    /// Returns rank 0's header of a parameter, and this rank's piece of it, if it is cut. Rank 0 passes its own.
    fn piece(
        &mut self,
        own: Option<(&ParameterHeader, &TensorData)>,
    ) -> Result<(ParameterHeader, Option<OwnPiece>)> {
        let (header, data) = own.unzip();
        let header = self.group.broadcast_object(header, 0)?;
        if !header.is_cut {
            return Ok((header, None));
        }
        let (id, width) = (ParamId::from(header.id), header.dtype.size());
        let partition = match self.partitioner.known().get(&id) {
            Some(partition) => partition,
            None => self.partitioner.settle(id, &header.shape, width, || true),
        };
        let piece = Piece::new(partition.clone(), self.group.rank());
        let piece = piece.offloaded(self.offload.as_ref());
        let whole = data.map(|data| &data.bytes()[..]);
        let bytes = piece.scatter(&self.group, width, whole)?;
        Ok((header, Some((piece, bytes))))
    }

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

thread_local! {
    /// The cutter of the model that is being mapped. A mapper sees only parameters. Nested units are part of the outer one.
    static CUTTER: RefCell<Option<Cutter>> = const { RefCell::new(None) };
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

/// This rank's piece of a parameter, and its bytes.
type OwnPiece = (Piece, Vec<u8>);

/// A parameter of rank 0.
#[derive(Deserialize, Serialize)]
struct ParameterHeader {
    id: u64,
    is_trained: bool,
    /// `false` for what stays whole: statistics, and frozen parameters that are vectors or quantised.
    is_cut: bool,
    dtype: DType,
    shape: Vec<usize>,
}

struct CutMapper<'a> {
    cutter: &'a mut Cutter,
    /// On rank 0, the places of running statistics among the floats of the unit.
    statistics: HashSet<usize>,
    place: usize,
    partitions: HashMap<ParamId, Arc<Partition>>,
}

impl ModuleMapper for CutMapper<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let place = self.place;
        self.place += 1;
        if self.cutter.failure.is_some() {
            return param;
        }
        let device = param.lazy_device();
        let is_main = self.cutter.group.rank() == 0;
        if self.cutter.tied.contains(&param.id) {
            // Rank 0 draws it in its turn.
            drop(is_main.then(|| param.base()));
            return param;
        }
        let own = is_main.then(|| {
            let value = param.base();
            let is_trained = value.is_require_grad();
            let is_frozen_matrix =
                D > 1 && Float::of(value.dtype()).is_some() && !self.statistics.contains(&place);
            let header = ParameterHeader {
                id: param.id.val(),
                is_trained,
                is_cut: is_trained || is_frozen_matrix,
                dtype: value.dtype(),
                shape: value.dims().to_vec(),
            };
            // What stays whole is not read.
            let data = match header.is_cut {
                true => value.into_data(),
                false => TensorData::new(Vec::<f32>::new(), [0]),
            };
            (header, data)
        });
        let own = own.as_ref().map(|(header, data)| (header, data));
        let (header, piece) = match self.cutter.piece(own) {
            Ok(piece) => piece,
            Err(error) => {
                self.cutter.failure = Some(error);
                return param;
            }
        };
        self.cutter.compare(&header, &param);
        let Some((piece, bytes)) = piece else {
            return param;
        };
        let id = ParamId::from(header.id);
        let value = piece.tensor::<D>(bytes, header.dtype, &device);
        self.partitions.insert(id, piece.partition);
        // A parameter that was not drawn is not drawn for this.
        let anything = Tensor::<D>::zeros([1; D], (&device, header.dtype));
        let param = param.transform_for_load(anything, id);
        param.map(|_| value.set_require_grad(header.is_trained))
    }
}
