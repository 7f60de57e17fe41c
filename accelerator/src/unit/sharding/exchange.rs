//! The exchange between ranks while units run: whole parameters before, gradients in backward.

use core::cell::Cell;
use core::fmt;
use core::ops::Mul;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use accelerator_collective::internal::ShardLayout;
use accelerator_collective::{Buffer, DType as WireType, Element, ProcessGroup, ReduceOp};
use accelerator_host::sync::Mutex;
use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Tensor, TensorData};

use crate::context::Context;
use crate::core::dyn_module::BoxedModule;
use crate::core::error::{Error, Result};
use crate::core::partition::{Partition, Pieces, replaced_piece};
use crate::core::scoped::Scoped;
use crate::core::tensor::{any_rank, from_data};
use crate::unit::seeded_run::runs_twice;

/// The most buffers that are kept for the next units: one is filled while another one is read.
const KEPT_BUFFERS: usize = 2;

/// Sets the weight of this rank's gradients in the sums over the ranks, for the backward pass that begins.
pub(in crate::unit) fn weigh(weight: f64) -> Scoped<Option<f64>> {
    Scoped::set(&WEIGHT, Some(weight))
}

thread_local! {
    static WEIGHT: Cell<Option<f64>> = const { Cell::new(None) };
}

/// Buffers to use again.
pub(super) type Buffers = Arc<Mutex<Vec<Buffer>>>;

/// The sharding of a unit's parameters.
#[derive(Debug)]
pub(in crate::unit) struct Sharding {
    /// A model may outlive its accelerator, whose group ends with it.
    context: Weak<Context>,
    /// The number of the unit: ranks that run other units must not exchange their parameters.
    number: usize,
    pub(in crate::unit) pieces: Arc<Pieces>,
    /// All units of the model share them.
    buffers: Buffers,
}

/// The pass in which a unit runs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::unit) enum Pass {
    Forward,
    Backward,
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        })
    }
}

/// The gradient of a whole parameter of a unit's block.
pub(in crate::unit) struct BlockGradient {
    pub(in crate::unit) id: ParamId,
    /// The parameter, as the block computed with it.
    pub(in crate::unit) leaf: DispatchTensor,
    /// `None` if the outputs do not depend on it.
    pub(in crate::unit) gradient: Option<DispatchTensor>,
}

impl Sharding {
    pub(super) fn new(
        context: Weak<Context>,
        number: usize,
        pieces: Pieces,
        buffers: Buffers,
    ) -> Self {
        Self {
            context,
            number,
            pieces: Arc::new(pieces),
            buffers,
        }
    }

    /// Runs `map`, which changes the pieces of the unit's parameters, or their ids.
    pub(in crate::unit) fn map<T>(self: &Arc<Self>, map: impl FnOnce() -> T) -> (T, Arc<Self>) {
        let (mapped, pieces) = self.pieces.map(map);
        if Arc::ptr_eq(&pieces, &self.pieces) {
            return (mapped, self.clone());
        }
        let sharding = Self {
            context: self.context.clone(),
            number: self.number,
            pieces,
            buffers: self.buffers.clone(),
        };
        (mapped, Arc::new(sharding))
    }

    /// Returns the block with whole parameters. All ranks call it. If gathering fails, the parameters are NaN, and the next
    /// call that all ranks make returns the error.
    pub(in crate::unit) fn gather(&self, block: BoxedModule, pass: Pass) -> BoxedModule {
        if !self.pieces.are_divided() {
            return block;
        }
        let context = self.context();
        let values = match self.gathered(&context, &block, pass) {
            Ok(values) => values,
            Err(error) => {
                context.forward_collectives.failed(error);
                HashMap::new()
            }
        };
        block.map(&mut WholeWriter {
            pieces: &self.pieces,
            values,
            made: HashMap::new(),
        })
    }

