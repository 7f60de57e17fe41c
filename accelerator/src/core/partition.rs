//! Partitions of parameters among the ranks, for sharded optimizers and sharded units.

use core::cell::RefCell;
use core::ops::Range;
use std::collections::HashMap;
use std::sync::Arc;

use burn::module::ParamId;

/// The number of elements in a block. The norm sums the squares of each block separately. Parameters are cut only between
/// blocks, so the norm is bit-identical however they are cut.
pub(crate) const BLOCK: usize = 1024;

/// A parameter is sharded only if each rank gets at least this many elements: for smaller shards, the
/// fixed cost of a shard exceeds the saving.
const WORTH_A_PIECE: usize = 4096;

/// The ranks on which the elements of a parameter live.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Partition {
    /// Rank `r` has the elements `bounds[r]..bounds[r + 1]`.
    bounds: Vec<usize>,
    shape: Vec<usize>,
}

impl Partition {
    pub(crate) fn range(&self, rank: usize) -> Range<usize> {
        self.bounds[rank]..self.bounds[rank + 1]
    }

    /// The shape of a rank's piece: that of the parameter, if it has all of it.
    pub(crate) fn shape(&self, rank: usize) -> Vec<usize> {
        let length = self.range(rank).len();
        if length == self.elements() {
            return self.shape.clone();
        }
        let mut shape = vec![1; self.shape.len().max(1)];
        shape[0] = length;
        shape
    }

    pub(crate) fn whole_shape(&self) -> &[usize] {
        &self.shape
    }

    pub(crate) fn elements(&self) -> usize {
        self.bounds.last().copied().unwrap_or(0)
    }

    /// Returns the beginning of each rank's part, and the end of the last one.
    pub(crate) fn bounds(&self) -> &[usize] {
        &self.bounds
    }
}

/// The partitions of parameters so far.
#[derive(Debug)]
pub(crate) struct Partitioner {
    /// Identifies gradients that are cut at these partitions.
    identity: Arc<()>,
    known: HashMap<ParamId, Partition>,
    loads: Vec<usize>,
}

impl Partitioner {
    pub(crate) fn new(ranks: usize) -> Self {
        Self {
            identity: Arc::default(),
            known: HashMap::new(),
            loads: vec![0; ranks],
        }
    }

    pub(crate) fn known(&self) -> &HashMap<ParamId, Partition> {
        &self.known
    }

    pub(crate) fn identity(&self) -> &Arc<()> {
        &self.identity
    }

    /// Returns `true` if [`settle`](Self::settle) would call `may_be_cut` for this parameter.
    pub(crate) fn asks_about(&self, id: ParamId, shape: &[usize]) -> bool {
        !self.known.contains_key(&id) && self.is_large(shape)
    }

    /// Assigns a parameter to ranks. Calls `may_be_cut` only if the parameter is large. `width` is the size of an element
    /// in bytes.
    pub(crate) fn settle(
        &mut self,
        id: ParamId,
        shape: &[usize],
        width: usize,
        may_be_cut: impl FnOnce() -> bool,
    ) -> &Partition {
        let (ranks, elements) = (self.loads.len(), shape.iter().product::<usize>());
        let cut = self.is_large(shape) && may_be_cut();
        let bounds = if cut {
            self.in_blocks(elements, width)
        } else {
            let owner = lightest(&self.loads);
            let bound = |rank| if rank > owner { elements } else { 0 };
            (0..=ranks).map(bound).collect()
        };
        let partition = Partition {
            bounds,
            shape: shape.to_vec(),
        };
        for (rank, load) in self.loads.iter_mut().enumerate() {
            *load += partition.range(rank).len() * width;
        }
        self.known.entry(id).or_insert(partition)
    }

    fn is_large(&self, shape: &[usize]) -> bool {
        shape.iter().product::<usize>() >= self.loads.len() * WORTH_A_PIECE
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

/// Returns the least loaded rank; the first of them on a tie.
fn lightest(loads: &[usize]) -> usize {
    let loads = loads.iter().enumerate();
    loads.min_by_key(|(_, load)| **load).map_or(0, |(at, _)| at)
}

/// Returns the most loaded rank; the last of them on a tie.
fn heaviest(loads: &[usize]) -> usize {
    let loads = loads.iter().enumerate();
    loads.max_by_key(|(_, load)| **load).map_or(0, |(at, _)| at)
}

/// The partitions of a sharded unit's parameters. Each rank holds one piece of each of them.
#[derive(Debug)]
pub(crate) struct Pieces {
    pub(crate) rank: usize,
    pub(crate) partitions: HashMap<ParamId, Partition>,
}

impl Pieces {
    /// Runs `visit`, in which [`partition_of`] finds the pieces of this unit.
    pub(crate) fn show<T>(self: &Arc<Self>, visit: impl FnOnce() -> T) -> T {
        struct Before(Option<Arc<Pieces>>);
        impl Drop for Before {
            fn drop(&mut self) {
                SHOWN.set(self.0.take());
            }
        }
        let _before = Before(SHOWN.replace(Some(self.clone())));
        visit()
    }
}

/// If the model that is being visited holds only a piece of the parameter, returns its partition and this rank. The
/// visitor sees the piece.
pub(crate) fn partition_of(id: ParamId) -> Option<(Partition, usize)> {
    SHOWN.with_borrow(|shown| {
        let shown = shown.as_ref()?;
        Some((shown.partitions.get(&id)?.clone(), shown.rank))
    })
}

thread_local! {
    /// The pieces of the sharded unit that is being visited. A visitor sees only parameters.
    static SHOWN: RefCell<Option<Arc<Pieces>>> = const { RefCell::new(None) };
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn homes_cover_every_element_once_and_are_balanced(
            sizes in proptest::collection::vec(0_usize..60_000, 1..30),
            ranks in 2_usize..6,
        ) {
            let mut partitions = Partitioner::new(ranks);
            for &size in &sizes {
                let partition = partitions.settle(ParamId::new(), &[size], 4, || true).clone();
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
            let partition = partitions.settle(ParamId::new(), &[100_000], 4, || false);
            assert_eq!(partition.range(owner), 0..100_000);
            assert_eq!(partition.shape(owner), [100_000]);
        }
    }
}
