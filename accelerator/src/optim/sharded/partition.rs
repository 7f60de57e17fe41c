use core::ops::Range;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::{Bytes, DType, Device, Shape, Tensor, TensorData};

use crate::model::Trainable;
use crate::reduce::{BLOCK, ShardMap};

/// A parameter is sharded only if each rank gets at least this many elements: for smaller shards, the
/// fixed cost of a shard exceeds the saving.
const WORTH_A_PIECE: usize = 4096;

/// The ranks on which the elements of a parameter live.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Partition {
    /// Rank `r` has the elements from the `r`-th to the next one.
    bounds: Vec<usize>,
    shape: Vec<usize>,
}

impl Partition {
    pub(super) fn range(&self, rank: usize) -> Range<usize> {
        self.bounds[rank]..self.bounds[rank + 1]
    }

    /// The shape of a rank's piece: that of the parameter, if it has all of it.
    pub(super) fn shape(&self, rank: usize) -> Vec<usize> {
        let length = self.range(rank).len();
        if length == self.elements() {
            return self.shape.clone();
        }
        let mut shape = vec![1; self.shape.len().max(1)];
        shape[0] = length;
        shape
    }

    pub(super) fn whole_shape(&self) -> &[usize] {
        &self.shape
    }

    pub(super) fn elements(&self) -> usize {
        self.bounds.last().copied().unwrap_or(0)
    }
}

/// The partitions of the parameters of all models that were stepped so far.
#[derive(Debug)]
pub(super) struct Partitioner {
    /// The identity that bounds of gradients are known by.
    identity: Arc<()>,
    known: HashMap<ParamId, Partition>,
    loads: Vec<usize>,
}

impl Partitioner {
    pub(super) fn new(ranks: usize) -> Self {
        Self {
            identity: Arc::default(),
            known: HashMap::new(),
            loads: vec![0; ranks],
        }
    }

    pub(super) fn known(&self) -> &HashMap<ParamId, Partition> {
        &self.known
    }

    pub(super) fn are_at(&self, bounds: &ShardMap) -> bool {
        bounds.are_of(&self.identity)
    }

    /// Returns the bounds of gradients of parameters with these partitions, by number.
    pub(super) fn bounds(&self, partitions: Vec<Partition>) -> ShardMap {
        let bounds = partitions.into_iter().map(|partition| partition.bounds);
        ShardMap::new(bounds.collect(), self.loads.len(), &self.identity)
    }

    /// Returns `true` if [`settle`](Self::settle) asks if this parameter may be cut.
    pub(super) fn asks_about(&self, parameter: &Trainable) -> bool {
        !self.known.contains_key(&parameter.id) && self.is_large(parameter)
    }

    /// Finds a home for a parameter. `may_be_cut` is asked where it is large.
    pub(super) fn settle(
        &mut self,
        parameter: &Trainable,
        may_be_cut: impl FnOnce() -> bool,
    ) -> &Partition {
        let (ranks, elements) = (self.loads.len(), parameter.shape.iter().product::<usize>());
        let cut = self.is_large(parameter) && may_be_cut();
        let bounds = if cut {
            self.in_blocks(elements, parameter.float.width())
        } else {
            let owner = lightest(&self.loads);
            let bound = |rank| if rank > owner { elements } else { 0 };
            (0..=ranks).map(bound).collect()
        };
        let partition = Partition {
            bounds,
            shape: parameter.shape.clone(),
        };
        for (rank, load) in self.loads.iter_mut().enumerate() {
            *load += partition.range(rank).len() * parameter.float.width();
        }
        self.known.entry(parameter.id).or_insert(partition)
    }

    fn is_large(&self, parameter: &Trainable) -> bool {
        parameter.shape.iter().product::<usize>() >= self.loads.len() * WORTH_A_PIECE
    }

    /// Splits `elements` elements of `width` bytes at block boundaries, evenly at first. Remaining blocks go to the
    /// least loaded ranks; then blocks move from the most to the least loaded rank while their loads differ by more
    /// than a block, which can happen because the last block of each parameter may be short.
    fn in_blocks(&self, elements: usize, width: usize) -> Vec<usize> {
        let (blocks, ranks) = (elements.div_ceil(BLOCK), self.loads.len());
        let (share, block) = (blocks / ranks, BLOCK * width);
        let mut shares = vec![share; ranks];
        let mut loads: Vec<_> = self.loads.iter().map(|load| load + share * block).collect();
        loads[ranks - 1] -= blocks * block - elements * width;
        for _ in 0..blocks % ranks {
            let least = lightest(&loads);
            shares[least] += 1;
            loads[least] += block;
        }
        loop {
            let (least, most) = (lightest(&loads), heaviest(&loads));
            if loads[most] - loads[least] <= block || shares[most] == 1 {
                break;
            }
            shares[most] -= 1;
            loads[most] -= block;
            shares[least] += 1;
            loads[least] += block;
        }
        let mut reached = 0;
        let ends = shares.into_iter().map(|share| {
            reached += share * BLOCK;
            reached.min(elements)
        });
        core::iter::once(0).chain(ends).collect()
    }
}

/// The first of the ranks that have least.
fn lightest(loads: &[usize]) -> usize {
    let loads = loads.iter().enumerate();
    loads.min_by_key(|(_, load)| **load).map_or(0, |(at, _)| at)
}

/// The last of the ranks that have most.
fn heaviest(loads: &[usize]) -> usize {
    let loads = loads.iter().enumerate();
    loads.max_by_key(|(_, load)| **load).map_or(0, |(at, _)| at)
}

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
    /// Its own, which knows how gradients are to be checkpointed.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::Float;

    fn parameter(elements: usize) -> Trainable {
        Trainable {
            id: ParamId::new(),
            path: String::new(),
            shape: vec![elements],
            float: Float::F32,
        }
    }

    proptest! {
        #[test]
        fn homes_cover_every_element_once_and_are_balanced(
            sizes in proptest::collection::vec(0_usize..60_000, 1..30),
            ranks in 2_usize..6,
        ) {
            let mut partitions = Partitioner::new(ranks);
            for &size in &sizes {
                let partition = partitions.settle(&parameter(size), || true).clone();
                let mut covered = 0;
                for rank in 0..ranks {
                    prop_assert_eq!(partition.range(rank).start, covered);
                    prop_assert_eq!(
                        partition.shape(rank).iter().product::<usize>(),
                        partition.range(rank).len()
                    );
                    if !partition.range(rank).is_empty() {
                        prop_assert_eq!(partition.range(rank).start % BLOCK, 0);
                    }
                    covered = partition.range(rank).end;
                }
                prop_assert_eq!(covered, size);
            }
            let most = partitions.loads.iter().max().unwrap();
            let least = partitions.loads.iter().min().unwrap();
            // One parameter that is not cut, and a block of one that is.
            let slack = 4 * (ranks * WORTH_A_PIECE + BLOCK);
            prop_assert!(most - least <= slack, "{:?}", partitions.loads);
        }
    }

    #[test]
    fn what_may_not_be_cut_lives_on_one_rank() {
        let mut partitions = Partitioner::new(2);
        for owner in [0, 1] {
            let partition = partitions.settle(&parameter(100_000), || false);
            assert_eq!(partition.range(owner), 0..100_000);
            assert_eq!(partition.shape(owner), [100_000]);
        }
    }
}