    fn gathered(
        &self,
        context: &Context,
        block: &BoxedModule,
        pass: Pass,
    ) -> Result<HashMap<ParamId, TensorData>> {
        if runs_twice() {
            return Err(Error::misuse(
                "a sharded `Unit` runs within `recompute`, which would gather its parameters twice: remove `recompute`, since \
                 the unit already recomputes its block",
            ));
        }
        let mut reader = PieceReader {
            pieces: &self.pieces,
            found: Vec::new(),
        };
        block.visit(&mut reader);
        let group = context
            .group
            .for_purpose(&format!("gather unit {} ({pass})", self.number));
        let mut values = HashMap::new();
        for wire_type in [WireType::F64, WireType::F32, WireType::F16, WireType::BF16] {
            let found = reader.found.iter();
            let found: Vec<_> = found
                .filter(|(_, piece)| wire_type_of(piece.dtype()) == Some(wire_type))
                .map(|(id, piece)| (*id, piece, &*self.pieces.partitions[id]))
                .collect();
            if found.is_empty() {
                continue;
            }
            let flat = FlatLayout::new(found.iter().map(|(.., partition)| *partition), 0);
            let mut buffer = self.buffer(&group, wire_type, flat.length);
            let width = wire_type.size();
            for ((_, piece, partition), start) in found.iter().zip(&flat.starts) {
                let own = partition.range(self.pieces.rank);
                if piece.bytes().len() != own.len() * width {
                    return Err(replaced_piece());
                }
                let bytes = (start + own.start) * width..(start + own.end) * width;
                buffer.bytes_mut()[bytes].copy_from_slice(piece.bytes());
            }
            group.all_gather_buffer(&mut buffer, &flat.shards(group.world_size())?)?;
            for ((id, piece, partition), start) in found.into_iter().zip(&flat.starts) {
                let bytes = start * width..(start + partition.elements()) * width;
                let bytes = buffer.bytes()[bytes].to_vec();
                let shape = partition.whole_shape().to_vec();
                values.insert(id, TensorData::from_bytes_vec(bytes, shape, piece.dtype()));
            }
            self.keep(buffer);
        }
        Ok(values)
    }

    /// Sums gradients of whole parameters over the ranks, and returns those of this rank's pieces. All ranks call it, also
    /// those without a gradient. If the reduction fails, the gradients are NaN, and the next call that all ranks make
    /// returns the error.
    pub(in crate::unit) fn scatter(
        &self,
        gradients: Vec<Option<BlockGradient>>,
    ) -> Vec<Option<DispatchTensor>> {
        if !self.pieces.are_divided() {
            let own = |gradient: Option<BlockGradient>| self.own(gradient?);
            return merged(gradients).into_iter().map(own).collect();
        }
        let context = self.context();
        let gradients = merged(gradients);
        let weight = WEIGHT.get().unwrap_or_else(|| {
            context.forward_collectives.failed(Error::misuse(
                "the backward pass of a model with sharded units ran outside `Accelerator::backward`: call it, and pass it the \
                 loss",
            ));
            0.0
        });
        let mut sums: Vec<_> = gradients.iter().map(|_| None).collect();
        for dtype in [DType::F64, DType::F32] {
            let members: Vec<_> = (0..)
                .zip(&gradients)
                .filter_map(|(place, gradient)| {
                    let gradient = gradient.as_ref()?;
                    let partition = &**self.pieces.partitions.get(&gradient.id)?;
                    let is_of_type = wide(any_rank(&gradient.leaf).dtype()) == dtype;
                    is_of_type.then_some((place, gradient, partition))
                })
                .collect();
            if members.is_empty() {
                continue;
            }
            if let Err(error) = self.summed(&context.group, dtype, &members, weight, &mut sums) {
                context.forward_collectives.failed(error);
                for (place, gradient, partition) in members {
                    sums[place] = Some(self.constant(&gradient.leaf, partition, f64::NAN));
                }
            }
        }
        for (sum, gradient) in sums.iter_mut().zip(gradients) {
            // A parameter that is not cut keeps its gradient.
            if let Some(gradient) = gradient
                && !self.pieces.partitions.contains_key(&gradient.id)
            {
                *sum = gradient.gradient;
            }
        }
        sums
    }

    /// Returns the gradient of a piece that is the whole parameter, which needs no other rank.
    fn own(&self, gradient: BlockGradient) -> Option<DispatchTensor> {
        let BlockGradient { id, leaf, gradient } = gradient;
        if !self.pieces.partitions.contains_key(&id) {
            return gradient;
        }
        let gradient = any_rank(&gradient?);
        let device = gradient.device();
        let dtype = wide(any_rank(&leaf).dtype());
        let data = gradient.into_data().convert_dtype(dtype);
        Some(from_data(self.pieces.in_file(data), &device))
    }

