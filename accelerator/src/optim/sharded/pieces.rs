//! The state of an optimizer whose model holds pieces of parameters, as one with sharded units does.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use accelerator_collective::ProcessGroup;
use accelerator_host::OFFLOAD_FOLDER;
use burn::module::{ModuleVisitor, Param, ParamId};
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Bytes, DType, Device, Tensor};

use super::param_shards::is_element_wise;
use super::records::{RecordField, Records};
use super::{FullState, Shards};
use crate::context::Context;
use crate::core::dyn_module::DynModule;
use crate::core::error::{Error, Result};
use crate::core::offload::{Offload, Scratch};
use crate::core::partition::{Partition, Piece, piece_of};
use crate::model::Layout;
use crate::optim::record_io::{ids_in, load};
use crate::optim::unsharded::is_fused;

/// The pieces of parameters that an optimizer steps on this rank.
pub(in crate::optim) struct PieceState {
    rank: usize,
    device: Device,
    /// The offload folder for the state, if offloading is on.
    pub(in crate::optim) offload: Option<Offload>,
    /// The partitions of the parameters of which the optimizer has only this rank's part of the state.
    partitions: HashMap<ParamId, Arc<Partition>>,
    /// The parameters in pieces that were stepped, of all models.
    stepped: HashSet<ParamId>,
}

impl PieceState {
    pub(in crate::optim) fn new(context: &Context) -> Self {
        Self {
            rank: context.rank(),
            device: context.device.clone(),
            offload: context.offload.clone(),
            partitions: HashMap::new(),
            stepped: HashSet::new(),
        }
    }

    /// Before a step, finds the parameters of which the model holds pieces. When they are first stepped, it cuts the state
    /// that came with the optimizer for them to this rank's part.
    pub(in crate::optim) fn settle(
        &mut self,
        model: &dyn DynModule,
        optimizer: &mut ModuleOptimizer,
        shards: Option<&Shards>,
    ) -> Result<()> {
        let mut search = NewPieces {
            known: self,
            found: HashMap::new(),
            is_moved: false,
        };
        model.visit(&mut search);
        let NewPieces {
            mut found,
            is_moved,
            ..
        } = search;
        if is_moved {
            return Err(Error::misuse(
                "the model was prepared again, and its sharded parameters are now divided differently from when the \
                 optimizer was resumed or last stepped: freeze parameters before `resume`; to prepare the model again, call \
                 `save_state` before, and `resume` afterwards",
            ));
        }
        if found.is_empty() {
            return Ok(());
        }
        if shards.is_some() {
            return Err(Error::misuse(
                "the optimizer was prepared as `Sharded`, but its model has sharded units, whose optimizer state is \
                 divided among the ranks already: prepare the optimizer without `Sharded`",
            ));
        }
        self.check(model, &found, optimizer)?;
        self.stepped.extend(found.keys());
        found.retain(|id, _| !self.partitions.contains_key(id));
        self.cut(optimizer, &found)?;
        self.partitions.extend(found);
        Ok(())
    }

    /// Forgets what was stepped: the optimizer has loaded the state of whole parameters, apart from these.
    pub(in crate::optim) fn reset(&mut self, partitions: HashMap<ParamId, Arc<Partition>>) {
        self.partitions = partitions;
        self.stepped.clear();
    }

    pub(in crate::optim) fn full_state(&self) -> Option<FullState> {
        // A single rank already holds the whole state.
        let mut partitions = self.partitions.values();
        let is_divided = partitions.any(|partition| partition.is_divided());
        is_divided.then(|| FullState::of_pieces(self.partitions.clone()))
    }

    /// Rejects an optimizer that is not element-wise or, with offloading, one that does not update values in place.
    fn check(
        &self,
        model: &dyn DynModule,
        partitions: &HashMap<ParamId, Arc<Partition>>,
        optimizer: &ModuleOptimizer,
    ) -> Result<()> {
        let blank = optimizer.clone().load_record(OptimizerRecord::default());
        let parameters = Layout::of(model).trainable().into_iter();
        let mut pieces = parameters.filter(|parameter| partitions.contains_key(&parameter.id));
        let refused = pieces
            .clone()
            .find(|parameter| self.offload.is_some() && !is_fused(&blank, parameter, &self.device));
        if let Some(parameter) = refused {
            return Err(Error::misuse(format!(
                "`offload_folder` or {} is set, but the optimizer cannot update `{}` in its file: use a fused optimizer, such as one \
                 from `AdamWConfig::init_fused`, without gradient clipping in its configuration (call `clip_norm` or \
                 `clip_value`), and parameters in f32 or f64",
                OFFLOAD_FOLDER.name, parameter.path
            )));
        }
        let whole = pieces.find(|parameter| !is_element_wise(&blank, parameter, &self.device));
        let Some(parameter) = whole else {
            return Ok(());
        };
        Err(Error::misuse(format!(
            "the optimizer does not step each element of `{}` independently, but each rank has only a piece of this \
             parameter: use SGD, Adam, AdamW or another element-wise optimizer, with no gradient clipping in its \
             configuration (call `clip_norm`, which uses the norm over all ranks), or set `units` to `recompute`",
            parameter.path
        )))
    }

