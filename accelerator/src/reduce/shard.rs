//! Sums of which each rank has a part; see "Sharded optimizers" in the README of this folder.

use core::ops::Range;
use std::sync::Arc;

use accelerator_collective::{ProcessGroup, ShardLayout};

/// By parameter of a model, by number: which of its elements each rank steps. Those of one rank begin at
/// whole [blocks](super::BLOCK) of the parameter, unless they are none.
#[derive(Debug)]
pub(crate) struct ShardMap {
    /// By parameter: where the part of each rank begins, and where the last one ends.
    bounds: Vec<Vec<usize>>,
    /// Of the optimizer that has settled them.
    owner: Arc<()>,
    ranks: usize,
}

impl ShardMap {
    pub(crate) fn new(bounds: Vec<Vec<usize>>, ranks: usize, owner: &Arc<()>) -> Self {
        Self {
            bounds,
            owner: owner.clone(),
            ranks,
        }
    }

    /// Whether they are those of that optimizer.
    pub(crate) fn are_of(&self, owner: &Arc<()>) -> bool {
        Arc::ptr_eq(&self.owner, owner)
    }

    pub(super) fn range(&self, parameter: usize, rank: usize) -> Range<usize> {
        let bounds = &self.bounds[parameter];
        bounds[rank]..bounds[rank + 1]
    }

    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }
}

/// How the sums of a layout are shared out.
#[derive(Debug)]
pub(super) struct BucketShards {
    pub(super) bounds: Arc<ShardMap>,
    /// By bucket: which of its elements each rank gets.
    pub(super) buckets: Vec<Arc<ShardLayout>>,
}

/// Which sums of a window a rank has.
#[derive(Clone, Debug)]
pub(super) enum SumScope {
    /// All of them.
    Whole,
    /// Its own part. The others are in the group.
    Own {
        cuts: Arc<BucketShards>,
        group: ProcessGroup,
    },
}

impl SumScope {
    pub(super) fn is_whole(&self) -> bool {
        matches!(self, Self::Whole)
    }

    /// What the parts are cut at.
    pub(super) fn bounds(&self) -> Option<&Arc<ShardMap>> {
        match self {
            Self::Whole => None,
            Self::Own { cuts, .. } => Some(&cuts.bounds),
        }
    }

    /// Which elements of a bucket each rank gets, where that is not all.
    pub(super) fn cut(&self, bucket: usize) -> Option<&Arc<ShardLayout>> {
        match self {
            Self::Whole => None,
            Self::Own { cuts, .. } => Some(&cuts.buckets[bucket]),
        }
    }

    /// The elements that this rank has of a parameter of so many.
    pub(super) fn of_parameter(&self, parameter: usize, elements: usize) -> Range<usize> {
        match self {
            Self::Whole => 0..elements,
            Self::Own { cuts, group } => cuts.bounds.range(parameter, group.rank()),
        }
    }

    /// The elements that this rank has of a bucket of so many.
    pub(super) fn of_bucket(
        &self,
        bucket: usize,
        elements: usize,
    ) -> impl Iterator<Item = Range<usize>> {
        let (own, whole) = match self {
            Self::Whole => (&[][..], Some(0..elements)),
            Self::Own { cuts, group } => (cuts.buckets[bucket].of(group.rank()), None),
        };
        own.iter().cloned().chain(whole)
    }
}
