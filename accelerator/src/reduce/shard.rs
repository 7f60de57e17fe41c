//! Sums of which each rank has a part; see "Sharded optimizers" in the README of this folder.

use core::ops::Range;
use std::sync::Arc;

use accelerator_collective::{ProcessGroup, ShardLayout};

/// The elements of each parameter that each rank steps, by number of the parameter. Those of one rank begin at
/// whole [blocks](super::BLOCK) of the parameter, unless there are none.
#[derive(Debug)]
pub(crate) struct ShardMap {
    /// The beginning of each rank's part, and the end of the last one, by parameter.
    bounds: Vec<Vec<usize>>,
    /// The identity of the optimizer that has settled them.
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

    /// Returns `true` if they are those of that optimizer.
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

/// The division of a layout's sums among the ranks.
#[derive(Debug)]
pub(super) struct BucketShards {
    pub(super) bounds: Arc<ShardMap>,
    /// The elements that each rank gets, by bucket.
    pub(super) buckets: Vec<Arc<ShardLayout>>,
}

/// The sums of a window that a rank has.
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

    /// Returns the bounds that the parts are cut at.
    pub(super) fn bounds(&self) -> Option<&Arc<ShardMap>> {
        match self {
            Self::Whole => None,
            Self::Own { cuts, .. } => Some(&cuts.bounds),
        }
    }

    /// Returns the elements of a bucket that each rank gets, if that is not all.
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