    /// Keeps this rank's part of the state of these parameters.
    fn cut(
        &self,
        optimizer: &mut ModuleOptimizer,
        partitions: &HashMap<ParamId, Arc<Partition>>,
    ) -> Result<()> {
        if !partitions.values().any(|partition| partition.is_divided()) {
            return Ok(());
        }
        let mut records = Records::of(optimizer)?;
        if !records.0.keys().any(|id| partitions.contains_key(id)) {
            return Ok(());
        }
        for (id, partition) in partitions {
            if let Some(entry) = records.0.remove(id)
                && let Some(entry) = entry.cut(&Piece::new(partition.clone(), self.rank))
            {
                records.0.insert(*id, entry);
            }
        }
        let blank = optimizer.clone().load_record(OptimizerRecord::default());
        *optimizer = load(
            "an optimizer of sharded units",
            blank,
            records.into_bytes()?,
        )?;
        Ok(())
    }
}

/// Searches a model for pieces that were not stepped.
struct NewPieces<'a> {
    known: &'a PieceState,
    found: HashMap<ParamId, Arc<Partition>>,
    /// Set if a parameter is divided differently from before.
    is_moved: bool,
}

impl ModuleVisitor for NewPieces<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(Piece { partition, .. }) = piece_of(param.id) else {
            return;
        };
        let known = self.known.partitions.get(&param.id);
        self.is_moved |= known.is_some_and(|known| *known != partition);
        if !self.known.stepped.contains(&param.id) {
            self.found.insert(param.id, partition);
        }
    }
}

/// A record of an optimizer on one rank.
pub(crate) struct RankRecord {
    /// Burn's record. Its bytes are shared.
    pub(crate) bytes: Bytes,
    /// The parameters with state on any rank.
    pub(in crate::optim) ids: HashSet<u64>,
    /// The parameters of which the record has only this rank's part.
    pub(in crate::optim) partitions: HashMap<ParamId, Arc<Partition>>,
}

impl RankRecord {
    /// The record of whole parameters.
    pub(crate) fn whole(bytes: Bytes) -> Result<Self> {
        Ok(Self {
            ids: ids_in(&bytes)?,
            bytes,
            partitions: HashMap::new(),
        })
    }
}

/// The state of whole parameters on rank 0 that each rank is to get its piece of.
#[derive(Default)]
pub(crate) struct WholeState(Vec<(ParamId, RecordField)>);

impl WholeState {
    /// Takes the state of parameters of which the ranks hold pieces out of a record. Returns the rest of the record.
    pub(crate) fn take_from(
        &mut self,
        record: Bytes,
        piece: &dyn Fn(ParamId) -> Option<Piece>,
    ) -> Result<Bytes> {
        let mut records = Records::read(record)?;
        for (id, entry) in &mut records.0 {
            if let Some(piece) = piece(*id) {
                let fields = entry.take_cut(&piece.partition).into_iter();
                self.0.extend(fields.map(|field| (*id, field)));
            }
        }
        records.into_bytes()
    }

    /// Adds this rank's part of the state that rank 0 has taken out to the rest of the record. All ranks call it.
    #[track_caller]
    pub(crate) fn scatter(
        self,
        group: &ProcessGroup,
        rest: Bytes,
        piece: &dyn Fn(ParamId) -> Option<Piece>,
    ) -> Result<RankRecord> {
        let header = |(id, field): &(ParamId, RecordField)| {
            (
                id.val(),
                field.name.clone(),
                field.dtype,
                field.shape.clone(),
            )
        };
        let headers: Vec<_> = self.0.iter().map(header).collect();
        let headers: Vec<(u64, String, DType, Vec<usize>)> =
            group.broadcast_object((group.rank() == 0).then_some(&headers), 0)?;
        let mut records = Records::read(rest)?;
        let ids: HashSet<_> = records.0.keys().map(|id| id.val()).collect();
        let headed = headers.iter().map(|(id, ..)| id);
        let pieces = ids.iter().chain(headed).map(|id| ParamId::from(*id));
        let pieces: HashMap<_, _> = pieces.filter_map(|id| Some((id, piece(id)?))).collect();
        let mut whole = self.0.into_iter();
        for (id, name, dtype, shape) in headers {
            let id = ParamId::from(id);
            let bytes = whole.next().map(|(_, field)| field.bytes);
            let piece = pieces.get(&id).ok_or_else(|| {
                Error::checkpoint("this rank has other sharded parameters than rank 0")
            })?;
            let own = piece.scatter(group, dtype.size(), bytes.as_deref())?;
            let is_whole = piece.range().len() == piece.partition.elements();
            records.0.entry(id).or_default().push(RecordField {
                name,
                dtype,
                shape: if is_whole { shape } else { piece.shape() },
                bytes: Scratch::of(own).into_bytes(),
            });
        }
        // A rank without elements of a parameter keeps no state of it.
        records.0.retain(|id, _| match pieces.get(id) {
            Some(piece) => !piece.range().is_empty() || piece.partition.elements() == 0,
            None => true,
        });
        let pieces = pieces.into_iter();
        Ok(RankRecord {
            bytes: records.into_bytes()?,
            ids,
            partitions: pieces.map(|(id, piece)| (id, piece.partition)).collect(),
        })
    }
}