    fn summed(
        &self,
        group: &ProcessGroup,
        dtype: DType,
        members: &[(usize, &BlockGradient, &Partition)],
        weight: f64,
        sums: &mut [Option<DispatchTensor>],
    ) -> Result<()> {
        let group = group.for_purpose(&format!("gradients of unit {}", self.number));
        // After the elements, each rank gets one count per parameter: how many ranks have a gradient for it.
        let partitions = members.iter().map(|(.., partition)| *partition);
        let flat = FlatLayout::new(partitions, members.len());
        let total = flat.length + group.world_size() * flat.counts;
        let wire_type = match dtype {
            DType::F64 => WireType::F64,
            _ => WireType::F32,
        };
        let mut buffer = self.buffer(&group, wire_type, total);
        buffer.bytes_mut().fill(0);
        for (number, (_, gradient, _)) in members.iter().enumerate() {
            // A rank without samples may have computed garbage, so it adds zeros.
            let Some(gradient) = gradient.gradient.as_ref().filter(|_| weight > 0.0) else {
                continue;
            };
            let data = any_rank(gradient).into_data().convert_dtype(dtype);
            match dtype {
                DType::F64 => flat.add::<f64>(&mut buffer, number, &data, weight)?,
                _ => flat.add::<f32>(&mut buffer, number, &data, weight as f32)?,
            }
        }
        let shards = flat.shards(group.world_size())?;
        group.reduce_scatter_buffer(&mut buffer, ReduceOp::Sum, &shards)?;
        let (rank, width) = (self.pieces.rank, wire_type.size());
        for (number, (place, gradient, partition)) in members.iter().enumerate() {
            let count = flat.count_at(rank, number) * width;
            if buffer.bytes()[count..count + width]
                .iter()
                .all(|byte| *byte == 0)
            {
                continue;
            }
            let (start, own) = (flat.starts[number], partition.range(rank));
            let bytes = (start + own.start) * width..(start + own.end) * width;
            let bytes = buffer.bytes()[bytes].to_vec();
            let data = TensorData::from_bytes_vec(bytes, partition.shape(rank), dtype);
            let device = any_rank(&gradient.leaf).device().inner();
            sums[*place] = Some(from_data(self.pieces.in_file(data), &device));
        }
        self.keep(buffer);
        Ok(())
    }

    /// Returns a gradient of zeros for this rank's piece of a parameter.
    pub(in crate::unit) fn zeros(&self, id: ParamId, leaf: &DispatchTensor) -> DispatchTensor {
        match self.pieces.partitions.get(&id) {
            Some(partition) => self.constant(leaf, partition, 0.0),
            None => any_rank(leaf).inner().zeros_like().into_dispatch(),
        }
    }

    fn constant(&self, leaf: &DispatchTensor, partition: &Partition, value: f64) -> DispatchTensor {
        let leaf = any_rank(leaf);
        let data = filled(wide(leaf.dtype()), partition.shape(self.pieces.rank), value);
        from_data(data, &leaf.device().inner())
    }

    /// Fails the next call that all ranks make.
    pub(in crate::unit) fn refuse(&self, error: Error) {
        self.context().forward_collectives.failed(error);
    }

    fn context(&self) -> Arc<Context> {
        let context = self.context.upgrade();
        #[expect(clippy::expect_used, reason = "documented at `Units::Shard`")]
        context
            .expect("a model with sharded units ran after its accelerator was dropped: keep the accelerator as long as the model runs")
    }

    fn buffer(&self, group: &ProcessGroup, dtype: WireType, length: usize) -> Buffer {
        let mut kept = self.buffers.lock();
        let fits = |buffer: &Buffer| buffer.dtype() == dtype && buffer.len() == length;
        match kept.iter().position(fits) {
            Some(at) => kept.swap_remove(at),
            None => group.buffer(dtype, length),
        }
    }

    fn keep(&self, buffer: Buffer) {
        let mut kept = self.buffers.lock();
        if kept.len() == KEPT_BUFFERS {
            kept.remove(0);
        }
        kept.push(buffer);
    }
}

/// Sums the gradients of all uses of a tied parameter, as the backward pass does outside units. The sum replaces the
/// gradient of the first use.
fn merged(gradients: Vec<Option<BlockGradient>>) -> Vec<Option<BlockGradient>> {
    let mut first_places: HashMap<ParamId, usize> = HashMap::new();
    let mut merged: Vec<Option<BlockGradient>> = Vec::with_capacity(gradients.len());
    for (place, gradient) in gradients.into_iter().enumerate() {
        let first = gradient
            .as_ref()
            .map(|found| *first_places.entry(found.id).or_insert(place));
        let earlier = first.and_then(|first| merged.get_mut(first)?.as_mut());
        let (Some(earlier), Some(later)) = (earlier, &gradient) else {
            merged.push(gradient);
            continue;
        };
        earlier.gradient = match (earlier.gradient.take(), &later.gradient) {
            (Some(sum), Some(more)) => Some((any_rank(&sum) + any_rank(more)).into_dispatch()),
            (sum, more) => sum.or_else(|| more.clone()),
        };
        merged.push(None);
    }
    merged
}

/// The layout of a buffer: whole parameters, one after another, followed by the counts of each rank.
struct FlatLayout {
    starts: Vec<usize>,
    /// The range of each rank within each parameter.
    bounds: Vec<Vec<usize>>,
    length: usize,
    counts: usize,
}

impl FlatLayout {
    fn new<'a>(partitions: impl Iterator<Item = &'a Partition>, counts: usize) -> Self {
        let (mut starts, mut bounds, mut length) = (Vec::new(), Vec::new(), 0);
        for partition in partitions {
            starts.push(length);
            bounds.push(partition.bounds().to_vec());
            length += partition.elements();
        }
        Self {
            starts,
            bounds,
            length,
            counts,
        }
    }

    /// The place of a count of a rank.
    fn count_at(&self, rank: usize, number: usize) -> usize {
        self.length + rank * self.counts + number
    }

    /// Writes the gradient of the parameter with this number, times the weight, and counts it for every rank.
    fn add<E: Element + burn::tensor::Element + Mul<Output = E>>(
        &self,
        buffer: &mut Buffer,
        number: usize,
        gradient: &TensorData,
        weight: E,
    ) -> Result<()> {
        let sums = buffer.as_mut_slice::<E>()?;
        let ranks = self.bounds[number].len() - 1;
        for rank in 0..ranks {
            sums[self.count_at(rank, number)] = E::from_elem(1.0);
        }
        for (sum, value) in sums[self.starts[number]..]
            .iter_mut()
            .zip(gradient.iter::<E>())
        {
            *sum = value * weight;
        }
        Ok(())
    }

    /// The elements and counts that each rank keeps.
    fn shards(&self, ranks: usize) -> Result<Arc<ShardLayout>> {
        let of_rank = |rank| {
            let parts = self.starts.iter().zip(&self.bounds);
            let parts = parts.map(|(start, bounds)| start + bounds[rank]..start + bounds[rank + 1]);
            let counts = self.count_at(rank, 0)..self.count_at(rank, self.counts);
            parts
                .chain([counts])
                .filter(|range| !range.is_empty())
                .collect()
        };
        let length = self.length + ranks * self.counts;
        let layout = ShardLayout::new(length, (0..ranks).map(of_rank).collect())?;
        Ok(Arc::new(layout))
    }
}

/// Reads this rank's pieces, each once.
struct PieceReader<'a> {
    pieces: &'a Pieces,
    found: Vec<(ParamId, TensorData)>,
}

impl ModuleVisitor for PieceReader<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let is_new = self.found.iter().all(|(id, _)| *id != param.id);
        if is_new && self.pieces.partitions.contains_key(&param.id) {
            self.found.push((param.id, param.val().into_data()));
        }
    }
}

/// Puts whole parameters in the places of pieces, outside of any graph.
struct WholeWriter<'a> {
    pieces: &'a Pieces,
    /// Empty if they could not be gathered.
    values: HashMap<ParamId, TensorData>,
    /// The tensors that were made so far, for other uses of a tied parameter.
    made: HashMap<ParamId, DispatchTensor>,
}

impl ModuleMapper for WholeWriter<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(partition) = self.pieces.partitions.get(&param.id) else {
            return param;
        };
        let (id, piece, mapper) = param.consume();
        let (device, dtype) = (piece.device(), piece.dtype());
        let whole = self.made.entry(id).or_insert_with(|| {
            let shape = partition.whole_shape();
            let data = self.values.remove(&id);
            let data = data.unwrap_or_else(|| filled(dtype, shape.to_vec(), f64::NAN));
            Tensor::<D>::from_data(data, (&device, dtype)).into_dispatch()
        });
        let value = Tensor::<D>::from_dispatch(whole.clone());
        Param::from_mapped_value(id, value, mapper)
    }
}

fn filled(dtype: DType, shape: Vec<usize>, value: f64) -> TensorData {
    let values = vec![value; shape.iter().product()];
    TensorData::new(values, shape).convert_dtype(dtype)
}

/// Returns the type in which gradients of this type are summed. The sums keep it, and the code that receives them accepts
/// it.
fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

fn wire_type_of(dtype: DType) -> Option<WireType> {
    match dtype {
        DType::F64 => Some(WireType::F64),
        DType::F32 | DType::Flex32 => Some(WireType::F32),
        DType::F16 => Some(WireType::F16),
        DType::BF16 => Some(WireType::BF16),
        _ => None,
    }
}
